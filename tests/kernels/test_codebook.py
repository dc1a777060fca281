"""Nearest codewords against float64, and counts of codes."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import codebook as book

from .draws import draw, generator, on

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of |x| |c| + |c|^2: sums of up to 290 products in fp32 miss by a tenth of it, a key that is cast
# to bf16 by a hundred times as much.
SHARE_OF_SIZE = 4e-6


def merits(x: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(merit [B, H, n, C], size)`` in float64: x . c - |c|^2 / 2, and how much is summed up."""
    x, words = x.double(), words.double()
    merit = torch.einsum("bhnd,hcd->bhnc", x, words) - words.square().sum(-1)[:, None] / 2
    size = x.norm(dim=-1).amax() * words.norm(dim=-1).amax() + words.square().sum(-1).amax()
    return merit, size


def check_nearest(
    place: tuple[str, str], x: torch.Tensor, words: torch.Tensor, norms: torch.Tensor | None = None
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
    assert (missed <= SHARE_OF_SIZE * size).all(), missed.max()
    return codes


@pytest.mark.factor("words_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.factor("dtype", FLOATS, ids=str)
@pytest.mark.factor("n, C, D", [(1, 1, 1), (37, 130, 20), (70, 65, 200), (5, 33, 290)])
def test_each_token_gets_its_nearest_codeword(
    place: tuple[str, str], n: int, C: int, D: int, dtype: torch.dtype, words_dtype: torch.dtype
) -> None:
    """No size is a multiple of a tile's; codewords differ in length, so their norms count."""
    x = draw(2, 3, n, D, seed=0, dtype=dtype)
    words = draw(3, C, D, seed=1) * torch.rand(3, C, 1, generator=generator(2)) * 2
    check_nearest(place, x, words.to(words_dtype))


def test_tokens_at_codewords_get_their_ids(place: tuple[str, str]) -> None:
    """The nearest is another one if the halves of squared norms are left out."""
    words = draw(2, 300, 64, seed=3) + 5
    order = torch.randperm(300, generator=generator(4))
    codes = check_nearest(place, words[None, :, order], words)
    assert torch.equal(codes, order.expand(1, 2, 300))


def test_of_equally_near_codewords_the_first_is_taken(place: tuple[str, str]) -> None:
    """Whole numbers, so that no sum is rounded; equals stand within tiles and in other tiles."""
    distinct = torch.randint(-3, 4, (1, 90, 8), generator=generator(5)).unique(dim=1).float()
    words = distinct.repeat_interleave(2, 1).repeat(1, 2, 1)
    x = torch.randint(-4, 5, (1, 1, 150, 8), generator=generator(6)).float()
    codes = check_nearest(place, x, words)
    assert torch.equal(codes, merits(x, words)[0].argmax(-1))
    mirrored = torch.tensor([[[1.0], [-1.0]]])
    assert check_nearest(place, torch.zeros(1, 1, 3, 1), mirrored).eq(0).all()


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 50])
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


def test_the_last_of_32768_codewords_has_an_id(place: tuple[str, str]) -> None:
    words = torch.zeros(1, book.MOST_CODEWORDS, 1)
    words[0, -1] = 1.0
    codes = check_nearest(place, torch.tensor([[[[1.0], [0.2]]]]), words)
    assert codes.flatten().tolist() == [book.MOST_CODEWORDS - 1, 0]


def test_strided_keys_and_rows_of_a_wider_cache(place: tuple[str, str]) -> None:
    """A view of keys beside values, tokens before heads; what lies around is NaN."""
    room = torch.full((2, 30, 3, 40), math.nan)
    room[:, 5:25, :, :17] = draw(2, 20, 3, 17, seed=9)
    moved = on(place, room)[:, 5:25, :, :17].transpose(1, 2)
    words = draw(3, 70, 17, seed=10)
    backend, _ = place
    codes = book.encode(moved, on(place, words), backend=backend)
    plain = book.encode(on(place, moved.contiguous()), on(place, words), backend=backend)
    assert torch.equal(codes, plain)
    columns = on(place, draw(2, 3, 17, 20, seed=9)).transpose(2, 3)
    expected = book.encode(columns.contiguous(), on(place, words), backend=backend)
    assert torch.equal(book.encode(columns, on(place, words), backend=backend), expected)


def test_norms_of_another_space_encode_transformed_keys(place: tuple[str, str]) -> None:
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


