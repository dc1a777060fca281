"""A2ATS's calibration: query-aware codebooks of keys before RoPE (A2ATS, section 4).

The error of a score is ``q . (k - k~)``; its mean square over the queries is ``(k - k~) H (k -
k~)^T`` with H their second moment. With ``H = L L^T`` that is ``|z - z~|^2`` of ``z = k L``, so
k-means on z minimizes the error of scores (section 4.2, equations 13 to 19). Here keys are those
before RoPE, and queries are rotated to the fixed distance.

The k-means draws its seeds one after the other with probability proportional to the squared
distance from the nearest one so far (Arthur and Vassilvitskii, 2007), the better of two candidates
each time, from a sample of the points: seeding would otherwise take longer than all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from hf_kvret.lab.calibrate.study import Calibration, LayerFindings, LayerStudy, Progress
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.methods.a2ats.learned import (
    CODEWORD_DTYPES,
    STORED_NAMES,
    CodebookOptions,
    at_distance,
)
from hf_kvret_kernels import codebook as codebook_ops
from hf_kvret_model_patches.rope import Rope

# So many fp32 elements are worked on at once; a temporary of k-means has the second count.
_MOST_NUMBERS = 1 << 26
_CHUNK_NUMBERS = 1 << 22
# Seeds are drawn from so many points, or so many a codeword if that is more; each is the better of
# so many candidates.
_SAMPLE = 1 << 14
_SAMPLE_OF_WORD = 4
_CANDIDATES = 2
# Nearer than this share of the mean square a point is taken for the codeword itself.
_SAME = 1e-8


def k_means(
    points: torch.Tensor,
    count: int,
    *,
    rounds: int = 300,
    tolerance: float = 1e-3,
    seed: int,
    progress: Callable[[int], object] = lambda heads: None,
) -> torch.Tensor:
    """``codebook [H, C, D]`` fp32 on the points' device.

    A head ends when a round lowers its mean squared distance by no more than the share
    ``tolerance``, or after ``rounds``. After each round, codewords of empty clusters move to the
    points that are farthest from theirs; a head may end with some empty. With fewer
    distinct points than codewords, the extra codewords are duplicates.

    Args:
        points: ``[H, n, D]`` fp32, n at least 1, D at most 1024.
        count: C, 1 to 32768; may exceed n.
        rounds: most Lloyd rounds, 0 for the seeds alone. 300 is the A2ATS authors' choice.
        tolerance: 0 or more, without unit. The authors end when no codeword moves by 1e-4; that
            takes three times as many rounds and lowers the error by less than half a percent.
        seed: of a generator of its own; torch's global state is left alone.
        progress: called with 1 after each head. Fits ``update`` of a tqdm bar.

    Raises:
        ValueError: points that are not finite.
    """
    if not points.isfinite().all():
        raise ValueError("points holds NaN or infinity: leave out the tokens that have them")
    heads, n, _ = points.shape
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand((heads, count, _CANDIDATES), generator=generator, dtype=torch.float64)
    size = max(_SAMPLE, _SAMPLE_OF_WORD * count)
    sample = torch.randperm(n, generator=generator)[:size].sort().values.to(points.device)
    codebook = points.new_empty(heads, count, points.shape[2])
    for head in range(heads):
        # Inner products of centred points lose fewer digits; keys often have a large common part.
        mean = points[head].double().mean(0).float()
        deviations = points[head] - mean
        # With no more points than codewords each is one: seeding a model takes minutes on a GPU.
        few = n == count
        seeds = deviations if few else _seed(deviations[sample], draws[head].to(points.device))
        codebook[head] = _lloyd(deviations, seeds, rounds, tolerance) + mean
        progress(1)
    return codebook


def _seed(points: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """``[C, D]``: points drawn by greedy k-means++.

    For each seed several candidates are drawn with probability proportional to the squared
    distance from the nearest seed, and the one that leaves the smallest total is kept. Once all
    distances are 0, all points are as likely.

    Args:
        points: ``[n, D]`` fp32.
        draws: ``[C, m]`` float64 from 0 to 1.
    """
    squares = points.square().sum(-1)
    uniform = torch.ones_like(squares, dtype=torch.float64).cumsum(0)
    distances = torch.full_like(squares, float("inf"))
    seeds = points.new_empty(len(draws), points.shape[1])
    sums = uniform
    for index, draw in enumerate(draws):
        ids = torch.searchsorted(sums, draw * sums[-1], right=True).clamp_(max=len(points) - 1)
        misses = torch.addmm(squares, points[ids], points.T, alpha=-2)
        misses.add_(squares[ids].unsqueeze(1)).clamp_(min=0.0)
        misses = torch.minimum(misses, distances)
        best = misses.sum(1).argmin()
        seeds[index], distances = points[ids[best]], misses[best]
        by_distance = distances.double().cumsum(0)
        sums = torch.where(by_distance[-1] > 0, by_distance, uniform)
    return seeds


def _lloyd(
    points: torch.Tensor, codebook: torch.Tensor, rounds: int, tolerance: float
) -> torch.Tensor:
    """``codebook [C, D]`` from centred points ``[n, D]`` and seeds."""
    near = _SAME * float(points.square().sum(-1).double().mean())
    last = math.inf
    for _ in range(rounds):
        codes = codebook_ops.encode(points[None, None], codebook[None])[0, 0].long()
        misses = torch.cat(
            [(some - codebook[ids]).square_().sum(-1) for some, ids in _chunks(points, codes)]
        )
        error = float(misses.double().mean())
        if last - error <= tolerance * error:
            break
        last = error
        codebook, empty = _means(points, codes, codebook)
        # Empty clusters move to the farthest points.
        worst = misses.topk(min(len(empty), len(misses)))
        targets = worst.indices[worst.values > near]
        codebook[empty[: len(targets)]] = points[targets]
    return codebook


def _means(
    points: torch.Tensor, codes: torch.Tensor, codebook: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster means ``[C, D]``, unchanged for empty clusters, and the numbers of these."""
    counts = codes.bincount(minlength=len(codebook))
    sums = torch.zeros_like(codebook, dtype=torch.float64)
    for some, ids in _chunks(points, codes):
        sums.index_add_(0, ids, some.double())
    means = (sums / counts.clamp(min=1).unsqueeze(1)).float()
    empty = (counts == 0).nonzero()[:, 0]
    means[empty] = codebook[empty]
    return means, empty


