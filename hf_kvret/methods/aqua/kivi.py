"""KiviStore: min-max codes with keys grouped along tokens, a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.schema import Schema
from hf_kvret.contracts.state import Tensors, part, tensor
from hf_kvret.methods.aqua.config import AquaConfig
from hf_kvret.methods.aqua.decoded import (
    CHUNK,
    BytePages,
    DecodedStore,
    check_shape,
    joined,
    spans,
    split,
)
from hf_kvret.stores.memory import PageMemory
from hf_kvret_kernels.higgs import MinMaxCodec

_GROUP = 32
"""Liu et al. (2024), section 4: group size 32."""


class KiviStore(DecodedStore):
    """Post-RoPE keys in groups of tokens, channel by channel; values in groups of elements.

    Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache* (2024). The newest
    keys, fewer than a group, stay uncoded. A crop into a group decodes the rest of it. Padding is
    coded like any token, in the group of its neighbours.

    Args:
        options: of the cache.
        memory: where codes lie.
    """

    # A row of key_groups is a group of tokens, a row of values is one token.
    _key_groups: BytePages = part()
    _values: BytePages = part()
    _newest: torch.Tensor | None = tensor(shared=True)

    def __init__(self, options: AquaConfig, memory: PageMemory) -> None:
        super().__init__(memory)
        assert options.bits is not None, "the cache has filled them in"
        self.options, self.bits = options, options.bits
        self.group = options.group or _GROUP
        self._key_groups, self._values = BytePages(memory, page_len=1), BytePages(memory)
        self._shape = (0, 0, 0)
        self._dtype = torch.float32

    def __len__(self) -> int:
        return len(self._values)

    @property
    def bus_share(self) -> float:
        """Share of the values; keys are in the same memory."""
        return self._values.bus_share

    def append(self, block: TokenBlock) -> None:
        if block.start != len(self):
            raise ValueError(f"block starts at slot {block.start}, the store ends at {len(self)}")
        if len(block) == 0:
            return
        assert not block.value_in_key, "the cache refuses latent attention"
        self._shape = block.keys.shape[1], block.keys.shape[3], block.values.shape[3]
        self._dtype = block.keys.dtype
        keys = joined(block.keys)
        if self._newest is not None:
            keys = torch.cat([self._newest, keys], dim=1)
        whole = keys.shape[1] // self.group * self.group
        if whole:
            groups = keys[:, :whole].unflatten(1, (-1, self.group)).transpose(2, 3)
            codes, scales = (x.flatten(2)[:, None] for x in self._key_codec.encode(groups))
            self._key_groups.append(TokenBlock(codes, scales, len(self._key_groups)))
        self._newest = keys[:, whole:].clone()
        codes, scales = self._value_codec.encode(joined(block.values))
        self._values.append(TokenBlock(codes[:, None], scales[:, None], block.start))

    def decoded_chunks(
        self, first: int, last: int, chunk_len: int = CHUNK
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        heads = self._shape[0]
        for start, end in spans(first, last, chunk_len):
            codes, scales = (x[:, 0] for x in self._values.read(start, end))
            values = self._value_codec.decode(codes, scales, self._dtype)
            yield start, split(self._keys(start, end), heads), split(values, heads)

    def chunks(
        self, chunk_len: int = CHUNK, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        end = len(self) if stop is None else min(stop, len(self))
        yield from self.decoded_chunks(0, end, chunk_len)

    def crop(self, length: int) -> None:
        """As for every state, but keys are cut by groups; the rest of a cut group is decoded."""
        if length >= len(self):
            return
        whole = length // self.group
        # These keys may be part of a group, so they are read before it is cropped.
        self._newest = self._keys(whole * self.group, length).clone()
        self._key_groups.crop(whole)
        self._values.crop(length)

    def row_nbytes(self, plain: int) -> int:
        if not len(self):
            return plain
        _, key_dim, value_dim = self._shape
        keys = self._key_codec.bits_per_value * key_dim
        return int(keys + self._value_codec.bits_per_value * value_dim) // 8

    def stats(self) -> dict[str, Any]:
        """``bits`` of the codes."""
        return {"bits": self.bits}

    def state_dict(self) -> Tensors:
        """``keys`` codes and ``values`` scales of values; ``group_*`` of keys; and the rest."""
        state = self._values.dense_state()
        if not state:
            return {}
        assert self._newest is not None
        groups = self._key_groups.dense_state()
        state |= {f"group_{name}": x for name, x in groups.items()}
        state["newest"] = self._newest.cpu().contiguous()
        state["shape"] = torch.tensor(self._shape)
        return state

    def check_saved(self, state: Tensors, schema: Schema) -> None:
        """As for every state: codes and scales of the layer's heads."""
        if state:
            check_shape(state["shape"], [schema[letter] for letter in "HDV"])

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        if not state:
            return
        heads, key_dim, value_dim = map(int, state["shape"])
        self._shape, self._newest = (heads, key_dim, value_dim), state["newest"].to(device)
        self._dtype = self._newest.dtype
        self._values.load_state_dict(state, device)
        names = ("keys", "values")
        groups = {name: state[f"group_{name}"] for name in names if f"group_{name}" in state}
        self._key_groups.load_state_dict(groups, device)

    @property
    def _key_codec(self) -> MinMaxCodec:
        return MinMaxCodec(self.bits, self.group)

    @property
    def _value_codec(self) -> MinMaxCodec:
        heads, _, value_dim = self._shape
        return self._codec_of(heads * value_dim)

    def _codec_of(self, width: int) -> MinMaxCodec:
        """The codec of values, ``width`` elements of all heads."""
        return MinMaxCodec(self.bits, min(self.group, width & -width))

    def _keys(self, first: int, last: int) -> torch.Tensor:
        """Keys ``[B, last - first, H * Dk]`` of tokens ``first .. last``."""
        assert self._newest is not None
        group_end = len(self._key_groups) * self.group
        newest = self._newest[:, max(0, first - group_end) : max(0, last - group_end)]
        if first >= min(last, group_end):
            return newest
        lowest, highest = first // self.group, -(-min(last, group_end) // self.group)
        codec, width = self._key_codec, self._shape[0] * self._shape[1]
        codes, scales = (
            x[:, 0].unflatten(2, (width, -1)) for x in self._key_groups.read(lowest, highest)
        )
        keys = codec.decode(codes, scales, self._dtype).transpose(2, 3).flatten(1, 2)
        offset = lowest * self.group
        keys = keys[:, first - offset : min(last, group_end) - offset]
        return torch.cat([keys, newest], dim=1)
