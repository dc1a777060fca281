"""``bench_host_attention.py``: ways that agree, rows, wrong ways, clear refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_host_attention import TOLERANCES, HostAttention, check_ways, make_rows, make_ways

from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.catalog import Draw, KernelShape
from hf_kvret_kernels.paged import PagedRows

SHAPE = KernelShape(
    length=200, batch=3, heads=2, group=3, head_dim=16, dtype=torch.float32, top_k=50
)
CPU = torch.device("cpu")
SIZES = {"tokens": 256, "heads": 2, "group": 2, "dim": 16, "repeats": 3, "threads": 1}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
WAYS = ("cpp", "sdpa", "sdpa-apart", "sdpa-by-head", "naive")


@pytest.fixture
def compiled() -> None:
    if reason := library.why_not():
        pytest.skip(reason)


def inputs(shape: KernelShape, sequences: int = 2) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
    draw = Draw(CPU, 0)
    rows = make_rows(shape, sequences, draw)
    return draw.query(shape), rows, draw.ids(shape, shape.top_k)


@pytest.mark.parametrize(("count", "sequences"), [(1, 3), (37, 1), (200, 3)])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_all_ways_give_the_same(
    compiled: None, dtype: torch.dtype, count: int, sequences: int
) -> None:
    shape = replace(SHAPE, dtype=dtype, top_k=count)
    query, rows, ids = inputs(shape, sequences)
    ways = make_ways(shape)
    errors = check_ways(ways, query, rows, ids)
    assert set(errors) == {"sdpa", "sdpa-apart", "sdpa-by-head", "naive"}
    keys, values = rows.gather(ids, backend="naive")
    grouped = query.double().view(3, 2, 3, 16)
    weights = (grouped @ keys[:, :, 0].double().transpose(-1, -2) / 4).softmax(-1)
    want = (weights @ values[:, :, 0].double()).view(3, 6, 1, 16)
    torch.testing.assert_close(ways["cpp"](query, rows, ids).double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["cpp", "sdpa-apart"])
def test_a_way_that_swaps_two_heads_fails_the_check(compiled: None, wrong: str) -> None:
    shape = replace(SHAPE, batch=2, dtype=torch.bfloat16)
    given, ways = inputs(shape), make_ways(shape)
    right = ways[wrong]
    for spoil in (lambda out: out[:, [0, 2, 1, 3, 4, 5]], lambda out: out * float("nan")):
        ways[wrong] = lambda *given, spoil=spoil: spoil(right(*given))
        with pytest.raises(CheckFailed, match="differ by"):
            check_ways(ways, *given)


def test_without_the_library_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/nowhere/library.so")
    said = refused(HostAttention, *SMALL, "--k", "16")
    assert "/nowhere/library.so could not be loaded" in said and library.PATH_VARIABLE in said


def test_smallest_run_has_rows_a_table_and_a_picture(compiled: None, smallest: Any) -> None:
    rows, table = smallest(HostAttention)
    assert list(rows) == [(way, "float32", 1, 16) for way in WAYS]
    for (way, *_), row in rows.items():
        assert 0 < row["seconds_least"] <= row["seconds"] and row["timed"] == 1
        assert row["row_bytes"] == 2 * 2 * 16 * 32 * 4
        assert row["bytes_per_second"] == pytest.approx(row["row_bytes"] / row["seconds"])
        assert (row["error"] is None) == (way == "cpp")
    assert "128 tokens, 2 KV heads of 32" in table
