"""The demo on the bundled model: right answers, honest counts, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import ParisKVCache
from hf_kvret.cli import main
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.demo import Demo
from hf_kvret.lab.evaluate.measurement import measure
from hf_kvret.lab.report.results import Results
from hf_kvret.stores import store_names


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--full", "--context", "2048", "--questions", "6", "--top-k", "64"]
    arguments += ["--json", str(folder / "demo.json"), "--plot", str(folder / "demo.png")]
    assert main(arguments) == 0
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((folder / "demo.json").read_text())
    assert content["name"] == "demo"
    return content


def rows_of(report: dict) -> dict[str, dict]:
    return {entry["cell"]["cache"]: entry["result"] for entry in report["cells"]}


def test_every_cache_answers_and_reads_few_rows(report: dict) -> None:
    rows = rows_of(report)
    quick = [cell["cache"] for cell in Demo().cells()]
    assert quick == ["static", "flat", "paris", "lrqk", "ctkvr", "a2ats"]
    assert set(rows) == {*quick, "full", "aqua"}
    for row in rows.values():
        # One of the questions may go wrong in a model that is 98% right.
        assert row["right_ratio"] >= 5 / 6
        assert row["tokens_per_second"] > 0
    assert rows["full"]["read_ratio"] == rows["static"]["read_ratio"] == 1.0
    assert rows["aqua"]["read_ratio"] > 0.99
    assert rows["aqua"]["host_bytes"] < 0.1 * rows["aqua"]["full_bytes"]
    for name in quick[1:]:
        cold = 2048 - (64 if name == "a2ats" else 256)
        assert rows[name]["read_ratio"] == pytest.approx(64 / cold, rel=0.01)
        assert rows[name]["host_bytes"] > 0
    assert rows["flat"]["recall"] == pytest.approx(1.0)
    assert all(rows[name]["recall"] > 0.8 for name in ("paris", "lrqk", "ctkvr"))
    # Its first layer looks for positions, which windowed RoPE forgets.
    assert min(rows["a2ats"]["recall_by_layer"][layer] for layer in ("1", "2")) > 0.3
    assert rows["full"]["recall_by_layer"] == {}
    by_layer = rows["lrqk"]["recall_by_layer"]
    assert list(by_layer) == ["0", "1", "2"]
    assert sum(by_layer.values()) / 3 == pytest.approx(rows["lrqk"]["recall"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("context", "dtype"), [(16384, "bfloat16"), (32768, "float32")])
def test_a_long_document_is_answered_as_well_as_by_full_attention(
    context: int, dtype: str, tmp_path: Path
) -> None:
    """The project promises this of the demo, with its default questions and budget."""
    file = tmp_path / "demo.json"
    arguments = ["demo", "--context", str(context), "--dtype", dtype, "--json", str(file)]
    assert main(arguments) == 0
    rows = rows_of(json.loads(file.read_text()))
    full = rows["full"]["right_ratio"]
    assert full >= 0.98
    for name in ("flat", "paris", "lrqk", "ctkvr", "a2ats"):
        assert rows[name]["right_ratio"] >= full - 0.02
        assert 0 < rows[name]["read_ratio"] <= 0.06
    assert rows["paris"]["device_bytes"] <= 0.30 * rows["paris"]["full_bytes"]


def test_the_same_questions_are_right_without_the_cli() -> None:
    demo = Demo(
        context=2048, questions=8, top_k=0.05, caches="paris", dtype="bfloat16", recall_questions=0
    )
    results = Results("demo", demo.setup())
    assert measure(demo, results) == []
    ((_, row),) = results
    assert row["right_ratio"] >= 7 / 8
    assert row["recall"] is None


def test_paris_with_a_host_store_keeps_little_on_the_device() -> None:
    """At 16K tokens, bf16: window and index take at most 30% of full attention's K and V."""
    model = load_bundled_model(torch.bfloat16)
    cache = ParisKVCache(model.config, store="host")
    keys = torch.randn(1, 2, 16_384, 64, dtype=torch.bfloat16)
    for layer in cache.retrieval_layers:
        layer.update(keys, keys)
        layer.waiting = False
        layer.kv.take_prompt(keys, keys, None)
    memory = cache.memory()
    assert memory.full_attention == 3 * 2 * 16_384 * 2 * 64 * 2
    assert memory.device <= 0.30 * memory.full_attention
    assert memory.host >= 0.95 * memory.full_attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--caches", "full,parris"], "unknown cache 'parris': choose among full,"),
        (["--context", "100"], "--context 100: 128 needles take at least 769 tokens"),
        (["--context", "1M"], "--context 1048576: with a question 1048582 tokens"),
        (["--top-k", "1.5"], "--top-k: 1.5: a count from 1 (256), or a share above 0"),
        (["--store", "disk"], "name both with a cache, as paris:store=disk:disk=/data"),
    ],
)
def test_a_mistake_is_named_in_the_last_line(
    arguments: list[str], message: str, program: Any
) -> None:
    assert message in program("demo", *arguments, status=2).err.splitlines()[-1]


@pytest.mark.parametrize(
    "store", [name for name in store_names().split(", ") if name not in ("host", "disk")]
)
def test_every_store_serves_the_default_caches(store: str, program: Any) -> None:
    """AQUA-KV, which has no slots and no other codes, keeps the store of its own."""
    words = ["demo", "--context", 400, "--questions", 2, "--store", store]
    assert "| aqua" in program(*words, "--caches", "flat,aqua").out
