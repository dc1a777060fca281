"""host_attention, host_scores, host_rank: without a library, wrong ids, threads, mistakes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.host_attention import host_attention, host_scores
from hf_kvret_kernels.paged import PagedRows

from .draws import Place
from .paged_rows import paged, random_ids, random_query

FUNCTIONS = (host_attention, host_scores)
BACKENDS = [
    "naive",
    pytest.param("cpp", marks=pytest.mark.skipif(bool(host.why_not()), reason=host.why_not())),
]
pytestmark = pytest.mark.factor("backend", BACKENDS)


@pytest.mark.factor("chunks", [(9,), (4, 5)], ids=str)
@pytest.mark.factor("entry", [-1, 9, 10**9])
def test_a_table_entry_without_a_page_is_refused(
    where: Place, entry: int, chunks: tuple[int, ...]
) -> None:
    if where[0] == "triton":
        pytest.skip("Triton may not look at the data")
    rows = paged("cpu", chunks=chunks)
    rows.table[0, 3] = entry
    ids = torch.full((2, 2, 1, 3), 25, dtype=torch.int32)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="a table entry that names none of the 9 pages"):
            function(random_query(rows, 4), rows, ids, scale=0.3, backend=where[0])


@pytest.mark.parametrize("shape", [(1, 1, 5000), (2, 3, 40)], ids=str)
def test_the_number_of_threads_changes_nothing(compiled: None, shape: tuple[int, int, int]) -> None:
    batch, queries, count = shape
    rows = paged(chunks=(80,), batch=batch, kv_heads=1, page_len=64)
    query, ids = random_query(rows, 4, queries), random_ids(rows, 1, queries, count)
    ids[..., : count // 2] = -1
    want = host_attention(query, rows, ids, scale=0.3, threads=1)
    want_scores = host_scores(query, rows, ids, scale=0.3, threads=1)
    for threads in range(2, 9):
        got = host_attention(query, rows, ids, scale=0.3, threads=threads)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        scores = host_scores(query, rows, ids, scale=0.3, threads=threads)
        assert torch.equal(scores, want_scores)


def test_a_child_after_fork_has_threads_of_its_own(compiled: None) -> None:
    rows = paged(chunks=(40,), page_len=64)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 1000)
    want, _ = host_attention(query, rows, ids, scale=0.3, threads=4)
    child = os.fork()
    if child == 0:
        # No torch arithmetic here: its own threads do not survive a fork.
        out, _ = host_attention(query, rows, ids, scale=0.3, threads=4)
        same = bytes(out.numpy().data) == bytes(want.numpy().data)
        os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _wanted(scores: torch.Tensor, ids: torch.Tensor, count: int) -> list[list[int]]:
    """Query after query, by Python's own arithmetic."""
    batch, heads, queries, named = ids.shape
    group = scores.shape[1] // heads
    results = []
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                relevance = [-math.inf] * named
                for g in range(group):
                    row = scores[b, h * group + g, q].tolist()
                    finite = [s for s in row if s > -math.inf]
                    lse = 0.0
                    if finite and group > 1:
                        top = max(finite)
                        lse = top + math.log(sum(math.exp(s - top) for s in finite))
                    relevance = [max(r, s - lse) for r, s in zip(relevance, row, strict=True)]
                order = sorted(range(named), key=lambda k: (-relevance[k], k))
                row_ids = ids[b, h, q].tolist()
                best = [row_ids[k] for k in order if row_ids[k] >= 0 and relevance[k] > -math.inf]
                results.append((best + [-1] * count)[:count])
    return results


