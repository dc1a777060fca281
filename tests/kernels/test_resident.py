"""Who gets which slot, against a slow LRU of plain loops, and rows copied into the slots."""

import itertools

import pytest
import torch

from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .draws import Place
from .paged_rows import NO_PAGE, TWO_ROWS, dense_rows, paged

# Rows have 24 elements.
DIMS = (16, 8)


def poisoned(rows: PagedRows, slots: int) -> torch.Tensor:
    lead = (rows.table.shape[0], rows.heads)
    return torch.full(
        (*lead, slots, rows.width), torch.nan, dtype=rows.dtype, device=rows.table.device
    )


def check_fetch(place: Place, rows: PagedRows, ids: torch.Tensor, fetched: torch.Tensor) -> None:
    """Rows lie where ``fetched`` says, all other slots are as they were."""
    slots = 1 + max(0, int(fetched.max()) if fetched.numel() else 0)
    buffer, expected, dense = poisoned(rows, slots), poisoned(rows, slots), dense_rows(rows)
    for b, h, r in (fetched >= 0).nonzero().tolist():
        expected[b, h, int(fetched[b, h, r])] = dense[b, h, int(ids[b, h, r])]
    fetch(rows, ids, fetched, buffer, backend=place[0])
    torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)


def random_fetches(
    rows: PagedRows, count: int, tokens: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids, fetched)``: some requests are holes, of others the row is there."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows.table.shape[0], rows.heads, count)
    ids = torch.randint(tokens, shape, generator=generator).int()
    fetched = torch.rand(shape, generator=generator).argsort(-1).int()
    fetched[torch.rand(shape, generator=generator) < 0.4] = -1
    ids[(fetched < 0) & (torch.rand(shape, generator=generator) < 0.5)] = -1
    return ids.to(rows.table.device), fetched.to(rows.table.device)


# Table, pages of each chunk, numbers of keys and values, requests, and tokens.
FETCHES = {
    "nothing": (TWO_ROWS, (9,), DIMS, 0, 32),
    "one row": (TWO_ROWS, (9,), (8, 8), 1, 32),
    "more than a program's": (TWO_ROWS, (9,), (5, 8), 130, 32),
    "wide rows": ([[1, 0]], (2,), (4000, 100), 3, 16),
    "chunks and shared pages": ([[0, 4, 2, NO_PAGE], [6, 4, 5, NO_PAGE]], (3, 1, 3), DIMS, 21, 24),
}


@pytest.mark.factor("name", FETCHES)
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_from_where_they_lie(place: Place, name: str, dtype: torch.dtype) -> None:
    table, chunks, dims, count, tokens = FETCHES[name]
    rows = paged(place[1], table, chunks, dims=dims, dtype=dtype)
    check_fetch(place, rows, *random_fetches(rows, count, tokens))


def test_nothing_to_fetch_reads_nothing(place: Place) -> None:
    rows = paged(place[1], [[NO_PAGE] * 4] * 2, dims=DIMS)
    ids, _ = random_fetches(rows, 21, 32)
    check_fetch(place, rows, ids, torch.full_like(ids, -1))


def test_strided_fetches_and_page_tables(place: Place) -> None:
    rows = paged(place[1], TWO_ROWS, dims=DIMS)
    rows.table = rows.table.t().contiguous().t()
    ids, fetched = random_fetches(rows, 22, 32)
    strided = ids.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
    check_fetch(place, rows, strided, fetched[..., ::2])


