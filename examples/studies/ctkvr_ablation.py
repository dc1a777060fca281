"""What each part of CTkvr is worth: recall of the exact top-k without it, or with another. choice:
which queries of the prompt are centroids (the paper's table 4). centroids, probes: how many
there are, and how many a query recalls (figure 10). rerank: how the recalled tokens are
compared, and how many there are (figure 11). budget: tables 1 and 6. update: new centroids over
--turns (table 5). dedup: tokens that several lists name (figure 13). time: of a step's parts on a
CPU (table 13). Without --text the model reads documents of needles with questions after them,
which is what --model needle speaks.

    python examples/studies/ctkvr_ablation.py --text novel.txt --json a.json --plot a.png
    python examples/studies/ctkvr_ablation.py --model needle --parts choice,update
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from ablation import (
    CANDIDATES,
    Ablation,
    CellResults,
    Plot,
    Table,
    bars_of,
    by_length,
    caches_option,
    curves_of,
    made,
    not_here,
    parts_option,
    stretches_of,
    values_option,
)
from follower import Follower
from tqdm import tqdm

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.recording import RecordedLayer, read_layers
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.teacher_forcing import full_choices
from hf_kvret.lab.program.arguments import budget, number, whole_number
from hf_kvret.lab.program.common_options import budget_option, count_option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table, share
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig, CTkvrIndex
from hf_kvret.methods.ctkvr.inverted_file import Centroids, best_keys
from hf_kvret.methods.ctkvr.rerank import recalled
from hf_kvret.stores import CpuStore
from hf_kvret_kernels import centroid
from hf_kvret_kernels.prompt_attention import prompt_partials

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
# Those that choose fixed options; the numbers of the other parts come from the command line.
FIXED: dict[str, dict[str, dict[str, Any]]] = {
    # Without a mask as published; with it an early centroid can list early tokens only.
    "choice": {
        **{name: {"choice": name, "causal": False} for name in CHOICES},
        **{f"{name}, causal": {"choice": name, "causal": True} for name in CHOICES[1:]},
    },
    "update": UPDATES,
}
# The part of ``nprobe`` keeps the name that stands in measured results.
PARTS = ("choice", "centroids", "probes", "rerank", "budget", "update", "dedup", "time")
_RERANKS = ("auto", "codes", "none")
# The rank in a list does not depend on its length, so one length says all.
_BY_RANK = "lists"


def rerank_names(ratios: tuple[float, ...]) -> list[str]:
    """The variants of the part ``rerank``."""
    return [*(f"{name}, ratio {ratio:g}" for name in _RERANKS for ratio in ratios), _BY_RANK]


def changed(part: str, name: str, base: CTkvrConfig, length: int) -> CTkvrConfig:
    """What ``base`` becomes in the variant ``name`` after a context of ``length`` tokens.

    A text that is followed a few tokens at a time asks nothing, so its passes count as questions
    only where a variant says so.
    """
    changes: dict[str, Any]
    if part in FIXED:
        changes = FIXED[part][name]
    elif part == "centroids":
        usual = base.centroids_for(max(1, length - base.recent))
        changes = {"centroids": centroid_count(name, usual), "tokens_per_centroid": 1}
    elif part == "probes":
        changes = {"nprobe": int(name)}
    elif part == "rerank" and name == _BY_RANK:
        changes = {"rerank": name}
    elif part == "dedup" and not name.startswith("rho"):
        what, value = name.split(" ")
        return changed("centroids" if what == "C" else "probes", value, base, length)
    elif part in ("dedup", "time"):
        changes = {"list_ratio": float(name[4:])} if part == "dedup" else {}
    elif part == "rerank":
        rerank, ratio = name.split(", ratio ")
        changes = {"rerank": rerank.replace("none", "off"), "list_ratio": float(ratio)}
    else:
        changes = {"top_k": int(name) if name.isdigit() else float(name)}
    return base.replace(**{"questions": False, **changes})


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
}
# The paper's accuracies, of other models on other tasks: where, and by variant.
_PAPER: dict[str, tuple[str, dict[str, str]]] = {
    "choice": ("table 4", {"last": "83.35", "random": "79.93", "first": "75.60", "even": "81.98"}),
    "probes": ("table 15", {"2": "0.8854", "4": "0.8958", "6": "0.8988", "8": "0.8990"}),
    "budget": ("tables 1 and 6", {"512": "84.70", "1024": "85.25", "0.04": "85.58"}),
}
_KINDS = ("recall", "mass", "tokens equal", "candidates", "rows read", "candidates / read")


def _plain_table(cells: CellResults) -> str:
    """A row a variant, columns for each length."""
    part = cells[0][0]["part"]
    columns, rows = by_length(cells, _KINDS if part == "rerank" else _KINDS[:-1])
    header = ["cache", PLAIN[part], *columns]
    source, figures = _PAPER.get(part, ("", {}))
    if figures:
        header.append(f"paper's accuracy, {source}")
        rows = {key: [*row, figures.get(key[1], "-")] for key, row in rows.items()}
    return markdown_table(header, [[*key, *row] for key, row in rows.items()])


def _turns_table(cells: CellResults) -> str:
    """Recall by turn (the paper's table 5)."""
    most = max(len(result["stretches"]) for _, result in cells)
    rows = []
    for cell, result in cells:
        turns = [share(one["overlap"]) for one in result["stretches"]]
        turns += ["-"] * (most - len(turns))
        mass = f"{result['mass']:.3f} of {result['best_mass']:.3f}"
        means = (share(result["overlap"]), mass, share(result["equal"]), str(result["list_builds"]))
        rows.append([cell["cache"], cell["variant"], str(cell["length"]), *turns, *means])
    turns = [f"turn {number + 1}" for number in range(most)]
    names = ("recall, mean", "mass, mean", "tokens equal", "times lists were made")
    return markdown_table(["cache", "update", "context", *turns, *names], rows)


@dataclass(frozen=True)
class Recalled:
    """A layer's index after a context, all of it cold, and later queries ``[1, Hq, q, D]``."""

    index: CTkvrIndex
    cold: ColdTokens
    queries: torch.Tensor

    @classmethod
    def of(cls, layer: RecordedLayer, length: int, options: CTkvrConfig) -> Recalled:
        """After the first ``length`` tokens of a layer."""
        keys, valid = layer.keys[None, :, :length], torch.ones(1, length, dtype=torch.bool)
        index, store = CTkvrIndex(options), CpuStore(keys.device)
        block, scoring = TokenBlock(keys, keys, 0), Scoring(valid, layer.scale, layer.softcap)
        index.on_forward(layer.queries[None, :, :length], keys, 0, None)
        store.append(block)
        index.add(block)
        cold = ColdTokens(store, scoring, options.budget(length))
        index.build(cold)
        return cls(index, cold, layer.queries[None, :, length:].contiguous())

    def duplicates(self) -> dict[str, float]:
        """``alpha``, different tokens over all that lists name; ``twice``, share of them by two.

        ``listed`` is the share of the cold tokens that the recalled lists name.
        """
        queue, length = self.index._file.queue, len(self.cold)
        assert queue is not None, "lists were made"
        queries, probes = self.index._grouped(self.queries), self.index.options.nprobe
        lists = queue.recall(queries, probes).flatten(3)
        names, counts = lists.long(), torch.zeros(*lists.shape[:3], length + 1)
        counts.scatter_add_(-1, names.masked_fill(lists < 0, length), (lists >= 0).float())
        known = float((counts > 0).sum())
        return {
            "alpha": known / float(counts.sum()),
            "twice": float((counts > 1).sum()) / known,
            "listed": known / counts[..., :length].numel(),
        }

    def times(self, window: int) -> dict[str, float]:
        """Median ms of each part of one query's step; the ``window`` newest keys stand for one."""
        index, cold, seconds = self.index, self.cold, dict[str, list[float]]()
        queue, store, scoring = index._file.queue, cold.store, (cold.scale, cold.softcap)
        assert queue is not None, "lists were made"
        live, probes = queue.live(), index.options.nprobe
        norms = live.queries.float().norm(dim=-1).reciprocal()
        near = next(store.key_chunks(len(cold)))[1][:, :, -window:].contiguous()
        see_window = partial(prompt_partials, scale=cold.scale, causal_offset=None)

        def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
            started = time.perf_counter()
            result = work(*arguments)
            seconds.setdefault(name, []).append(time.perf_counter() - started)
            return result

        def nearest(group: torch.Tensor) -> None:
            centroid.similarity(group, live.queries, norms).topk(probes, dim=-1)

        def attend(query: torch.Tensor, ids: torch.Tensor) -> None:
            store.begin(query, ids, *scoring)()

        def list_all(new: Centroids) -> None:
            list(best_keys(cold, new, queue.width, causal=False))

        for query in self.queries.split(1, dim=2):
            group = index._grouped(query)
            timed("centroids", nearest, group)
            ids = timed("lists", recalled, queue, group, probes, 0, cold.valid)
            best = timed("rerank", store.best, query, ids, cold.budget, *scoring)
            timed("attention", attend, query, best)
            timed("window", see_window, query, near, near)
            new, twin = Centroids(group, torch.zeros(1, 1, dtype=torch.long)), queue.fork()
            timed("update", twin.push, new, (ids[..., : queue.width],), len(cold))
            timed("list of all keys", list_all, new)
            timed("attention to all recalled", attend, query, ids)
        result = {name: 1e3 * median(each) for name, each in seconds.items()}
        return {**result, "lists": result["lists"] - result["centroids"]}


def _layers_table(cells: CellResults) -> str:
    """Means over layers (the paper's figure 13); of times the sums (table 13)."""
    names, rows = list(cells[0][1]["layers"][0]), []
    of_times = cells[0][0]["part"] == "time"
    for cell, row in cells:
        values = [[one[name] for one in row["layers"]] for name in names]
        numbers = [f"{sum(x):.2f}" if of_times else share(fmean(x)) for x in values]
        rows.append([cell["cache"], cell["variant"], str(cell["length"]), *numbers])
    titles = [f"{name}, ms" for name in names] if of_times else names
    return markdown_table(["cache", cells[0][0]["part"], "context", *titles], rows)


def _dedup_plot(path: Path, cells: CellResults) -> None:
    means = [(cell, {"overlap": fmean(x["alpha"] for x in row["layers"])}) for cell, row in cells]
    bars_of("CTkvr: different tokens, of all that lists name", y="alpha")(path, means)


TABLES: dict[str, Table] = {
    **dict.fromkeys(PLAIN, _plain_table),
    "update": _turns_table,
    "dedup": _layers_table,
    "time": _layers_table,
}
PLOTS: dict[str, Plot] = {
    **{part: bars_of(f"CTkvr: {title}") for part, title in PLAIN.items()},
    "rerank": curves_of("CTkvr: how recalled tokens are compared", *CANDIDATES),
    "dedup": _dedup_plot,
    "update": stretches_of("CTkvr: new centroids over turns", x="turn", numbered=True),
}


@dataclass
class TurnFollower(Follower):
    """A follower of whole turns, which counts how often lists were made."""

    _builds: int = 0

    def talk(self, window: torch.Tensor, length: int, turns: int, new: int, measured: int) -> None:
        """Read ``window[:length]``, then so many ``turns``, and measure in each.

        A turn has ``new`` tokens of text, read in one pass, and ``measured`` after them, one at a
        time.
        """
        # A fork finishes the index, so that the first turn is no part of the prompt.
        reader, stretches = self.reader(window, length).fork(), []
        expected = full_choices(self.subject.model, window, start=length)
        for turn in tqdm(range(turns), leave=False, desc=self.choice.name, unit="turn"):
            asked = length + turn * (new + measured) + new
            end = asked + measured
            reader.feed(window[asked - new : asked])
            right = expected[asked - length : end - length]
            reader, result = self.measure(reader, window[asked:end], right, 1)
            stretches.append(result | {"end": (turn + 1) * measured})
            assert isinstance(reader.cache, CTkvrCache)
            self._builds += sum(one["list_builds"] for one in reader.cache.stats()["layers"])
        self.samples.append(stretches)

    def result(self) -> dict[str, Any]:
        """As ``Follower.result``, with ``list_builds`` of all layers."""
        return {**super().result(), "list_builds": self._builds}


@dataclass(frozen=True, kw_only=True)
class CTkvrAblation(Ablation):
    """What each part of CTkvr is worth: recall of the exact top-k without it, or with another."""

    name = "ctkvr-ablation"
    method = "ctkvr"
    example = "causal=false"
    described = (*("windows", "new_tokens", "turns", "turn_tokens", "turn_measured"),)
    # It follows thousands of tokens.
    once = ("update",)
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model needle --context 256 --top-k 16 --new-tokens 16 --turns 2 --turn-tokens 16 "
        "--turn-measured 8 --parts probes,rerank,update,dedup,time --nprobe 2 --ratios 2 "
        "--caches ctkvr:dense_below=0:recent=16:flush=16"
    )

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
    step: int = not_here(1)
    turns: int = count_option(8, "of the update part")
    turn_tokens: int = count_option(256, "of new text in a turn")
    turn_measured: int = count_option(64, "tokens after it that are measured")
    # Queries and keys of the last text, for the parts about them.
    _read: dict[int, list[RecordedLayer]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Refuse values that CTkvr refuses.
        options = {"nprobe": self.nprobe, "list_ratio": self.ratios, "top_k": self.budgets}
        for name, values in options.items():
            for value in values:
                CTkvrConfig().replace(**{name: value})

    def variants(self, part: str) -> Sequence[str]:
        if part in FIXED:
            return list(FIXED[part])
        if part == "rerank":
            return rerank_names(self.ratios)
        if part == "dedup":
            names = [f"rho {ratio:g}" for ratio in self.ratios]
            return [*names, *(f"C {c}" for c in self.centroids), *(f"C' {n}" for n in self.nprobe)]
        if part == "time":
            return ["step"]
        values = {"centroids": self.centroids, "probes": self.nprobe, "budget": self.budgets}
        return list(map(str, values[part]))

    def following(self, part: str) -> int:
        turns = self.turns * (self.turn_tokens + self.turn_measured)
        return turns if part == "update" else self.new_tokens

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, length = cell["part"], cell["length"]
        assert isinstance(choice.options, CTkvrConfig)
        options = changed(part, cell["variant"], choice.options, length)
        if part in ("dedup", "time"):
            return {"layers": self._of_layers(part, length, subject, options)}
        chosen = made(f"{part}: {cell['variant']}", CTkvrCache, options)
        follower = (TurnFollower if part == "update" else Follower)(subject, chosen, self.method)
        for window in self.contexts(subject, part, length):
            if isinstance(follower, TurnFollower):
                follower.talk(window, length, self.turns, self.turn_tokens, self.turn_measured)
            else:
                follower.follow(window, length, self.pace)
        return follower.result()

    def _of_layers(
        self, part: str, length: int, subject: Subject, options: CTkvrConfig
    ) -> list[dict[str, float]]:
        """What the part measures in each layer, on recorded queries and keys."""
        if length not in self._read:
            self._read.clear()
            self._read[length] = read_layers(subject.model, self.contexts(subject, part, length)[0])
        bar = tqdm(self._read[length], desc="layers", leave=False)
        layers = (Recalled.of(layer, length, options) for layer in bar)
        return [
            one.duplicates() if part == "dedup" else one.times(options.recent) for one in layers
        ]


MEASUREMENT = CTkvrAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
