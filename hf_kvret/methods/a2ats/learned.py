"""Codebooks: what they are learned with, and codewords and metric of one layer on a device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from transformers import PreTrainedConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.shared import (
    calibration_options,
    check_positions_known,
    learned_rope,
    made_once,
)
from hf_kvret.options.declare import OneOf, check_options, integer, option, real
from hf_kvret_kernels import codebook
from hf_kvret_model_patches.rope import Rope

_LAST_POSITION = 2**31 - 1

CODEWORD_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CodebookOptions:
    """How the codebooks of each KV head are made, one codebook for all inputs.

    Attributes:
        codewords: C, of each KV head, at most the number of training tokens; the paper has 4096.
        distance: b, in tokens, of all that is not local from a query (equations 11 and 12).
        rounds: most rounds of k-means; 300 is the authors' choice.
        tolerance: share by which a round must lower k-means' error for another one to follow.
        space: ``"windowed"``: keys before RoPE; ``"rotated"``: after it, for study (table 2).
        codeword_dtype: of the codewords in the artifact and in memory, ``"bfloat16"`` or
            ``"float32"``. Codewords are learned in fp32 and rounded; reported errors are those of
            the rounded ones.
        seed: of k-means.

    Raises:
        TypeError: an option of another kind than above.
        ValueError: one that is out of its range.
    """

    codewords: int = option(4096, integer(1, most=codebook.MOST_CODEWORDS))
    distance: int = option(2048, integer(0, "tokens", most=_LAST_POSITION))
    rounds: int = option(300, integer(0))
    tolerance: float = option(1e-3, real(0, below=float("inf")))
    space: str = option("windowed", OneOf("windowed", "rotated"))
    codeword_dtype: str = option("bfloat16", OneOf(*CODEWORD_DTYPES))
    seed: int = option(0, integer(0))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, eq=False)
class KeySpace:
    """The space of keys and queries as attention sees them (table 2, without windowed RoPE).

    Attributes:
        rope: RoPE of the layer.
        distance: b, in tokens, assumed between queries and all cold tokens (equation 12).
    """

    rope: Rope
    distance: int

    def keys(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """``[B, H, n, D]`` fp32 of post-RoPE keys at ``positions [B, n]``."""
        return keys.float()

    def queries(self, queries: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """``[B, Hq, n, D]`` fp32 of post-RoPE queries at ``positions [B, n]``."""
        return queries.float()


def at_distance(query: torch.Tensor, rope: Rope, distance: int) -> torch.Tensor:
    """``[B, Hq, n, D]`` fp32: queries whose dot products with keys before RoPE are the scores of
    keys ``distance`` tokens back (equation 12).

    YaRN multiplies the rotated elements of queries and of keys by its factor. Keys before RoPE
    don't have it, so these queries have it twice; elements that RoPE leaves alone never have it.

    Args:
        query: ``[B, Hq, n, D]`` before RoPE, any float dtype.
        rope: that of the layer, on the same device.
        distance: b, in tokens.
    """
    square_rope = replace(rope, attention_factor=rope.attention_factor**2)
    return square_rope.rotate_to(query, distance, dtype=torch.float32)


class WindowedSpace(KeySpace):
    """Windowed RoPE: keys before RoPE, queries rotated to position b (section 4.1)."""

    def keys(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return self._before(keys, positions)

    def queries(self, queries: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return at_distance(self._before(queries, positions), self.rope, self.distance)

    def _before(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        if not self.rope.rotary_dim:
            return x.float()
        if positions is None:
            raise ValueError(
                "this model does not tell its attention the positions of tokens, and windowed RoPE "
                "needs them: pass position_ids to the model, or use another method"
            )
        return self.rope.unrotate(x, positions, dtype=torch.float32)


SPACES: dict[str, type[KeySpace]] = {"windowed": WindowedSpace, "rotated": KeySpace}

METHOD = "a2ats"
STORED_NAMES = {"window": "distance"}
"""Options that artifacts have under another name."""
_UNREAD = ("query_aware", "compare")

# Elements of keys that are un-rotated and multiplied at once: an fp32 copy takes 64 MiB.
_CHUNK_NUMBERS = 1 << 24


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Codewords and metric of one layer, shared by all caches.

    Attributes:
        words: ``[H, C, D]``, codewords in the space of the metric.
        metric: ``[H, D, D]`` fp32, L of H = L L^T (equation 15); a key k is encoded as k L.
        space: the space of keys and queries before the metric is applied.
    """

    words: torch.Tensor
    metric: torch.Tensor
    space: KeySpace

    @cached_property
    def norms(self) -> torch.Tensor:
        """``[H, C]`` fp32: half the squared lengths of the codewords."""
        return codebook.half_norms(self.words)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """``[H, D, D]`` fp32: the inverse of the metric, transposed."""
        eye = torch.eye(self.metric.shape[-1], device=self.metric.device)
        return torch.linalg.solve_triangular(
            self.metric, eye.expand_as(self.metric), upper=False
        ).mT

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in (self.words, self.metric, self.norms, self.inverse))

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of codewords and metric: codes are valid with these only."""
        digest = hashlib.sha256()
        for x in (self.words, self.metric):
            digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:8]) >> 1

    def encode(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Ids ``[B, H, n]`` int16 of post-RoPE ``keys [B, H, n, D]`` at ``positions [B, n]``."""
        batch, heads, count, dim = keys.shape
        codes = torch.empty(batch, heads, count, dtype=torch.int16, device=keys.device)
        step = max(1, _CHUNK_NUMBERS // (batch * heads * dim))
        for start in range(0, count, step):
            chunk = slice(start, start + step)
            where = None if positions is None else positions[:, chunk]
            plain = self.space.keys(keys[:, :, chunk], where)
            codes[:, :, chunk] = codebook.encode(plain @ self.metric, self.words, norms=self.norms)
        return codes

    def table(
        self,
        query: torch.Tensor,
        positions: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Scores ``[B, Hq, Q, C]`` fp32 of post-RoPE ``query [B, Hq, Q, D]`` (equation 21)."""
        plain = self.space.queries(query, positions)
        groups = plain.unflatten(1, (len(self.words), -1))
        table_query = torch.matmul(groups, self.inverse[:, None]).flatten(1, 2)
        return codebook.score_table(table_query, self.words, scale=scale, softcap=softcap)


def check_artifact(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact that can't be one of a model, before any token is cached.

    Raises:
        ValueError: the first thing that is wrong: architecture, options, or the model's positions.
    """
    artifact.check(config)
    if _options(artifact).space == "windowed":
        command = "`hf-kvret calibrate a2ats --space rotated`"
        check_positions_known(config, "another method", command)


def _options(artifact: CalibrationArtifact) -> CodebookOptions:
    make = partial(calibration_options, artifact, CodebookOptions, STORED_NAMES, _UNREAD)
    return made_once(artifact, "options", make)


def learned_layer(
    artifact: CalibrationArtifact, layer: int, device: torch.device, heads: range | None = None
) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    ``heads`` are the KV heads that this process holds; None: all of them.
    """

    def make() -> LearnedLayer:
        names = (f"layers.{layer}.{name}" for name in ("codewords", "metric"))
        held = slice(None) if heads is None else slice(heads.start, heads.stop)
        words, metric = (artifact.tensors[name][held].to(device) for name in names)
        options, rope = _options(artifact), learned_rope(artifact, layer).to(device)
        return LearnedLayer(words, metric.float(), SPACES[options.space](rope, options.distance))

    return made_once(artifact, (layer, device, heads), make)
