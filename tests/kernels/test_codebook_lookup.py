"""Tables of scores and look-ups against float64, head by head."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import codebook as book
from hf_kvret_kernels.top_k import top_k

from .draws import draw, generator, on

INF = float("inf")
# Of the sum of a score's products, each taken as positive; see the tests of proxy scores.
SHARE_OF_SIZE = 4e-6
# fp32 rounding of scores up to 40, of their exponentials' sum and its logarithm.
LSE_ERROR = 2e-5


def draw_codes(*shape: int, words: int, seed: int = 0) -> torch.Tensor:
    """Some codes are much more common than others, some never occur."""
    share = torch.rand(shape, generator=generator(seed)) ** 3
    return (share * words * 0.8).short()


def scores_by_hand(
    table: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None
) -> torch.Tensor:
    """``[B, Hq, Q, n]`` float64, one token at a time."""
    batch, query_heads, queries, _ = table.shape
    group = query_heads // codes.shape[1]
    scores = torch.full((*table.shape[:3], codes.shape[2]), -INF, dtype=torch.float64)
    for b in range(batch):
        for token in range(codes.shape[2]):
            if valid is not None and not valid[b, token]:
                continue
            for head in range(query_heads):
                for q in range(queries):
                    code = int(codes[b, head // group, token])
                    scores[b, head, q, token] = table[b, head, q, code].double()
    return scores


def relevance_by_hand(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, H, Q, n]`` float64: the best log-softmax of a group."""
    batch, query_heads, queries, length = scores.shape
    shares = torch.full_like(scores, -INF)
    for b in range(batch):
        for head in range(query_heads):
            for q in range(queries):
                row = scores[b, head, q]
                held = row != -INF
                if held.any():
                    part = row[held] - row[held].max()
                    shares[b, head, q, held] = part - part.exp().sum().log()
    return shares.view(batch, heads, query_heads // heads, queries, length).amax(2)


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("words_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.factor("H, C, D", [(4, 1, 1), (2, 130, 20), (1, 45, 200), (2, 45, 290)])
def test_the_table_has_the_score_of_every_codeword(
    place: tuple[str, str],
    H: int,
    C: int,
    D: int,
    dtype: torch.dtype,
    words_dtype: torch.dtype,
    softcap: float | None,
) -> None:
    backend, device = place
    query = draw(2, 4, 3, D, seed=0, dtype=dtype)
    words = draw(H, C, D, seed=1, dtype=words_dtype)
    table = book.score_table(
        query.to(device), words.to(device), scale=0.25, softcap=softcap, backend=backend
    )
    assert table.shape == (2, 4, 3, C) and table.dtype == torch.float32
    assert table.device.type == device
    own = words.double().repeat_interleave(4 // H, 0)
    expected = torch.einsum("bhqd,hcd->bhqc", query.double(), own) * 0.25
    size = torch.einsum("bhqd,hcd->bhqc", query.double().abs(), own.abs()) * 0.25
    if softcap is not None:
        expected, size = softcap * torch.tanh(expected / softcap), size + softcap
    assert ((table.cpu().double() - expected).abs() <= SHARE_OF_SIZE * size).all()


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor(
    "H, Hq, Q, n, C", [(1, 1, 1, 1, 1), (2, 4, 1, 77, 50), (1, 3, 2, 50, 300), (2, 2, 1, 1100, 9)]
)
def test_a_token_has_the_score_of_its_codeword(
    place: tuple[str, str], H: int, Hq: int, Q: int, n: int, C: int, masked: bool
) -> None:
    """Exact, for it is a copy."""
    table = draw(2, Hq, Q, C, seed=2)
    codes = draw_codes(2, H, n, words=C)
    valid = torch.rand(2, n, generator=generator(3)) < 0.7 if masked else None
    if valid is not None:
        codes[~valid[:, None].expand_as(codes)] = -9
    got = book.lookup(on(place, table), on(place, codes), valid=on(place, valid), backend=place[0])
    assert got.dtype == torch.float32 and got.device.type == place[1]
    assert torch.equal(got.cpu().double(), scores_by_hand(table, codes, valid))


@pytest.mark.factor("counted", [False, True])
@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor(
    "H, Hq, Q, n, C",
    [
        (1, 1, 1, 1, 1),
        (2, 4, 1, 77, 50),
        (1, 3, 2, 50, 300),
        (2, 2, 1, 1100, 9),
        (1, 9, 2, 30, 70),
    ],
)
def test_relevance_is_the_best_softmax_of_the_group(
    place: tuple[str, str], H: int, Hq: int, Q: int, n: int, C: int, masked: bool, counted: bool
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
    expected = relevance_by_hand(scores_by_hand(table, codes, valid), H)
    assert got.shape == expected.shape and got.dtype == torch.float32
    got = got.cpu().double()
    assert torch.equal(got == -INF, expected == -INF)
    error = (got - expected).masked_fill(expected == -INF, 0.0).abs()
    assert error.max() <= LSE_ERROR


@pytest.mark.parametrize("heads", [2, 9])
def test_codes_of_no_token_take_no_part_in_the_softmax(place: tuple[str, str], heads: int) -> None:
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
def test_a_row_without_valid_tokens_has_no_relevance(place: tuple[str, str], heads: int) -> None:
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


def test_views_of_a_growing_buffer_are_read_in_place(place: tuple[str, str]) -> None:
    """Spare room holds ids that are none; the mask is a view with strides of its own."""
    backend, device = place
    room = torch.full((2, 3, 64), -1, dtype=torch.int16)
    room[:, :, :40] = draw_codes(2, 3, 40, words=20)
    mask = torch.rand(2, 80, generator=generator(7)) < 0.7
    table = draw(2, 20, 6, 2, seed=8).permute(0, 2, 3, 1)
    moved = (table.to(device), room.to(device)[:, :, :40], mask.to(device)[:, ::2])
    plain = (table.contiguous(), room[:, :, :40].contiguous(), mask[:, ::2].contiguous())
    for scores in (book.lookup, book.lookup_scores):
        got = scores(moved[0], moved[1], valid=moved[2], backend=backend).cpu()
        expected = scores(plain[0], plain[1], valid=plain[2], backend="naive")
        assert torch.equal(got == -INF, expected == -INF)
        assert (got - expected).masked_fill(expected == -INF, 0.0).abs().max() <= LSE_ERROR


def test_the_best_tokens_are_those_of_the_nearest_codewords(place: tuple[str, str]) -> None:
    """Encode, table, look-up and top-k: with a codeword for each token it is exact retrieval."""
    backend, device = place
    keys, query = draw(1, 2, 90, 16, seed=9), draw(1, 4, 1, 16, seed=10)
    words = keys[0].to(device)
    codes = book.encode(keys.to(device), words, backend=backend)
    table = book.score_table(query.to(device), words, scale=0.25, backend=backend)
    ids = top_k(book.lookup_scores(table, codes, backend=backend), 10, backend=backend)
    exact = torch.einsum("bhgqd,bhnd->bhgqn", query.view(1, 2, 2, 1, 16), keys).double() * 0.25
    best = exact.log_softmax(-1).amax(2).topk(10).indices
    assert torch.equal(ids.cpu().long().sort().values, best.sort().values)


def test_arguments_that_do_not_fit_are_named() -> None:
    table, codes = torch.zeros(1, 4, 1, 6), torch.zeros(1, 2, 5, dtype=torch.int16)
    for scores in (book.lookup, book.lookup_scores):
        for wrong in (table.double(), table[0], table[..., :0]):
            with pytest.raises(ValueError, match=r"table is .*: pass fp32 \[B, Hq, Q, C\]"):
                scores(wrong, codes)
        with pytest.raises(ValueError, match="table has C=40000"):
            scores(torch.zeros(1, 4, 1, 40000), codes)
        for unfit in (codes.int(), codes[0], codes.expand(2, 2, 5)):
            with pytest.raises(ValueError, match=r"codes is .*: pass int16 \[1, any, any\]"):
                scores(table, unfit)
        with pytest.raises(ValueError, match="codes have 3 heads: must divide the 4"):
            scores(table, codes[:, :1].expand(1, 3, 5))
        with pytest.raises(ValueError, match=r"pass bool \[1, 5\]"):
            scores(table, codes, valid=torch.ones(1, 5))
        with pytest.raises(ValueError, match=r"codes is .* on meta"):
            scores(table, codes.to("meta"))
        with pytest.raises(ValueError, match=r"valid is .* on meta"):
            scores(table, codes, valid=torch.ones(1, 5, dtype=torch.bool, device="meta"))
    for counts in (torch.zeros(1, 2, 5).int(), torch.zeros(1, 2, 6)):
        with pytest.raises(ValueError, match=r"counts is .* pass int32 \[1, 2, 6\]"):
            book.lookup_scores(table, codes, counts=counts)


def test_many_queries_of_long_codewords_have_their_scores(
    place: tuple[str, str],
) -> None:
    """More queries of a codebook than a tile holds, groups of drafts, views with gaps of NaN."""
    backend, device = place
    room = torch.full((1, 2 * 33, 2, 300), math.nan)
    room[..., :290] = draw(1, 2 * 33, 2, 290, seed=11)
    words = draw(2, 40, 290, seed=12)
    query = room.to(device)[..., :290]
    table = book.score_table(query, words.to(device), scale=0.1, backend=backend).cpu()
    own = words.double().repeat_interleave(33, 0)
    chunks = (query.cpu().double() * 0.1, own)
    expected = torch.einsum("bhqd,hcd->bhqc", *chunks)
    size = torch.einsum("bhqd,hcd->bhqc", *(x.abs() for x in chunks))
    assert table.shape == (1, 66, 2, 40)
    assert ((table.double() - expected).abs() <= SHARE_OF_SIZE * size).all()


def test_arguments_of_score_table_that_do_not_fit_are_named() -> None:
    query, words = torch.zeros(1, 4, 1, 8), torch.zeros(2, 6, 8)
    for wrong in (query.double(), query[0]):
        with pytest.raises(ValueError, match=r"query is .* \[B, Hq, Q, D\]"):
            book.score_table(wrong, words)
    with pytest.raises(ValueError, match=r"pass fp32 or bf16 \[2, any, 8\]"):
        book.score_table(query, words[..., :7])
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"codebook has {count} heads: must divide the 4"):
            book.score_table(query, torch.zeros(count, 6, 8))
    with pytest.raises(ValueError, match="softcap=-1"):
        book.score_table(query, words, softcap=-1.0)
    with pytest.raises(ValueError, match=r"codebook is .* on meta"):
        book.score_table(query, words.to("meta"))
