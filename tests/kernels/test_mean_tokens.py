"""Attention to the mean of what is not selected, against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels.mean_tokens import MeanToken

HEADS, SCALE = 2, 0.3


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("group", "choosers"), [(1, 2), (3, 2), (4, 8)])
def test_the_mean_counts_for_the_tokens_that_are_left_out(
    group: int, choosers: int, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(2, HEADS * group, 3, 24, generator=generator)
    keys, values = torch.randn(2, 2, HEADS, 1, 24, generator=generator).unbind()
    ids = torch.rand(2, choosers, 3, 9, generator=generator).argsort(-1)[..., :6].int()
    ids[..., 0] = -1
    # The second sequence has as many tokens as are selected of it: nothing is left out.
    means = MeanToken(keys, values, torch.tensor([[9], [5]]))
    out, lse = means.attend(query, ids, SCALE, softcap)
    logits = (query.double() * keys.double().repeat_interleave(group, dim=1)).sum(-1) * SCALE
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = logits[0] + torch.tensor(4.0).double().log()
    torch.testing.assert_close(lse[0].double(), expected, rtol=1e-5, atol=2e-5)
    wanted = values[0].repeat_interleave(group, dim=0).expand(-1, 3, -1)
    assert torch.equal(out[0], wanted)
    assert not out[1].any() and bool((lse[1] == -torch.inf).all())
