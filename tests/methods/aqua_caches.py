"""AQUA-KV's caches on small models: artifacts, passes, and the rows that stores decode to."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret.artifacts.shared import shared_artifact
from hf_kvret.lab.calibrate.aqua import predict
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.methods.aqua import AquaKVCache, AquaStore
from hf_kvret.stores import Store
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret_kernels.higgs import HiggsCodec

from ..patches.test_rope import YARN

LAYERS, HEADS, DIM = 3, 2, 16


def deep_model() -> PreTrainedModel:
    """Three layers in a chain, with YaRN's factor."""
    config = AutoConfig.for_model(
        "llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=HEADS, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.1,
        rope_parameters=YARN,
    )  # fmt: skip
    torch.manual_seed(0)
    return attached(AutoModelForCausalLM.from_config(config).eval())


def attached(model: PreTrainedModel) -> PreTrainedModel:
    """The model with our attention."""
    hf_kvret.attach(model)
    return model


def learn(model: PreTrainedModel, folder: Path, **options: Any) -> str:
    """The folder with an artifact of the model, of 4 bits where ``options`` have no others."""
    return tiny_artifact(model, "aqua", folder, **{"bits": 4, "space": "before", **options})


def make_cache(model: PreTrainedModel, artifact: str | None, **changes: Any) -> AquaKVCache:
    options = {**COVERING_OPTIONS, "artifact": artifact, "bits": 4, **changes}
    return AquaKVCache(model.config, **options)


@torch.no_grad()
def read(model: PreTrainedModel, cache: AquaKVCache, ids: torch.Tensor, **how: Any) -> Any:
    """Logits ``[B, n, V]`` of more tokens."""
    return model(ids, past_key_values=cache, **how).logits


def decode(model: PreTrainedModel, cache: AquaKVCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of more tokens, one after the other."""
    return torch.cat([read(model, cache, token) for token in ids.split(1, dim=1)], dim=1)


def stores_of(cache: AquaKVCache) -> list[AquaStore]:
    return [layer.kv.store for layer in cache.retrieval_layers]


def rows_of(store: Store) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all cold tokens, as attention reads them."""
    starts, *sides = zip(*store.chunks(64), strict=True)
    assert list(starts) == sorted(starts) and starts[0] == 0
    return tuple(torch.cat(side, dim=2) for side in sides)


def reference(cache: AquaKVCache, artifact: str) -> list[list[torch.Tensor]]:
    """Keys and values of all layers, decoded from the codes, first layer first.

    ``[B, n, heads * dim]``, before RoPE where they are coded so.
    """
    whole, below, dense = shared_artifact(artifact, None, "aqua"), None, []
    for store in stores_of(cache):
        number = str(store.plan.layer)
        settings, state = whole.options["layers"][number], store._pages.dense_state()
        rows: list[torch.Tensor] = []
        code_at = scale_at = 0
        for side, dim in (("key", "head_dim"), ("value", "value_head_dim")):
            prefix, width = f"layers.{number}.{side}.", settings["heads"] * settings[dim]
            tensors = {n.removeprefix(prefix): x for n, x in whole.tensors.items() if prefix in n}
            group = settings["group" if side == "key" else "value_group"]
            codec = HiggsCodec(store.plan.bits, group)
            codes = state["keys"][:, 0, :, code_at : code_at + codec.code_bytes(width)]
            scales = state["values"][:, 0, :, scale_at : scale_at + codec.scale_bytes(width)]
            code_at, scale_at = code_at + codes.shape[-1], scale_at + scales.shape[-1]
            row = codec.decode(codes, scales)
            if settings["previous"] is None:
                row = row + tensors.get("bias", torch.zeros(()))
            elif tensors:
                inputs = below[:1] if side == "key" else [*rows, *below[1:]]
                row = row + predict(tensors, torch.cat(inputs, dim=-1))
            rows.append(row)
        below = rows
        dense.append(rows)
    return dense
