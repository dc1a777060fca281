"""One tiny random model: how it is built, and how its weights are drawn.

The weights are drawn so that attention is peaked and logits are far apart: a model whose every
token attends to everything a little gives the same greedy text when the cache loses a token, and
a test on it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

PAD_TOKEN = 0
"""Padding id; prompts of the suite never contain it."""

# Standard deviations in units of 1 / sqrt(fan in), by the end of the module's name. Queries and
# keys are drawn wide to make attention peaked, outputs wide to make it count in the residual sum.
_GAINS = {
    ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn"): 2.0,
    ("o_proj", "out_proj", "dense", "c_proj"): 2.0,
    ("lm_head", "embed_out"): 4.0,
}


@dataclass(frozen=True)
class TinyModel:
    """How to build one model of the zoo.

    Attributes:
        name: key in the zoo.
        config: makes the configuration anew.
        full_attention: indices of the layers with full attention, which get retrieval.
        seed: of the weights; chosen so that a token lost in mid-prompt changes the greedy text.
        architecture: class in transformers; empty for the causal language model of the config.
        attention: implementation; None for the one that transformers chooses.
        embedding: standard deviation of embeddings; where a model multiplies them, less than 1
            keeps them from drowning what attention adds.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    full_attention: tuple[int, ...]
    seed: int = 0
    architecture: str = ""
    attention: str | None = None
    embedding: float = 1.0

    def build(self) -> PreTrainedModel:
        """Return the model: fp32, on the CPU, in eval mode, the same weights every time.

        It never stops early: no end-of-text token is set.
        """
        config = self.config()
        options = {"dtype": torch.float32, "attn_implementation": self.attention}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.architecture:
                model = getattr(transformers, self.architecture)._from_config(config, **options)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
        spread_weights(model, self.seed, self.embedding)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD_TOKEN
        return model.eval()


@torch.no_grad()
def spread_weights(model: PreTrainedModel, seed: int, embedding: float = 1.0) -> None:
    """Redraw the weights of `model` in place so that attention is peaked and logits are far apart.

    Matrices get a normal distribution with standard deviation gain / sqrt(fan in), embeddings
    `embedding`, biases 0.1, attention sinks 1; scales of norms and the parameters of recurrences
    stay.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if kind == "sinks":
            std = 1.0
        elif kind == "bias" or kind.endswith("_bias"):
            std = 0.1
        elif "embed_tokens" in name or name.endswith(
            ("wte.weight", "wpe.weight", "embed_in.weight")
        ):
            std = embedding
        elif parameter.ndim == 2:
            gain = next((g for ends, g in _GAINS.items() if module.endswith(ends)), 1.0)
            std = gain / math.sqrt(_fan_in(model, module, parameter))
        elif parameter.ndim == 3 and "experts" in name:
            std = 1.0 / math.sqrt(model.config.get_text_config().hidden_size)
        else:
            continue
        parameter.normal_(0.0, std, generator=generator)


def _fan_in(model: PreTrainedModel, module: str, weight: torch.Tensor) -> int:
    """Input width of a linear map; GPT-2's Conv1D stores the matrix transposed."""
    transposed = type(model.get_submodule(module)).__name__ == "Conv1D"
    return weight.shape[0] if transposed else weight.shape[1]
