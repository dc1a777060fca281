"""``bench_save.py``: each way saves and loads the same cache, and its table compares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_save import Save

from hf_kvret.lab.report.results import Results

Bench = Callable[..., int]
SMALL = Save.smallest.split()


def test_every_way_is_timed_and_compared(bench: Bench, tmp_path: Path) -> None:
    path, picture = tmp_path / "save.json", tmp_path / "save.png"
    place = tmp_path / "disk"
    place.mkdir()
    outputs = ["--json", str(path), "--plot", str(picture), "--folder", str(place)]
    assert bench("save", *SMALL, *outputs) == 0
    results = Results.load(path)
    rows: dict[Any, Any] = {
        (cell["cache"], cell["work"], cell["way"]): row for cell, row in results
    }
    assert len(rows) == 2 * 2 * 4
    for (cache, _, _), row in rows.items():
        assert row["timed"] == 2 and row["seconds"] > 0
        assert row["bytes"] == rows[cache, "save", "checked"]["bytes"]
    # Keys and values of two layers with two heads of 64 numbers in bf16, and an index.
    least = 3072 * 2 * 2 * 2 * 64 * 2
    assert least < rows["paris:top_k=64", "save", "checked"]["bytes"] < 1.5 * least
    table = Save.table(results)
    assert table.count("| load |") == table.count("| save |") == 2
    assert "checked / safetensors" in table and picture.is_file()
    assert not list(place.iterdir())


def test_what_can_not_be_saved_is_said(bench: Bench) -> None:
    for arguments, message in (
        (["--caches", "full"], "only retrieval caches can be saved"),
        (["--folder", "nowhere"], "make it"),
        (["--shape", "nothing"], "known shape"),
    ):
        with pytest.raises(ValueError, match=message):
            bench("save", *arguments)
