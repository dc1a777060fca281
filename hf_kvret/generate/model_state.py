"""Gives a model, for each pass and call, what it keeps of the conversation in the cache at hand.

``hf_kvret.models.kept_state`` says what that is. Models that keep nothing get no hooks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.requests import Request, current_request
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.kept_state import (
    is_shift,
    read_state,
    shifts,
    stateful_attributes,
    write_state,
)
from hf_kvret.models.versions import cache_argument
from hf_kvret.saved.identity import without_wrapper
from hf_kvret_model_patches.decoders import decoder_of

# The model that a hooked module is part of.
_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
# The newest pass, or preparation of a call, of each model.
_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Use:
    """A pass of a model that keeps something, or the preparation of a call before its first pass.

    What the model keeps lies on it, so one thread can use it at a time. Nobody waits: a thread that
    comes while another one runs the model is refused.

    Attributes:
        module: the outermost one of the pass; None in a preparation.
        retrieves: whether it uses a retrieval cache.
        before: what the model kept when the preparation began.
        start: tokens in the cache before the pass.
        positions: position ids as the innermost hooked module got them.
        thread: that it runs in.
        is_over: whether it has ended; a pass that a KeyboardInterrupt broke off never does.
        has_refused: whether a thread was refused for it. The next one is not, as it may be broken.
    """

    module: nn.Module | None
    retrieves: bool
    before: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    positions: torch.Tensor | None = None
    thread: int = field(default_factory=threading.get_ident)
    is_over: bool = False
    has_refused: bool = False

    def runs_here(self) -> bool:
        """Whether it is running, in this thread."""
        return not self.is_over and self.thread == threading.get_ident()

    def end(self) -> None:
        """It is over, and refers to no model: the dictionary of uses would keep it alive."""
        self.is_over, self.module, self.positions, self.before = True, None, None, {}

    def begin(self, model: nn.Module) -> None:
        """Become the newest use of ``model``; RuntimeError while another thread runs it."""
        newest = _uses.get(model)
        if newest is not None and (self.retrieves or newest.retrieves):
            # It may be running, in another thread.
            is_elsewhere = not newest.is_over and newest.thread != self.thread
            if is_elsewhere and not newest.has_refused:
                newest.has_refused = True
                _refuse(model)
        _uses[model] = self


def _refuse(model: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"two threads ran one {type(model).__name__} at the same time, which keeps positions of "
        "its conversation (or a pass broke off in the other thread: then try again): run one call "
        "at a time, or give each thread its own model (copy.deepcopy)"
    )


def keep_state(model: PreTrainedModel) -> None:
    """Have the passes of ``model`` with a retrieval cache use what that cache keeps of it."""
    model = without_wrapper(model)
    if not stateful_attributes(model):
        return
    for module in _hooked(model):
        _models[module] = weakref.ref(model)
        add_hooks(module, _before_pass, _after_pass)


def add_hooks(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Have ``before`` and ``after`` called around passes, also failed ones; once if done twice."""
    if before not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)


