"""CTkvr's variants, made from the options of one cache."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ablation import made
from split_recall import SplitCTkvrCache

from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig

CHOICES = ("mixed", "last", "random", "first", "even")
# The rank in a list does not depend on its length, so without a rerank one length says all.
RERANKS = ("auto", "codes")
BY_RANK = "lists"
_PUBLISHED = {"update": 1, "update_lists": "recalled"}
UPDATES: dict[str, dict[str, Any]] = {
    "off": {"update": 0},
    "every 1, of recalled keys": _PUBLISHED,
    "every 8, of recalled keys": {**_PUBLISHED, "update": 8},
    "every 8, of all keys": {"update": 8, "update_lists": "all"},
    "every 32, of all keys": {"update": 32, "update_lists": "all"},
    "off, questions": {"update": 0, "questions": True},
    "every 8, of all keys, questions": {"update": 8, "update_lists": "all", "questions": True},
}
QUESTIONS: dict[str, dict[str, Any]] = {"on": {"questions": True}, "off": {"questions": False}}
UPKEEP: dict[str, dict[str, Any]] = {
    "as given": {},
    "no pending list": {"pending": 0},
    "published lists, pending and coverage": _PUBLISHED,
    "published lists and pending": {**_PUBLISHED, "coverage": 0.0},
    "as published": {**_PUBLISHED, "pending": 0, "coverage": 0.0},
}
# Those that choose fixed options; the numbers of the other parts come from the command line.
_FIXED: dict[str, dict[str, dict[str, Any]]] = {
    # Without a mask as published; with it an early centroid can list early tokens only.
    "choice": {
        **{name: {"choice": name, "causal": False} for name in CHOICES},
        **{f"{name}, causal": {"choice": name, "causal": True} for name in CHOICES[1:]},
    },
    "questions": QUESTIONS,
    "update": UPDATES,
    "pending": UPKEEP,
}
PARTS = ("choice", "centroids", "probes", "rerank", "budget", "questions", "update", "pending")


@dataclass(frozen=True)
class Variants:
    """What the parts of the ablation vary.

    Attributes:
        centroids: counts as ``512``, or multiples of the usual count as ``1/8x``.
        probes: centroids that a query recalls.
        ratios: keys of a list, as multiples of the budget.
        budgets: as ``RetrievalConfig.top_k``.

    Raises:
        ValueError: a value that CTkvr refuses.
    """

    centroids: tuple[str, ...]
    probes: tuple[int, ...]
    ratios: tuple[float, ...]
    budgets: tuple[int | float, ...]

    def __post_init__(self) -> None:
        for text in self.centroids:
            centroid_count(text, 1)
        for option, values in (
            ("probes", self.probes),
            ("list_ratio", self.ratios),
            ("top_k", self.budgets),
        ):
            for value in values:
                CTkvrConfig(**{option: value})

    def names(self, part: str) -> list[str]:
        """The variants of a part, in the order of its table."""
        if part in _FIXED:
            return list(_FIXED[part])
        return {
            "centroids": list(self.centroids),
            "probes": [str(probes) for probes in self.probes],
            "rerank": [
                *(_reranked(name, ratio) for name in RERANKS for ratio in self.ratios),
                BY_RANK,
            ],
            "budget": [str(budget) for budget in self.budgets],
        }[part]

    def options(self, part: str, name: str, given: CTkvrConfig, length: int) -> CTkvrConfig:
        """What ``given`` becomes in the variant ``name`` after a context of ``length`` tokens.

        A text that is followed a few tokens at a time asks nothing, so its passes count as
        questions only where a variant says so. ValueError for a part that ``given`` has off.
        """
        if part == "pending" and not (given.pending and given.coverage):
            raise ValueError(
                f"pending={given.pending}, coverage={given.coverage}: there is nothing to switch "
                "off; leave these options out, or the part pending out of --parts"
            )
        usual = given.centroids_for(max(1, length - given.recent))
        changes: dict[str, Any]
        if part in _FIXED:
            changes = _FIXED[part][name]
        elif part == "centroids":
            count = centroid_count(name, usual)
            changes = {"centroids": count, "tokens_per_centroid": 1}
        elif part == "probes":
            changes = {"probes": int(name)}
        elif part == "rerank" and name == BY_RANK:
            changes = {"rerank": name}
        elif part == "rerank":
            rerank, ratio = name.split(", ratio ")
            changes = {"rerank": rerank, "list_ratio": float(ratio)}
        else:
            changes = {"top_k": int(name) if name.isdigit() else float(name)}
        return given.replace(**{"questions": False, **changes})

    def choice(self, part: str, name: str, given: CTkvrConfig, length: int) -> CacheChoice:
        """A cache of that variant; the part ``pending`` tells prompt and generation apart."""
        cache_class = SplitCTkvrCache if part == "pending" else CTkvrCache
        return made(f"{part}: {name}", cache_class, self.options(part, name, given, length))


def centroid_count(text: str, usual: int) -> int:
    """``512`` is itself, ``1/8x`` an eighth of ``usual``; at least 1.

    ValueError for anything else.
    """
    try:
        count = Fraction(text[:-1]) * usual if text.endswith("x") else Fraction(int(text))
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"--centroids {text}: write a count as 512, or a multiple as 0.5x or 1/8x"
        ) from None
    if count <= 0:
        raise ValueError(f"--centroids {text}: above 0")
    return max(1, round(count))


def _reranked(rerank: str, ratio: float) -> str:
    return f"{rerank}, ratio {ratio:g}"
