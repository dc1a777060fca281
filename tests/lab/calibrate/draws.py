"""Random rows and a rotation, for studies of a layer."""

import torch

from hf_kvret_model_patches.rope import Rope

CPU = torch.device("cpu")
HEADS, DIM = 2, 16
ROPE = Rope(10000.0 ** -(torch.arange(0, DIM, 2) / DIM), 1.5)
NO_ROPE = Rope(torch.empty(0), 1.0, "none")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
