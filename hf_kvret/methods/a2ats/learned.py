"""The codebook and metric of one layer, from the artifact, on a device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import torch

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.shared import check_tensor, learned_rope, made_once, shared_artifact
from hf_kvret.methods.a2ats.spaces import SPACES, KeySpace
from hf_kvret_kernels import codebook

METHOD = "a2ats"

# Numbers of keys that are un-rotated and multiplied at once: an fp32 copy takes 64 MiB.
_PIECE_NUMBERS = 1 << 24


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Codewords and metric of one layer, shared by all caches.

    Attributes:
        words: ``[H, C, D]``, codewords in the space of the metric.
        metric: ``[H, D, D]`` fp32, L of H = L L^T (equation 14); a key k is encoded as k L.
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

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``; itself if it is there."""
        if device == self.words.device:
            return self
        parts = (self.words.to(device), self.metric.to(device), self.space.to(device))
        return type(self)(*parts)

    def encode(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Ids ``[B, H, n]`` int16 of post-RoPE ``keys [B, H, n, D]`` at ``positions [B, n]``."""
        batch, heads, count, dim = keys.shape
        codes = torch.empty(batch, heads, count, dtype=torch.int16, device=keys.device)
        step = max(1, _PIECE_NUMBERS // (batch * heads * dim))
        for start in range(0, count, step):
            piece = slice(start, start + step)
            where = None if positions is None else positions[:, piece]
            plain = self.space.keys(keys[:, :, piece], where)
            codes[:, :, piece] = codebook.encode(plain @ self.metric, self.words, norms=self.norms)
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


def load(artifact: str, revision: str | None) -> CalibrationArtifact:
    """The artifact of a folder or hub id; OSError or ValueError as ``shared_artifact``."""
    return shared_artifact(artifact, revision, METHOD)


def check_learned(artifact: CalibrationArtifact, layers: Iterable[int]) -> None:
    """Check an artifact for completeness, before any token is cached. Checks each layer once.

    Raises:
        ValueError: a layer or field is missing, has a wrong shape, or is not finite.
    """
    for layer in layers:
        made_once(artifact, ("checked", layer), partial(_check_layer, artifact, layer))


def _check_layer(artifact: CalibrationArtifact, layer: int) -> bool:
    learned_rope(artifact, layer)
    heads, _, dim = check_tensor(artifact, f"layers.{layer}.codewords", (None, None, None)).shape
    metric = check_tensor(artifact, f"layers.{layer}.metric", (heads, dim, dim))
    window = artifact.options.get("window")
    if not isinstance(window, int) or not bool((metric.diagonal(dim1=1, dim2=2) > 0).all()):
        raise ValueError(
            f"the a2ats artifact of {artifact.model.name} has window={window!r}, or a metric of "
            f"layer {layer} that can't be inverted: make it again with `hf-kvret calibrate a2ats`"
        )
    return True


def space_of(artifact: CalibrationArtifact) -> type[KeySpace]:
    """The space of keys in which the codewords were learned.

    Raises:
        ValueError: the artifact does not name one, or an unknown one.
    """
    name = artifact.options.get("space")
    if not isinstance(name, str) or name not in SPACES:
        raise ValueError(
            f"the a2ats artifact of {artifact.model.name} has space={name!r}, known are "
            f"{', '.join(map(repr, SPACES))}: upgrade hf-kvret, or make it again with "
            "`hf-kvret calibrate a2ats`"
        )
    return SPACES[name]


def learned_layer(artifact: CalibrationArtifact, layer: int, device: torch.device) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    Raises:
        ValueError: as ``check_learned`` and ``space_of``.
    """
    check_learned(artifact, [layer])

    def make() -> LearnedLayer:
        words, metric = (artifact.tensors[f"layers.{layer}.{x}"] for x in ("codewords", "metric"))
        space = space_of(artifact)(learned_rope(artifact, layer), artifact.options["window"])
        return LearnedLayer(words, metric.float(), space).to(device)

    return made_once(artifact, (layer, device), make)
