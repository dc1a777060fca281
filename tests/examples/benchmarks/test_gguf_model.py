"""A model's GGUF file has the tensors that llama.cpp looks for, with the model's own numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_model import check_architecture, find_gguf, write_gguf
from transformers import AutoConfig, PreTrainedConfig

from hf_kvret.lab.bench.shapes import load_shape, random_model

# Heads that don't fill the width, and three query heads for a KV head.
SIZES = {
    "vocab_size": 120,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
# By the last part of its name, as llama.cpp's loaders declare it: [out, in].
LAYER = {
    "attn_q": (192, 96),
    "attn_k": (64, 96),
    "attn_v": (64, 96),
    "attn_output": (96, 192),
    "ffn_gate": (80, 96),
    "ffn_up": (80, 96),
    "ffn_down": (96, 80),
    "attn_norm": (96,),
    "ffn_norm": (96,),
}
QWEN3 = {"attn_q_norm": (32,), "attn_k_norm": (32,)}
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def config_of(kind: str, **more: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **SIZES, **more)


def numbers(tensor: Any) -> torch.Tensor:
    """A tensor of a GGUFReader, which gives bf16 as bytes."""
    data = torch.from_numpy(tensor.data.copy())
    return data.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else data


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tensors_are_those_of_llama_cpp(
    kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    model = random_model(config_of(kind, tie_word_embeddings=tied), dtype, "cpu", seed=0)
    write_gguf(tmp_path / "model.gguf", model)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    wanted = {
        f"blk.{number}.{name}.weight": shape
        for number in range(2)
        for name, shape in (LAYER | (QWEN3 if kind == "qwen3" else {})).items()
    }
    wanted |= {"token_embd.weight": (120, 96), "output_norm.weight": (96,)}
    wanted |= {} if tied else {"output.weight": (120, 96)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # A GGUF file has the innermost dimension first.
    assert {name: tuple(one.shape[::-1]) for name, one in tensors.items()} == wanted
    for name, one in tensors.items():
        assert one.tensor_type.name == ("F32" if len(wanted[name]) == 1 else KINDS[dtype]), name
    state = model.state_dict()
    own = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for name, other in own.items():
        found, want = numbers(tensors[name]), state[other]
        assert torch.equal(found, want.float() if want.ndim == 1 else want), name


@pytest.mark.parametrize("shape", ["tiny", "llama-3.1-8b", "qwen3-0.6b"])
def test_shapes_of_known_architectures_are_let_through(shape: str) -> None:
    check_architecture(load_shape(shape).config, shape)


def test_other_architectures_and_sliding_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"phi-4 is a model with type 'phi3', .* llama and qwen3"):
        check_architecture(load_shape("phi-4").config, "phi-4")
    kinds = ["full_attention", "sliding_attention"]
    config = config_of("qwen3", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    with pytest.raises(ValueError, match="a model with layers of sliding_attention"):
        check_architecture(config, "mine")


def test_without_gguf_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        find_gguf()
