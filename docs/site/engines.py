"""The table of engines in ``docs/multi-gpu.md``: what was compared with one process, by method.

``python docs/site/engines.py`` runs it on this machine's CPU and writes the section anew: two ranks
and four of a tensor parallel model, and a model whose layers lie on the CPU and on the disk. Each
number is of modes of use that gave one process' tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.testing import COVERING_OPTIONS, MODES, TinyModel
from hf_kvret.testing.models import small_config
from hf_kvret.testing.ranks import RankCase, RankOutcome, compare, run_cases, run_on_ranks

PAGE = Path(__file__).parents[1] / "multi-gpu.md"
BEGIN = "<!-- made by `python docs/site/engines.py`, from here -->"
END = "<!-- made by `python docs/site/engines.py`, to here -->"
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 8}
METHODS = ("flat", "paris", "lrqk", "ctkvr", "h2o", "a2ats", "aqua")
STORES = ("device", "host", "resident", "cpu", "disk", "higgs", "higgs-host")
STORE_MODES = ("second_turn", "beams", "greedy_ragged")
# Behind a copy of a split model that drafts, transformers' own cache waits forever.
ALL_MODES = tuple(mode for mode in MODES if mode != "assisted")

Runner = Callable[[Sequence[RankCase]], list[RankOutcome]]


def build() -> PreTrainedModel:
    """A small Llama of four KV heads and three layers."""
    config = small_config("llama", **SIZES, num_hidden_layers=3)
    return TinyModel("four heads", config, (0, 1, 2)).build()


def spread(model: PreTrainedModel, cases: Sequence[RankCase], folder: Path) -> list[RankOutcome]:
    """The cases with layers on the CPU and on the disk, as accelerate puts them."""
    places = {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "disk"}
    at_home = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    model.save_pretrained(folder / "model")
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "device_map": places | dict.fromkeys(at_home, "cpu"),
        "offload_folder": folder / "offloaded",
    }
    there = AutoModelForCausalLM.from_pretrained(folder / "model", **options).eval()
    alone, found = (
        run_cases(each, cases, folder / name) for each, name in ((model, "a"), (there, "b"))
    )
    return [compare(one, [other]) for one, other in zip(alone, found, strict=True)]


def cases_of(method: str, artifacts: Mapping[str, str], folder: Path) -> dict[str, list[RankCase]]:
    """By column: all modes with a covering budget, and some with each store."""
    learned = {"artifact": artifacts["a2ats"]} if method == "a2ats" else {}
    codec = {"predictor": "none", "first_bits": 4} if method == "aqua" else {}
    covering = {**COVERING_OPTIONS, **learned}
    if method == "aqua":
        covering = {**COVERING_OPTIONS, **codec}
        del covering["top_k"]
    columns = {"every mode": [RankCase(method, mode, covering) for mode in ALL_MODES]}
    for store in STORES if method in ("paris", "lrqk") else ():
        more: dict[str, Any] = {"store": store}
        if store == "disk":
            more["disk"] = str(folder)
        columns[store] = [RankCase(method, mode, {**SMALL, **more}) for mode in STORE_MODES]
    return columns


def cell(outcomes: Sequence[RankOutcome]) -> str:
    """``24 of 24``, or what was refused."""
    equal = sum(outcome.equal for outcome in outcomes)
    refusals = {one.detail for one in outcomes if one.detail.startswith("refused: ")}
    if len(refusals) == 1 and not equal:
        return next(iter(refusals))
    alike = sum(one.alike and "refused" not in one.detail for one in outcomes)
    if alike > equal:
        return f"{equal} of {len(outcomes)}, {alike} alike on all ranks"
    return f"{equal} of {len(outcomes)}"


def measure(runners: Mapping[str, Runner], artifacts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the table; failures are printed."""
    rows = []
    with TemporaryDirectory() as folder:
        for engine, run in runners.items():
            for method in tqdm(METHODS, desc=engine, unit="method"):
                columns = cases_of(method, artifacts, Path(folder))
                outcomes = iter(run([case for cases in columns.values() for case in cases]))
                found = {x: [next(outcomes) for _ in cases] for x, cases in columns.items()}
                for name, each in found.items():
                    for case, one in zip(columns[name], each, strict=True):
                        if not one.equal:
                            tqdm.write(f"{engine}, {method}, {name}, {case.mode}: {one.detail}")
                cells = {name: cell(each) for name, each in found.items()}
                rows.append({"engine": engine, "method": method, **cells})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown; stores that all agree share a column."""
    lines = []
    for row in rows:
        stores = [f"{name} {row[name]}" for name in STORES if name in row]
        name = f"{row['method']}, `predictor='none'`" if row["method"] == "aqua" else row["method"]
        lines.append((row["engine"], name, row["every mode"], ", ".join(stores) or "-"))
    head = ("engine", "method", "modes, covering budget", "modes by store, small budget")
    return markdown_table(head, lines)


def main() -> None:
    """Run all engines and write the page, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows, and write no page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        artifacts = {"a2ats": tiny_artifact(model, "a2ats", folder / "a2ats")}
        runners: dict[str, Runner] = {
            f"{ranks} ranks": partial(run_on_ranks, model, ranks=ranks, seconds=900)
            for ranks in (2, 4)
        }
        runners["layers on CPU and disk"] = lambda cases: spread(model, cases, folder / "spread")
        rows = measure(runners, artifacts)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
