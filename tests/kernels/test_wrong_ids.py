"""Ids and codes that name nothing: torch refuses them, Triton takes them for none.

The last page has rows behind the last token, of NaN, and the page table a column behind that, which
would crash as a page number; tables of slots and codewords are followed by others'.
"""

import math

import pytest
import torch

from hf_kvret_kernels import centroid, codebook
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec
from hf_kvret_kernels.ids import WrongIdError, check_code_range, check_id_range
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .draws import Place, draw, run_at
from .paged_rows import code_rows

# There are 30 tokens on four pages of 8.
TOKENS, TABLE = 30, [[0, 1, 2, 3, 10**9], [4, 2, 5, 6, 10**9]]
MOST = 2**31 - 1
WRONG = [TOKENS, TOKENS + 1, TOKENS + 5, MOST, -2, -MOST - 1]


def paged(place: Place, is_coded: bool = False) -> PagedRows | CodedRows:
    """Keys and values of 16 numbers."""
    pages = draw(7, 2, 8, 32)
    # These tokens are on the last page of each sequence.
    pages[[3, 6], :, TOKENS % 8 :] = math.nan
    table = torch.tensor(TABLE, dtype=torch.int32, device=place[1])
    if is_coded:
        return code_rows(HiggsCodec(4, 16), pages.split(16, dim=-1), table, tokens=TOKENS)
    return PagedRows([pages.to(place[1])], table, 16, tokens=TOKENS)


def ids_with(place: Place, wrong: list[int], heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[2, heads, 1, 14]``, some of them wrong ones in turn, and the same with -1 there."""
    ids = torch.rand(2, heads, 1, TOKENS).argsort(-1)[..., :14].int()
    holes = ids.clone()
    for at in range(0, 14, 2):
        ids[:, at % heads, 0, at], holes[:, at % heads, 0, at] = wrong[at // 2 % len(wrong)], -1
    return ids.to(place[1]), holes.to(place[1])


def check(place: Place, name: str, heads: int = 2) -> None:
    """Torch names the id, Triton takes it for a hole: results are the same to the bit."""
    if place[0] == "triton":
        got, right = (work(place, name, ids) for ids in ids_with(place, WRONG, heads))
        assert all(map(torch.equal, got, right)) and not any(part.isnan().any() for part in got)
        return
    for wrong in WRONG:
        ids, holes = ids_with(place, [wrong], heads)
        said = f"id {wrong} of 30 tokens: allowed are 0 to 29, or -1 for none"
        with pytest.raises(WrongIdError, match=said):
            work(place, name, ids)
        assert not any(part.isnan().any() for part in work(place, name, holes))


def work(place: Place, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What an operation gives, always of the same inputs but for its ids."""
    backend, device = place
    query, rows = draw(2, 4, 1, 16).to(device), paged(place, name.endswith("codes"))
    if name.startswith("attention"):
        return gather_attention(query, rows, ids, scale=0.3, backend=backend)
    if name.startswith("scores"):
        return (gather_scores(query, rows, ids, scale=0.3, backend=backend),)
    if name.startswith("rows"):
        pages = rows.pages if isinstance(rows, CodedRows) else rows
        return pages.gather(ids, backend=backend)
    assert isinstance(rows, PagedRows)
    ids, slot_count = ids.flatten(2), TOKENS if name == "fetched" else 32
    buffer = torch.zeros(2, 2, slot_count, 32, device=device)
    if name == "fetched":
        tokens = torch.arange(14, dtype=torch.int32, device=device).expand(2, 2, 14)
        fetch(rows, tokens.contiguous(), ids, buffer, backend=backend)
        return (buffer,)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=device)

    # The table of slots has room behind the tokens, as it always has in a store.
    slots = SlotMap(numbers(2, 2, 40), numbers(2, 2, 32), numbers(2, 2, 32), numbers(1) + 1)
    places, fetched = assign(slots, ids, tokens=TOKENS, backend=backend)
    fetch(rows, ids, fetched, buffer, backend=backend)
    return places, fetched, buffer, slots.table, slots.token, slots.stamp


@pytest.mark.factor("heads", [2, 4])
@pytest.mark.factor("name", ["attention", "scores", "attention to codes"])
def test_ids_of_rows_that_are_attended_to(where: Place, name: str, heads: int) -> None:
    check(where, name, heads)


@pytest.mark.factor("name", ["rows", "rows of codes", "slots", "fetched"])
def test_ids_of_rows_slots_and_codes(place: Place, name: str) -> None:
    check(place, name)


@pytest.mark.factor("masked", [False, True])
def test_codes(place: Place, masked: bool) -> None:
    """Tokens of such a code are as those that are not valid; where they aren't, it may be any."""
    astray = torch.arange(TOKENS) % 7 == 0
    valid = (torch.rand(2, TOKENS) < 0.8) | astray
    codes, table = torch.randint(0, 5, (2, 2, TOKENS), dtype=torch.int16), draw(2, 4, 1, 5)
    wrong = [5, 6, 2**15 - 1, -1, -(2**15)]

    def results(codes: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
        options = {"valid": valid}
        return [
            run_at(place, codebook.lookup, table, codes, **options),
            run_at(place, codebook.lookup_scores, table, codes, **options),
        ]

    wrongly, own = codes.clone(), valid if masked else None
    wrongly[:, :, astray] = torch.tensor(wrong, dtype=torch.int16)
    right = results(codes, valid & ~astray)
    assert all(map(torch.equal, results(wrongly, valid & ~astray), right))
    if place[0] == "triton":
        right = right if masked else results(codes, ~astray.expand(2, -1))
        assert all(map(torch.equal, results(wrongly, own), right))
        return
    for code in wrong:
        wrongly = codes.masked_fill(astray, code)
        with pytest.raises(WrongIdError, match=f"code {code} of 5 codewords: allowed are 0 to 4$"):
            results(wrongly, own)


@pytest.mark.factor("has_high", [False, True])
def test_lists_that_are_none(place: Place, has_high: bool) -> None:
    low = torch.randint(0, 99, (2, 2, 6, 4), dtype=torch.int16)
    high = torch.randint(0, 3, low.shape, dtype=torch.uint8) if has_high else None
    index = torch.randint(0, 6, (2, 2, 1, 5))
    lists = run_at(place, centroid.take_lists, low, high, index)
    wrong = [6, 7, 2**62, -1, -(2**62)]
    if place[0] == "triton":
        lists[1, 0, 0], index[1, 0, 0] = -1, torch.tensor(wrong)
        assert torch.equal(run_at(place, centroid.take_lists, low, high, index), lists)
        return
    for number in wrong:
        index[1, 0, 0, 3] = number
        with pytest.raises(RuntimeError, match="out of bounds"):
            centroid.take_lists(low, high, index, backend="naive")


def test_listed_tokens_beyond_the_last_one_name_nothing(place: Place) -> None:
    """Lists keep the ids of tokens that a crop took away, so no backend refuses them."""
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    ids = ids_with(("naive", "cpu"), WRONG)
    assert torch.equal(*(run_at(place, centroid.unite, each, valid) for each in ids))


def test_numbers_in_range_are_not_refused() -> None:
    check_id_range(torch.tensor([-1, 0, 29], dtype=torch.int32), 30)
    check_id_range(torch.empty(0, dtype=torch.int32), 0)
    check_code_range(torch.tensor([0, 4], dtype=torch.int16), 5)
    with pytest.raises(WrongIdError, match="id 0, and there are no tokens: allowed is -1"):
        check_id_range(torch.zeros(1, dtype=torch.int32), 0)
