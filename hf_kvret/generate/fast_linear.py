"""Linear modules of a model go through the compiled library, in passes with a retrieval cache."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.model_state import add_hooks
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.products import fits, is_hooked, linear, may_be_quicker
from hf_kvret.models.versions import cache_argument
from hf_kvret_model_patches.decoders import decoder_of


class _Passes(threading.local):
    """The modules whose pass with a retrieval cache is under way in a thread.

    One stays where Ctrl-C ends its pass, until its next one.
    """

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_passes = _Passes()


class FastLinear:
    """The ``_compiled_call_impl`` of a linear module, which copies and pickles leave out."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        is_fast = not kwargs and len(args) == 1 and _may_be_fast(module)
        if is_fast and fits(args[0], module.weight, module.bias):
            return linear(args[0], module.weight, module.bias)
        return module._call_impl(*args, **kwargs)


def _may_be_fast(module: nn.Module) -> bool:
    """Whether a pass with our cache is under way, and nobody looks at what the module does."""
    # A compiled layer has products of its own, and gradients need torch's.
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _passes.modules:
        return False
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    is_changed = is_hooked(module) or "forward" in vars(module)
    return not (modes or is_changed or torch.is_autocast_enabled("cpu"))


def speed_up(model: PreTrainedModel) -> None:
    """Have linear modules of ``model`` multiply few tokens quicker. Harmless twice."""
    # Subclasses, as adapters and quantized weights have them, compute something else.
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    linears = [module for module in linears if may_be_quicker(module.weight)]
    for module in linears:
        module._compiled_call_impl = module._compiled_call_impl or FastLinear(module)
    # Adapters of PEFT call the decoder past the model's hooks.
    for module in (model, decoder_of(model)) if linears else ():
        add_hooks(module, _before_pass, _after_pass)


def slow_down(model: PreTrainedModel) -> None:
    """Undo ``speed_up``, but for its hooks."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, FastLinear):
            module._compiled_call_impl = None


@not_compiled
def _before_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    retrieves = isinstance(cache_argument(kwargs), RetrievalCache)
    (_passes.modules.add if retrieves else _passes.modules.discard)(module)


@not_compiled
def _after_pass(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
    _passes.modules.discard(module)