def _chunks(
    points: torch.Tensor, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Points and codes, of which temporaries don't take much memory."""
    step = max(1, _CHUNK_NUMBERS // points.shape[1])
    return zip(points.split(step), codes.split(step), strict=True)


# The diagonal of H grows by this, in units of its rms entry, as in the authors' code.
_RIDGE = 1e-6


@dataclass(frozen=True)
class A2ATSCalibration(CodebookOptions, Calibration):
    """Learns a codebook for each KV head. Arguments and errors are those of ``CodebookOptions``."""

    method: ClassVar[str] = "a2ats"
    tensors_held: ClassVar[int] = 1

    def check(self, lengths: Sequence[int]) -> None:
        super().check(lengths)
        tokens = sum(lengths)
        if self.codewords > tokens:
            raise ValueError(
                f"codewords={self.codewords} of {tokens} tokens: give more --tokens or fewer "
                "--codewords"
            )

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
        step = max(1, _MOST_NUMBERS // (queries.shape[1] * tokens.key.shape[3]))
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

        It is 0 where nothing is lost, 1 where all scores would be 0 (equation 13). None if nothing
        is held out, or if keys don't vary. An offset common to all keys does not change a softmax,
        so means are subtracted.
        """
        if not self._keys[True]:
            return None
        keys = self._all_keys(True)
        codes = codebook_ops.encode((keys @ factor)[None], words)[0].long()
        codewords = words.gather(1, codes.unsqueeze(-1).expand_as(keys))
        pair = keys.double(), codewords.double() @ inverse.double()
        exact, near = (x - x.mean(1, keepdim=True) for x in pair)
        metric = self._moments[True].to(self.device)
        lost, whole = (((x @ metric) * x).sum((1, 2)) for x in (exact - near, exact))
        error = float((lost / whole).mean())
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
