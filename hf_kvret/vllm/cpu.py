"""vLLM's backend on a CPU, selecting. Its own pages are packed, so plain rows lie beside them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from hf_kvret.vllm.selecting import SelectingAttention, SelectingBuilder

_log = logging.getLogger(__name__)


class SelectingImpl(SelectingAttention, CPUAttentionBackendImpl):
    """Attention with a plain copy of the layer's rows."""

    _rows: torch.Tensor | None = None

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As vLLM's own, and keep the rows as they are."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if not self.selects:
            return
        if self._rows is None:
            self._rows = torch.empty(kv_cache.shape, dtype=key.dtype)
            mebibytes = self._rows.nbytes / 2**20
            _log.info("%s: %.0f MiB of plain rows", layer.layer_name, mebibytes)
        # Padding of a batch has negative slots.
        places = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block_len = slot_mapping[places], kv_cache.shape[2]
        new = torch.cat([key[places], value[places]], dim=-1)
        self._rows[slots // block_len, :, slots % block_len] = new

    def rows_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The plain copy."""
        if self._rows is None:
            raise RuntimeError("a step came before any token: vLLM did not write its cache")
        return self._rows


class SelectingMetadataBuilder(SelectingBuilder, CPUAttentionMetadataBuilder):
    """vLLM's builder, which finds the sequences of requests too."""


class SelectingBackend(CPUAttentionBackend):
    """``CPU_ATTN`` with decode steps that select."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Attention."""
        return SelectingImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Metadata."""
        return SelectingMetadataBuilder