@pytest.mark.factor("group", [1, 3])
@pytest.mark.factor("count", [1, 7, 40, 55])
def test_the_best_come_first(backend: str, group: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.rand(2, 2, 3, 40, generator=generator).argsort(-1).int() * 3
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    ids[0, 0, 0] = -1
    scores = 4 * torch.randn(2, 2 * group, 3, 40, generator=generator)
    scores = scores.masked_fill((ids < 0).repeat_interleave(group, dim=1), float("-inf"))
    best = host.host_rank(scores, ids, count, backend=backend)
    assert best.dtype == torch.int32 and best.shape == (2, 2, 3, count)
    assert best.flatten(0, 2).tolist() == _wanted(scores, ids, count)


def test_of_equal_tokens_the_first_named_comes_first(backend: str) -> None:
    ids = torch.tensor([[[[9, 4, -1, 7, 1]]]], dtype=torch.int32)
    for group in (1, 2):
        best = host.host_rank(torch.zeros(1, group, 1, 5), ids, 3, backend=backend)
        assert best.flatten().tolist() == [9, 4, 7]


@pytest.mark.parametrize("group", [1, 2])
def test_a_score_that_is_no_number_is_never_chosen_and_moves_no_other(
    backend: str, group: int
) -> None:
    ids = torch.arange(6, dtype=torch.int32).view(1, 1, 1, 6)
    scores = torch.tensor([1.0, float("nan"), 3.0, float("-inf"), 2.0, 0.0])
    scores = scores.expand(1, group, 1, 6).contiguous()
    best = host.host_rank(scores, ids, 6, backend=backend).flatten().tolist()
    assert best == [2, 4, 0, 5, -1, -1]
    scores[..., 5] = float("inf")
    best = host.host_rank(scores, ids, 6, backend=backend).flatten().tolist()
    assert best[0] == 5 and 1 not in best and 3 not in best
    assert group > 1 or best == [5, 2, 4, 0, -1, -1]


def test_nothing_to_choose_from_or_nothing_wanted(backend: str) -> None:
    none = torch.zeros(2, 2, 3, 0, dtype=torch.int32)
    best = host.host_rank(torch.zeros(2, 4, 3, 0), none, 5, backend=backend)
    assert best.shape == (2, 2, 3, 5) and int(best.max()) == -1
    some = torch.zeros(2, 2, 3, 4, dtype=torch.int32)
    assert host.host_rank(torch.zeros(2, 4, 3, 4), some, 0, backend=backend).shape == (2, 2, 3, 0)


@pytest.mark.skipif(bool(host.why_not()), reason=host.why_not())
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_change_nothing(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(3000, dtype=torch.int32).expand(1, 4, 2, 3000)
    scores = torch.randn(1, 8, 2, 3000, generator=generator)
    best = host.host_rank(scores, ids, 200, threads=threads)
    assert torch.equal(best, host.host_rank(scores, ids, 200, backend="naive"))


@pytest.mark.parametrize(
    ("scores", "ids", "count", "said"),
    [
        (torch.zeros(1, 3, 1, 4), torch.zeros(1, 2, 1, 4, dtype=torch.int32), 1, "a multiple of 2"),
        (torch.zeros(1, 2, 1, 5), torch.zeros(1, 2, 1, 4, dtype=torch.int32), 1, "scores is"),
        (torch.zeros(1, 2, 1, 4).half(), torch.zeros(1, 2, 1, 4).int(), 1, "pass fp32"),
        (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 1, "pass int32"),
        (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4).int(), -1, "count=-1"),
    ],
)
def test_bad_input_is_refused(
    scores: torch.Tensor, ids: torch.Tensor, count: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        host.host_rank(scores, ids, count)


ROWS = PagedRows([torch.zeros(9, 2, 8, 32)], torch.zeros(2, 9, dtype=torch.int32), 16)
QUERY = torch.zeros(2, 4, 1, 16)
IDS = torch.zeros(2, 2, 1, 3, dtype=torch.int32)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_places", lambda: iter([tmp_path / "none.so"]))
    library.opened.cache_clear()
    yield
    library.opened.cache_clear()


def test_without_the_library_torch_does_the_work(no_library: None) -> None:
    assert host.why_not()
    assert "Install one (GCC or Clang)" in host.why_not()
    got = host_attention(QUERY, ROWS, IDS, scale=1.0)
    want = host_attention(QUERY, ROWS, IDS, scale=1.0, backend="naive")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(host_scores(QUERY, ROWS, IDS, scale=1.0), torch.zeros(2, 4, 1, 3))
    for options in ({"backend": "cpp"}, {"path": "portable"}):
        with pytest.raises(ImportError, match="installed without a C\\+\\+ compiler"):
            host_attention(QUERY, ROWS, IDS, scale=1.0, **options)


def test_a_library_that_does_not_load_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / library.FILE_NAME
    file.write_bytes(b"no library")
    monkeypatch.setenv(library.PATH_VARIABLE, str(file))
    assert str(file) in host.why_not()
    assert f"unset {library.PATH_VARIABLE}" in host.why_not()


@pytest.mark.parametrize(
    ("query", "ids", "options", "message"),
    [
        (QUERY[..., :8], IDS, {}, "Dk=8"),
        (QUERY.to("meta"), IDS, {}, "reads host memory"),
        (QUERY, IDS, {"threads": 0}, "threads=0"),
        (QUERY, IDS, {"backend": "triton"}, "choose one of auto, naive, cpp"),
        (QUERY, IDS, {"path": "avx2", "backend": "naive"}, "use backend='cpp'"),
        (QUERY, IDS, {"path": "sse"}, "choose one of avx512_bf16, avx512, avx2, neon, portable"),
    ],
)
@pytest.mark.parametrize("function", [host_attention, host_scores])
def test_mistakes_are_refused(
    function: Any, query: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(query, ROWS, ids, **{"scale": 1.0, **options})


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


def test_a_library_of_another_version_is_refused(
    built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, built)
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    library.opened.cache_clear()
    assert f"this code needs {library.VERSION}" in host.why_not()
    library.opened.cache_clear()


@pytest.mark.skipif(bool(host.why_not()), reason="the library is not compiled")
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
        None,
    )
    with pytest.raises(MemoryError, match="work space of 1 threads"):
        library.call("hfk_attend", 1, request)