def remove_hooks(model: PreTrainedModel) -> None:
    """Take away all that ``add_hooks`` put on ``model`` and in it. Twice is harmless."""
    for module in {model, *_hooked(without_wrapper(model))}:
        for key in [key for key, hook in module._forward_pre_hooks.items() if _is_ours(hook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key in [key for key, hook in module._forward_hooks.items() if _is_ours(hook)]:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _is_ours(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith(f"{__package__}.")


def _hooked(model: PreTrainedModel) -> set[nn.Module]:
    """The model, its base model, which adapters of PEFT call, and its text model."""
    return {model, model.base_model, decoder_of(model)}


def _model_of(module: Any) -> nn.Module:
    """The model that ``module`` is part of; itself in a copy of a model, which has our hooks."""
    reference = _models.get(module)
    model = None if reference is None else reference()
    if model is None:
        model = module
        _models.update({part: weakref.ref(module) for part in _hooked(module)})
    return model


def prepare_state(call: Request) -> None:
    """Have ``generate`` prepare positions with what the cache of ``call`` keeps."""
    model = call.model
    # A function from a folder may call `generate` itself, in any thread.
    if not stateful_attributes(model) or isinstance(call.arguments.get("custom_generate"), str):
        return
    use, cache = _Use(None, call.retrieves), cache_argument(call.arguments)
    use.begin(model)
    call.preparation = use
    if isinstance(cache, RetrievalCache):
        state, prompt = dict(cache.model_state.values()), call.prompt()[1]
        rows = len(prompt) if prompt is not None and prompt.ndim > 1 else 1
        for name, x in state.items():
            if is_shift(name) and x is not None:
                # One row for each of the prompt's, which `generate` repeats for beams.
                state[name] = x[:: max(1, len(x) // rows)]
        write_state(model, state)
    use.before = read_state(model)


def keep_prepared(call: Request) -> None:
    """Keep, in ``call``, what ``generate`` has set on the model for the first pass.

    A draft's passes, or those of a caller's own loop, may change it before. RuntimeError where
    another thread ran the model in the meantime.
    """
    model, use = call.model, call.preparation
    if use is None:
        return
    newest = _uses[model]
    if newest.thread != use.thread and (use.retrieves or newest.retrieves):
        _refuse(model)
    now = read_state(model)
    call.prepared_state = {name: x for name, x in now.items() if x is not use.before[name]}
    use.end()
    call.preparation = None


def end_use(call: Request) -> None:
    """Note that ``call`` is over, also where it broke off."""
    use = _uses.get(call.model)
    if use is not None and use.runs_here():
        use.end()


# A compiled model would trace the hooks.
@not_compiled
def _before_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the model what the cache keeps, at the outermost of its modules.

    A pass with another cache counts, too: it writes what the model keeps.
    """
    cache, model = _cache_of(args, kwargs), _model_of(module)
    use = _uses.get(model)
    if use is None or not use.runs_here() or use.module in (None, module):
        use = _Use(module, cache is not None)
        use.begin(model)
        if cache is not None:
            state, call = cache.model_state.values(), current_request(model)
            if call.cache is cache:
                # In its first pass, what `generate` prepared.
                state, call.prepared_state = state | call.prepared_state, {}
            write_state(model, state)
            use.start = cache.get_seq_length()
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        use.positions = kwargs["position_ids"]


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RetrievalCache | None:
    """The retrieval cache among the arguments of a pass, by name or by position."""
    values = (cache_argument(kwargs), *args)
    return next((value for value in values if isinstance(value, RetrievalCache)), None)


@not_compiled
def _after_pass(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Keep the model's state in its cache.

    RuntimeError where another thread ran the model in the meantime.
    """
    cache, model = _cache_of(args, kwargs), _model_of(module)
    use = _uses.get(model)
    is_own = use is not None and use.runs_here()
    if use is None or (is_own and use.module is not module):
        return
    # A pass that failed has no output, and the cache has not gone on.
    if output is not None and not is_own and (use.retrieves or cache is not None):
        _refuse(model)
    if output is not None and is_own and cache is not None:
        _keep(model, cache, use, kwargs.get("attention_mask"))
    if is_own:
        use.end()


def _keep(model: nn.Module, cache: RetrievalCache, use: _Use, mask: Any) -> None:
    """Keep what ``model`` keeps after a pass, whose attention mask was ``mask``, in ``cache``."""
    state, now = cache.model_state, read_state(model)
    start, end = use.start, cache.get_seq_length()
    rows = cache.retrieval_layers[0].batch_size
    positions, cuts = use.positions, None
    if positions is not None and positions.shape[-1] != end - start:
        positions = None
    has_mask = mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (rows, end))
    if state.changed(now) and has_mask and positions is not None:
        cuts = shifts(positions, mask, start, state.shift, rows)
    state.record(now, start, end, rows, cuts)
