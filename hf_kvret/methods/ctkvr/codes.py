"""KeyCodes: compact codes of all cold keys, to compare recalled tokens on the device."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens
from hf_kvret.core.store import best_of
from hf_kvret.core.token_buffer import GrowingRows
from hf_kvret.methods.ctkvr.recalled import Recalled
from hf_kvret.methods.ctkvr.rerank import Rerank
from hf_kvret_kernels import paris

_PLANES = ("sign", "magnitude", "weight")
_SUBSPACE_DIM = 8


class KeyCodes(Rerank):
    """By scores that ParisKV's codes estimate (its section 4.1), about 5 bits a number of a key.

    The mean key of the first block is subtracted from all keys before they are encoded.
    """

    def __init__(self, seed: int) -> None:
        """``seed``: of the random rotation."""
        self.seed = seed
        self._planes = {name: GrowingRows() for name in _PLANES}
        self._mean: torch.Tensor | None = None
        self._signs: torch.Tensor | None = None
        self._levels: torch.Tensor | None = None

    def best(
        self, recalled: Recalled, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        heads = recalled.ids.shape[1]
        bundles = query.unflatten(1, (heads, -1)).transpose(2, 3)
        logits = self.logits(bundles, recalled.ids, cold.scale, cold.softcap)
        flat = logits.transpose(2, 3).flatten(1, 2)
        return best_of(flat, recalled.ids, count)

    def observe(self, block: TokenBlock) -> None:
        """Encode the keys of ``block``."""
        if self._mean is None:
            self._start(block.mean_key())
        assert self._signs is not None and self._levels is not None
        codes = paris.encode(
            block.keys, self._signs, self._levels, m=_SUBSPACE_DIM, mean=self._mean
        )
        for name, plane in self._planes.items():
            plane.append(getattr(codes, name))

    def logits(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Estimated logits ``[B, H, Q, G, M]`` fp32, -inf for ids of -1.

        ``query [B, H, Q, G, D]``, ``ids [B, H, Q, M]`` int32.
        """
        assert self._mean is not None and self._signs is not None and self._levels is not None
        query = query.float()
        codes = paris.ParisCodes(**{name: plane.rows for name, plane in self._planes.items()})
        rotated = paris.rotate(query, self._signs)
        found = paris.rerank(rotated, codes, ids.contiguous(), self._levels, m=_SUBSPACE_DIM)
        found = found * scale
        if softcap is None:
            return found
        # A cap bends the whole score, the mean key's part included.
        whole = found + scale * (query * self._mean[:, :, None, None]).sum(-1, keepdim=True)
        capped = softcap * torch.tanh(whole / softcap)
        return capped.masked_fill((ids < 0).unsqueeze(3), float("-inf"))

    def crop(self, length: int) -> None:
        """Keep the first ``length`` keys."""
        for plane in self._planes.values():
            plane.crop(length)

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        for plane in self._planes.values():
            plane.reorder(rows)
        if self._mean is not None:
            self._mean = self._mean.index_select(0, rows)

    def fork(self) -> Self:
        """A copy that shares what there is until it appends."""
        twin = type(self)(self.seed)
        twin._planes = {name: plane.fork() for name, plane in self._planes.items()}
        twin._mean, twin._signs, twin._levels = self._mean, self._signs, self._levels
        return twin

    def nbytes(self) -> int:
        """Bytes of all tensors, spare room included."""
        small = (self._mean, self._signs, self._levels)
        planes = sum(plane.nbytes() for plane in self._planes.values())
        return planes + sum(x.nbytes for x in small if x is not None)

    def token_nbytes(self) -> float:
        """Bytes of one token's code, all heads and rows of the batch."""
        planes = [plane for plane in self._planes.values() if plane.length]
        return sum(plane.rows.nbytes / plane.length for plane in planes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it; empty for none."""
        if self._mean is None:
            return {}
        state = {name: plane.rows.contiguous() for name, plane in self._planes.items()}
        return {**state, "mean": self._mean}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become what was saved. KeyError names a missing tensor."""
        self._start(state["mean"])
        for name in _PLANES:
            self._planes[name] = GrowingRows()
            self._planes[name].append(state[name])

    def _start(self, mean: torch.Tensor) -> None:
        self._mean = mean
        self._signs = paris.random_signs(paris.rotated_dim(mean.shape[-1]), self.seed)
        self._signs = self._signs.to(mean.device)
        self._levels = paris.magnitude_levels(_SUBSPACE_DIM).to(mean.device)
