"""The dense opponent at its best: a preallocated cache that attends to what it holds, no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache, is_stranger, known_caches
from hf_kvret.models.compatibility import head_dims, model_layers
from hf_kvret.models.products import fits, linear, may_be_quicker
from hf_kvret_kernels.host_step import HostWindow, run_step, why_not

CAPTURED = ("dense-graph", "dense-compiled")
DENSE = ("dense", "dense-cpp", *CAPTURED)
CPP_ATTENTION = "hf_kvret_dense_cpp"
"""The name of ``attend_to_all`` in transformers."""


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values in buffers made once; a step writes its rows and returns views.

    ``DynamicCache`` copies everything at each step, ``StaticCache`` attends to its whole buffer
    under a mask. This does neither, and without a mask sdpa takes its fastest kernels.

    Args:
        capacity: the most tokens that it will hold.

    Attributes:
        length: tokens held. Setting it back forgets the newest.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers for tokens shaped like these, ``[B, Hkv, *, D]``."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            like.new_empty(*like.shape[:2], self.capacity, like.shape[3])
            for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in ``[B, Hkv, n, D]``; returns views of all tokens held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for ``query_length`` new queries covers."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.capacity


class PreallocatedCache(Cache):
    """A ``PreallocatedLayer`` for each layer of full attention, the model's own cache elsewhere."""

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        layers = [
            PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer
            for layer in model_layers(config)
        ]
        super().__init__(layers=layers)

    def rewind(self, length: int) -> None:
        """Forget all tokens from ``length`` on.

        Raises:
            ValueError: the model has other layers than those of full attention.
        """
        if not all(isinstance(layer, PreallocatedLayer) for layer in self.layers):
            raise ValueError(
                f"{' and '.join(CAPTURED)} replay one step, which only layers of full attention "
                "allow: use dense for this model"
            )
        for layer in self.layers:
            layer.length = length


class CppDenseCache(PreallocatedCache):
    """A preallocated cache for decode steps in C++: the floor of reading everything on a CPU.

    Raises:
        ImportError: the C++ kernels were not compiled.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        if why_not():
            raise ImportError(f"dense-cpp: {why_not()}")
        super().__init__(config, capacity)
        ALL_ATTENTION_FUNCTIONS.register(CPP_ATTENTION, attend_to_all)
        ALL_MASK_ATTENTION_FUNCTIONS.register(CPP_ATTENTION, sdpa_mask)


def bench_caches() -> list[str]:
    """Every name that ``choose_bench_cache`` takes, options left out."""
    return [*known_caches(), *DENSE]


def choose_bench_cache(
    text: str, defaults: dict[str, Any] | None = None, device: str = "cpu"
) -> CacheChoice:
    """The cache that ``text`` names: one of ``hf-kvret eval``, or of ``DENSE``.

    Raises:
        ValueError: an unknown name, a bad option, a cache that can't work here.
        ModuleNotFoundError: the package behind an opponent is missing.
    """
    name, place = text.partition(":")[0].strip(), torch.device(device).type
    if name not in bench_caches() and not is_stranger(text):
        raise ValueError(f"unknown cache {name!r}: choose among {', '.join(bench_caches())}")
    if name not in DENSE:
        return choose_cache(text, defaults, device)
    if name != text:
        raise ValueError(f"{text!r}: {name} takes no options")
    if name in CAPTURED and place != "cuda":
        raise ValueError(
            f"{name}: CUDA graphs need a CUDA device, and the model is on {device!r}: use dense "
            "here"
        )
    if name == "dense-cpp" and place != "cpu":
        raise ValueError(
            f"dense-cpp reads with the CPU kernels, and the model is on {device!r}: use dense here"
        )
    return CacheChoice(text, CppDenseCache if name == "dense-cpp" else PreallocatedCache)


def check_choices(
    choices: dict[str, CacheChoice], config: PreTrainedConfig, contexts: Sequence[int]
) -> None:
    """Look at retrieval caches before a model is built.

    Raises:
        ValueError: a context at which one would be plain attention, or head sizes that it can't
            have.
    """
    for name, options in ((name, choice.options) for name, choice in choices.items()):
        if options is None or not options.retrieves:
            continue
        for dim in head_dims(config):
            options.check_head_dim(dim)
        dense = max(options.dense_len, options.recent + options.flush + 1)
        short = [context for context in contexts if context < dense]
        if short:
            raise ValueError(
                f"--context {short[0]}: {name} attends to everything below {dense} tokens "
                f"(dense_below={options.dense_len}, recent={options.recent}, "
                f"flush={options.flush}); give a longer context, or smaller options as "
                f"{name}:dense_below=0:recent=64:flush=64"
            )


def attend_to_all(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: C++ for one query without a mask, sdpa for a prompt.

    Shapes as of ``sdpa_attention_forward``; keys and values are views ``[:, :, :n]`` of buffers.

    Raises:
        ValueError: a soft cap or learned sinks, which sdpa would leave out of the prompt.
    """
    special = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if special:
        raise ValueError(f"dense-cpp: this model's attention has {special[0]}; use full or static")
    if query.shape[2] > 1 or attention_mask is not None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = run_step(query, HostWindow(key, value, key.shape[2]), scale=scale, dtype=query.dtype)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def in_cpp(model: PreTrainedModel) -> Iterator[None]:
    """``model`` with ``attend_to_all``, and products in C++ where a retrieval cache has them."""
    every: Iterator[Any] = (module for module in model.modules() if type(module) is nn.Linear)
    linears = [module for module in every if may_be_quicker(module.weight)]
    for module in linears:
        module.forward = partial(_multiply, module)
    try:
        with attention_of(model, CPP_ATTENTION):
            yield
    finally:
        for module in linears:
            del module.forward


def _multiply(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight, module.bias
    is_quick = fits(x, weight, bias) and not torch.is_grad_enabled()
    return (linear if is_quick else nn.functional.linear)(x, weight, bias)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """``model`` with another implementation of attention, as ``"eager"`` or ``CPP_ATTENTION``."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
