"""Weights of a model in 8 or 4 bits, as torchao makes them, and their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

WEIGHTS = ("bf16", "int8", "int4")
GROUP = 64
"""Weights of 4 bits share a scale and a zero point with so many of their row."""
# torch's operation for weights of 4 bits makes so many outputs at a time.
_OUTPUTS = 16


def quantize(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    """``model`` itself, on a CPU, whose linear maps have codes in the place of their weights.

    Embeddings and norms stay as they are. A head that shares the embedding's weight gets codes of
    its own. Other ``weights`` than ``"int8"`` and ``"int4"`` change nothing.

    Raises:
        ModuleNotFoundError: torchao is not installed, or is too old.
    """
    if is_coded(weights):
        configs = _torchao(weights)
        configs.quantize_(model, configs.config)
    return model


def is_coded(weights: str) -> bool:
    """Whether these are codes, not numbers of the model's dtype."""
    return weights in ("int8", "int4")


def linear_bytes(linear: nn.Linear, weights: str) -> int:
    """Bytes of the weight of ``linear``, or of its codes and scales."""
    outputs, inputs = linear.weight.shape
    size = linear.weight.element_size()
    if weights == "int8":
        # A scale in fp32 and a zero point for each output.
        return outputs * (inputs + 5)
    if weights == "int4":
        return outputs * (inputs // 2 + 2 * size * (inputs // GROUP))
    return linear.weight.nbytes


def check_weights_of(
    config: PreTrainedConfig, weights: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Look at ``--weights`` before a model is built.

    Raises:
        ValueError: bf16 in another dtype, codes elsewhere than on a CPU, or a linear map whose
            sizes codes of 4 bits don't divide, which torchao would leave as it is.
        ModuleNotFoundError: torchao is not installed, or is too old.
    """
    option = f"--weights {weights}"
    if weights == "bf16" and dtype != torch.bfloat16:
        raise ValueError(
            f"{option}: such a model computes in bfloat16, and --dtype is "
            f"{str(dtype).removeprefix('torch.')}: give --dtype bfloat16"
        )
    if not is_coded(weights):
        return
    if device.type != "cpu":
        raise ValueError(
            f"{option} is measured on a CPU, and the model is on {str(device)!r}: give --device "
            "cpu, or leave it out"
        )
    _torchao(weights)
    if weights == "int8":
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, one in model.named_modules():
        if isinstance(one, nn.Linear) and (one.in_features % GROUP or one.out_features % _OUTPUTS):
            raise ValueError(
                f"{option}: {name} has {one.in_features} inputs and {one.out_features} outputs, "
                f"and 4 bits take multiples of {GROUP} and {_OUTPUTS}: give int8 or another --shape"
            )


class _Torchao:
    """What is used of torchao; its settings of torch.compile and of fp32 products stay out."""

    def __init__(self, weights: str) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        self.quantize_: Any = quantize_
        if weights == "int8":
            self.config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
        else:
            # The configuration without "Prototype" has no operation for CPUs.
            self.config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)


def _torchao(weights: str) -> _Torchao:
    try:
        return _Torchao(weights)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"--weights {weights} needs torchao 0.18 or newer: pip install -U torchao"
        ) from error
