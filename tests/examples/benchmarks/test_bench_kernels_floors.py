"""Floors of ``bench kernels``: bytes counted by hand, written bytes, checks that can fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bench_kernels import OPS, choose_ops
from kernel_inputs import Draw, KernelShape
from kernel_work import Rates, Work, distance, not_shared, unequal

from hf_kvret_kernels.host_attention import why_not

SHAPE = KernelShape(
    length=100,
    batch=2,
    heads=3,
    group=2,
    head_dim=16,
    dtype=torch.bfloat16,
    top_k=10,
    codewords=32,
    rank=4,
)
CPU = torch.device("cpu")

# 6 KV heads of both sequences, 12 query heads, 600 tokens of all KV heads, 32 bytes a vector.
COUNTED = {
    "codebook.encode": Work(
        600 * 64 + 3 * 32 * 32 + 3 * 32 * 4,  # keys in fp32, codewords, half norms
        600 * 2,
        600 * 32 * 16,
    ),
    "codebook.score_table": Work(12 * 64 + 3 * 32 * 32, 12 * 32 * 4, 12 * 32 * 16),
    "codebook.lookup": Work(12 * 32 * 4 + 600 * 2 + 200, 1200 * 4),
    "codebook.lookup_scores": Work(12 * 32 * 4 + 600 * 2 + 200, 600 * 4),
    "proxy.top_indices": Work(600 * 8 + 12 * 16 + 200, 60 * 4, 1200 * 4),
    "top_k": Work(600 * 4, 60 * 4),
    # 6 centroids of 2 heads for each KV head, lists of 25.
    "centroid.top_keys": Work(600 * 32 + 72 * 32 + 200, 36 * 25 * 4, 72 * 100 * 16),
    "centroid.similarity": Work(72 * 32 + 12 * 32 + 72 * 4, 36 * 4, 72 * 16),
    # A code has 2 bytes of signs, 6 of magnitudes and two weights of 2.
    "paris.encode": Work(600 * 32 + 6 * 16 * 4 + 16 * 4, 600 * 12),
    # Queries, and how many tokens have each of 256 patterns in each of two subspaces.
    # Half of the tokens are candidates.
    "paris.search": Work(
        600 * 2 + 300 * 12 + 12 * 32 + 16 * 4 + 12 * 256 * 4 + 8 * 4 + 200, 60 * 4, 600 * 16
    ),
    "paris.candidates": Work(600 * 2 + 12 * 16 * 4 + 12 * 256 * 4 + 200, 300 * 4),
    "paris.rerank": Work(300 * (4 + 12) + 12 * 16 * 4 + 8 * 4, 600 * 4, 600 * 16),
    "relevance.best_ids": Work(300 * (4 + 2 * 4), 60 * 4),
    # Coded at 4 bits with one scale, a vector has 10 bytes.
    "higgs.encode": Work(600 * 32, 600 * 10),
    "higgs.decode": Work(600 * 10, 600 * 32),
    "higgs.attend": Work(60 * 4 + 60 * 20 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_attention": Work(60 * 4 + 120 * 32 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_scores": Work(60 * 4 + 60 * 32 + 12 * 32, 120 * 4, 120 * 16),
    "prompt_attention": Work(1200 * 32 + 12 * 32 + 200, 12 * 17 * 4, 2 * 1200 * 16),
}


def test_every_operation_is_counted_here() -> None:
    assert set(COUNTED) == set(OPS)


@pytest.mark.parametrize("name", COUNTED)
def test_floors_are_the_bytes_and_products_counted_by_hand(name: str) -> None:
    assert OPS[name].work(SHAPE) == COUNTED[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COUNTED)
def test_written_bytes_are_those_of_what_the_call_returns(name: str, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    returned = OPS[name].prepare(shape, Draw(CPU, 0)).run("naive")
    assert sum(one.nbytes for one in returned) == OPS[name].work(shape).written_bytes
    # No hole among ids: all of what is counted was written.
    assert all(one.is_floating_point() or int(one.min()) >= 0 for one in returned)


@pytest.mark.factor("name", COUNTED)
def test_backends_agree(name: str, place: tuple[str, str]) -> None:
    backend, device = place
    call = OPS[name].prepare(SHAPE, Draw(torch.device(device), 0))
    assert call.error(call.run(backend), call.run("naive")) <= call.tolerance


@pytest.mark.skipif(bool(why_not()), reason="the compiled library was not built")
@pytest.mark.parametrize("name", ["gather_attention", "gather_scores"])
def test_the_library_agrees(name: str) -> None:
    assert OPS[name].backends(CPU) == ("cpp", "naive")
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    assert call.error(call.run("cpp"), call.run("naive")) <= call.tolerance


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", COUNTED)
def test_a_way_that_swaps_batch_rows_or_heads_fails_its_check(name: str, dim: int) -> None:
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    want = call.run("naive")
    assert call.error(want, want) == 0.0
    # Not for what rounding explains, and not for NaN either.
    assert not call.error([one.roll(1, dim) for one in want], want) <= call.tolerance


@pytest.mark.parametrize("name", COUNTED)
def test_a_way_that_leaves_the_last_token_or_head_unwritten_fails_its_check(name: str) -> None:
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    want = call.run("naive")
    found = [one.clone() for one in want]
    for one in found:
        hole = one.select(1, -1)
        hole.fill_(float("nan") if one.is_floating_point() else 0)
    assert not call.error(found, want) <= call.tolerance


def test_top_k_may_choose_among_equal_scores_but_not_twice_nor_out_of_range() -> None:
    call = OPS["top_k"].prepare(SHAPE, Draw(CPU, 0))
    (want,) = call.run("naive")
    assert call.error([want.flip(-1)], [want]) == 0.0
    twice = want.clone()
    twice[..., 0] = twice[..., 1]
    assert not call.error([twice], [want]) <= call.tolerance
    outside = want.clone()
    outside[0, 0, 0, 0] = -1
    assert not call.error([outside], [want]) <= call.tolerance


def test_the_higher_floor_binds() -> None:
    work = Work(read_bytes=300, written_bytes=100, multiply_adds=6000)
    slow_memory = Rates(100.0, {"float32": 1000.0, "bfloat16": 3000.0})
    assert work.moved_bytes == 400
    assert (work.byte_seconds(slow_memory), work.product_seconds(slow_memory)) == (4.0, 2.0)
    assert (work.seconds(slow_memory), work.bound(slow_memory)) == (4.0, "bytes")
    slow_products = Rates(100.0, {"float32": 1000.0})
    assert (work.seconds(slow_products), work.bound(slow_products)) == (6.0, "products")


def test_distance_is_that_of_the_worst_row_and_infinities_must_agree() -> None:
    want = torch.tensor([[3.0, 4.0], [30.0, float("-inf")]])
    found = torch.tensor([[3.0, 4.5], [30.0, float("-inf")]])
    assert distance([found], [want]) == pytest.approx(0.1)
    assert distance([want], [found.masked_fill(found.isinf(), 0.0)]) == float("inf")


def test_shares_of_other_elements_and_ids() -> None:
    want = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert unequal([want, want[:1]], [want, want[:1] + torch.tensor([0, 0, 0, 1])]) == 0.25
    assert not_shared([want.flip(-1)], [want]) == 0.0
    assert not_shared([torch.tensor([[1, 2, 3, 9], [9, 0, 7, 8]])], [want]) == 0.375
    assert not_shared([want.flip(0)], [want]) == 1.0


def test_a_folder_names_all_its_operations() -> None:
    assert list(choose_ops(["codebook", "gather_scores"])) == [
        "codebook.encode",
        "codebook.score_table",
        "codebook.lookup",
        "codebook.lookup_scores",
        "gather_scores",
    ]
    # No prefix of a name, and nothing twice.
    for wanted, message in (
        (["code"], r"--ops code: choose of codebook\.encode, .*prompt_attention"),
        (["codebook", "codebook.lookup"], "codebook.lookup is named twice"),
        ([], "--ops is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_ops(wanted)
