"""Nearest codewords, counts of codes, tables of scores and look-ups, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import codebook as book

from .draws import Place, best_share, draw, generator, moved_with_room, on

INF = float("inf")
# The error may be this share of the sum of a score's absolute products; see the proxy tests.
SHARE_OF_SIZE = 4e-6
# fp32 rounding of scores up to 40, of their exponentials' sum and its logarithm.
LSE_ERROR = 2e-5
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def draw_codes(*shape: int, words: int, seed: int = 0) -> torch.Tensor:
    """Some codes are much more common than others, some never occur."""
    share = torch.rand(shape, generator=generator(seed)) ** 3
    return (share * words * 0.8).short()


def expected_scores(
    table: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None
) -> torch.Tensor:
    """``[B, Hq, Q, n]`` float64: the entry of each token's code, -inf where it is not valid."""
    index = codes.long().clamp(min=0).repeat_interleave(table.shape[1] // codes.shape[1], dim=1)
    scores = table.double().gather(-1, index.unsqueeze(2).expand(*table.shape[:3], -1))
    return scores if valid is None else scores.masked_fill(~valid[:, None, None], -INF)


def check_table(
    place: Place, query: torch.Tensor, words: torch.Tensor, softcap: float | None = None
) -> None:
    """Against float64; ``query`` may be a view, and stays one."""
    backend, device = place
    moved = moved_with_room(query, device)
    table = book.score_table(moved, words.to(device), scale=0.25, softcap=softcap, backend=backend)
    assert table.shape == (*query.shape[:3], words.shape[1]) and table.dtype == torch.float32
    assert table.device.type == device
    own = words.double().repeat_interleave(query.shape[1] // len(words), 0)
    expected = torch.einsum("bhqd,hcd->bhqc", query.double(), own) * 0.25
    size = torch.einsum("bhqd,hcd->bhqc", query.double().abs(), own.abs()) * 0.25
    if softcap is not None:
        expected, size = softcap * torch.tanh(expected / softcap), size + softcap
    assert ((table.cpu().double() - expected).abs() <= SHARE_OF_SIZE * size).all()


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("words_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.factor("dtype", FLOATS, ids=str)
@pytest.mark.factor("H, C, D", [(4, 1, 1), (2, 45, 290)])
def test_the_table_has_the_score_of_every_codeword(
    place: Place,
    H: int,
    C: int,
    D: int,
    dtype: torch.dtype,
    words_dtype: torch.dtype,
    softcap: float | None,
) -> None:
    query = draw(2, 4, 3, D, seed=0, dtype=dtype)
    check_table(place, query, draw(H, C, D, seed=1, dtype=words_dtype), softcap)


def test_many_queries_of_long_codewords_have_their_scores(place: Place) -> None:
    """More queries of a codebook than a tile holds, groups of drafts, views with gaps of NaN."""
    room = torch.full((1, 2 * 33, 2, 300), math.nan)
    room[..., :290] = draw(1, 2 * 33, 2, 290, seed=11)
    check_table(place, room[..., :290], draw(2, 40, 290, seed=12))


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("H, Hq, Q, n, C", [(1, 3, 2, 50, 300), (2, 2, 1, 1100, 9)])
def test_a_token_has_the_score_of_its_codeword(
    place: Place, H: int, Hq: int, Q: int, n: int, C: int, masked: bool
) -> None:
    """Exact, for it is a copy."""
    table = draw(2, Hq, Q, C, seed=2)
    codes = draw_codes(2, H, n, words=C)
    valid = torch.rand(2, n, generator=generator(3)) < 0.7 if masked else None
    if valid is not None:
        codes[~valid[:, None].expand_as(codes)] = -9
    got = book.lookup(on(place, table), on(place, codes), valid=on(place, valid), backend=place[0])
    assert got.dtype == torch.float32 and got.device.type == place[1]
    assert torch.equal(got.cpu().double(), expected_scores(table, codes, valid))


@pytest.mark.factor("counted", [False, True])
@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor(
    "H, Hq, Q, n, C",
    [(1, 3, 2, 50, 300), (2, 2, 1, 1100, 9), (1, 9, 2, 30, 70)],
)
def test_relevance_is_the_best_softmax_of_the_group(
    place: Place, H: int, Hq: int, Q: int, n: int, C: int, masked: bool, counted: bool
) -> None:
    """Heads whose scores are of different sizes, so that raw scores would choose otherwise."""
    backend, device = place
    table = draw(2, Hq, Q, C, seed=4) * torch.arange(1, Hq + 1)[:, None, None] * 3
    codes = draw_codes(2, H, n, words=C)
    valid = torch.rand(2, n, generator=generator(5)) < 0.7 if masked else None
    if valid is not None:
        codes[~valid[:, None].expand_as(codes)] = -9
    counts = book.code_counts(codes, C, valid=valid) if counted else None
    got = book.lookup_scores(
        table.to(device),
        codes.to(device),
        valid=on(place, valid),
        counts=on(place, counts),
        backend=backend,
    )
    expected = best_share(expected_scores(table, codes, valid), H)
    assert got.shape == expected.shape and got.dtype == torch.float32
    got = got.cpu().double()
    torch.testing.assert_close(got, expected, rtol=0, atol=LSE_ERROR)


@pytest.mark.parametrize("heads", [2, 9])
def test_codes_of_no_token_take_no_part_in_the_softmax(place: Place, heads: int) -> None:
    """Their scores are far above all others, so far that an exponential would overflow."""
    table = torch.zeros(1, heads, 1, 5000)
    table[..., 1:4999] = 1e4
    table[..., 4999] = -1.0
    codes = torch.tensor([0, 4999, 0]).short().view(1, 1, 3)
    got = book.lookup_scores(on(place, table), on(place, codes), backend=place[0]).cpu()
    lse = math.log(2 + math.exp(-1))
    expected = torch.tensor([-lse, -1 - lse, -lse]).view(1, 1, 1, 3)
    assert (got - expected).abs().max() <= LSE_ERROR


@pytest.mark.parametrize("heads", [4, 18])
def test_a_row_without_valid_tokens_has_no_relevance(place: Place, heads: int) -> None:
    table = on(place, draw(2, heads, 1, 8, seed=6))
    codes = on(place, draw_codes(2, 2, 9, words=8))
    valid = torch.tensor([[False] * 9, [True] * 9]).to(place[1])
    for scores in (book.lookup, book.lookup_scores):
        got = scores(table, codes, valid=valid, backend=place[0])
        assert got[0].eq(-INF).all() and got[1].isfinite().all()
    empty = book.lookup_scores(table, codes[..., :0], backend=place[0])
    assert empty.shape == (2, 2, 1, 0)
    none = book.lookup(table[:, :, :0], codes, backend=place[0])
    assert none.shape == (2, heads, 0, 9)


# Of |x| |c| + |c|^2: sums of up to 290 products in fp32 miss by a tenth of it, a key that is cast
# to bf16 by a hundred times as much.


def merits(x: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(merit [B, H, n, C], size)`` in float64: x . c - |c|^2 / 2, and how much is summed up."""
    x, words = x.double(), words.double()
    merit = torch.einsum("bhnd,hcd->bhnc", x, words) - words.square().sum(-1)[:, None] / 2
    size = x.norm(dim=-1).amax() * words.norm(dim=-1).amax() + words.square().sum(-1).amax()
    return merit, size


def check_nearest(
    place: Place, x: torch.Tensor, words: torch.Tensor, norms: torch.Tensor | None = None
) -> torch.Tensor:
    """The codeword found is the best of all, up to rounding; and its id is an int16."""
    backend, device = place
    moved = None if norms is None else norms.to(device)
    codes = book.encode(on(place, x), on(place, words), norms=moved, backend=backend)
    assert codes.shape == x.shape[:3] and codes.dtype == torch.int16
    assert codes.device.type == device
    codes = codes.cpu().long()
    assert ((codes >= 0) & (codes < words.shape[1])).all()
    merit, size = merits(x, words)
    missed = merit.amax(-1) - merit.gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    assert (missed <= SHARE_OF_SIZE * size).all()
    return codes


@pytest.mark.factor("words_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.factor("dtype", FLOATS, ids=str)
@pytest.mark.factor("n, C, D", [(1, 1, 1), (5, 33, 290)])
def test_each_token_gets_its_nearest_codeword(
    place: Place, n: int, C: int, D: int, dtype: torch.dtype, words_dtype: torch.dtype
) -> None:
    """No size is a multiple of a tile's; codewords differ in length, so their norms count."""
    x = draw(2, 3, n, D, seed=0, dtype=dtype)
    words = draw(3, C, D, seed=1) * torch.rand(3, C, 1, generator=generator(2)) * 2
    check_nearest(place, x, words.to(words_dtype))


def test_of_equally_near_codewords_the_first_is_taken(place: Place) -> None:
    """Whole numbers, so that no sum is rounded; equals stand within tiles and in other tiles."""
    distinct = torch.randint(-3, 4, (1, 90, 8), generator=generator(5)).unique(dim=1).float()
    words = distinct.repeat_interleave(2, 1).repeat(1, 2, 1)
    x = torch.randint(-4, 5, (1, 1, 150, 8), generator=generator(6)).float()
    codes = check_nearest(place, x, words)
    assert torch.equal(codes, merits(x, words)[0].argmax(-1))
    mirrored = torch.tensor([[[1.0], [-1.0]]])
    assert check_nearest(place, torch.zeros(1, 1, 3, 1), mirrored).eq(0).all()


@pytest.mark.parametrize("splits", [1, 3, 50])
def test_programs_that_share_the_codewords_agree(splits: int) -> None:
    """Also with a last share that is shorter, and with equals in different shares."""
    pytest.importorskip("triton")
    from hf_kvret_kernels.codebook import triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = torch.randint(-3, 4, (2, 300, 9), generator=generator(7)).float().repeat(1, 2, 1)
    x = torch.randint(-4, 5, (2, 2, 19, 9), generator=generator(8)).float()
    moved = (x.to(device), words.to(device), book.half_norms(words).to(device))
    codes = triton.encode(*moved, splits=splits)
    assert torch.equal(codes.cpu().long(), merits(x, words)[0].argmax(-1))


def test_the_last_of_32768_codewords_has_an_id(place: Place) -> None:
    words = torch.zeros(1, book.MOST_CODEWORDS, 1)
    words[0, -1] = 1.0
    codes = check_nearest(place, torch.tensor([[[[1.0], [0.2]]]]), words)
    assert codes.flatten().tolist() == [book.MOST_CODEWORDS - 1, 0]


def test_norms_of_another_space_encode_transformed_keys(place: Place) -> None:
    """``x @ L`` is encoded without being computed."""
    metric = torch.eye(12) + 0.3 * draw(12, 12, seed=11)
    words = draw(2, 80, 12, seed=12)
    x = draw(1, 2, 50, 12, seed=13)
    backend, device = place
    norms = book.half_norms(words).to(device)
    folded = on(place, words @ metric.mT)
    codes = book.encode(on(place, x), folded, norms=norms, backend=backend).cpu().long()
    merit, size = merits(x @ metric, words)
    missed = merit.amax(-1) - merit.gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    assert (missed <= SHARE_OF_SIZE * size).all()


def test_a_token_of_nan_gets_0_and_harms_no_other(place: Place) -> None:
    x, words = draw(1, 1, 20, 8, seed=14), draw(1, 40, 8, seed=15)
    clean = check_nearest(place, x, words)
    x[0, 0, 7, 3] = math.nan
    codes = book.encode(on(place, x), on(place, words), backend=place[0]).cpu().long()
    clean[0, 0, 7] = 0
    assert torch.equal(codes, clean)


def test_no_tokens_have_no_codes(place: Place) -> None:
    words = on(place, draw(3, 4, 8, seed=16))
    assert book.encode(on(place, torch.zeros(2, 3, 0, 8)), words).shape == (2, 3, 0)


def test_scores_are_never_held_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvret_kernels.codebook import naive

    x, words = draw(2, 2, 31, 8, seed=17), draw(2, 40, 8, seed=18)
    expected = book.encode(x, words)
    sizes = []
    whole = torch.addmm

    def watched(*arguments: torch.Tensor, **options: float) -> torch.Tensor:
        result = whole(*arguments, **options)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(naive, "_MOST_SCORES", 1000)
    monkeypatch.setattr(torch, "addmm", watched)
    assert torch.equal(book.encode(x, words), expected)
    assert len(sizes) > 1 and max(sizes) <= 1000


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("n, C", [(1, 1), (2500, 37), (1024, 4096)])
def test_codes_are_counted(place: Place, n: int, C: int, masked: bool) -> None:
    codes = torch.randint(0, C, (2, 3, n), generator=generator(19)).short()
    valid = torch.rand(2, n, generator=generator(20)) < 0.6 if masked else None
    if valid is not None:
        # What is not valid may be anything, even no code at all.
        codes[~valid[:, None].expand_as(codes)] = -7
    counts = book.code_counts(
        on(place, codes), C, valid=None if valid is None else on(place, valid), backend=place[0]
    )
    assert counts.shape == (2, 3, C) and counts.dtype == torch.int32
    for b in range(2):
        indices = torch.arange(n) if valid is None else valid[b].nonzero()[:, 0]
        for h in range(3):
            expected = codes[b, h, indices].long().bincount(minlength=C)
            assert torch.equal(counts[b, h].cpu().long(), expected)
