"""Which models may have their decode steps captured and replayed."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_kvret.models.kept_state import grows

REPLAYABLE: frozenset[str] = frozenset(
    {
        "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "biogpt", "bitnet", "cohere",
        "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
        "exaone4", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
        "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe",
        "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
        "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kimi_linear", "laguna",
        "lfm2", "llama", "llama4_text", "llava", "minicpm3", "minimax_m2", "ministral",
        "ministral3", "mistral", "mistral3", "mistral4", "mixtral", "nanochat", "nemotron",
        "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi",
        "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl",
        "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open",
        "stablelm", "starcoder2", "vaultgemma", "youtu", "zamba2", "zaya",
    }
)  # fmt: skip
"""Types (``config.model_type``) whose steps may be replayed.

A step that waits for the device can't be captured, and an error says so. But if a model keeps a
number on the host, such as its own count of tokens, that number is baked into the graph, and every
replay uses it: wrong tokens, and no error. So a type is listed once a model of it was tested with
replayed steps, on the tape (``hf_kvret.testing.tape``), which freezes such numbers as a graph does:

1. Add it here, and a composite's text part too.
2. ``python -m pytest -m slow tests/replay/test_replayable.py -k <type>``
"""

# Modules whose hooks a replay may leave out: those of transformers stay after a call with
# output_hidden_states and do nothing without it, ours note tokens, which is done for a replay, and
# what models keep, which a step of one token with given positions neither reads nor changes.
_HARMLESS = (
    "transformers.utils.output_capturing",
    "hf_kvret.generate.fast_linear",
    "hf_kvret.generate.provenance",
    "hf_kvret.generate.model_state",
)
_WAY_OUT = "graph=False silences this; see docs/models.md"


def untested(model: PreTrainedModel) -> str | None:
    """Why steps of ``model`` must not be replayed on any device; None if they may be.

    A replay would not compute frequencies that depend on the length of the text.

    A composite model (text and vision) must be in ``REPLAYABLE`` with both of its types, its own
    and its text part's. Code from outside transformers (``trust_remote_code``, a subclass) is
    never known, even where its configuration has a type that is.
    """
    if grows(model):
        return f"the frequencies of its rotary embeddings grow with the text ({_WAY_OUT})"
    config = model.config
    types = (config.model_type, config.get_text_config(decoder=True).model_type)
    for name in types:
        reason = untested_type(name)
        if reason is not None:
            return reason
    for module in model.modules():
        source = type(module).__module__
        if isinstance(module, PreTrainedModel) and not source.startswith("transformers.models."):
            return (
                f"{type(module).__name__} is defined in {source}, not in transformers, and was not "
                f"tested with replayed steps ({_WAY_OUT})"
            )
    return None


def untested_type(name: str) -> str | None:
    """Why steps of models of type ``name`` must not be replayed; None if they may be."""
    if name in REPLAYABLE:
        return None
    return f"models of type {name} were not tested with replayed steps ({_WAY_OUT})"


def is_compiled(model: PreTrainedModel) -> bool:
    """By ``model.compile()``, or by ``model.forward = torch.compile(model.forward)``."""
    whole = model._compiled_call_impl is not None
    return whole or hasattr(model.forward, "_torchdynamo_orig_callable")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that do something in a decode step."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if getattr(hook, "__module__", "") not in _HARMLESS]
    return bool(others) or hasattr(module, "_hf_hook")
