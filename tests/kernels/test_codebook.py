"""Nearest codewords, counts of codes, tables of scores and look-ups, against float64."""

import math
from typing import Any

import pytest
import torch

from hf_kvret_kernels import codebook as book

from .draws import DEVICE, Place, best_share, draw, generator, run_at

INF = float("inf")
# The error may be this share of the sum of a score's absolute products; see the proxy tests. Sums
# of up to 290 products in fp32 miss by a tenth of it, a key that is cast to bf16 by a hundred times
# as much.
SHARE_OF_SIZE = 4e-6
# fp32 rounding of scores up to 40, of their exponentials' sum and its logarithm.
LSE_ERROR = 2e-5
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def draw_codes(
    batch: int, heads: int, length: int, words: int, masked: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes, some much more common than others; those of tokens that are not valid are none."""
    share = torch.rand(batch, heads, length, generator=generator(0)) ** 3
    codes = (share * words * 0.8).short()
    if not masked:
        return codes, None
    valid = torch.rand(batch, length, generator=generator(3)) < 0.7
    return codes.masked_fill(~valid[:, None], -9), valid


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
    table = run_at(place, book.score_table, query, words, scale=0.25, softcap=softcap)
    assert table.shape == (*query.shape[:3], words.shape[1]) and table.dtype == torch.float32
    own = words.double().repeat_interleave(query.shape[1] // len(words), 0)
    expected = query.double() @ own.mT * 0.25
    size = query.double().abs() @ own.abs().mT * 0.25
    if softcap is not None:
        expected, size = softcap * torch.tanh(expected / softcap), size + softcap
    assert ((table.double() - expected).abs() <= SHARE_OF_SIZE * size).all()


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
    query = draw(2, 4, 3, D, dtype=dtype)
    check_table(place, query, draw(H, C, D, seed=1, dtype=words_dtype), softcap)


def test_many_queries_of_long_codewords_have_their_scores(place: Place) -> None:
    """More queries of a codebook than a tile holds, groups of drafts, views with gaps of NaN."""
    room = torch.full((1, 2 * 33, 2, 300), math.nan)
    room[..., :290] = draw(1, 2 * 33, 2, 290, seed=11)
    check_table(place, room[..., :290], draw(2, 40, 290, seed=12))


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("H, Hq, Q, n, C", [(1, 3, 2, 50, 300), (2, 2, 1, 1100, 9), (1, 9, 2, 30, 70)])
def test_a_token_has_the_score_of_its_codeword_and_the_best_share_of_a_group(
    place: Place, H: int, Hq: int, Q: int, n: int, C: int, masked: bool
) -> None:
    """Heads whose scores are of different sizes, so that raw scores would choose otherwise."""
    table = draw(2, Hq, Q, C, seed=4) * torch.arange(1, Hq + 1)[:, None, None] * 3
    codes, valid = draw_codes(2, H, n, C, masked)
    expected = expected_scores(table, codes, valid)
    scores = run_at(place, book.lookup, table, codes, valid=valid)
    # It is a copy.
    assert scores.dtype == torch.float32 and torch.equal(scores.double(), expected)
    best = run_at(place, book.lookup_scores, table, codes, valid=valid)
    assert best.dtype == torch.float32
    torch.testing.assert_close(best.double(), best_share(expected, H), rtol=0, atol=LSE_ERROR)


@pytest.mark.parametrize("heads", [2, 9])
def test_codes_of_no_token_take_no_part_in_the_softmax(place: Place, heads: int) -> None:
    """Their scores are far above all others, so far that an exponential would overflow."""
    table = torch.full((1, heads, 1, 5000), 1e4)
    table[..., 0], table[..., 4999] = 0.0, -1.0
    codes = torch.tensor([0, 4999, 0]).short().view(1, 1, 3)
    lse = math.log(2 + math.exp(-1))
    expected = torch.tensor([-lse, -1 - lse, -lse]).view(1, 1, 1, 3)
    scores = run_at(place, book.lookup_scores, table, codes)
    torch.testing.assert_close(scores, expected, rtol=0, atol=LSE_ERROR)


@pytest.mark.parametrize("heads", [4, 18])
def test_a_row_without_valid_tokens_has_no_relevance(place: Place, heads: int) -> None:
    table, (codes, _) = draw(2, heads, 1, 8, seed=6), draw_codes(2, 2, 9, 8, masked=False)
    valid = torch.tensor([[False] * 9, [True] * 9])
    for scores in (book.lookup, book.lookup_scores):
        result = run_at(place, scores, table, codes, valid=valid)
        assert result[0].eq(-INF).all() and result[1].isfinite().all()
    empty = run_at(place, book.lookup_scores, table, codes[..., :0])
    assert empty.shape == (2, 2, 1, 0)
    assert run_at(place, book.lookup, table[:, :, :0], codes).shape == (2, heads, 0, 9)


def merits(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """``[B, H, n, C]`` float64: x . c - |c|^2 / 2."""
    words = words.double()
    return x.double() @ words.mT - words.square().sum(-1)[:, None] / 2


def check_nearest(place: Place, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The codeword found is the best of all, up to rounding; and its id is an int16."""
    codes = run_at(place, book.encode, x, words)
    assert codes.shape == x.shape[:3] and codes.dtype == torch.int16
    check_merits(codes, x, words)
    return codes.long()


def check_merits(codes: torch.Tensor, x: torch.Tensor, words: torch.Tensor) -> None:
    """No other codeword has more merit than rounding explains."""
    index = codes.long()
    assert ((index >= 0) & (index < words.shape[1])).all()
    merit, lengths = merits(x, words), words.double().norm(dim=-1).amax()
    missed = merit.amax(-1) - merit.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    size = (x.double().norm(dim=-1).amax() + lengths) * lengths
    assert (missed <= SHARE_OF_SIZE * size).all()


@pytest.mark.factor("words_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.factor("dtype", FLOATS, ids=str)
@pytest.mark.factor("n, C, D", [(1, 1, 1), (5, 33, 290)])
def test_each_token_gets_its_nearest_codeword(
    place: Place, n: int, C: int, D: int, dtype: torch.dtype, words_dtype: torch.dtype
) -> None:
    """No size is a multiple of a tile's; codewords differ in length, so their norms count."""
    x = draw(2, 3, n, D, dtype=dtype)
    words = draw(3, C, D, seed=1) * torch.rand(3, C, 1, generator=generator(2)) * 2
    check_nearest(place, x, words.to(words_dtype))


def test_of_equally_near_codewords_the_first_is_taken(place: Place) -> None:
    """Whole numbers, so that no sum is rounded; equals stand within tiles and in other tiles."""
    distinct = torch.randint(-3, 4, (1, 90, 8), generator=generator(5)).unique(dim=1).float()
    words = distinct.repeat_interleave(2, 1).repeat(1, 2, 1)
    x = torch.randint(-4, 5, (1, 1, 150, 8), generator=generator(6)).float()
    assert torch.equal(check_nearest(place, x, words), merits(x, words).argmax(-1))
    mirrored = torch.tensor([[[1.0], [-1.0]]])
    assert check_nearest(place, torch.zeros(1, 1, 3, 1), mirrored).eq(0).all()


@pytest.mark.parametrize("splits", [1, 3, 50])
def test_programs_that_share_the_codewords_agree(splits: int) -> None:
    """Also with a last share that is shorter, and with equals in different shares."""
    pytest.importorskip("triton")
    from hf_kvret_kernels.codebook import triton

    words = torch.randint(-3, 4, (2, 300, 9), generator=generator(7)).float().repeat(1, 2, 1)
    x = torch.randint(-4, 5, (2, 2, 19, 9), generator=generator(8)).float()
    moved = (each.to(DEVICE) for each in (x, words, book.half_norms(words)))
    codes = triton.encode(*moved, splits=splits)
    assert torch.equal(codes.cpu().long(), merits(x, words).argmax(-1))


def test_the_last_of_32768_codewords_has_an_id(place: Place) -> None:
    # Tiles of 16 bits have more of them.
    words = torch.zeros(1, book.MOST_CODEWORDS, 1, dtype=torch.bfloat16)
    words[0, -1] = 1.0
    codes = check_nearest(place, torch.tensor([[[[1.0], [0.25]]]]).bfloat16(), words)
    assert codes.flatten().tolist() == [book.MOST_CODEWORDS - 1, 0]


def test_norms_of_another_space_encode_transformed_keys(place: Place) -> None:
    """``x @ L`` is encoded without being computed."""
    metric = torch.eye(12) + 0.3 * draw(12, 12, seed=11)
    words, x = draw(2, 80, 12, seed=12), draw(1, 2, 50, 12, seed=13)
    codes = run_at(place, book.encode, x, words @ metric.mT, norms=book.half_norms(words))
    check_merits(codes, x @ metric, words)


def test_a_token_of_nan_gets_0_and_harms_no_other(place: Place) -> None:
    x, words = draw(1, 1, 20, 8, seed=14), draw(1, 40, 8, seed=15)
    clean = check_nearest(place, x, words)
    x[0, 0, 7, 3], clean[0, 0, 7] = math.nan, 0
    assert torch.equal(run_at(place, book.encode, x, words).long(), clean)
    assert run_at(place, book.encode, x[:, :, :0], words).shape == (1, 1, 0)


def test_scores_are_never_held_all_at_once(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvret_kernels.codebook import naive

    x, words = draw(2, 2, 31, 8, seed=17), draw(2, 40, 8, seed=18)
    expected = book.encode(x, words)
    monkeypatch.setattr(naive, "_MOST_SCORES", 1000)
    sizes = watch(torch, "addmm", lambda _, left, right, **__: len(left) * right.shape[1])
    assert torch.equal(book.encode(x, words), expected)
    assert len(sizes) > 1 and max(sizes) <= 1000