def test_after_a_fetch_every_request_finds_its_row(place: Place) -> None:
    rows, device = paged(place[1], TWO_ROWS, (4, 5), dims=DIMS), place[1]
    table = torch.full((2, 2, 32), -1, dtype=torch.int32, device=device)
    token = table[..., :11].contiguous()
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    slots = SlotMap(table, token, token.clone(), clock, counts)
    buffer, dense = poisoned(rows, 11), dense_rows(rows)
    for step in range(4):
        # A third of the tokens comes more often, so that there are hits, misses and repeats.
        ids, _ = random_fetches(rows, 10, 32 if step % 2 else 11, seed=step)
        old = counts.clone()
        places, fetched = assign(slots, ids, backend=place[0])
        fetch(rows, ids, fetched, buffer, backend=place[0])
        assert torch.equal(places < 0, ids < 0)
        assert (counts - old).tolist() == [(ids >= 0).sum(), (fetched >= 0).sum(), 0]
        for b, h, r in (ids >= 0).nonzero().tolist():
            expected = dense[b, h, int(ids[b, h, r])]
            assert torch.equal(buffer[b, h, int(places[b, h, r])].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_fetched_from_the_gpu() -> None:
    place = ("triton", "cuda")
    near = paged(place[1], TWO_ROWS, (4, 5), dtype=torch.float16, dims=DIMS)
    far = PagedRows([chunk.cpu().pin_memory() for chunk in near.chunks], near.table, near.key_dim)
    ids, fetched = random_fetches(near, 40, 32)
    buffers = [torch.zeros(2, 2, 40, 24, dtype=torch.float16, device="cuda") for _ in range(2)]
    for rows, buffer in zip((near, far), buffers, strict=True):
        fetch(rows, ids, fetched, buffer)
    assert buffers[0].any()
    assert torch.equal(buffers[0], buffers[1])


# What stands in table columns that no token leads to; as a slot it would crash.
GARBAGE = 10**9


def empty_map(
    device: str, tokens: int, slots: int, lead: tuple[int, int] = (1, 1), spare: int = 0
) -> SlotMap:
    """No token has a slot; with ``spare`` the table is a view of a buffer that ends in garbage."""
    room = torch.full((*lead, tokens + spare), GARBAGE, dtype=torch.int32, device=device)
    room[..., :tokens] = -1
    token = torch.full((*lead, slots), -1, dtype=torch.int32, device=device)
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    return SlotMap(room[..., :tokens], token, token.clone(), clock)


def requests(device: str, *rows: list[int]) -> torch.Tensor:
    """``[1, H, R]``, a head for each of ``rows``."""
    return torch.tensor([rows], dtype=torch.int32, device=device)


def random_requests(
    place: Place, lead: tuple[int, int], tokens: int, count: int, seed: int
) -> torch.Tensor:
    """Tokens that repeat, more often low ones, with holes."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(*lead, count, generator=generator) ** 2
    ids = (share * tokens).int().clamp(max=tokens - 1)
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    return ids.to(place[1])


class SlowLru:
    """For each row of slots the call in which a token was last asked for, as a dictionary."""

    def __init__(self) -> None:
        self.calls = 0
        self.last_use: dict[tuple[int, int], dict[int, int]] = {}

    def check(self, place: Place, slots: SlotMap, ids: torch.Tensor) -> torch.Tensor:
        """Call ``assign`` and look at all it promises; returns ``fetched``."""
        before = slots.token.tolist(), slots.stamp.tolist()
        places, fetched = assign(slots, ids, backend=place[0])
        self.calls += 1
        assert slots.clock.tolist() == [self.calls]
        for result in (places, fetched):
            assert result.dtype == torch.int32 and result.shape == ids.shape
            assert result.device == ids.device
        after = (x.tolist() for x in (ids, places, fetched, slots.table, slots.token, slots.stamp))
        state = *before, *after
        for b, h in itertools.product(*map(range, ids.shape[:2])):
            self._check_row((b, h), *(values[b][h] for values in state))
        return fetched

    def _check_row(
        self,
        row: tuple[int, int],
        old_token: list[int],
        old_stamp: list[int],
        ids: list[int],
        places: list[int],
        fetched: list[int],
        table: list[int],
        token: list[int],
        stamp: list[int],
    ) -> None:
        used = self.last_use.setdefault(row, {})
        expected = {t for t in ids if t >= 0}
        missing = expected - used.keys()

        # Each missing token is fetched by one request, into its slot.
        by = [(t, slot) for t, slot in zip(ids, fetched, strict=True) if slot >= 0]
        assert sorted(t for t, _ in by) == sorted(missing)
        assert all(token[slot] == t for t, slot in by)
        # The slots of lowest stamp make room, the first among equals, never one that is asked for.
        others = [s for s in range(len(token)) if old_token[s] not in expected]
        order = sorted(others, key=lambda s: (old_stamp[s], s))
        assert {slot for _, slot in by} == set(order[: len(missing)])
        # What goes was used before all that stays.
        gone = {old_token[slot] for _, slot in by} - {-1}
        stays = used.keys() - gone - expected
        last_gone = max((used[t] for t in gone), default=0)
        assert last_gone <= min((used[t] for t in stays), default=self.calls)
        for t in gone:
            del used[t]
        used.update(dict.fromkeys(expected, self.calls))

        # Table and tokens lead to each other, and everyone got the place of its token.
        held = {t: s for s, t in enumerate(token) if t >= 0}
        assert table == [held.get(t, -1) for t in range(len(table))]
        assert held.keys() == used.keys()
        assert [used.get(t, -1) for t in token] == stamp
        assert places == [table[t] if t >= 0 else -1 for t in ids]


# Rows of slots, tokens, slots, and requests of each step.
WALKS = {
    "many steps": ((1, 2), 61, 23, (1, 23, 16, 7) * 4),
    "one slot": ((3, 1), 3, 1, (1,) * 4),
    "about a block": ((3, 1), 771, 257, (256,) * 4),
    "about two blocks": ((3, 1), 1533, 511, (300,) * 4),
    "more than a block holds": ((1, 1), 9000, 5000, (5000, 4500, 2049, 5000)),
}


@pytest.mark.parametrize("name", WALKS)
def test_random_walks_keep_every_promise(place: Place, name: str) -> None:
    lead, tokens, size, counts = WALKS[name]
    slots, lru = empty_map(place[1], tokens, size, lead, spare=3), SlowLru()
    for step, count in enumerate(counts):
        lru.check(place, slots, random_requests(place, lead, tokens, count, seed=step))


def test_requests_for_one_token_in_different_blocks_fetch_it_once(place: Place) -> None:
    slots, lru = empty_map(place[1], 5000, 4200), SlowLru()
    ids = torch.arange(4200, dtype=torch.int32, device=place[1]) % 7 + 4990
    assert (lru.check(place, slots, ids.view(1, 1, -1)) >= 0).sum() == 7
    assert (lru.check(place, slots, ids.view(1, 1, -1)) == -1).all()


def test_freed_slots_are_taken_before_used_ones(place: Place) -> None:
    slots, lru = empty_map(place[1], 20, 4), SlowLru()
    for t in (10, 3, 11, 4):
        lru.check(place, slots, requests(place[1], [t]))
    # As a crop does it: tokens from 11 on are no more.
    freed = int(slots.table[0, 0, 11])
    slots.token[0, 0, freed] = slots.stamp[0, 0, freed] = slots.table[0, 0, 11] = -1
    del lru.last_use[0, 0][11]
    assert lru.check(place, slots, requests(place[1], [12])).item() == freed


@pytest.mark.factor("count", [0, 3])
def test_no_request_at_all_moves_only_the_clock(place: Place, count: int) -> None:
    slots, lru = empty_map(place[1], 9, 4), SlowLru()
    lru.check(place, slots, requests(place[1], [1, 2]))
    ids = torch.full((1, 1, count), -1, dtype=torch.int32, device=place[1])
    assert (lru.check(place, slots, ids) == -1).all()


def test_strided_requests_and_spare_room_beside_the_table(place: Place) -> None:
    lead = (2, 3)
    # A table whose heads lie outermost, so that none of its strides follows from its shape.
    room = torch.full((3, 2, 40), GARBAGE, dtype=torch.int32, device=place[1])
    room[..., :31] = -1
    like, lru = empty_map(place[1], 31, 8, lead), SlowLru()
    slots = SlotMap(room.transpose(0, 1)[..., :31], like.token, like.stamp, like.clock)
    for step in range(4):
        wide = random_requests(place, (3, 2), 31, 16, seed=step)
        lru.check(place, slots, wide.transpose(0, 1)[..., ::2])
    assert (room[..., 31:] == GARBAGE).all()


def test_late_clocks_are_counted_on(place: Place) -> None:
    slots = empty_map(place[1], 9, 4)
    slots.clock.fill_(2**31 - 10)
    for t in (0, 1, 2, 3, 0, 4):
        assign(slots, requests(place[1], [t]), backend=place[0])
    assert set(slots.token.flatten().tolist()) == {0, 2, 3, 4}
    assert slots.stamp.max().item() == 2**31 - 4
