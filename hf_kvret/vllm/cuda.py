"""vLLM's FlashAttention backend, selecting: our kernels read its pages in place. Not run on a GPU.

A page has the rows of a head one after the other, key and value side by side, which is what
``PagedRows`` reads; a layout that mixes heads is not offered.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from hf_kvret.vllm.selecting import SelectingAttention, SelectingBuilder


class SelectingImpl(SelectingAttention, FlashAttentionImpl):
    """Attention over vLLM's own pages."""


class SelectingMetadataBuilder(SelectingBuilder, FlashAttentionMetadataBuilder):
    """vLLM's builder, which finds the sequences of requests too."""


class SelectingBackend(FlashAttentionBackend):
    """``FLASH_ATTN`` with decode steps that select."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Blocks of heads of rows, those of each layer contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_rswa(cls) -> bool:
        """False: a step knows no window behind the prompt."""
        return False

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Attention."""
        return SelectingImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Metadata."""
        return SelectingMetadataBuilder
