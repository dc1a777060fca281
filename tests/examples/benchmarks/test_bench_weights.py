"""``hf-kvret bench weights``: each way multiplies the same row with the same weights, nearly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_weights import Weights, maps_of, ways

from hf_kvret.lab.bench.shapes import load_shape
from hf_kvret.lab.report.results import Results

Bench = Callable[..., int]
SMALL = Weights.smallest.split()
# The format in which a way keeps its weights decides how far its product may be off.
MOST_ERROR = {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2, "int4": 0.15}


def test_every_way_gives_nearly_the_product(bench: Bench, tmp_path: Path) -> None:
    path, picture = tmp_path / "weights.json", tmp_path / "weights.png"
    assert bench("weights", *SMALL, "--json", str(path), "--plot", str(picture)) == 0
    results = Results.load(path)
    assert len(results) == 2 * len(ways()) and picture.is_file()
    for cell, row in results:
        most = next(most for name, most in MOST_ERROR.items() if name in cell["cache"])
        assert 0 <= row["error"] < most, cell
        assert row["timed"] == 2 and row["seconds"] > 0 and row["bandwidth"] > 0
    table = Weights.table(results)
    assert table.count("| layer |") == table.count("| head  |") == len(ways())
    threads = torch.get_num_threads()
    assert bench("weights", *SMALL, "--threads", "1") == 0
    assert torch.get_num_threads() == threads


def test_maps_are_those_of_the_model() -> None:
    shape = load_shape("tiny")
    # Queries, keys, values, output; gate, up, down.
    attention = [(256, 256), (128, 256), (128, 256), (256, 256)]
    assert maps_of(shape, "layer") == [*attention, (512, 256), (512, 256), (256, 512)]
    assert maps_of(shape, "head") == [(1024, 256)]
    tied = maps_of(load_shape("qwen3-0.6b"), "head")
    assert tied == [(151_936, 1024)]


def test_what_is_compiled_is_the_rows_own_product() -> None:
    way = ways().get("C++ loop, bf16")
    if way is None:
        pytest.skip("there is no C++ compiler")
    weight, row = torch.randn(7, 48), torch.randn(1, 48)
    out = way.prepare(weight)(row.bfloat16())
    torch.testing.assert_close(out.float(), row @ weight.T, atol=0.3, rtol=0.05)
