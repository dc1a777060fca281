"""Shapes of well-known models, and models of these shapes with random weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_kvret.models.compatibility import check_config

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def _model(
    model_type: str, vocabulary: int, positions: int, *sizes: int, **more: Any
) -> dict[str, Any]:
    """A model with an output head of its own; ``sizes`` are those of ``_SIZES``."""
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **dict(zip(_SIZES, sizes, strict=True)),
    } | more


def _llama3(factor: float, *sizes: int, **more: Any) -> dict[str, Any]:
    """A text model of Llama 3.1 or 3.2."""
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    common = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_scaling": rope, "head_dim": 128}
    tokens = {"bos_token_id": 128_000, "eos_token_id": 128_001}
    return _model("llama", 128_256, 131_072, *sizes, **{**common, **tokens, **more})


def _hybrid(*sizes: int, **more: Any) -> dict[str, Any]:
    """A text model like Qwen3.5."""
    return _model("qwen3_5_text", 65_536, 131_072, *sizes, tie_word_embeddings=True, **more)


_TIED = {"tie_word_embeddings": True}
_MILLION = {"rope_theta": 1_000_000.0}
_QWEN3 = {"rms_norm_eps": 1e-6, "head_dim": 128, **_MILLION}
# The sizes are those of the models' published config.json files.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _llama3(8.0, 4096, 14_336, 32, 32, 8),
    "llama-3.2-1b": _llama3(32.0, 2048, 8192, 16, 32, 8, head_dim=64, **_TIED),
    "llama-3.1-70b": _llama3(8.0, 8192, 28_672, 80, 64, 8),
    "qwen3-0.6b": _model("qwen3", 151_936, 40_960, 1024, 3072, 28, 16, 8, **_QWEN3, **_TIED),
    "qwen3-8b": _model("qwen3", 151_936, 40_960, 4096, 12_288, 36, 32, 8, **_QWEN3),
    "qwen3-4b": _model("qwen3", 151_936, 40_960, 2560, 9728, 36, 32, 8, **_QWEN3, **_TIED),
    # No published models: one in four layers attends, as in Qwen3.5, at sizes for a CPU.
    "hybrid-0.5b": _hybrid(1024, 3072, 24, 8, 2, linear_num_value_heads=16),
    "hybrid-0.1b": _hybrid(
        *(512, 1536, 12, 4, 2), linear_num_key_heads=8, linear_num_value_heads=8, head_dim=128
    ),
    # No published model: small enough for a CPU and for tests.
    "tiny": _model("llama", 1024, 131_072, 256, 512, 2, 4, 2, head_dim=64),
}


# Sizes of what is not attention, in a model that is measured for its attention alone.
_BESIDE_ATTENTION = {
    "vocab_size": 1024,
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64
    ),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), 2),
}
PARTS = ("whole", "attention")


@dataclass(frozen=True)
class Shape:
    """A model's shape.

    Attributes:
        name: as the user gave it.
        config: of the whole model; not to be changed.
    """

    name: str
    config: PreTrainedConfig

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return self.config.num_hidden_layers

    def part(self, name: str) -> Shape:
        """``"whole"``, or ``"attention"``: a small vocabulary and MLPs without experts or width."""
        config = copy.deepcopy(self.config)
        for size, value in _BESIDE_ATTENTION.items():
            if name == "attention" and hasattr(config, size):
                setattr(config, size, value)
        return Shape(self.name, config)

    def with_layers(self, layers: int) -> PreTrainedConfig:
        """A configuration with ``layers`` layers and otherwise this shape.

        Raises:
            ValueError: more layers than the model has, none, or some of a model whose layers
                differ, of which a part would say nothing about the whole.
        """
        if not 1 <= layers <= self.layers:
            raise ValueError(f"--layers {layers}: {self.name} has 1 to {self.layers} to build")
        config = copy.deepcopy(self.config)
        if layers == self.layers:
            return config
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            types = getattr(config, name, None)
            if types and len(set(types)) > 1:
                raise ValueError(
                    f"--layers {layers}: the layers of {self.name} differ "
                    f"({', '.join(sorted(set(types)))}), so some of them say nothing of all: "
                    "leave --layers out"
                )
            if types:
                setattr(config, name, list(types[:layers]))
        config.num_hidden_layers = layers
        return config


def load_shape(name: str) -> Shape:
    """The shape called ``name``: one of ``SHAPES``, or a folder or hub id with config.json.

    Raises:
        ValueError: no shape of that name, or a model that can't be measured; says why.
        OSError: no configuration there, or the hub can't be reached.
    """
    if name in SHAPES:
        return Shape(name, AutoConfig.for_model(**SHAPES[name]))
    if "/" not in name and not Path(name).is_dir():
        raise ValueError(
            f"{name}: neither a known shape ({', '.join(SHAPES)}) nor a folder or hub id "
            "(owner/name) with config.json"
        )
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    except ValueError as error:
        raise ValueError(f"--shape {name}: no configuration of a model ({error})") from error
    check_config(config)
    return Shape(name, config)


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str, seed: int
) -> PreTrainedModel:
    """A model with random weights, made on ``device`` itself, in eval mode.

    Every matrix is normal with standard deviation ``hidden_size ** -0.5``: what a projection gives
    is about as large as what it was given, scores have a standard deviation near 1, and float16
    doesn't overflow at any width. Attention is transformers' sdpa. The global random state is
    set to ``seed``.
    """
    config = copy.deepcopy(config)
    config.initializer_range = config.hidden_size**-0.5
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's parameters.

    Attributes:
        held: all of them.
        read: what a decode step reads: all but the input embedding, of which a step reads single
            rows; where it serves as output head too, it is read in full and counted once. Of the
            experts of a mixture, as many as one token has.
        row: one row of the input embedding.
    """

    held: int
    read: int
    row: int


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> WeightBytes:
    """Bytes of the model with this configuration; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    held = sum(parameter.nbytes for parameter in model.parameters())
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    idle = _idle_bytes(model)
    return WeightBytes(held, held - idle - (0 if tied else table.nbytes), table[0].nbytes)


def _idle_bytes(model: PreTrainedModel) -> int:
    """Bytes of the experts that a token does not pass through."""

    def first_of(*names: str) -> int:
        return next((count for name in names if (count := getattr(model.config, name, None))), 0)

    count = first_of("num_experts", "num_local_experts", "n_routed_experts")
    active = first_of("num_experts_per_tok", "moe_topk", "moe_k")
    if not count or not active:
        return 0
    named = model.named_parameters()
    nbytes = sum(parameter.nbytes for name, parameter in named if ".experts." in name)
    return nbytes * (count - active) // count
