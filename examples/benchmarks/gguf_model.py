"""A model of transformers as a GGUF file, for llama.cpp to measure."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.models.compatibility import layer_shape

ARCHITECTURES = ("llama", "qwen3")
"""Model types that ``write_gguf`` knows, which llama.cpp calls by the same names."""

_FILE_TYPES = {
    torch.float32: "ALL_F32",
    torch.float16: "MOSTLY_F16",
    torch.bfloat16: "MOSTLY_BF16",
}


def find_gguf() -> Any:
    """The module of llama.cpp's own package.

    Raises:
        ModuleNotFoundError: it is not installed; names the remedy.
    """
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--opponents llama.cpp writes its model with the package gguf: pip install gguf"
        ) from error


def check_architecture(config: PreTrainedConfig, shape: str) -> None:
    """ValueError for a model that ``write_gguf`` can't write; ``shape`` is the user's name of it.

    Layers of sliding attention are refused too: for these architectures llama.cpp has none.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type in ARCHITECTURES and not kinds:
        return
    what = f"layers of {', '.join(sorted(kinds))}" if kinds else f"type {config.model_type!r}"
    raise ValueError(
        f"--opponents llama.cpp: {shape} is a model with {what}, and for llama.cpp only "
        f"{' and '.join(ARCHITECTURES)} with full attention are written: give a --shape of these, "
        "as llama-3.1-8b or qwen3-0.6b, or leave --opponents out"
    )


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """Write the weights of ``model``, a model of ``ARCHITECTURES`` on the CPU, in its dtype.

    Vectors are written in float32, as llama.cpp wants its norms. The file is good for measuring
    time, not for text: it has no vocabulary, no scaling of RoPE, and the rows of a Llama's queries
    and keys stay in transformers' order.

    Raises:
        ModuleNotFoundError: the package gguf is not installed.
        ValueError: a tensor of the model has no name in llama.cpp.
    """
    gguf, config = find_gguf(), model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    writer = gguf.GGUFWriter(path, config.model_type)
    _write_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[model.dtype]])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            # llama.cpp takes the embedding where there is no head.
            continue
        name = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"llama.cpp has no name for {own} of {config.model_type}")
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        elif tensor.dtype == torch.bfloat16:
            # numpy has no such numbers: their bytes.
            data, kind = tensor.view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: PreTrainedConfig) -> None:
    dim = layer_shape(config, 0).head_dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
