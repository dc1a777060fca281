"""What host_attention says without its library, with a broken one or another, and to mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.host_attention import host_attention, host_scores
from hf_kvret_kernels.paged import PagedRows

ROWS = PagedRows([torch.zeros(9, 2, 8, 32)], torch.zeros(2, 9, dtype=torch.int32), 16)
QUERY = torch.zeros(2, 4, 1, 16)
IDS = torch.zeros(2, 2, 1, 3, dtype=torch.int32)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(library, "_places", lambda: iter([tmp_path / "none.so"]))
    library._open.cache_clear()
    yield
    library._open.cache_clear()


def test_without_the_library_torch_does_the_work(no_library: None) -> None:
    assert not host.available()
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
        (QUERY.half(), IDS, {}, "query is torch.float16"),
        (QUERY[..., :8], IDS, {}, "Dk=8"),
        (QUERY[0], IDS, {}, r"pass \[B, H, T, D\]"),
        (QUERY.to("meta"), IDS, {}, "reads host memory"),
        (QUERY.clone().requires_grad_(), IDS, {}, "requires gradients"),
        (QUERY[:, :3], IDS, {}, "no multiple of the rows' 2"),
        (QUERY, IDS.long(), {}, "pass int32"),
        (QUERY, IDS[:1], {}, "its batch must be 2"),
        (QUERY, IDS.expand(2, 2, 5, 3), {}, "ids has shape"),
        (QUERY, IDS, {"softcap": 0.0}, "softcap=0.0"),
        (QUERY, IDS, {"threads": 0}, "threads=0"),
        (QUERY, IDS, {"backend": "triton"}, "choose one of auto, naive, cpp"),
        (QUERY, IDS, {"path": "avx2", "backend": "naive"}, "use backend='cpp'"),
        (QUERY, IDS, {"path": "neon"}, "choose one of avx512_bf16, avx512, avx2, portable"),
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
    numbers = torch.cat([torch.linspace(-87.29, 0, 500_001), -torch.logspace(-30, 0, 1001)])
    want = numbers.double().exp()
    error = (library.exponentials(numbers, path).double() / want - 1).abs().max().item()
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
    library._open.cache_clear()
    assert f"this code needs {library.VERSION}" in host.why_not()
    library._open.cache_clear()


@pytest.mark.skipif(bool(host.why_not()), reason="the library is not compiled")
def test_a_work_space_that_no_memory_has_is_told() -> None:
    """The C++ runtime's exception is caught in the library, whatever runtimes the process has."""
    more_than_addresses = 2**50
    ids, pages = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    request = library.pack_request(
        torch.zeros(1, 1, 1, 16),
        ids,
        (ids[0, 0], pages, 16, 1),
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
