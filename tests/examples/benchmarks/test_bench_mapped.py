"""``hf-kvret bench mapped``: what a process tells of a cache in files, and the table of ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_mapped
import pytest
from bench_mapped import Mapped
from bench_save import fill_cache
from mapped_process import Process

from hf_kvret.lab.bench.shapes import load_shape
from hf_kvret.lab.report.results import Results

Bench = Callable[..., int]
ASKED: dict[str, Any] = {
    "shape": "tiny", "cache": "paris:top_k=64", "context": 3072, "steps": 4, "cold_steps": 1,
    "dtype": "float32", "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved cache."""
    folder = tmp_path_factory.mktemp("saved")
    fill_cache(load_shape("tiny"), ASKED["cache"], 3072, 0, "float32").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", ["read", "mapped", "cpu", "disk"])
def test_a_process_tells_what_is_in_memory(way: str, saved: Path, tmp_path: Path) -> None:
    folder = saved if way in ("read", "mapped") else tmp_path
    costs = Process(ASKED | {"way": way, "folder": str(folder)}).measure()
    assert 0 < costs["open"] < costs["first"] and costs["step"] > 0
    assert 0 < costs["read_ratio"] < 0.1
    in_files = way in ("mapped", "disk")
    assert (costs["touched_last"] > 0) == (costs["mapped"] > 0) == in_files
    assert costs["touched_first"] <= costs["touched_last"]
    assert ("cold" in costs) == in_files and ("cold_unasked" in costs) == (way == "disk")


def test_the_table_has_a_line_for_each_way(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    @contextmanager
    def process(words: dict[str, Any]) -> Iterator[Any]:
        asked.append(words)
        costs = {"open": 0.2, "first": 0.4 + len(asked), "own": 1e9, "mapped": 3e9, "step": 0.1}
        costs |= {"touched_first": 1e9, "touched_last": 2e9, "read_ratio": 0.03, "index": 1e8}
        if words["way"] == "mapped":
            # Their folder has the files.
            assert [*Path(words["folder"]).glob("*.safetensors")]
        lines = iter([json.dumps(costs) + "\n", "500000000\n"])
        yield SimpleNamespace(
            stdin=SimpleNamespace(write=lambda text: None, flush=lambda: None),
            stdout=SimpleNamespace(readline=lambda: next(lines, "")),
        )

    monkeypatch.setattr(bench_mapped, "_process", process)
    path = tmp_path / "mapped.json"
    assert bench("mapped", *Mapped.smallest.split(), "--json", str(path)) == 0
    results = Results.load(path)
    assert [cell["way"] for cell, _ in results] == [
        "cpu", "disk", "read", "mapped", "mapped x 4"
    ]  # fmt: skip
    rows = {cell["way"]: row for cell, row in results}
    assert rows["mapped x 4"]["pss"] == 4 * 5e8 and rows["mapped"]["pss"] == 2e9
    # The slowest of four.
    assert rows["mapped x 4"]["first"] == 0.4 + 8
    assert "| mapped x 4 |" in Mapped.table(results) and "| 2.00 " in Mapped.table(results)


def test_a_process_that_fails_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_mapped, "_PROGRAM", Path("no such program"))
    with pytest.raises(RuntimeError, match="ended with 2"):
        bench("mapped", *Mapped.smallest.split())


def test_what_can_not_be_measured_is_said(bench: Bench) -> None:
    for arguments, message in (
        (["--caches", "full"], "only retrieval caches"),
        (["--folder", "nowhere"], "make it"),
        (["--steps", "1"], "at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            bench("mapped", *arguments)
