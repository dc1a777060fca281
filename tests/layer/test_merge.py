"""Merging partial attention results by log-sum-exp."""

from __future__ import annotations

import torch

from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import merge

INF = float("inf")


def _attention(scores: torch.Tensor, values: torch.Tensor) -> AttentionResult:
    """Of logits ``[B, Hq, Q, n]`` and values ``[B, Hq, n, D]``, in fp64."""
    lse = torch.logsumexp(scores.double(), dim=-1)
    weights = (scores.double() - lse.unsqueeze(-1)).exp()
    return (weights @ values.double()).float(), lse.float()


def _empty(like: AttentionResult) -> AttentionResult:
    out, lse = like
    return torch.zeros_like(out), torch.full_like(lse, -INF)


def test_parts_merge_to_attention_over_their_union() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 3, 30, generator=generator) * 5
    values = torch.randn(2, 4, 30, 8, generator=generator)
    out, lse = _attention(scores, values)
    cuts = [(0, 1), (1, 20), (20, 30)]
    parts = [_attention(scores[..., a:b], values[:, :, a:b]) for a, b in cuts]
    merged_out, merged_lse = merge(parts)
    # fp32 sums of three terms: a few units in the last place of values around 1.
    torch.testing.assert_close(merged_out, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse, lse, atol=1e-5, rtol=1e-6)
    assert merged_out.dtype == merged_lse.dtype == torch.float32


def test_an_empty_part_changes_nothing() -> None:
    part = _attention(torch.randn(1, 2, 1, 5), torch.randn(1, 2, 5, 4))
    merged_out, merged_lse = merge([_empty(part), part, _empty(part)])
    assert torch.equal(merged_lse, part[1])
    assert torch.equal(merged_out, part[0])


def test_only_empty_parts_give_zero_and_minus_infinity() -> None:
    part = _empty(_attention(torch.randn(1, 2, 1, 5), torch.randn(1, 2, 5, 4)))
    merged_out, merged_lse = merge([part, part])
    assert torch.equal(merged_out, torch.zeros(1, 2, 1, 4))
    assert (merged_lse == -INF).all()


def test_learned_sinks_join_the_softmax_once() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 4, 3, 12, generator=generator)
    values = torch.randn(2, 4, 12, 8, generator=generator)
    logits = torch.tensor([-3.0, 0.0, 2.0, 9.0])
    with_sink = torch.cat([scores, logits.view(1, 4, 1, 1).expand(2, 4, 3, 1)], dim=-1)
    out, lse = _attention(with_sink, torch.cat([values, torch.zeros(2, 4, 1, 8)], dim=2))
    parts = [_attention(scores[..., :5], values[:, :, :5])]
    parts.append(_attention(scores[..., 5:], values[:, :, 5:]))
    merged_out, merged_lse = merge(parts, logits)
    torch.testing.assert_close(merged_out, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse, lse, atol=1e-5, rtol=1e-6)


def test_sinks_alone_give_no_value() -> None:
    part = _empty(_attention(torch.randn(1, 2, 1, 5), torch.randn(1, 2, 5, 4)))
    merged_out, merged_lse = merge([part], torch.tensor([1.0, 2.0]))
    assert torch.equal(merged_out, torch.zeros(1, 2, 1, 4))
    torch.testing.assert_close(merged_lse, torch.tensor([[[1.0], [2.0]]]))


def test_large_logits_neither_overflow_nor_vanish() -> None:
    values = torch.tensor([[[[1.0], [3.0]]]])
    high = _attention(torch.tensor([[[[2e4]]]]), values[:, :, :1])
    near = _attention(torch.tensor([[[[2e4]]]]), values[:, :, 1:])
    low = _attention(torch.tensor([[[[-2e4]]]]), values[:, :, 1:])
    assert merge([high, low])[0].item() == 1.0
    assert merge([high, near])[0].item() == 2.0


def test_half_precision_parts_are_summed_in_fp32() -> None:
    part = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 1)
    merged_out, _ = merge([part] * 300)
    assert merged_out.dtype == torch.float32
    torch.testing.assert_close(merged_out, torch.ones(1, 1, 1, 4), atol=1e-5, rtol=0)


def test_the_result_has_the_dtype_that_is_asked_for() -> None:
    part = _attention(torch.randn(1, 2, 1, 5), torch.randn(1, 2, 5, 4))
    merged_out, merged_lse = merge([part, _empty(part)], dtype=torch.bfloat16)
    assert merged_out.dtype == torch.bfloat16 and merged_lse.dtype == torch.float32
    assert torch.equal(merged_out, part[0].bfloat16())
