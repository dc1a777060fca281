"""Pages of coded rows, as attention reads them."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hf_kvret_kernels.higgs.codec import HiggsCodec
from hf_kvret_kernels.paged import PagedRows, WithoutAddresses


@dataclass(eq=False)
class CodedRows(WithoutAddresses):
    """Rows of codes and scales, and what they are codes of.

    A row holds, for one token and KV head, four runs of bytes: codes of the key, codes of the
    value, scales of the key, scales of the value, each as ``codec.encode`` makes them of the
    ``key_dim`` or ``value_dim`` numbers. ``pages.key_dim`` is the length of both codes; scales lie
    apart from them (``pages.apart``), so that codes are aligned to their own length.

    Kernels never form a key or a value: the query is transformed instead of the keys, values are
    summed up as they lie, and the sum is transformed back, in Triton once for each chunk of the
    ids. Triton rounds what it multiplies to the query's dtype: the transformed query, and with one
    group a head grid points and softmax weights times scales, else softmax weights and scaled
    numbers, which in fp16 overflow from scales of 19000 on.

    Attributes:
        pages: the bytes; table and chunks lie where attention reads them.
        codec: what the rows were encoded with; its group divides both dims.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        value_in_key: values are the first numbers of keys, and rows hold codes and scales of keys
            alone.
        key_mean: ``[B, Hkv, key_dim]`` fp32, contiguous, what was taken off the keys before they
            were encoded; None: nothing was. Not with ``value_in_key``.

    Raises:
        ValueError: rows of another size than the codec's, or a mean of another form.
    """

    pages: PagedRows
    codec: HiggsCodec
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    key_mean: torch.Tensor | None = None
    # Decode steps read these, which ``HostRows`` explains.
    width: int = field(init=False, repr=False)
    value_start: int = field(init=False, repr=False)
    heads: int = field(init=False, repr=False)
    page_len: int = field(init=False, repr=False)
    token_count: int = field(init=False, repr=False)
    table: torch.Tensor = field(init=False, repr=False)
    in_files: ClassVar[bool] = False
    triton_module: ClassVar[str] = "hf_kvret_kernels.higgs.triton_attend"

    def __post_init__(self) -> None:
        codec, pages, group = self.codec, self.pages, self.codec.group
        dims = [self.key_dim] if self.value_in_key else [self.key_dim, self.value_dim]
        code_bytes = sum(map(codec.code_bytes, dims))
        scale_bytes = sum(map(codec.scale_bytes, dims))
        if self.value_in_key and (self.value_dim > self.key_dim or self.value_dim % group):
            raise ValueError(
                f"value_dim={self.value_dim} with value_in_key: values are whole groups of "
                f"{group}, and no longer than keys of {self.key_dim}"
            )
        if pages.dtype != torch.uint8:
            raise ValueError(f"rows are {pages.dtype}: pass coded rows, bytes (uint8)")
        if (pages.key_dim, pages.value_dim) != (code_bytes, scale_bytes):
            raise ValueError(
                f"rows have {pages.key_dim} bytes of codes and {pages.value_dim} of scales; "
                f"{codec} has {code_bytes} and {scale_bytes} for key_dim={self.key_dim} and "
                f"value_dim={self.value_dim}"
            )
        mean = self.key_mean
        if mean is not None and (
            mean.dtype != torch.float32
            or mean.shape != (len(pages.table), pages.heads, self.key_dim)
            or mean.device != pages.table.device
            or not mean.is_contiguous()
            or self.value_in_key
        ):
            raise ValueError(
                f"key_mean is {mean.dtype} {tuple(mean.shape)} on {mean.device}: pass fp32 "
                f"[{len(pages.table)}, {pages.heads}, {self.key_dim}] beside the page table, "
                "contiguous, and none with value_in_key"
            )
        self.heads, self.page_len, self.table = pages.heads, pages.page_len, pages.table
        self.token_count, self.width = pages.token_count, code_bytes
        self.value_start = 0 if self.value_in_key else codec.code_bytes(self.key_dim)

    @functools.cached_property
    def coding_address(self) -> int:
        """The address of ``hfk_coding``, for the compiled library; good while this lives."""
        return ctypes.addressof(self._coding)

    @functools.cached_property
    def _coding(self) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(self.codec.host_coding(self.key_mean))

    @property
    def page_address(self) -> torch.Tensor | None:
        """As of ``PagedRows``."""
        return self.pages.page_address

    @property
    def dtype(self) -> torch.dtype:
        """Of the bytes."""
        return self.pages.dtype

    def addresses(self) -> torch.Tensor:
        """As of ``PagedRows``."""
        return self.pages.addresses()

    def check_range(self, ids: torch.Tensor) -> None:
        """As of ``PagedRows``."""
        self.pages.check_range(ids)

    def check(self, query: torch.Tensor, ids: torch.Tensor, softcap: float | None) -> None:
        """ValueError for a query or ids that don't fit; see ``gather_attention``."""
        self.pages.check(query, ids, softcap, coded_dim=self.key_dim)

    def gather_with_torch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, Q, K, key_dim]`` and values, fp32, by plain torch; any rows for holes."""
        codes, scales = self.pages.gather_with_torch(ids)
        codec, dims = self.codec, (self.key_dim, self.value_dim)
        if self.value_in_key:
            keys = codec.decode(codes, scales, backend="naive")
            return keys, keys[..., : self.value_dim]
        code_parts = codes.split([codec.code_bytes(dim) for dim in dims], -1)
        scale_parts = scales.split([codec.scale_bytes(dim) for dim in dims], -1)
        keys, values = (
            codec.decode(*parts, backend="naive")
            for parts in zip(code_parts, scale_parts, strict=True)
        )
        if self.key_mean is not None:
            share = ids.shape[1] // self.pages.heads
            keys = keys + self.key_mean.repeat_interleave(share, 1)[:, :, None, None]
        return keys, values
