"""CTkvr's variants, as changes of the options of one cache."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hf_kvret.methods.ctkvr import CTkvrConfig

CHOICES = ("mixed", "last", "random", "first", "even")
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
FIXED: dict[str, dict[str, dict[str, Any]]] = {
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
_RERANKS = ("auto", "codes")
# The rank in a list does not depend on its length, so without a rerank one length says all.
_BY_RANK = "lists"


def rerank_names(ratios: tuple[float, ...]) -> list[str]:
    """The variants of the part ``rerank``."""
    return [*(f"{name}, ratio {ratio:g}" for name in _RERANKS for ratio in ratios), _BY_RANK]


def changed(part: str, name: str, given: CTkvrConfig, length: int) -> CTkvrConfig:
    """What ``given`` becomes in the variant ``name`` after a context of ``length`` tokens.

    A text that is followed a few tokens at a time asks nothing, so its passes count as questions
    only where a variant says so. ValueError for a part that ``given`` has off.
    """
    if part == "pending" and not (given.pending and given.coverage):
        raise ValueError(
            f"pending={given.pending}, coverage={given.coverage}: there is nothing to switch off; "
            "leave these options out, or the part pending out of --parts"
        )
    changes: dict[str, Any]
    if part in FIXED:
        changes = FIXED[part][name]
    elif part == "centroids":
        usual = given.centroids_for(max(1, length - given.recent))
        changes = {"centroids": centroid_count(name, usual), "tokens_per_centroid": 1}
    elif part == "probes":
        changes = {"probes": int(name)}
    elif part == "rerank" and name == _BY_RANK:
        changes = {"rerank": name}
    elif part == "rerank":
        rerank, ratio = name.split(", ratio ")
        changes = {"rerank": rerank, "list_ratio": float(ratio)}
    else:
        changes = {"top_k": int(name) if name.isdigit() else float(name)}
    return given.replace(**{"questions": False, **changes})


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
