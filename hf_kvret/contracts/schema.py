"""Schema: the sizes and dtypes that the tensors of a saved layer must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

DTypes = torch.dtype | tuple[torch.dtype, ...] | None

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What keys may be."""


class Schema:
    """Sizes by letter, with which saved tensors are compared before anything uses them.

    Capital letters are of the layer: ``B`` sequences, ``H`` KV heads, ``Q`` query heads
    (not always known), ``D`` and ``V`` elements of a key and a value, ``S`` sinks, ``N`` cold
    tokens, ``T`` all tokens, ``I`` elements of a key that are its value. Other letters stand for a
    size that the first tensor of a state decides for its others.

    Attributes:
        dtype: of keys and values.
    """

    def __init__(self, dtype: torch.dtype, sizes: Mapping[str, int]) -> None:
        self.dtype = dtype
        self._sizes = dict(sizes)

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

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
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, not "
                f"{types} {sizes}: the file is damaged, or of another model; save the cache again"
            )
