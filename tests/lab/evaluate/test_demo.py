"""The demo on the bundled model: right answers, honest counts, clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import ParisKVCache
from hf_kvret.cli import main
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.demo import Demo


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    cells = json.loads(file.read_text())["cells"]
    return {entry["cell"]["cache"]: entry["result"] for entry in cells}


def test_every_cache_answers_and_reads_few_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    ours = [f"{name}:dense_below=0:recent=64:flush=32" for name in ("paris", "a2ats", "aqua")]
    arguments = ["demo", "--caches", ",".join(["full", *ours]), "--context", "1024"]
    arguments += ["--questions", "4", "--top-k", "64", "--json", str(file), "--plot", str(picture)]
    assert main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = rows_of(file)
    for row in rows.values():
        # One of the questions may go wrong in a model that is 98% right.
        assert row["right_ratio"] >= 3 / 4 and row["tokens_per_second"] > 0
    full, paris, a2ats, aqua = rows.values()
    assert full["read_ratio"] == 1 and full["recall"] is None
    assert aqua["read_ratio"] > 0.99 and aqua["host_bytes"] < 0.1 * aqua["full_bytes"]
    for row in (paris, a2ats):
        # These are shares of the tokens beyond the window, which has up to 96.
        assert row["read_ratio"] == pytest.approx(64 / (1024 - 80), rel=0.03)
    assert paris["host_bytes"] > 0 and paris["recall"] > 0.8 > a2ats["recall"] > 0.2
    shown = capsys.readouterr().out
    assert "which two words stand behind" in shown and "| paris:" in shown
    assert "of the questions right, full attention (full)" in shown


def test_the_usual_caches_are_a_full_one_and_those_that_retrieve() -> None:
    usual = [cell["cache"] for cell in Demo().cells()]
    assert usual == ["static", "flat", "paris", "lrqk", "ctkvr", "a2ats"]


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
    rows = rows_of(file)
    full = rows["static"]["right_ratio"]
    assert full >= 0.98
    for name in ("flat", "paris", "lrqk", "ctkvr", "a2ats"):
        assert rows[name]["right_ratio"] >= full - 0.02
        assert 0 < rows[name]["read_ratio"] <= 0.06
    assert rows["paris"]["device_bytes"] <= 0.30 * rows["paris"]["full_bytes"]


def test_paris_with_a_host_store_keeps_little_on_the_device() -> None:
    """At 16K tokens, bf16: window and index take at most 30% of full attention's K and V."""
    cache = ParisKVCache(load_bundled_model(torch.bfloat16).config, store="host")
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
        (["--caches", ""], "no cache named: choose among full,"),
        (["--context", "100"], "--context 100: 128 needles take at least 769 tokens"),
        (["--context", "1M"], "1048582 tokens, but the model knows 131072 positions"),
        (["--top-k", "1.5"], "--top-k: 1.5: a count from 1 (256), or a share above 0"),
        (["--store", "disk"], "argument --store: invalid choice: 'disk'"),
    ],
)
def test_a_mistake_is_named_in_the_last_line(
    arguments: list[str], message: str, program: Any
) -> None:
    assert message in program("demo", *arguments, status=2).err.splitlines()[-1]


def test_a_store_that_a_cache_does_not_take_is_left_to_the_others(program: Any) -> None:
    """AQUA-KV has codes of its own."""
    words = ["demo", "--context", 400, "--questions", 2, "--store", "higgs"]
    assert "| aqua" in program(*words, "--caches", "flat,aqua").out
