"""Rerank: the tokens in the lists of a query's nearest centroids, and how they are compared."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch.nn.functional import pad

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.schema import FLOATS
from hf_kvret.contracts.state import State, tensor
from hf_kvret.contracts.store import best_of, scores_of_gathered
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.methods.ctkvr.inverted_file import CentroidQueue
from hf_kvret_kernels import centroid, paris
from hf_kvret_kernels.soft_cap import soft_cap_


def recalled(
    queue: CentroidQueue,
    query: torch.Tensor,
    nprobe: int,
    pending: int,
    valid: torch.Tensor,
    *,
    in_turn: bool = False,
) -> torch.Tensor:
    """Ids ``[B, H, Q, M]`` int32, each valid id once, at its first occurrence; else -1.

    For ``query [B, H, Q, G, D]``, with the ``pending`` newest tokens as one more list. List after
    list, the nearest centroid's first; with ``in_turn`` round-robin, the best token of each list
    first.
    """
    lists = queue.recall(query, nprobe)
    length = valid.shape[1]
    newest = torch.arange(
        length - 1, length - 1 - pending, -1, dtype=torch.int32, device=query.device
    )
    if in_turn:
        width = max(lists.shape[-1], pending)
        lists = pad(lists, (0, width - lists.shape[-1]), value=-1)
        last = pad(newest, (0, width - pending), value=-1).expand(*lists.shape[:3], 1, width)
        ids = torch.cat([lists, last], dim=3).transpose(3, 4).flatten(3)
    else:
        ids = torch.cat([lists.flatten(3), newest.expand(*lists.shape[:3], -1)], dim=3)
    return centroid.unite(ids, valid)


class Rerank(State):
    """Selects the best of a query's recalled tokens. One per index.

    Attributes:
        in_turn: whether recalled tokens must be in round-robin order over the lists.
        reads_keys: whether it reads the recalled keys from the store.
        keeps_all: whether every recalled token is selected, however many there are.
    """

    in_turn: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False

    @abstractmethod
    def best(
        self, ids: torch.Tensor, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        """``[B, H, Q, count]`` int32, best first, then -1.

        ``ids [B, H, Q, M]`` int32 are recalled; ``query [B, Hq, Q, D]``.
        """

    def add(self, block: TokenBlock) -> None:
        """Add tokens that became cold."""

    def token_nbytes(self) -> float:
        """Bytes that comparing one token reads outside the store, all heads and sequences."""
        return 0.0


class StoredKeys(Rerank):
    """By exact scores, computed where the store attends (algorithm 2, lines 5 and 6)."""

    reads_keys = True

    def best(
        self, ids: torch.Tensor, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        return cold.store.best(query, ids, count, cold.scale, cold.softcap)


class FetchedKeys(Rerank):
    """By exact scores on the queries' device, to which the recalled keys are fetched."""

    reads_keys = True

    def best(
        self, ids: torch.Tensor, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        logits = scores_of_gathered(cold.store, query, ids, cold.scale, cold.softcap)
        return best_of(logits, ids, count)


class ListOrder(Rerank):
    """By their ranks in the lists, without scoring; not in the paper."""

    in_turn = True

    def best(
        self, ids: torch.Tensor, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        absent_last = (ids < 0).byte().argsort(dim=-1, stable=True)
        best_ids = ids.gather(-1, absent_last[..., :count])
        return pad(best_ids, (0, count - best_ids.shape[-1]), value=-1)


class NoRerank(ListOrder):
    """All recalled tokens, in the order of their ranks in the lists (section 4.2.2, figure 11)."""

    keeps_all = True


_SUBSPACE_DIM = 8


class KeyCodes(Rerank):
    """By scores that ParisKV's codes estimate (its section 4.1), about 5 bits an element of a key.

    The mean key of the first block is subtracted from all keys before they are encoded.
    """

    # As in ``ParisCodes``.
    _sign: TokenBuffer = tokens(dims="B H N p", dtype=torch.uint8)
    _magnitude: TokenBuffer = tokens(dims="B H N q", dtype=torch.uint8)
    _weight: TokenBuffer = tokens(dims="B H N s", dtype=FLOATS)
    _mean: torch.Tensor | None = tensor(shared=True, dims="B H D", dtype=torch.float32)
    _signs: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)
    _levels: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)

    def __init__(self, seed: int) -> None:
        """``seed``: of the random rotation."""
        self.seed = seed

    def best(
        self, ids: torch.Tensor, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        heads = ids.shape[1]
        grouped = query.unflatten(1, (heads, -1)).transpose(2, 3)
        logits = self.logits(grouped, ids, cold.scale, cold.softcap)
        flat = logits.transpose(2, 3).flatten(1, 2)
        return best_of(flat, ids, count)

    def add(self, block: TokenBlock) -> None:
        """Encode the keys of ``block``."""
        if self._mean is None:
            self._start(block.mean_key())
        assert self._signs is not None and self._levels is not None
        codes = paris.encode(
            block.keys, self._signs, self._levels, m=_SUBSPACE_DIM, mean=self._mean
        )
        self._sign.append(codes.sign)
        self._magnitude.append(codes.magnitude)
        self._weight.append(codes.weight)

    def logits(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Estimated logits ``[B, H, Q, G, M]`` fp32, -inf for ids of -1.

        ``query [B, H, Q, G, D]``, ``ids [B, H, Q, M]`` int32.
        """
        if self._mean is None or self._signs is None or self._levels is None:
            raise RuntimeError("no key was coded: call add before search")
        query = query.float()
        rotated, codes = paris.rotate(query, self._signs), self._codes()
        logits = paris.rerank(rotated, codes, ids.contiguous(), self._levels, m=_SUBSPACE_DIM)
        logits = logits * scale
        if softcap is None:
            return logits
        # A cap bends the whole score, the mean key's part included.
        whole = logits + scale * (query * self._mean[:, :, None, None]).sum(-1, keepdim=True)
        return soft_cap_(whole, softcap).masked_fill_((ids < 0).unsqueeze(3), float("-inf"))

    def _codes(self) -> paris.ParisCodes:
        return paris.ParisCodes(self._sign.rows, self._magnitude.rows, self._weight.rows)

    def token_nbytes(self) -> float:
        """Bytes of one token's code, all heads and sequences."""
        planes = [plane for plane in (self._sign, self._magnitude, self._weight) if len(plane)]
        return sum(plane.rows.nbytes / len(plane) for plane in planes)

    def loaded(self) -> None:
        """Make the rotation anew, from the seed."""
        assert self._mean is not None, "it is loaded"
        self._start(self._mean)

    def _start(self, mean: torch.Tensor) -> None:
        self._mean = mean
        dim = paris.rotated_dim(mean.shape[-1])
        self._signs = paris.random_signs(dim, self.seed).to(mean.device)
        self._levels = paris.magnitude_levels(_SUBSPACE_DIM).to(mean.device)
