"""Options of CTkvr."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_kvret.options.config import (
    RetrievalConfig,
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_seed,
)

_LARGEST_HEAD = 256
_CHOICES = {
    "choice": ("mixed", "last", "random", "first", "even"),
    "rerank": ("auto", "cpu", "device", "codes", "lists", "off"),
    "update_lists": ("all", "recalled"),
}


@dataclass(frozen=True)
class CTkvrConfig(RetrievalConfig):
    """CTkvr's options beside those of every retrieval cache.

    Attributes:
        centroids: the most past queries that are centroids, C.
        tokens_per_centroid: there is at most one centroid for so many cold tokens.
        choice: the prompt's queries that become centroids. ``"mixed"``: half of them the last,
            half spread over the others. ``"last"``, ``"random"``, ``"first"`` or ``"even"``: all of
            them so (table 4).
        list_ratio: length of a centroid's list, as a multiple of the budget.
        nprobe: centroids whose lists a query recalls, C'.
        rerank: how recalled tokens are compared. ``"auto"``: by their keys, where the store
            attends. ``"cpu"``: the same, for ``store="cpu"`` alone. ``"device"``: by their keys,
            on the queries' device. ``"codes"``: by compact codes on the device. ``"lists"``: by
            their rank in the lists. ``"off"``: they are not compared, and all are attended to.
        causal: at the first build, a centroid lists no key that comes after it. Not for choices
            with early centroids.
        update: decoded tokens from one new centroid to the next; each drops the oldest. 0: never.
        update_lists: the keys of a new centroid's list: ``"all"`` keys, at the next flush, or the
            ``"recalled"`` keys, at once.
        pending: every query recalls the tokens that are in no list yet. Beyond this number of them
            all lists are made again. 0: such tokens are not recalled.
        coverage: lists are made again when the share of cold tokens in any list falls below this
            part of its first value. 0: never.
        questions: the queries of a pass of several tokens become centroids, with lists over all
            keys, before the answer is selected.
        seed: for ``choice="random"`` and for the codes.
    """

    learns_from_queries: ClassVar[bool] = True
    # Section 4.1.1, and algorithms 1 and 2: nothing but the FIFO changes the lists.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "top_k": 1024,
            "dense_below": 0,
            "choice": "last",
            "update": 1,
            "update_lists": "recalled",
            "pending": 0,
            "coverage": 0.0,
            "questions": False,
        }
    }

    centroids: int = 2048
    tokens_per_centroid: int = 16
    choice: str = "mixed"
    list_ratio: float = 2.5
    nprobe: int = 4
    rerank: str = "auto"
    causal: bool = False
    update: int = 8
    update_lists: str = "all"
    pending: int = 2048
    coverage: float = 0.5
    questions: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("centroids", "tokens_per_centroid", "nprobe"):
            check_int(name, getattr(self, name), 1)
        check_int("update", self.update, 0)
        check_int("pending", self.pending, 0)
        check_seed(self.seed)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.rerank == "cpu" and self.store != "cpu":
            raise ValueError(
                f"rerank='cpu' with store={self.store!r}: the CPU compares keys where it attends "
                "to them, so take store='cpu', or rerank='auto'"
            )
        check_flag("causal", self.causal)
        check_flag("questions", self.questions)
        check_number(
            "list_ratio",
            self.list_ratio,
            lambda x: 1.0 <= x < math.inf,
            "at least 1, so that one list fills a budget",
        )
        check_number(
            "coverage", self.coverage, lambda x: 0.0 <= x <= 1.0, "a share from 0 (never) to 1"
        )

    def check_model(self, head_dim: int) -> None:
        """ValueError for codes of heads that have none."""
        super().check_model(head_dim)
        if self.rerank == "codes" and head_dim > _LARGEST_HEAD:
            raise ValueError(
                f"head dim {head_dim}: codes exist up to {_LARGEST_HEAD}; use rerank='auto'"
            )

    @property
    def even_len(self) -> int:
        """See ``RetrievalConfig``: lists are all there, and their slots take three bytes."""
        lists = max(self.centroids * self.tokens_per_centroid, 1 << 16)
        return max(super().even_len, lists + self.recent + self.flush)

    def centroids_for(self, cold_len: int) -> int:
        """How many there are for ``cold_len`` tokens: at least 1."""
        return max(1, min(self.centroids, cold_len // self.tokens_per_centroid))

    def list_len(self, cold_len: int, budget: int) -> int:
        """Keys of a list."""
        return min(cold_len, math.ceil(self.list_ratio * budget))
