"""QuantizedStore: rows at 2 to 4 bits an element, on the device or in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import Tensors, tensor
from hf_kvret.contracts.store import AttentionResult, RowChunks
from hf_kvret.stores.memory import PageMemory
from hf_kvret.stores.paged import PagedStore, WrappedStore
from hf_kvret_kernels import higgs, host_library
from hf_kvret_kernels.gather_attention import gather_partials, gather_scores
from hf_kvret_kernels.higgs.codec import LARGEST_GROUP, SMALLEST_GROUP

# Tokens coded at once, so that a prompt is never in fp32 as a whole.
_CHUNK = 4096


def _finite_mean(block: TokenBlock) -> torch.Tensor:
    """``[B, Hkv, Dk]`` fp32 mean key; 0 where NaN or infinity would spoil all rows."""
    return block.mean_key().nan_to_num_(0.0, 0.0, 0.0)


class QuantizedStore(WrappedStore):
    """A paged store of coded rows, for every index (AQUA-KV's codec, without its predictors).

    Keys and values of each KV head are coded by themselves, so that single rows can be read. An
    element takes ``bits / 8 + 2 / group`` bytes, with the largest power of two that divides the
    head's dims as group. Keys are coded around the mean of a sequence's first block, by channel:
    the error of a codec is a share of what it codes, and an offset distinguishes no tokens. Rows of
    latent attention are coded as they are. Codes are never recoded. Rows read back have the error;
    if they are appended again, they lose a little more, far less than the first time. Scales lie
    apart from the codes of a page, whose rows are then aligned to their own length.

    Args:
        memory: where the bytes lie.
        bits: 2, 3 or 4.
    """

    codes_rows = True

    # ``[B, Hkv, Dk]`` fp32, what is taken off the keys; None where they contain the values.
    _key_mean: torch.Tensor | None = tensor(
        optional=True, shared=True, dims="B H D", dtype=torch.float32
    )

    def __init__(self, memory: PageMemory, bits: int) -> None:
        super().__init__(PagedStore(memory, apart=True))
        self._bits = bits
        self._codec: higgs.HiggsCodec | None = None
        self._coded: higgs.CodedRows | None = None
        # Dims of keys and of values; those of values are 0 where they are elements of the keys.
        self._dims = (0, 0)
        self._value_in_key = 0
        self._dtype = torch.float32

    def append(self, block: TokenBlock) -> None:
        if len(block) == 0:
            return
        if not len(self):
            self._key_mean = None if block.value_in_key else _finite_mean(block)
        elif self._key_mean is not None and block.valid is not None:
            # A sequence that had only padding gets its mean now: nothing has read its rows.
            unknown = (self._key_mean == 0).flatten(1).all(1)[:, None, None]
            self._key_mean = torch.where(unknown, _finite_mean(block), self._key_mean)
        codec = self._codec_for(block.keys, block.values, block.value_in_key)
        parts = [self._encoded(codec, block, first) for first in range(0, len(block), _CHUNK)]
        codes, scales = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        # Codes are the keys of the store below, scales their values.
        self.rows.append(TokenBlock(codes, scales, block.start))

    def _encoded(
        self, codec: higgs.HiggsCodec, block: TokenBlock, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales ``[B, Hkv, n, bytes]`` of the tokens of a block from ``first`` on."""
        keys, values = (x[:, :, first : first + _CHUNK] for x in (block.keys, block.values))
        if self._key_mean is not None:
            keys = keys.float() - self._key_mean[:, :, None]
        tensors = [keys] if block.value_in_key else [keys, values]
        halves = zip(*map(codec.encode, tensors), strict=True)
        codes, scales = (torch.cat(half, dim=-1) for half in halves)
        return codes, scales

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        return gather_partials(query, self.coded_rows(), ids, scale=scale, softcap=softcap)

    def scores(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        if not host_library.is_asked("auto", query):
            return super().scores(query, ids, scale, softcap)
        return gather_scores(query, self.coded_rows(), ids, scale=scale, softcap=softcap)

    def host_rows(self) -> higgs.CodedRows | None:
        rows = self.coded_rows()
        return rows if rows.table.is_cpu else None

    def coded_rows(self) -> higgs.CodedRows:
        """The rows as kernels read them, until the next change. RuntimeError for an empty store."""
        pages, rows = self.rows.paged_rows(), self._coded
        if rows is None or rows.pages is not pages:
            assert self._codec is not None, "there are rows"
            key_dim, value_dim = self._dims
            in_key = self._value_in_key
            rows = self._coded = higgs.CodedRows(
                pages, self._codec, key_dim, in_key or value_dim, in_key > 0, self._key_mean
            )
        return rows

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As for every store, in the dtype of the model."""
        keys, values = self._decoded(*self.rows.gather(ids))
        # Rows of no token are zero bytes, which decode to zeros, beside the mean.
        none = (ids < 0) | (ids >= len(self))
        return keys.masked_fill_(none[..., None], 0.0), values

    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        for start, codes, scales in self.rows.chunks(chunk_len, stop):
            yield start, *self._decoded(codes, scales)

    def reset(self) -> None:
        super().reset()
        self._codec = self._coded = None

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
            **({} if self._key_mean is None else {"key_mean": self._key_mean.cpu()}),
            **({"value_in_key": torch.tensor(self._value_in_key)} if self._value_in_key else {}),
        }

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
        self._key_mean = state["key_mean"].to(device) if "key_mean" in state else None
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
        (key_codes, value_codes), (key_scales, value_scales) = (
            codes.split([codec.code_bytes(dim) for dim in self._dims], dim=-1),
            scales.split([codec.scale_bytes(dim) for dim in self._dims], dim=-1),
        )
        keys = codec.decode(key_codes, key_scales, self._dtype, added=self._key_mean)
        return keys, codec.decode(value_codes, value_scales, self._dtype)
