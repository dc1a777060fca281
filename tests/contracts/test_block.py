"""TokenBlock: the mean of its keys, in bounded memory."""

from collections.abc import Callable

import pytest
import torch

from hf_kvret import TokenBlock


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.factor("padded", [False, True])
@pytest.mark.factor("count", [0, 1, 7, 40_000])
def test_mean_key(count: int, padded: bool, dtype: torch.dtype) -> None:
    keys = torch.randn(2, 2, count, 32, generator=torch.Generator().manual_seed(count)).to(dtype)
    valid = None
    if padded:
        valid = torch.ones(2, count, dtype=torch.bool)
        valid[0] = False
        valid[1, : count // 2] = False
        keys[0] = float("nan")
    got = TokenBlock(keys, keys, 5, valid).mean_key()
    assert got.dtype == torch.float32 and got.shape == (2, 2, 32)
    for row in range(2):
        left = keys[row] if valid is None else keys[row][:, valid[row]]
        want = left.double().sum(1) / max(1, left.shape[1])
        # Up to 40,000 fp32 additions of numbers of size 1, divided by their count.
        torch.testing.assert_close(got[row].double(), want, rtol=0, atol=1e-5)


def test_a_prompt_is_never_all_in_fp32(temporaries: Callable[[Callable[[], object]], int]) -> None:
    keys = torch.ones(1, 8, 16_000, 64, dtype=torch.bfloat16)
    block = TokenBlock(keys, keys, 0, torch.ones(1, 16_000, dtype=torch.bool))
    # A chunk of bf16 without padding, and the same in fp32.
    assert temporaries(block.mean_key) < 7 * 2**20 < keys.nbytes
