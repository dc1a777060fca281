"""What an artifact says about one layer, on the device that asks for it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Self

import torch

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.files import DESCRIPTION
from hf_kvret.methods.a2ats.spaces import SPACES, KeySpace
from hf_kvret_kernels import codebook
from hf_kvret_model_patches.rope import Rope

METHOD = "a2ats"

# Keys that are un-rotated and multiplied at once, however long a prompt is: a copy in fp32 takes
# 64 MiB with 128 numbers a head.
_PIECE = 1 << 17


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Codewords and metric of one layer, shared by all caches.

    Attributes:
        words: ``[H, C, D]``, codewords in the space of the metric.
        metric: ``[H, D, D]`` fp32, L of H = L L^T (equation 14); a key k is encoded as k L.
        space: what keys and queries are before they meet the metric.
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
        """Of codewords and metric, 63 bits: codes mean nothing with others."""
        digest = hashlib.sha256()
        for x in (self.words, self.metric):
            digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:8]) >> 1

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        if device == self.words.device:
            return self
        moved = (self.words.to(device), self.metric.to(device), self.space.to(device))
        return type(self)(*moved)

    def encode(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Ids ``[B, H, n]`` int16 of post-RoPE ``keys [B, H, n, D]`` at ``positions [B, n]``."""
        batch, heads, count, _ = keys.shape
        codes = torch.empty(batch, heads, count, dtype=torch.int16, device=keys.device)
        step = max(1, _PIECE // (batch * heads))
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
        grouped = plain.unflatten(1, (len(self.words), -1))
        folded = torch.matmul(grouped, self.inverse[:, None]).flatten(1, 2)
        return codebook.score_table(folded, self.words, scale=scale, softcap=softcap)


def load(artifact: str, revision: str | None) -> CalibrationArtifact:
    """The artifact of a folder or hub id, read once for a process, or when a folder was rewritten.

    Raises:
        OSError, ValueError: as ``CalibrationArtifact.from_pretrained``.
    """
    described = (Path(artifact).expanduser() / DESCRIPTION).absolute()
    stamp = (str(described), described.stat().st_mtime_ns) if described.is_file() else None
    return _load(artifact, revision, stamp)


@lru_cache(maxsize=4)
def _load(
    artifact: str, revision: str | None, stamp: tuple[str, int] | None
) -> CalibrationArtifact:
    return CalibrationArtifact.from_pretrained(artifact, method=METHOD, revision=revision)


def space_of(artifact: CalibrationArtifact) -> type[KeySpace]:
    """What the keys were when the codewords were learned.

    Raises:
        ValueError: the artifact doesn't say, or names a space that we don't know.
    """
    told = artifact.options.get("space")
    if told not in SPACES:
        raise ValueError(
            f"the a2ats artifact of {artifact.model.name} has space={told!r}, known are "
            f"{', '.join(map(repr, SPACES))}: upgrade hf-kvret, or make it again with "
            "`hf-kvret calibrate a2ats`"
        )
    return SPACES[told]


@lru_cache(maxsize=512)
def learned_layer(found: CalibrationArtifact, layer: int, device: torch.device) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    Raises:
        ValueError: the artifact has no such layer, or is of a kind that we don't know.
    """
    space = space_of(found)
    try:
        words = found.tensors[f"layers.{layer}.codewords"]
        metric = found.tensors[f"layers.{layer}.metric"]
        frequencies = found.tensors[f"layers.{layer}.inv_freq"]
        told = found.options["layers"][str(layer)]
        window = found.options["window"]
    except KeyError as missing:
        raise ValueError(
            f"the a2ats artifact of {found.model.name} has no {missing} for layer {layer}: make it "
            "again with `hf-kvret calibrate a2ats`"
        ) from missing
    rope = Rope(frequencies, told["attention_factor"], told["layout"])
    return LearnedLayer(words, metric.float(), space(rope, window)).to(device)
