"""What the backends for all devices have in common. vLLM's workers import it."""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from hf_kvret.vllm import VARIABLE, selection_of
from hf_kvret.vllm.decode import Selector, Sequence, Sequences, cold_end, decode

_WITHOUT = f"unset {VARIABLE} for this model"


@dataclass(frozen=True)
class Steps:
    """The requests of a batch that decode one token.

    Attributes:
        rows: ``[B]`` int64, their places among the batch's tokens.
        table: ``[B, max_blocks]`` int32, their blocks.
        lengths: of each, that of its query included.
        sequences: of each.
        is_all: the batch has no other tokens.
    """

    rows: torch.Tensor
    table: torch.Tensor
    lengths: Items[int]
    sequences: Items[Sequence]
    is_all: bool


class SelectingBuilder:
    """Gives the metadata of a batch the steps in it, once for all layers.

    In front of one of vLLM's builders. Prompts, and drafted tokens, attend to everything. A step
    selects whatever else is in its batch, so that tokens don't depend on what runs beside.
    """

    # Each group of layers has its own steps, and a draft's steps have lengths of their own.
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
        if not any(getattr(getattr(layer, "impl", None), "selects", False) for layer in layers):
            raise ValueError(f"no layer of this model has full attention to select in: {_WITHOUT}")
        _, self._options = selection_of(os.environ[VARIABLE])
        # As many again as run at once: a finished request is the beginning of its next turn.
        most = 2 * vllm_config.scheduler_config.max_num_seqs
        self._sequences = Sequences(kv_cache_spec.block_size, most)
        # Layers with chunks of their own see other tables, of virtual requests.
        self._has_steps = not isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Never: graphs have all of a model but its attention (piecewise)."""
        return AttentionCGSupport.NEVER

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: which requests decode is read on the host."""
        return False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata with ``steps``, or None. Waits for the device."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        self._sequences.note_writes(common.slot_mapping[: common.num_actual_tokens])
        can_select = common.causal is True and self._has_steps
        metadata.steps = self._steps(common) if can_select else None
        return metadata

    def _steps(self, common: Any) -> Steps | None:
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        decodes = starts.diff() == 1
        if common.is_prefilling is not None:
            decodes &= ~common.is_prefilling[: common.num_reqs].cpu()
        if not decodes.any():
            return None
        chosen = decodes.nonzero()[:, 0]
        device = common.block_table_tensor.device
        rows, chosen = starts[chosen].to(device), chosen.to(device)
        lengths, table = common.seq_lens[chosen].tolist(), common.block_table_tensor[chosen]
        ends = [cold_end(self._options, length) for length in lengths]
        sequences = self._sequences.of_requests(table, lengths, ends)
        return Steps(rows, table, lengths, sequences, len(lengths) == common.num_actual_tokens)


class SelectingAttention:
    """Decode steps that select, in front of one of vLLM's implementations.

    Layers with a sliding window, and of encoders, stay as they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own: Any = self
        self._method, self._options = selection_of(os.environ[VARIABLE])
        windows = own.sliding_window
        window = max(windows) if isinstance(windows, tuple) else windows
        is_decoder = own.attn_type == AttentionType.DECODER
        self.selects = is_decoder and window in (None, -1)
        config = get_current_vllm_config()
        copies = getattr(config.cache_config, "mamba_cache_mode", "") == "align"
        for there, what in (
            (own.alibi_slopes is not None, "biases by distance (ALiBi)"),
            (own.sinks is not None, "learned attention sinks"),
            (own.kv_sharing_target_layer_name is not None, "layers that read another's keys"),
            (own.kv_cache_dtype != "auto", f"kv_cache_dtype={own.kv_cache_dtype}"),
            (config.kv_transfer_config is not None, "rows that a KV connector brings"),
            (config.parallel_config.decode_context_parallel_size > 1, "decode context parallel"),
            (own.attn_type == AttentionType.ENCODER_DECODER, "cross attention"),
            (config.parallel_config.use_ubatching, "microbatches"),
            (copies and config.cache_config.enable_prefix_caching, "mamba_cache_mode='align'"),
        ):
            if there:
                raise ValueError(f"hf_kvret selects no rows with {what}: {_WITHOUT}")
        if self.selects:
            self._options.check_head_dim(own.head_size)

    def rows_of(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """``[blocks, Hkv, block_len, 2 * D]``: keys and values side by side, contiguous."""
        return kv_cache

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's own, but that each step attends to what it selects."""
        steps: Steps | None = getattr(attn_metadata, "steps", None)
        if steps is None or not self.selects or not steps.is_all:
            super().forward(  # type: ignore[misc]
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if steps is not None and self.selects:
            own: Any = self
            scores = own.scale, float(own.logits_soft_cap or 0.0) or None
            selector = Selector(self._method, self._options, layer.layer_name, *scores)
            pages, queries = self.rows_of(kv_cache), query[steps.rows]
            out = decode(selector, queries, pages, steps.table, steps.lengths, steps.sequences)
            output[steps.rows] = out.view(len(out), *output.shape[1:]).to(output.dtype)
        return output


_REFUSAL = f"hf_kvret selects rows on CPU_ATTN and FLASH_ATTN alone, not latent ones: {_WITHOUT}"


class RefusedBackend(AttentionBackend):
    """In place of all other backends, for latent attention for instance: they would be dense."""

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The reason, for vLLM's list of backends that were not chosen."""
        return [_REFUSAL]

    @staticmethod
    def get_name() -> str:
        """As vLLM shows it."""
        return "HF_KVRET_REFUSED"

    @staticmethod
    def get_impl_cls() -> Any:
        """ValueError: there is none."""
        raise ValueError(_REFUSAL)

    @staticmethod
    def get_builder_cls() -> Any:
        """ValueError: there is none."""
        return RefusedBackend.get_impl_cls()
