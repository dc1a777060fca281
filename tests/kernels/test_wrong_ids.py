"""Ids and codes that name nothing: torch refuses them, Triton takes them for none.

The last page has rows behind the last token, of NaN, and the page table a column behind that, which
would crash as a page number; tables of slots and codewords are followed by others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hf_kvret_kernels import centroid, codebook, higgs, paris
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.ids import WrongIdError, check_code_range, check_id_range
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .draws import Place
from .paged_rows import code_rows

# There are 30 tokens on four pages of 8.
TOKENS, TABLE = 30, [[0, 1, 2, 3, 10**9], [4, 2, 5, 6, 10**9]]
MOST = 2**31 - 1
WRONG = [TOKENS, TOKENS + 1, TOKENS + 5, MOST, -2, -MOST - 1]


def paged(place: Place, width: int = 32, key_dim: int = 16) -> PagedRows:
    pages = torch.randn(7, 2, 8, width)
    # These tokens are on the last page of each sequence.
    pages[[3, 6], :, TOKENS % 8 :] = math.nan
    table = torch.tensor(TABLE, dtype=torch.int32, device=place[1])
    return PagedRows([pages.to(place[1])], table, key_dim, tokens=TOKENS)


def coded(place: Place, codec: higgs.HiggsCodec, dim: int) -> higgs.CodedRows:
    plain = paged(("naive", "cpu"), 2 * dim, dim)
    sides = plain.chunks[0].split(dim, dim=-1)
    return code_rows(codec, sides, plain.table.to(place[1]), tokens=TOKENS)


def ids_with(place: Place, wrong: list[int], heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[2, heads, 1, 14]``, some of them wrong ones in turn, and the same with -1 there."""
    ids = torch.rand(2, heads, 1, TOKENS).argsort(-1)[..., :14].int()
    holes = ids.clone()
    for at in range(0, 14, 2):
        ids[:, at % heads, 0, at], holes[:, at % heads, 0, at] = wrong[at // 2 % len(wrong)], -1
    return ids.to(place[1]), holes.to(place[1])


Work = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def masks(work: Work, ids: torch.Tensor, holes: torch.Tensor) -> None:
    """It gives what it gives for holes, bit for bit."""
    for got, right in zip(work(ids), work(holes), strict=True):
        assert torch.equal(got, right) and not got.isnan().any()


def check(place: Place, work: Work, heads: int = 2) -> None:
    """Torch names the id, Triton takes it for a hole."""
    if place[0] == "triton":
        masks(work, *ids_with(place, WRONG, heads))
        return
    for wrong in WRONG:
        ids, holes = ids_with(place, [wrong], heads)
        said = f"id {wrong} of 30 tokens: allowed are 0 to 29, or -1 for none"
        with pytest.raises(WrongIdError, match=said):
            work(ids)
        assert not any(part.isnan().any() for part in work(holes))


@pytest.mark.factor("heads", [2, 4])
def test_attention_and_scores(where: Place, heads: int) -> None:
    rows, query = paged(where), torch.randn(2, 4, 1, 16).to(where[1])
    options = {"scale": 0.3, "backend": where[0]}
    check(where, lambda ids: gather_attention(query, rows, ids, **options), heads)
    check(where, lambda ids: (gather_scores(query, rows, ids, **options),), heads)


@pytest.mark.factor("is_coded", [False, True])
def test_gathered_rows(place: Place, is_coded: bool) -> None:
    rows = coded(place, higgs.HiggsCodec(4, 16), 16).pages if is_coded else paged(place)
    check(place, lambda ids: rows.gather(ids, backend=place[0]))


def test_attention_to_coded_rows(where: Place) -> None:
    query, rows = torch.randn(2, 4, 1, 32).to(where[1]), coded(where, higgs.HiggsCodec(4, 16), 32)
    check(where, lambda ids: gather_attention(query, rows, ids, scale=0.3, backend=where[0]))


def test_slots_and_what_is_fetched_into_them(place: Place) -> None:
    """The table of slots has room behind the tokens, as it always has in a store."""
    rows = paged(place)

    def work(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=place[1])

        clock = numbers(1) + 1
        slots = SlotMap(numbers(2, 2, 40), numbers(2, 2, 32), numbers(2, 2, 32), clock)
        buffer = torch.zeros(2, 2, 32, 32, device=place[1])
        ids = ids.flatten(2)
        places, fetched = assign(slots, ids, tokens=TOKENS, backend=place[0])
        fetch(rows, ids, fetched, buffer, backend=place[0])
        return places, fetched, buffer, slots.table, slots.token, slots.stamp

    check(place, work)


def test_rows_are_fetched_into_slots_that_there_are(place: Place) -> None:
    rows, ids = paged(place), torch.arange(14, dtype=torch.int32).expand(2, 2, 14).contiguous()
    ids = ids.to(place[1])

    def work(fetched: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffer = torch.zeros(2, 2, TOKENS, 32, device=place[1])
        fetch(rows, ids, fetched.flatten(2), buffer, backend=place[0])
        return (buffer,)

    check(place, work)


@pytest.mark.factor("dim", [16, 192])
def test_rerank(place: Place, dim: int) -> None:
    """Of rows that are no power of two long the kernel is another one."""
    signs = paris.random_signs(dim, seed=7).to(place[1])
    levels = paris.magnitude_levels(8).to(place[1])
    codes = paris.encode(torch.randn(2, 2, TOKENS + 2, dim).to(place[1]), signs, levels)
    planes = codes.sign, codes.magnitude, codes.weight
    codes = paris.ParisCodes(*(plane[:, :, :TOKENS] for plane in planes))
    query = paris.rotate(torch.randn(2, 2, 1, 2, dim).to(place[1]), signs)
    check(place, lambda ids: (paris.rerank(query, codes, ids, levels, backend=place[0]),))


@pytest.mark.factor("masked", [False, True])
def test_codes(place: Place, masked: bool) -> None:
    """Tokens of such a code are as those that are not valid; where they aren't, it may be any."""
    backend, device = place
    astray = torch.arange(TOKENS) % 7 == 0
    valid = (torch.rand(2, TOKENS) < 0.8) | astray
    codes, table = torch.randint(0, 5, (2, 2, TOKENS), dtype=torch.int16), torch.randn(2, 4, 1, 5)
    wrong = [5, 6, 2**15 - 1, -1, -(2**15)]

    def work(codes: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        codes, valid = codes.to(device), None if valid is None else valid.to(device)
        return (
            codebook.code_counts(codes, 5, valid=valid, backend=backend),
            codebook.lookup(table.to(device), codes, valid=valid, backend=backend),
            codebook.lookup_scores(table.to(device), codes, valid=valid, backend=backend),
        )

    rightly, wrongly = (
        work(codes, valid & ~astray if masked else ~astray.expand(2, -1)),
        codes.clone(),
    )
    wrongly[:, :, astray] = torch.tensor(wrong, dtype=torch.int16)
    for got, right in zip(
        work(wrongly, valid & ~astray), work(codes, valid & ~astray), strict=True
    ):
        assert torch.equal(got, right)
    if backend == "triton":
        for got, right in zip(work(wrongly, valid if masked else None), rightly, strict=True):
            assert torch.equal(got, right)
        return
    for code in wrong:
        wrongly = codes.masked_fill(astray, code)
        with pytest.raises(WrongIdError, match=f"code {code} of 5 codewords: allowed are 0 to 4$"):
            work(wrongly, valid if masked else None)


@pytest.mark.factor("has_high", [False, True])
def test_lists_that_are_none(place: Place, has_high: bool) -> None:
    backend, device = place
    low = torch.randint(0, 99, (2, 2, 6, 4), dtype=torch.int16).to(device)
    high = torch.randint(0, 3, low.shape, dtype=torch.uint8).to(device) if has_high else None
    index = torch.randint(0, 6, (2, 2, 1, 5)).to(device)
    lists = centroid.take_lists(low, high, index, backend=backend)
    wrong = [6, 7, 2**62, -1, -(2**62)]
    if backend == "triton":
        lists[1, 0, 0], index[1, 0, 0] = -1, torch.tensor(wrong)
        assert torch.equal(centroid.take_lists(low, high, index, backend=backend), lists)
        return
    for number in wrong:
        index[1, 0, 0, 3] = number
        with pytest.raises(RuntimeError, match="out of bounds"):
            centroid.take_lists(low, high, index, backend=backend)


def test_listed_tokens_beyond_the_last_one_name_nothing(place: Place) -> None:
    """Lists keep the ids of tokens that a crop took away, so no backend refuses them."""
    ids, holes = ids_with(place, WRONG)
    valid = torch.ones(2, TOKENS, dtype=torch.bool, device=place[1])
    united = centroid.unite(ids, valid, backend=place[0])
    assert torch.equal(united, centroid.unite(holes, valid, backend=place[0]))


def test_numbers_in_range_are_not_refused() -> None:
    check_id_range(torch.tensor([-1, 0, 29], dtype=torch.int32), 30)
    check_id_range(torch.empty(0, dtype=torch.int32), 0)
    check_code_range(torch.tensor([0, 4], dtype=torch.int16), 5)
    with pytest.raises(WrongIdError, match="id 0, and there are no tokens: allowed is -1"):
        check_id_range(torch.zeros(1, dtype=torch.int32), 0)
