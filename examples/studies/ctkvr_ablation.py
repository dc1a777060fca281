"""What each part of CTkvr is worth: recall of the exact top-k without it, or with another. choice:
which queries of the prompt are centroids (the paper's table 4). centroids, probes: how many
there are, and how many a query recalls (figure 10). rerank: how the recalled tokens are
compared, and how many there are (figure 11). budget: tables 1 and 6. questions: whether a
question's queries become centroids. update: new centroids over --turns (table 5). pending:
recall of the prompt's and of generated tokens along --long-tokens, without the pending list and
without the watch on coverage. Without --text the model reads documents of needles with questions
after them, which is what --model needle speaks.

    python examples/studies/ctkvr_ablation.py --text novel.txt --json a.json --plot a.png
    python examples/studies/ctkvr_ablation.py --model needle --parts choice,questions
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ablation import Ablation, caches_option, made, parts_option, values_option
from follower import CTkvrFollower, SplitCTkvrCache, starts_of
from study_tables import CANDIDATES, Found, Plot, Table, bars_of, by_length, curves_of, stretches_of

from hf_kvret.evaluation.arguments import budget, number, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import budget_option, count_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.stretches import Pace, mean_of, share
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.tables import markdown_table
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig

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
    "questions": {"on": {"questions": True}, "off": {"questions": False}},
    "update": UPDATES,
    "pending": UPKEEP,
}
# The part of ``nprobe`` keeps the name that stands in measured results.
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
        changes = {"nprobe": int(name)}
    elif part == "rerank" and name == _BY_RANK:
        changes = {"rerank": name}
    elif part == "rerank":
        rerank, ratio = name.split(", ratio ")
        changes = {"rerank": rerank, "list_ratio": float(ratio)}
    else:
        changes = {"top_k": int(name) if name.isdigit() else float(name)}
    return given.replace(**{"questions": False, **changes})


def centroid_count(text: str, usual: int) -> int:
    """``512`` is itself, ``1/8x`` an eighth of ``usual``; at least 1. ValueError for others."""
    try:
        count = Fraction(text[:-1]) * usual if text.endswith("x") else Fraction(int(text))
    except (ValueError, ZeroDivisionError):
        way_out = "write a count as 512, or a multiple as 0.5x or 1/8x"
        raise ValueError(f"--centroids {text}: {way_out}") from None
    if count <= 0:
        raise ValueError(f"--centroids {text}: above 0")
    return max(1, round(count))


def _centroids(text: str) -> str:
    try:
        centroid_count(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# Parts with one number a variant, and what their variants are.
PLAIN = {
    "choice": "centroids",
    "centroids": "C, centroids",
    "probes": "C', recalled centroids",
    "rerank": "rerank",
    "budget": "budget",
    "questions": "question's centroids",
}
# The paper's accuracies, of other models on other tasks: where, and by variant.
_PAPER: dict[str, tuple[str, dict[str, str]]] = {
    "choice": ("table 4", {"last": "83.35", "random": "79.93", "first": "75.60", "even": "81.98"}),
    "probes": ("table 15", {"2": "0.8854", "4": "0.8958", "6": "0.8988", "8": "0.8990"}),
    "budget": ("tables 1 and 6", {"512": "84.70", "1024": "85.25", "0.04": "85.58"}),
}
_PLACES = {"prompt_recall": "of the prompt", "generated_recall": "that were generated"}
_KINDS = ("recall", "mass", "tokens equal", "candidates", "rows read", "candidates / read")


def _plain_table(cells: Found) -> str:
    """A row a variant, columns for each length."""
    part = cells[0][0]["part"]
    columns, rows = by_length(cells, _KINDS if part == "rerank" else _KINDS[:-1])
    header = ["cache", PLAIN[part], *columns]
    source, figures = _PAPER.get(part, ("", {}))
    if figures:
        header.append(f"paper's accuracy, {source}")
        rows = {key: [*row, figures.get(key[1], "-")] for key, row in rows.items()}
    return markdown_table(header, [[*key, *row] for key, row in rows.items()])


def _turns_table(cells: Found) -> str:
    """Recall by turn (the paper's table 5)."""
    most = max(len(found["stretches"]) for _, found in cells)
    rows = []
    for cell, found in cells:
        turns = [share(one["overlap"]) for one in found["stretches"]]
        turns += ["-"] * (most - len(turns))
        mass = f"{found['mass']:.3f} of {found['best_mass']:.3f}"
        means = (share(found["overlap"]), mass, share(found["equal"]), str(found["list_builds"]))
        rows.append([cell["cache"], cell["variant"], str(cell["length"]), *turns, *means])
    turns = [f"turn {number + 1}" for number in range(most)]
    names = ("recall, mean", "mass, mean", "tokens equal", "times lists were made")
    return markdown_table(["cache", "update", "context", *turns, *names], rows)


def _long_tables(cells: Found) -> str:
    """Recall along the generation, of tokens in either place."""
    ends = sorted({one["end"] for _, found in cells for one in found["stretches"]})
    tables = []
    for name, place in _PLACES.items():
        rows = []
        for cell, found in cells:
            known = {one["end"]: share(one[name]) for one in found["stretches"]}
            row = [cell["cache"], cell["variant"], str(cell["length"])]
            row += [known.get(end, "-") for end in ends]
            mean, builds = share(mean_of(found["stretches"], name)), str(found["list_builds"])
            rows.append([*row, mean, builds])
        header = ["cache", f"recall of tokens {place}", "context", *(f"to {end}" for end in ends)]
        tables.append(markdown_table([*header, "mean", "times lists were made"], rows))
    return "\n\n".join(tables)


def _plot_long(name: str) -> Plot:
    title = f"CTkvr: tokens {_PLACES[name]}"
    return stretches_of(title, x="tokens after the prompt", name=name, low=-0.03)


TABLES: dict[str, Table] = {
    **dict.fromkeys(PLAIN, _plain_table),
    "update": _turns_table,
    "pending": _long_tables,
}
PLOTS: dict[str, Plot] = {
    **{part: bars_of(f"CTkvr: {title}") for part, title in PLAIN.items()},
    "rerank": curves_of("CTkvr: how recalled tokens are compared", *CANDIDATES),
    "update": stretches_of("CTkvr: new centroids over turns", x="turn", numbered=True),
    "pending": _plot_long("prompt_recall"),
    "generated": _plot_long("generated_recall"),
}


@dataclass(frozen=True, kw_only=True)
class CTkvrAblation(Ablation):
    """What each part of CTkvr is worth: recall of the exact top-k without it, or with another."""

    name = "ctkvr-ablation"
    method = "ctkvr"
    example = "causal=false"
    described = (
        *("windows", "new_tokens", "step", "questions", "question_tokens", "answer_tokens"),
        *("turns", "turn_tokens", "turn_measured", "long_tokens", "every"),
    )
    # These follow thousands of tokens.
    once = ("update", "pending")
    tables = TABLES
    plots = PLOTS
    drawn = MappingProxyType({"generated": "pending"})

    caches: str | None = caches_option("ctkvr")
    # A share of the cold tokens like that of 1,024 of 32K.
    top_k: int | float = budget_option(128)
    parts: tuple[str, ...] = parts_option(PARTS)
    centroids: tuple[str, ...] = values_option(
        ("1/8x", "1/4x", "1/2x", "1x", "2x"), "counts, or multiples of what is usual", _centroids
    )
    nprobe: tuple[int, ...] = values_option((1, 2, 4, 8, 16), "centroids recalled", whole_number(1))
    ratios: tuple[float, ...] = values_option(
        (1.0, 1.5, 2.5, 4.0), "keys of a list, as multiples of the budget", number(0)
    )
    budgets: tuple[int | float, ...] = values_option(
        (512, 1024, 0.04), "of the part budget", budget
    )
    step: int = count_option(8, "tokens a forward pass; turns and answers take 1")
    questions: int = count_option(4, "passages that come again, each on a fork")
    question_tokens: int = option(48, "of a passage", kind=whole_number(2))
    answer_tokens: int = count_option(32, "that follow it and are measured")
    turns: int = count_option(8, "of the update part")
    turn_tokens: int = count_option(256, "of new text in a turn")
    turn_measured: int = count_option(64, "tokens after it that are measured")
    long_tokens: int = count_option(4000, "of the pending part")
    every: int = count_option(400, "of them a number")

    @property
    def long(self) -> Pace:
        """Of the pending part."""
        return Pace(self.long_tokens, self.every, self.step)

    def __post_init__(self) -> None:
        # Refuse steps that cross the end of a stretch, and values that CTkvr refuses.
        _ = self.long
        known = {"nprobe": self.nprobe, "list_ratio": self.ratios, "top_k": self.budgets}
        for name, values in known.items():
            for value in values:
                CTkvrConfig().replace(**{name: value})
        if "questions" in self.parts:
            for length in self.context:
                starts_of(self.questions, self.question_tokens + self.answer_tokens, length)

    def variants(self, part: str) -> Sequence[str]:
        if part in FIXED:
            return list(FIXED[part])
        if part == "rerank":
            return rerank_names(self.ratios)
        values = {"centroids": self.centroids, "probes": self.nprobe, "budget": self.budgets}
        return list(map(str, values[part]))

    def following(self, part: str) -> int:
        turns = self.turns * (self.turn_tokens + self.turn_measured)
        others = {"questions": 0, "update": turns, "pending": self.long_tokens}
        return others.get(part, self.new_tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, length = cell["part"], cell["length"]
        assert isinstance(choice.options, CTkvrConfig)
        options = changed(part, cell["variant"], choice.options, length)
        # A split cache tells prompt and generation apart.
        cache_class = SplitCTkvrCache if part == "pending" else CTkvrCache
        chosen = made(f"{part}: {cell['variant']}", cache_class, options)
        follower = CTkvrFollower(subject, chosen, self.method)
        for window in self.contexts(subject, part, length):
            if part == "questions":
                follower.ask(window, self.questions, self.question_tokens, self.answer_tokens)
            elif part == "update":
                follower.talk(window, length, self.turns, self.turn_tokens, self.turn_measured)
            else:
                follower.follow(window, length, self.long if part == "pending" else self.pace)
        return follower.result()


MEASUREMENT = CTkvrAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
