"""The tables of every type in docs/models.md: the scan of transformers, and trials.

``python -m tests.model_types.page TYPE...`` tries these types again, or without any those that
``trials.json`` lacks, keeps the results there and writes the tables.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import transformers

from hf_kvret.commands.models import ModelType, default_type, type_names
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.testing.conformance import ALL_MODELS

from .trial import Trial, trial

TRIALS = Path(__file__).with_name("trials.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- made by `python -m tests.model_types.page`, from here -->"
END = "<!-- made by `python -m tests.model_types.page`, to here -->"
# How a refusal ends: with what to do instead.
_WAY_OUT = re.compile(r"[;:,]? (use|load|not supported yet|so a retrieval cache would)\b.*")
_OTHER_LAYERS = {"sliding": "slide", "recurrent": "are recurrent", "other": "hold nothing"}


def read_trials() -> tuple[str, dict[str, Trial]]:
    """The version of transformers that trials were made with, and each by its type."""
    kept = json.loads(TRIALS.read_text(encoding="utf-8"))
    return kept["transformers"], {name: Trial(**one) for name, one in kept["types"].items()}


def write_trials(trials: dict[str, Trial]) -> None:
    """Write the trials, each in a line without what is empty or usual."""
    usual = asdict(Trial(""))
    lines = []
    for name in sorted(trials):
        entry = {
            key: x for key, x in asdict(trials[name]).items() if key == "outcome" or x != usual[key]
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    head = f'{{"transformers": "{transformers.__version__}", "types": {{\n'
    TRIALS.write_text(head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


def markdown(types: Iterable[ModelType], trials: dict[str, Trial]) -> str:
    """Two tables: what is served, and what is refused, with all types of one reason in a line."""
    types = list(types)
    verdicts = {one.name: _verdict(one, trials.get(one.name)) for one in types}
    reasons: dict[str, list[str]] = {}
    for one in types:
        if one.refusal:
            reasons.setdefault(_reason(one), []).append(f"`{one.name}`")
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in verdicts.values()}
    summary = ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    header = ("type", "tested", "layers that retrieve", "KV heads x key", "bytes a token")
    served = [
        (
            f"`{one.name}`{one.changed and f', {one.changed}'}",
            verdicts[one.name] + _not_in(trials.get(one.name)),
            _layers(dict(one.layers)),
            f"{one.kv_heads} x {one.key_dim}",
            f"{one.token_bytes:,}",
            "yes" if one.replay else "no",
            "yes" if one.chunks else "no",
        )
        for one in types
        if not one.refusal
    ]
    refused = [(reason, ", ".join(names)) for reason, names in sorted(reasons.items())]
    return "\n\n".join(
        [
            f"{len(types)} types of transformers {transformers.__version__}: {summary}.",
            _table((*header, "graph", "auto chunks"), served),
            "### Refused",
            "With a `ValueError` that says why and what to do instead, before the first token.",
            _table(("because it", "types"), refused),
        ]
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # Without padding: names of types and reasons are long.
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(one: ModelType, tried: Trial | None) -> str:
    if one.refusal:
        return "refused"
    if tried is None or tried.outcome == "not tried":
        return "not tried"
    if tried.outcome != "equal":
        return "wrong"
    if tried.part != "whole":
        return tried.part
    return "all modes" if one.name in _conformance_types() else "tried"


def _reason(one: ModelType) -> str:
    """Why a type is refused, without its name and without what to do instead."""
    first, _, rest = one.refusal.partition(" ")
    if first == f"{one.name}:":
        return rest
    return _WAY_OUT.sub("", f"is composite: {rest}" if first.endswith(":") else rest)


def _not_in(tried: Trial | None) -> str:
    return f", not in {', '.join(tried.failures)}" if tried is not None and tried.failures else ""


def _layers(counts: dict[str, int]) -> str:
    """``12 of 48, others slide``."""
    total, full = sum(counts.values()), counts["full"]
    if total == full:
        return "all"
    others = " or ".join(text for name, text in _OTHER_LAYERS.items() if name in counts)
    return f"{full} of {total}, others {others}"


def table_in(page: str) -> str:
    """The tables that stand in a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def write_page(text: str) -> None:
    """Put the tables in their place on the page."""
    head, _, body = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{body.partition(END)[2]}", encoding="utf-8")


@cache
def _conformance_types() -> set[str]:
    types = set()
    for model in ALL_MODELS.values():
        # Older transformers lack some of them.
        with suppress(ValueError):
            types.add(model.config().model_type)
    return types


def main(names: list[str]) -> None:
    """Try types, keep the results, and write the page."""
    types, (_, trials) = [*map(default_type, type_names())], read_trials()
    served = {one.name for one in types if not one.refusal}
    for name in tqdm(names or sorted(served - set(trials)), desc="trials", unit="type"):
        trials[name] = trial(name)
        write_trials(trials)
        tqdm.write(f"{name}: {trials[name].outcome} {trials[name].detail}".rstrip())
    write_page(markdown(types, trials))


if __name__ == "__main__":
    main(sys.argv[1:])
