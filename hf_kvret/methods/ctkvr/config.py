"""Options of CTkvr."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import FLAG, OneOf, integer, option, real


@dataclass(frozen=True)
class CTkvrConfig(RetrievalConfig):
    """CTkvr's options beside those of every retrieval cache.

    Attributes:
        centroids: the most past queries that are centroids, C.
        tokens_per_centroid: there is at most one centroid for so many cold tokens.
        choice: the prompt's queries that become centroids. ``"mixed"``: half of them the last,
            half spread over the others. ``"last"``: the last ones.
        list_ratio: length of a centroid's list, as a multiple of the budget.
        nprobe: centroids whose lists a query recalls, C'.
        metric: what a head's query and centroid are compared by. ``"scores"``: what they score
            over the cold keys, whose correlation is taken. ``"queries"``: their own cosine.
            Numbers that all queries share, or in which all keys are alike, may decide it.
        similarity: of a query and a centroid, the ``"mean"`` or the ``"max"`` of their heads'
            cosines. The largest may be that of a head whose queries are all alike.
        following: tokens recalled behind each of a list's best, and how many of these there are.
            Past queries rarely asked for the later tokens of a text that an answer repeats.
        update: decoded tokens from one new centroid to the next; each drops the oldest. 0: never.
        update_lists: the keys of a new centroid's list: ``"all"`` keys, at the next flush, or the
            ``"recalled"`` keys, at once.
        pending: every query recalls the tokens that are in no list yet. Beyond this number of them
            all lists are made again. 0: such tokens are not recalled.
        questions: the queries of a pass of several tokens become centroids, with lists over all
            keys, before the answer is selected.
    """

    learns_from_queries: ClassVar[bool] = True
    # Section 4.1.1, and algorithms 1 and 2: nothing but the FIFO changes the lists.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "top_k": 1024,
            "dense_below": 0,
            "tokens_per_centroid": 16,
            "choice": "last",
            "metric": "queries",
            "similarity": "max",
            "following": 0,
            "update": 1,
            "update_lists": "recalled",
            "pending": 0,
            "questions": False,
            "rest": None,
        }
    }

    centroids: int = option(2048, integer(1))
    tokens_per_centroid: int = option(8, integer(1))
    choice: str = option("mixed", OneOf("mixed", "last"))
    list_ratio: float = option(2.5, real(note="one list fills a budget", least=1, below=math.inf))
    nprobe: int = option(4, integer(1))
    metric: str = option("scores", OneOf("scores", "queries"))
    similarity: str = option("mean", OneOf("mean", "max"))
    following: int = option(16, integer(0, most=256))
    update: int = option(8, integer(0))
    update_lists: str = option("all", OneOf("all", "recalled"))
    pending: int = option(2048, integer(0))
    questions: bool = option(True, FLAG)

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
