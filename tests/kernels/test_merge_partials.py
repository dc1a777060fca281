"""The merge of partial attention against float64."""

import pytest
import torch

from hf_kvret_kernels.merge import merge_partials

from .draws import Place, draw, run_at

INF = float("inf")


def random_parts(
    number: int, *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``number`` sets for queries ``[B, Hq, Q]`` and values of ``Dv``; some are empty."""
    generator = torch.Generator().manual_seed(number)
    outs, lses = [], []
    for _ in range(number):
        lse = torch.randn(shape[:3], generator=generator) * 4
        lse[torch.rand(shape[:3], generator=generator) < 0.2] = -INF
        outs.append(torch.randn(shape, generator=generator).to(dtype))
        lse[0, 0, :1] = -INF
        lses.append(lse)
    return outs, lses


def merged_by_hand(
    outs: list[torch.Tensor], lses: list[torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = torch.stack(lses).double()
    outs64 = torch.stack(outs).double()
    if sinks is not None:
        logit = sinks.double().view(1, 1, -1, 1).expand(1, *logs.shape[1:])
        logs, outs64 = torch.cat([logs, logit]), torch.cat([outs64, torch.zeros_like(outs64[:1])])
    weights = logs.softmax(dim=0).nan_to_num(0.0)
    return (weights.unsqueeze(-1) * outs64).sum(0), logs.logsumexp(0)


def check(
    place: Place,
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in ``place``, compare with float64, return the result."""
    out, lse = run_at(place, merge_partials, outs, lses, sink_logits=sinks, out_dtype=dtype)
    want_out, want_lse = merged_by_hand(outs, lses, sinks)
    assert out.shape == want_out.shape and lse.shape == want_lse.shape
    assert out.dtype == dtype and lse.dtype == torch.float32
    # Sums of a few fp32 terms of size 1, rounded to ``dtype`` in the end.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else [torch.finfo(dtype).eps] * 2
    torch.testing.assert_close(out.double(), want_out, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)
    return out, lse


@pytest.mark.factor("with_sinks", [False, True])
@pytest.mark.factor("number", [1, 2, 5])
@pytest.mark.factor("shape", [(1, 3, 5, 40), (2, 2, 3, 1), (1, 2, 0, 8)])
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sets_merge_to_their_union(
    place: Place, shape: tuple[int, ...], number: int, with_sinks: bool, dtype: torch.dtype
) -> None:
    """Of any layout, and in fp32 whatever comes in and goes out."""
    sinks = torch.linspace(-3.0, 5.0, shape[1], dtype=dtype) if with_sinks else None
    outs, lses = random_parts(number, *shape, dtype=dtype)
    outs[0] = outs[0].transpose(1, 2).contiguous().transpose(1, 2)
    lses[0] = lses[0].transpose(0, 2).contiguous().transpose(0, 2)
    check(place, outs, lses, sinks)
    out, lse = check(place, outs, lses, sinks, dtype)
    if with_sinks:
        assert lse.isfinite().all()
    elif shape[2]:
        assert lse[0, 0, 0] == -INF and out[0, 0, 0].eq(0).all()


def test_one_set_and_empty_ones_give_it_back_to_the_bit(place: Place) -> None:
    out, lse = draw(1, 2, 3, 20), draw(1, 2, 3, seed=1) * 30
    empty = torch.zeros_like(out), torch.full_like(lse, -INF)
    for outs, lses in (([out], [lse]), ([empty[0], out], [empty[1], lse])):
        same = run_at(place, merge_partials, outs, lses)
        assert torch.equal(same[0], out) and torch.equal(same[1], lse)


def test_large_logits_keep_their_digits(place: Place) -> None:
    """Weights come from differences to the largest, not to the sum."""
    lses = [torch.full((1, 1, 1), value) for value in (3e4, 3e4 - 1, -3e4)]
    outs = [torch.full((1, 1, 1, 2), value) for value in (1.0, 0.0, 5.0)]
    out, lse = run_at(place, merge_partials, outs, lses)
    share = torch.tensor(1.0).sigmoid().item()
    assert out.flatten().tolist() == pytest.approx([share, share], rel=1e-6)
    assert lse.item() == pytest.approx(3e4 + 0.3133, abs=2e-3)
