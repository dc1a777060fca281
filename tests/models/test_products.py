"""Products of few tokens and weights of 16 bits by the compiled library."""

import pytest
import torch

from hf_kvret.models.products import linear, most_tokens
from hf_kvret_kernels import host_library

pytestmark = pytest.mark.skipif(bool(host_library.why_not()), reason="no compiled library")

SHAPES = [(1, 33), (1, 2, 130), (3, 1, 64), (2, 33), (15, 48), (1, 17, 48), (33, 130)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 70, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(
    shape: tuple[int, ...], outputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = shape, (outputs, shape[-1]), (outputs,)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    got = linear(x, weight, bias if has_bias else None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)


def test_where_amx_multiplies_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not any(map(most_tokens.__wrapped__, (torch.bfloat16, torch.float16)))
