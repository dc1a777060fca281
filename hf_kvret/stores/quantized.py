"""QuantizedStore: rows at 2 to 4 bits an element, on the device or in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.schema import Schema, damaged
from hf_kvret.contracts.state import Tensors
from hf_kvret.contracts.store import AttentionResult, check_in_key, check_rows
from hf_kvret.stores.memory import PageMemory
from hf_kvret.stores.paged import PagedStore, WrappedStore
from hf_kvret_kernels import higgs
from hf_kvret_kernels.higgs.codec import LARGEST_GROUP, SMALLEST_GROUP


class QuantizedStore(WrappedStore):
    """A paged store of coded rows, for every index (AQUA-KV's codec, without its predictors).

    Keys and values of each KV head are coded by themselves, so that single rows can be read:
    ``bits / 8 + 2 / group`` bytes an element, with the largest power of two that divides the head's
    dims as group. Codes are never recoded. Keys and values read back have the codec's error; if
    they are appended again, they lose a little more, far less than the first time. Scales lie apart
    from the codes of a page, whose rows are then aligned to their own length.

    Args:
        memory: where the bytes lie.
        bits: 2, 3 or 4.
    """

    codes_rows = True

    def __init__(self, memory: PageMemory, bits: int) -> None:
        super().__init__(PagedStore(memory, apart=True))
        self._bits = bits
        self._codec: higgs.HiggsCodec | None = None
        # Dims of keys and of values; those of values are 0 where they are elements of the keys.
        self._dims = (0, 0)
        self._value_in_key = 0
        self._dtype = torch.float32

    def append(self, block: TokenBlock) -> None:
        if len(block) == 0:
            return
        codec = self._codec_for(block.keys, block.values, block.value_in_key)
        tensors = [block.keys] if block.value_in_key else [block.keys, block.values]
        halves = zip(*map(codec.encode, tensors), strict=True)
        codes, scales = (torch.cat(half, dim=-1) for half in halves)
        # Codes are the keys of the store below, scales their values.
        self.rows.append(TokenBlock(codes, scales, block.start))

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        if self._codec is None:
            raise RuntimeError("the store is empty: append first")
        key_dim, value_dim = self._dims
        return higgs.attend_partials(
            query,
            self.rows.paged_rows(),
            ids,
            self._codec,
            key_dim=key_dim,
            value_dim=self._value_in_key or value_dim,
            scale=scale,
            softcap=softcap,
            value_in_key=self._value_in_key > 0,
        )

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As for every store, in the dtype of the model."""
        # Rows of holes are zero bytes, which decode to zeros.
        return self._decoded(*self.rows.gather(ids))

    def chunks(
        self, chunk_len: int = 4096, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for start, codes, scales in self.rows.chunks(chunk_len, stop):
            yield start, *self._decoded(codes, scales)

    def reset(self) -> None:
        super().reset()
        self._codec = None

    def row_nbytes(self, plain: int) -> int:
        if self._codec is None:
            return plain
        dims = [dim for dim in self._dims if dim]
        return sum(self._codec.code_bytes(dim) + self._codec.scale_bytes(dim) for dim in dims)

    def state_dict(self) -> Tensors:
        """``codes`` and ``scales [B, Hkv, n, bytes]`` uint8, and an empty row of each half."""
        rows = self.rows.dense_state()
        if not rows:
            return {}
        key_like, value_like = (torch.empty(0, dim, dtype=self._dtype) for dim in self._dims)
        return {
            "codes": rows["keys"],
            "scales": rows["values"],
            "bits": torch.tensor(self._bits),
            "key_like": key_like,
            "value_like": value_like,
            **({"value_in_key": torch.tensor(self._value_in_key)} if self._value_in_key else {}),
        }

    def check_saved(self, state: Tensors, schema: Schema) -> None:
        """As for every store, of rows in full or coded."""
        if "codes" not in state:
            check_rows(state, schema)
            return
        names = {"codes", "scales", "bits", "key_like", "value_like", "value_in_key"}
        if not state.keys() <= names:
            raise damaged(f"store has an unknown {min(state.keys() - names)[:80]}")
        check_in_key(state, schema)
        value_dim = 0 if schema.get("I") else schema["V"]
        for name, dims in (("key_like", "0 D"), ("value_like", f"0 {value_dim}")):
            schema.check(f"store.{name}", state[name], dims)
        schema.check("store.bits", state["bits"].reshape(-1), "1", torch.int64)
        if int(state["bits"]) != self._bits:
            # Loading refuses them with a message of their own.
            return
        codec = higgs.HiggsCodec(self._bits, self._group(schema["D"], value_dim or schema["D"]))
        all_dims = [schema["D"], value_dim] if value_dim else [schema["D"]]
        widths = {
            "codes": sum(map(codec.code_bytes, all_dims)),
            "scales": sum(map(codec.scale_bytes, all_dims)),
        }
        for name, width in widths.items():
            schema.check(f"store.{name}", state[name], f"B H N {width}", torch.uint8)

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        """Fill an empty store with a saved one, coded or not."""
        if "codes" not in state:
            super().load_state_dict(state, device)
            return
        bits = int(state["bits"])
        if bits != self._bits:
            raise ValueError(
                f"the cache was saved with rows of {bits} bits, not bits={self._bits}: coded rows "
                "can't be changed, leave bits out"
            )
        key_like, value_like = state["key_like"].to(device), state["value_like"].to(device)
        in_key = int(state.get("value_in_key", 0))
        self._codec_for(key_like, key_like[..., :in_key] if in_key else value_like, in_key)
        self.rows.append(TokenBlock(state["codes"].to(device), state["scales"].to(device), 0))

    def _codec_for(
        self, keys: torch.Tensor, values: torch.Tensor, value_in_key: int
    ) -> higgs.HiggsCodec:
        """The codec, made when the first rows come.

        Raises:
            ValueError: heads whose dims no group divides.
        """
        if self._codec is None:
            dims = keys.shape[-1], values.shape[-1]
            self._codec = higgs.HiggsCodec(self._bits, self._group(*dims)).to(keys.device)
            self._dims = (dims[0], 0) if value_in_key else dims
            self._value_in_key, self._dtype = value_in_key, keys.dtype
        return self._codec

    @staticmethod
    def _group(key_dim: int, value_dim: int) -> int:
        """Elements that share a scale; ValueError for dims that no group divides."""
        whole = math.gcd(key_dim, value_dim)
        group = min(LARGEST_GROUP, whole & -whole)
        if group < SMALLEST_GROUP:
            raise ValueError(
                f"heads of {key_dim} and {value_dim} numbers: coded rows need dims that "
                f"{SMALLEST_GROUP} divides; use store='device' or 'host'"
            )
        return group

    def _decoded(
        self, codes: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[..., D]`` of rows' bytes."""
        codec = self._codec
        assert codec is not None, "rows were coded before they are decoded"
        if self._value_in_key:
            keys = codec.decode(codes, scales, self._dtype)
            return keys, keys[..., : self._value_in_key]
        halves = zip(
            codes.split([codec.code_bytes(dim) for dim in self._dims], dim=-1),
            scales.split([codec.scale_bytes(dim) for dim in self._dims], dim=-1),
            strict=True,
        )
        keys, values = (codec.decode(*half, self._dtype) for half in halves)
        return keys, values