def test_a_token_of_nan_gets_0_and_harms_no_other(place: tuple[str, str]) -> None:
    x, words = draw(1, 1, 20, 8, seed=14), draw(1, 40, 8, seed=15)
    clean = check_nearest(place, x, words)
    x[0, 0, 7, 3] = math.nan
    codes = book.encode(on(place, x), on(place, words), backend=place[0]).cpu().long()
    clean[0, 0, 7] = 0
    assert torch.equal(codes, clean)


@pytest.mark.factor("shape", [(2, 3, 0, 8), (0, 3, 5, 8)])
def test_no_tokens_have_no_codes(place: tuple[str, str], shape: tuple[int, ...]) -> None:
    words = on(place, draw(3, 4, 8, seed=16))
    codes = book.encode(on(place, torch.zeros(shape)), words, backend=place[0])
    assert codes.shape == shape[:3] and codes.dtype == torch.int16


def test_scores_are_never_held_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvret_kernels.codebook import naive

    x, words = draw(2, 2, 31, 8, seed=17), draw(2, 40, 8, seed=18)
    expected = book.encode(x, words)
    sizes = []
    whole = torch.baddbmm

    def watched(*arguments: torch.Tensor, **options: float) -> torch.Tensor:
        result = whole(*arguments, **options)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(naive, "_MOST_SCORES", 1000)
    monkeypatch.setattr(torch, "baddbmm", watched)
    assert torch.equal(book.encode(x, words), expected)
    assert len(sizes) > 1 and max(sizes) <= 1000


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("n, C", [(1, 1), (2500, 37), (1024, 4096)])
def test_codes_are_counted(place: tuple[str, str], n: int, C: int, masked: bool) -> None:
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
        held = torch.arange(n) if valid is None else valid[b].nonzero()[:, 0]
        for h in range(3):
            expected = codes[b, h, held].long().bincount(minlength=C)
            assert torch.equal(counts[b, h].cpu().long(), expected)


def test_arguments_of_encode_that_do_not_fit_are_named() -> None:
    x, words = torch.zeros(1, 2, 5, 8), torch.zeros(2, 6, 8)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        book.encode(x.double(), words)
    with pytest.raises(ValueError, match=r"pass fp32, bf16 or fp16 \[B, H, n, D\]"):
        book.encode(x[0], words)
    for wrong in (words[:1], words[..., :7], words[0], words.half()):
        with pytest.raises(ValueError, match=r"codebook is .*: pass fp32 or bf16 \[2, any, 8\]"):
            book.encode(x, wrong)
    with pytest.raises(ValueError, match="C=0 codewords"):
        book.encode(x, words[:, :0])
    with pytest.raises(ValueError, match="C=32769 codewords: pass 1 to 32768"):
        book.encode(x, torch.zeros(2, 32769, 8))
    with pytest.raises(ValueError, match="head dim D is 1025"):
        book.encode(torch.zeros(1, 2, 5, 1025), torch.zeros(2, 6, 1025))
    for norms in (torch.zeros(2, 5), torch.zeros(2, 6).double()):
        with pytest.raises(ValueError, match=r"norms is .* pass fp32 \[2, 6\]"):
            book.encode(x, words, norms=norms)
    with pytest.raises(ValueError, match=r"codebook is .* on meta"):
        book.encode(x, words.to("meta"))
    with pytest.raises(ValueError, match=r"norms is .* on meta"):
        book.encode(x, words, norms=torch.zeros(2, 6, device="meta"))
    with pytest.raises(ValueError, match="x requires gradients"):
        book.encode(x.clone().requires_grad_(), words)
    with pytest.raises(ValueError, match="backend='cuda'"):
        book.encode(x, words, backend="cuda")


def test_arguments_of_code_counts_that_do_not_fit_are_named() -> None:
    codes = torch.zeros(1, 2, 5, dtype=torch.int16)
    for wrong in (codes.int(), codes[0]):
        with pytest.raises(ValueError, match=r"pass int16 \[B, H, n\]"):
            book.code_counts(wrong, 4)
    for count in (0, 32769):
        with pytest.raises(ValueError, match=f"codewords={count}: 1 to 32768"):
            book.code_counts(codes, count)
    with pytest.raises(ValueError, match=r"pass bool \[1, 5\]"):
        book.code_counts(codes, 4, valid=torch.ones(1, 6, dtype=torch.bool))
