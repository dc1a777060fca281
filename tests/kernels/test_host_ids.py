"""Ids that lead to no row: errors of host_attention and host_scores, on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.host_attention import host_attention, host_scores
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.paged import PagedRows

FUNCTIONS = (host_attention, host_scores)


pytestmark = pytest.mark.factor("place", ["naive", *library.PATHS], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keyword arguments that choose torch, or one path of the installed library."""
    if request.param == "naive":
        return {"backend": "naive"}
    if not host.available() or request.param not in host.paths():
        pytest.skip(f"no library, or the processor has no {request.param}")
    return {"backend": "cpp", "path": request.param}


def _rows(tokens: int | None = None) -> PagedRows:
    """Two batch rows of 9 pages of 8 tokens, or fewer."""
    table = torch.stack([torch.randperm(9), torch.randperm(9)]).int()
    return PagedRows([torch.randn(9, 2, 8, 32)], table, 16, tokens=tokens)


@pytest.mark.factor("count", [1, 65, 1000])
@pytest.mark.factor("tokens", [None, 69])
@pytest.mark.factor("bad", [0, 1, 500, 2**31 - 1, -2, -(2**31)])
def test_an_id_of_no_token_is_refused_by_name(
    place: dict[str, Any], bad: int, tokens: int | None, count: int
) -> None:
    """The first two behind the last token, which may be in the middle of a page, and others."""
    rows = _rows(tokens)
    bad = rows.token_count + bad if bad in (0, 1) else bad
    ids = torch.randint(-1, rows.token_count, (2, 2, 2, count), dtype=torch.int32)
    right = ids.clone()
    right[1, 0, 1, count // 2] = -1
    ids[1, 0, 1, count // 2] = bad
    query = torch.randn(2, 4, 2, 16)
    for function in FUNCTIONS:
        with pytest.raises(WrongIdError, match=rf"^id {bad} of {rows.token_count} tokens: allowed"):
            function(query, rows, ids, scale=0.3, threads=3, **place)
        function(query, rows, right, scale=0.3, threads=3, **place)


@pytest.mark.factor("chunks", [1, 2])
@pytest.mark.factor("entry", [-1, 9, 10**9])
def test_a_table_entry_without_a_page_is_refused(
    place: dict[str, Any], entry: int, chunks: int
) -> None:
    rows = _rows()
    rows.table[0, 3] = entry
    two_chunks = [chunk.contiguous() for chunk in rows.chunks[0].split([4, 5])]
    rows = PagedRows(two_chunks if chunks == 2 else rows.chunks, rows.table, rows.key_dim)
    ids = torch.full((2, 2, 1, 3), 25, dtype=torch.int32)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="a table entry that names none of the 9 pages"):
            function(torch.randn(2, 4, 1, 16), rows, ids, scale=0.3, **place)
