"""What tests of kernels share: random tensors of a seed, their place, and refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map_only

from hf_kvret_kernels import host_library
from hf_kvret_kernels.paris import ParisCodes, magnitude_levels, random_signs, rotated_dim

register_dataclass(ParisCodes)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
# Half a unit in the last place, to which Triton rounds the softmax weights of 16-bit inputs.
HALF_ULP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
Place = tuple[str, str]
"""Backend and device of a kernel."""
NAIVE: Place = ("naive", DEVICE)
TRITON: Place = ("triton", DEVICE)


def generator(seed: int) -> torch.Generator:
    """One on the CPU that begins at ``seed``."""
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of ``dtype``."""
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def best_share(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, heads, Q, n]``: the best log-softmax of a group of ``scores [B, Hq, Q, n]``.

    It is -inf in a row without tokens.
    """
    shares = scores.log_softmax(-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    return shares.unflatten(1, (heads, -1)).amax(2)


def best_places(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``[..., count]`` int32: places of the highest scores, ascending; -1 behind the last.

    Of equal ones they are the first, and -inf has none.
    """
    order, none = scores.sort(dim=-1, descending=True, stable=True), scores.shape[-1]
    best = order.indices.masked_fill(order.values == float("-inf"), none)[..., :count].sort().values
    best = torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=none)
    return best.masked_fill(best == none, -1).int()


def paris_tools(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs and levels of ParisKV."""
    return random_signs(rotated_dim(head_dim), seed=7), magnitude_levels()


def hadamard(size: int) -> torch.Tensor:
    """Orthonormal, entry by entry: the parity of the bits that row and column share."""
    shared = [[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)]
    return (1 - 2 * torch.tensor(shared, dtype=torch.float64)) / size**0.5


def run_at(place: Place, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The results of ``operation`` in a place, on the CPU; tensors move there with their room."""
    backend, device = place
    args, options = tree_map_only(
        torch.Tensor, partial(moved_with_room, device=device), (args, options)
    )
    results = operation(*args, **options, backend=backend)
    assert all(x.device.type == device for x in tree_leaves(results))
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, results)


def moved_with_room(rows: torch.Tensor, device: str) -> torch.Tensor:
    """A view's whole buffer moves: moving the view alone would lose its spare room."""
    if device == rows.device.type:
        return rows
    memory = rows.untyped_storage()
    room = rows.new_empty(0).set_(memory, 0, (memory.nbytes() // rows.element_size(),))
    return room.to(device).as_strided(rows.shape, rows.stride(), rows.storage_offset())


def attention_inputs(
    place: Place,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 3,
    tokens: int = 63,
    dims: tuple[int, int] = (40, 40),
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values, whose head dims are ``dims``."""
    torch.manual_seed(tokens + queries)
    query = torch.randn(batch, heads, queries, dims[0])
    key = torch.randn(batch, kv_heads, tokens, dims[0])
    value = torch.randn(batch, kv_heads, tokens, dims[1])
    return query.to(place[1], dtype), key.to(place[1], dtype), value.to(place[1], dtype)


def attention64(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, lse, scores)`` in float64, through the whole matrix of scores.

    Args:
        query, keys, values: ``[..., Q, Dk]``, ``[..., n, Dk]`` and ``[..., n, Dv]``.
        seen: ``[..., Q, n]`` bool; rows that no query sees may hold anything.
        scale, softcap: of the scores.
        sinks: logits of learned attention sinks, of the shape ``[..., 1]``, or None.
    """
    scores = query.double() @ keys.double().mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.double().expand(*scores.shape[:-1], 1)], -1)
    lse = logits.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    unseen = ~seen.any(-2).expand(*values.shape[:-1]).unsqueeze(-1)
    return weights @ values.double().masked_fill(unseen, 0.0), lse, scores


@contextmanager
def library_threads(count: int) -> Iterator[None]:
    """Within it the compiled library uses so many threads, on however few processors."""
    with (
        patch.object(host_library, "PROCESSORS", count),
        # Torch itself stays as it is.
        patch.object(torch, "get_num_threads", lambda: count),
    ):
        yield
