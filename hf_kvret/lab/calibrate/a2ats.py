"""A2ATS's calibration: query-aware codebooks of keys before RoPE (A2ATS, section 4).

The error of a score is ``q . (k - k~)``; its mean square over the queries is ``(k - k~) H (k -
k~)^T`` with H their second moment. With ``H = L L^T`` that is ``|z - z~|^2`` of ``z = k L``, so
k-means on z minimizes the error of scores (section 4.2, equations 13 to 19). Here keys are those
before RoPE, and queries are rotated to the fixed distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret.lab.calibrate.study import Calibration, LayerFindings, LayerStudy, Progress
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.methods.a2ats.learned import (
    CODEWORD_DTYPES,
    STORED_NAMES,
    CodebookOptions,
    at_distance,
)
from hf_kvret_kernels import codebook
from hf_kvret_model_patches.rope import Rope

# So many fp32 elements of queries are worked on at once.
_CHUNK_NUMBERS = 1 << 26
# The diagonal of H grows by this, in units of its rms entry, as in the authors' code.
_RIDGE = 1e-6


@dataclass(frozen=True)
class A2ATSCalibration(CodebookOptions, Calibration):
    """Learns a codebook for each KV head. Arguments and errors are those of ``CodebookOptions``."""

    method: ClassVar[str] = "a2ats"

    def check(self, lengths: Sequence[int]) -> None:
        super().check(lengths)
        tokens = sum(lengths)
        if self.codewords > tokens:
            raise ValueError(
                f"codewords={self.codewords} of {tokens} tokens: give more --tokens or fewer "
                "--codewords"
            )

    def token_nbytes(self, tokens: LayerTokens) -> int:
        return tokens.key.nbytes

    def study(self, layer: int, rope: Rope, device: torch.device) -> CodebookStudy:
        return CodebookStudy(self, rope, device)

    def options(self) -> dict[str, Any]:
        stored = {name: key for key, name in STORED_NAMES.items()}
        return {stored.get(name, name): value for name, value in asdict(self).items()}


class CodebookStudy(LayerStudy):
    """Collects keys and second moments of queries; learns one codebook per KV head.

    The findings are ``codewords [H, C, D]`` of ``codeword_dtype`` in the space of ``metric [H, D,
    D]``, which is L of equation 15, and ``inv_freq`` of the layer's RoPE, both fp32;
    ``score_error`` is measured on held-out tokens.
    """

    def __init__(self, options: A2ATSCalibration, rope: Rope, device: torch.device) -> None:
        self.options, self.rope, self.device = options, rope, device
        # Both are kept by held_out: keys in the model's dtype, moments in fp64.
        self._keys: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        self._moments: dict[bool, torch.Tensor] = {}

    @property
    def work(self) -> int:
        return len(self._moments.get(False, ()))

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        rotated = self.options.space == "rotated"
        keys = tokens.key if rotated else before_rope(tokens.key, self.rope)
        # Keys may be a view of something larger, so they are copied on the CPU too.
        self._keys[held_out].append(keys[0].to("cpu", copy=True))
        moments = self._moments.get(held_out)
        for queries in self._queries(tokens, rotated):
            # All heads that share a KV head have their queries in one matrix, [H, G * n, D].
            group_queries = queries[0].unflatten(0, (keys.shape[1], -1)).flatten(1, 2).double()
            products = (group_queries.mT @ group_queries).cpu()
            moments = products if moments is None else moments + products
        assert moments is not None
        self._moments[held_out] = moments

    def finish(self, progress: Progress, carried: object = None) -> LayerFindings:
        options = self.options
        options.check([keys.shape[1] for keys in self._keys[False]])
        factor, inverse = query_metric(self._moments[False].to(self.device))
        words = k_means(
            self._all_keys(False) @ factor,
            options.codewords,
            rounds=options.rounds,
            tolerance=options.tolerance,
            seed=options.seed,
            progress=progress,
        )
        words = words.to(CODEWORD_DTYPES[options.codeword_dtype])
        tensors = {"codewords": words, "metric": factor, "inv_freq": self.rope.inv_freq}
        return LayerFindings(
            {name: x.cpu().contiguous() for name, x in tensors.items()},
            self.rope.settings,
            {"score_error": self._score_error(words, factor, inverse)},
        )

    def _queries(self, tokens: LayerTokens, rotated: bool) -> Iterator[torch.Tensor]:
        """Queries in the space of the metric, ``[1, Hq, m, D]``, all of them in chunks.

        Those of latent attention are absorbed, as an index sees them: longer than the model's own.
        """
        queries = tokens.query if rotated else before_rope(tokens.query, self.rope)
        rope = self.rope.to(queries.device)
        heads = None if tokens.latent is None else ModuleHeads(tokens.latent)
        step = max(1, _CHUNK_NUMBERS // (queries.shape[1] * tokens.key.shape[3]))
        for chunk in queries.split(step, dim=2):
            rows = chunk if heads is None else heads.absorb(chunk)
            yield rows if rotated else at_distance(rows, rope, self.options.distance)

    def _all_keys(self, held_out: bool) -> torch.Tensor:
        """All keys, ``[H, n, D]`` fp32 on the device."""
        return torch.cat(self._keys[held_out], dim=1).to(self.device).float()

    def _score_error(
        self, words: torch.Tensor, factor: torch.Tensor, inverse: torch.Tensor
    ) -> float | None:
        """Share of the held-out scores' variance over keys lost by codewords, mean over KV heads.

        None if nothing is held out, or if keys don't vary. An offset common to all keys does not
        change a softmax, so means are subtracted.
        """
        if not self._keys[True]:
            return None
        keys = self._all_keys(True)
        codes = codebook.encode((keys @ factor)[None], words)[0].long()
        codewords = words.gather(1, codes.unsqueeze(-1).expand_as(keys))
        deviations = [x - x.mean(1, keepdim=True) for x in (keys, codewords.float() @ inverse)]
        errors = score_error(deviations[0], deviations[1], self._moments[True].to(self.device))
        error = float(errors.mean())
        return error if math.isfinite(error) else None


def query_metric(second_moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(L, L_inverse)``, both ``[H, D, D]`` fp32 on the same device, L lower triangular.

    H is divided by the root mean square of its entries, 1e-6 is added to its diagonal, and
    ``L @ L.mT`` is the result; computed in float64.

    Args:
        second_moments: ``[H, D, D]`` fp64, for each KV head the sum of ``q^T q`` over tokens and
            the query heads of its group; fewer than D queries will do.

    Raises:
        ValueError: a head whose matrix has NaN or infinity, is zero, or is not positive definite
            with what is added.
    """
    size = second_moments.square().mean((1, 2), keepdim=True).sqrt()
    # Products that are summed up in another order are not symmetric to the last bit.
    moments = second_moments / size
    moments = (moments + moments.mT) / 2
    eye = torch.eye(moments.shape[1], dtype=torch.float64, device=moments.device)
    factor, info = torch.linalg.cholesky_ex(moments + _RIDGE * eye)
    bad = (info > 0) | ~factor.isfinite().flatten(1).all(1)
    if bad.any():
        heads = ", ".join(map(str, bad.nonzero()[:, 0].tolist()))
        raise ValueError(
            f"second_moments of head {heads} are zero, not finite or not positive definite: "
            "calibrate on a longer text, with a model in bfloat16 or float32"
        )
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return factor.float(), inverse.float()


def score_error(
    keys: torch.Tensor, approximation: torch.Tensor, second_moments: torch.Tensor
) -> torch.Tensor:
    """``[H]`` fp32: mean squared error of scores over that of leaving the keys out.

    0 where nothing is lost, 1 where all scores would be 0 (equation 13, over the mean of ``k H
    k^T``); for held-out tokens pass their keys and the second moment of their queries.

    Args:
        keys: ``[H, n, D]`` before quantization, any float dtype.
        approximation: ``[H, n, D]`` their codewords, in the space of the keys.
        second_moments: ``[H, D, D]`` fp64.
    """
    exact, metric = keys.double(), second_moments.double()
    errors = exact - approximation.double()
    loss = ((errors @ metric) * errors).sum((1, 2))
    return (loss / ((exact @ metric) * exact).sum((1, 2))).float()
