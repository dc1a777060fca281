"""The compiled library: threads, ranks, its own errors, and what is done without it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.relevance import host_rank, naive

from .draws import Place, best_share, draw, generator, library_threads
from .paged_rows import paged, random_ids, random_query

needs_library = pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())
RANKS = [naive.host_rank, pytest.param(host_rank, marks=needs_library)]
pytestmark = pytest.mark.factor("rank", RANKS, ids=["torch", "cpp"])
Rank = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@pytest.mark.factor("chunks", [(9,), (4, 5)], ids=str)
@pytest.mark.factor("entry", [-1, 9, 10**9])
def test_entries_of_no_page_are_refused(where: Place, entry: int, chunks: tuple[int, ...]) -> None:
    if where[0] == "triton":
        pytest.skip("Triton may not look at the data")
    rows = paged("cpu", chunks=chunks)
    rows.table[0, 3] = entry
    ids = torch.full((2, 2, 1, 3), 25, dtype=torch.int32)
    said = "a table entry that names none of the 9 pages"
    for function in (gather_attention, gather_scores):
        with pytest.raises(ValueError, match=said):
            function(random_query(rows, 4), rows, ids, scale=0.3, backend=where[0])


@pytest.mark.parametrize("shape", [(1, 1, 5000), (2, 3, 40)], ids=str)
def test_the_number_of_threads_changes_nothing(compiled: None, shape: tuple[int, int, int]) -> None:
    batch, queries, count = shape
    rows = paged(chunks=(80,), batch=batch, kv_heads=1, page_len=64)
    query, ids = random_query(rows, 4, queries), random_ids(rows, 1, queries, count)
    ids[..., : count // 2] = -1
    results = []
    for threads in (1, 2, 7):
        with library_threads(threads):
            scores = gather_scores(query, rows, ids, scale=0.3)
            attention = gather_attention(query, rows, ids, scale=0.3)
            results.append((scores, attention, host_rank(scores, ids, 20)))
    for scores, attention, best in results[1:]:
        assert torch.equal(scores, results[0][0]) and torch.equal(best, results[0][2])
        torch.testing.assert_close(attention, results[0][1], rtol=1e-6, atol=1e-6)


def test_a_child_after_fork_has_threads_of_its_own(compiled: None) -> None:
    rows = paged(chunks=(40,), page_len=64)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 1000)
    with library_threads(4):
        want, _ = gather_attention(query, rows, ids, scale=0.3, backend="cpp")
        child = os.fork()
        if child == 0:
            # No torch arithmetic here: its own threads do not survive a fork.
            out, _ = gather_attention(query, rows, ids, scale=0.3, backend="cpp")
            same = bytes(out.numpy().data) == bytes(want.numpy().data)
            os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.factor("group", [1, 3])
@pytest.mark.factor("count", [1, 7, 40, 55])
def test_the_best_come_first(rank: Rank, group: int, count: int) -> None:
    ids = torch.rand(2, 2, 3, 40, generator=generator(count)).argsort(-1).int() * 3
    ids[torch.rand(ids.shape, generator=generator(1)) < 0.3] = -1
    ids[0, 0, 0] = -1
    scores = 4 * draw(2, 2 * group, 3, 40, seed=2)
    scores = scores.masked_fill((ids < 0).repeat_interleave(group, dim=1), float("-inf"))
    best = rank(scores, ids, count)
    order = best_share(scores.double(), 2).sort(descending=True, stable=True)
    wanted = ids.gather(-1, order.indices).masked_fill(order.values == float("-inf"), -1)
    wanted = torch.nn.functional.pad(wanted, (0, 55 - 40), value=-1)[..., :count]
    assert best.dtype == torch.int32 and torch.equal(best, wanted)


def test_of_equal_tokens_the_first_named_comes_first(rank: Rank) -> None:
    ids = torch.tensor([[[[9, 4, -1, 7, 1]]]], dtype=torch.int32)
    for group in (1, 2):
        assert rank(torch.zeros(1, group, 1, 5), ids, 3).flatten().tolist() == [9, 4, 7]


@pytest.mark.parametrize("group", [1, 2])
def test_a_score_that_is_no_number_is_not_chosen_and_moves_no_other(rank: Rank, group: int) -> None:
    ids = torch.arange(6, dtype=torch.int32).view(1, 1, 1, 6)
    scores = torch.tensor([1.0, float("nan"), 3.0, float("-inf"), 2.0, 0.0])
    scores = scores.expand(1, group, 1, 6).contiguous()
    assert rank(scores, ids, 6).flatten().tolist() == [2, 4, 0, 5, -1, -1]
    scores[..., 5] = float("inf")
    best = rank(scores, ids, 6).flatten().tolist()
    assert best[0] == 5 and 1 not in best and 3 not in best
    assert group > 1 or best == [5, 2, 4, 0, -1, -1]


def test_nothing_to_choose_from_or_nothing_wanted(rank: Rank) -> None:
    ids = torch.zeros(2, 2, 3, 4, dtype=torch.int32)
    best = rank(torch.zeros(2, 4, 3, 0), ids[..., :0], 5)
    assert best.shape == (2, 2, 3, 5) and int(best.max()) == -1
    assert rank(torch.zeros(2, 4, 3, 4), ids, 0).shape == (2, 2, 3, 0)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_places", lambda: iter([tmp_path / "none.so"]))
    library.opened.cache_clear()
    yield
    library.opened.cache_clear()


def test_without_the_library_torch_does_the_work_and_cpp_says_why(no_library: None) -> None:
    assert "Install one (GCC or Clang)" in library.why_not()
    rows = paged("cpu")
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for operation in (gather_scores, gather_attention):
        naive, *others = (
            operation(query, rows, ids, scale=0.3, backend=name)
            for name in ("naive", "auto", "host")
        )
        for other in others:
            torch.testing.assert_close(other, naive, rtol=0, atol=0)
        with pytest.raises(ImportError, match="installed without a C\\+\\+ compiler"):
            operation(query, rows, ids, scale=0.3, backend="cpp")


def test_a_library_says_why_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / library.FILE_NAME
    file.write_bytes(b"no library")
    monkeypatch.setenv(library.PATH_VARIABLE, str(file))
    assert str(file) in library.why_not()
    assert f"unset {library.PATH_VARIABLE}" in library.why_not()


@pytest.mark.parametrize("path", list(library.PATHS), indirect=True)
def test_exp_is_accurate(compiled: None, path: str) -> None:
    # A library that was built for speed may have set this for the whole process.
    torch.set_flush_denormal(False)
    exponents = torch.cat([torch.linspace(-87.29, 0, 500_001), -torch.logspace(-30, 0, 1001)])
    want = exponents.double().exp()
    error = (library.exponentials(exponents, path).double() / want - 1).abs().max().item()
    assert error < 1e-6
    special = torch.tensor([0.0, -0.0, -88.0, -1e30, float("-inf"), float("nan")])
    got = library.exponentials(special, path)
    torch.testing.assert_close(
        got, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, float("nan")]), rtol=0, atol=0, equal_nan=True
    )


def test_another_version_is_refused(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    library.opened.cache_clear()
    assert f"this code needs {library.VERSION}" in library.why_not()
    library.opened.cache_clear()


@needs_library
def test_a_work_space_that_no_memory_has_is_told() -> None:
    """The C++ runtime's exception is caught in the library, whatever runtimes the process has."""
    more_than_addresses = 2**50
    ids, pages = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    request = library.pack_request(
        torch.zeros(1, 1, 1, 16),
        ids,
        (ids[0, 0], pages, 16, 1, False),
        (1, more_than_addresses, more_than_addresses, 0),
        None,
        None,
        1.0,
        None,
        1,
    )
    with pytest.raises(MemoryError, match="work space of 1 threads"):
        library.call("hfk_attend", 1, request)
