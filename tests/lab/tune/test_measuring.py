"""Windows are cut from the whole text, and the divergence is that of torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hf_kvret.lab.tune.measuring import cut_windows, divergence, needle_windows


@pytest.mark.parametrize("bos", [None, 999])
@pytest.mark.parametrize("length", [140, 141, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_continuations_never_overlap_and_are_of_the_text(
    length: int, bos: int | None, seed: int
) -> None:
    context, new, count = 100, 10, 4
    windows = cut_windows(torch.arange(length), context, new, count, bos=bos, seed=seed)
    assert len(windows) == count
    starts = []
    for window in windows:
        assert window.shape == (context + new,) and window.dtype == torch.int64
        text = window if bos is None else window[1:]
        assert bos is None or window[0] == bos
        assert torch.equal(text, torch.arange(int(text[0]), int(text[0]) + len(text)))
        assert text[0] >= 0 and text[-1] < length
        starts.append(int(window[-new]))
    assert all(new <= right - left for left, right in pairwise(sorted(starts)))


def test_a_short_text_is_refused_with_what_it_lacks() -> None:
    assert len(cut_windows(torch.arange(140), 100, 10, 4, bos=None, seed=0)) == 4
    with pytest.raises(ValueError, match="139 tokens, fewer than the 100 of --context and the 40"):
        cut_windows(torch.arange(139), 100, 10, 4, bos=None, seed=0)


def test_needle_windows_are_different_documents() -> None:
    windows = needle_windows(200, 50, 3, seed=0)
    assert [len(window) for window in windows] == [250] * 3
    assert not torch.equal(windows[0], windows[1])


def test_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    full, other = torch.randn(2, 37, 50, generator=generator)
    want = torch.nn.functional.kl_div(
        other.double().log_softmax(-1),
        full.double().log_softmax(-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    torch.testing.assert_close(divergence(full, other), want)
    assert (divergence(full, full) == 0).all()
