"""Schema: the sizes and dtypes that the tensors of a saved layer must have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import torch

DTypes = torch.dtype | tuple[torch.dtype, ...] | None

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What keys may be."""

# The squares of a million tokens with a thousand such elements add up to 1e37, within fp32.
_MOST_ROW = 1e14


class Schema:
    """Sizes by letter, with which saved tensors are compared before anything uses them.

    Capital letters are of the layer: ``B`` sequences, ``H`` KV heads, ``Q`` query heads
    (not always known), ``D`` and ``V`` elements of a key and a value, ``S`` sinks, ``N`` cold
    tokens, ``T`` all tokens; a ``State`` may add others (``State.saved_sizes``). Other letters
    stand for a size that the first tensor of a state decides for its others.

    Attributes:
        dtype: of keys and values.
    """

    def __init__(self, dtype: torch.dtype, sizes: Mapping[str, int]) -> None:
        self.dtype = dtype
        self._sizes = dict(sizes)

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

    def get(self, letter: str) -> int | None:
        """The size of a letter, None where it is not known."""
        return self._sizes.get(letter)

    def extended(self, sizes: Mapping[str, int]) -> Self:
        """A copy for another state, with more sizes and without those of small letters."""
        layer_sizes = {letter: size for letter, size in self._sizes.items() if letter.isupper()}
        return type(self)(self.dtype, {**layer_sizes, **sizes})

    def check(self, name: str, tensor: torch.Tensor, dims: str, dtype: DTypes = None) -> None:
        """ValueError unless ``tensor`` has these dims and (one of) these dtypes.

        Args:
            name: for the message.
            tensor: on any device.
            dims: letters or numbers with blanks between them, ``"B H N D"``.
            dtype: None for that of keys.
        """
        allowed = (self.dtype,) if dtype is None else dtype
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        letters = dims.split()
        fits = tensor.dtype in allowed and tensor.ndim == len(letters)
        for letter, size in zip(letters, tensor.shape, strict=False):
            expected = int(letter) if letter.isdigit() else self._sizes.setdefault(letter, size)
            fits &= size == expected
        if not fits:
            sizes = [int(x) if x.isdigit() else self._sizes.get(x, x) for x in letters]
            types = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise damaged(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, not "
                f"{types} {sizes}"
            )


def check_range(name: str, values: torch.Tensor, least: int, most: int) -> None:
    """ValueError for saved integers outside ``least .. most``; none is fine."""
    if not values.numel():
        return
    lowest, highest = int(values.min()), int(values.max())
    if lowest < least or highest > most:
        raise damaged(f"{name} goes from {lowest} to {highest}, not from {least} to {most}")


def check_ids(name: str, ids: torch.Tensor, end: int) -> None:
    """ValueError unless ``ids [..., k]`` name tokens before ``end``, each once a row, or none (-1).

    Kernels use them as addresses.
    """
    check_range(name, ids, -1, end - 1)
    ordered = ids.sort(dim=-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise damaged(f"{name} names a token twice")


def check_finite(name: str, values: torch.Tensor) -> None:
    """ValueError for saved numbers that are infinite or no numbers."""
    if not math.isfinite(_largest(values)):
        raise damaged(f"{name} has numbers that are not finite")


def check_squares(name: str, values: torch.Tensor) -> None:
    """ValueError for saved numbers whose squares can't be summed up in fp32."""
    largest = _largest(values)
    if not math.isfinite(largest):
        raise damaged(f"{name} has numbers that are not finite")
    if largest > _MOST_ROW:
        raise damaged(f"{name} has numbers above {_MOST_ROW:g}, which no model makes")


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value, NaN where one is NaN; 0 of none. One pass, and no copy."""
    if not values.numel():
        return 0.0
    lowest, highest = map(float, torch.aminmax(values))
    # Both are NaN where one is.
    return max(abs(lowest), abs(highest))


def damaged(what: str) -> ValueError:
    """The error for a saved cache in which ``what`` is wrong."""
    return ValueError(f"{what}: the file is damaged or crafted, save the cache again")
