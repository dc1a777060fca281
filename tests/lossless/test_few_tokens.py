"""Products of few tokens and bf16 weights by the compiled library."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.lossless import few_tokens
from hf_kvret_kernels import host_library

pytestmark = pytest.mark.skipif(bool(host_library.why_not()), reason="no compiled library")


@pytest.mark.parametrize("shape", [(2, 33), (1, 17, 48), (33, 130), (3, 21, 64)], ids=str)
@pytest.mark.parametrize("outputs", [1, 70, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(shape: tuple[int, ...], outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = shape, (outputs, shape[-1]), (outputs,)
    x, weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    got = few_tokens.linear(x, weight, bias if has_bias else None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)


def test_only_few_tokens_in_bf16_leave_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "_has_bf16", lambda: False)
    calls = []

    def spy(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return x.new_zeros(*x.shape[:-1], len(rest[0]))

    monkeypatch.setattr(few_tokens, "linear", spy)
    layer = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    with torch.inference_mode(), few_tokens.fast_products():
        for count in (1, 2, 64, 65):
            layer(torch.zeros(1, count, 8, dtype=torch.bfloat16))
        torch.nn.Linear(8, 4)(torch.zeros(1, 2, 8))
    assert calls == [(1, 2, 8), (1, 64, 8)]
    calls.clear()
    monkeypatch.setattr(few_tokens, "_has_bf16", lambda: True)
    with torch.inference_mode(), few_tokens.fast_products():
        layer(torch.zeros(1, 2, 8, dtype=torch.bfloat16))
    assert not calls
