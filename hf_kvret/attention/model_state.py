"""Gives a model, for each pass and call, what it keeps of the conversation in the cache at hand.

``hf_kvret.models.kept_state`` says what that is. Models that keep nothing get no hooks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvret.attention.requests import Request, current_request, is_using
from hf_kvret.cache import RetrievalCache
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.kept_state import is_shift, kept, put, shifts, take
from hf_kvret.models.versions import cache_argument
from hf_kvret.saved.identity import without_wrapper
from hf_kvret_model_patches.decoders import decoder_of

# The model that a hooked module is part of.
_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[nn.Module, _Turn] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()
# Seconds after which a thread that waits looks whether the other one is still there.
_PATIENCE = 1.0


class _Turn:
    """The thread that may use what one model keeps: passes of different threads take turns.

    Attributes:
        module: the outermost one of the running pass; None between passes.
        before: what the model kept when the preparation of a call began.
        start: tokens in the cache before the pass.
        has_positions: the caller gave position ids.
        positions: position ids as the innermost hooked module got them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self.module: nn.Module | None = None
        self.before: dict[str, Any] = {}
        self.start = 0
        self.has_positions = False
        self.positions: torch.Tensor | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def begin(self, module: nn.Module | None) -> None:
        """Wait for the turn. A thread whose pass broke off has it until another one asks."""
        if not self.is_mine:
            while not self._lock.acquire(timeout=_PATIENCE):
                self._end_broken()
            self._owner = threading.get_ident()
        self.module, self.positions = module, None

    def _end_broken(self) -> None:
        """Take the turn from a thread whose pass a KeyboardInterrupt or the like ended.

        torch calls no hooks then. The pass has ended if its thread is not inside the module.
        """
        with _turns_lock:
            owner, module = self._owner, self.module
            if owner and module is not None and not _runs(owner, module):
                self._owner, self.module = 0, None
                self._lock.release()

    def end(self) -> None:
        """Let the next thread go on, if this one has the turn."""
        if self.is_mine:
            self.module, self.positions, self.before = None, None, {}
            self._owner = 0
            self._lock.release()


def _runs(thread: int, module: nn.Module) -> bool:
    """Whether a thread is inside a call of ``module``."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def _turn_of(model: nn.Module) -> _Turn:
    with _turns_lock:
        return _turns.setdefault(model, _Turn())


def keep_state(model: PreTrainedModel) -> None:
    """Have the passes of ``model`` with a retrieval cache use what that cache keeps of it."""
    model = without_wrapper(model)
    if not kept(model):
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


@contextmanager
def state_of_call(call: Request) -> Iterator[None]:
    """Context of a call of ``generate``: it prepares positions with what its cache keeps.

    Until ``keep_prepared`` other threads with the same model wait.
    """
    model = call.model
    # A function from a folder may call `generate` itself, in any thread.
    if not kept(model) or isinstance(call.arguments.get("custom_generate"), str):
        yield
        return
    turn, cache = _turn_of(model), cache_argument(call.arguments)
    turn.begin(None)
    try:
        if isinstance(cache, RetrievalCache):
            put(model, _for_prompt(cache.model_state.values(), call))
        turn.before = take(model)
        yield
    finally:
        turn.end()


def _for_prompt(state: dict[str, Any], call: Request) -> dict[str, Any]:
    """``state`` with one row for each of the prompt's, which ``generate`` repeats for beams."""
    prompt = call.prompt()[1]
    rows = len(prompt) if prompt is not None and prompt.ndim > 1 else 1
    return {
        name: value[:: max(1, len(value) // rows)]
        if is_shift(name) and value is not None
        else value
        for name, value in state.items()
    }


def keep_prepared(call: Request) -> None:
    """Keep, in ``call``, what ``generate`` has set on the model for the first pass."""
    model = call.model
    if not kept(model):
        return
    turn = _turn_of(model)
    if turn.is_mine:
        before = turn.before
        now = take(model)
        call.prepared_state = {name: now[name] for name in now if now[name] is not before[name]}
    turn.end()


# A compiled model would trace the hooks.
@not_compiled
def _before_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the model what the cache keeps, at the outermost of its modules.

    A pass with another cache only takes its turn: it writes what the model keeps, too.
    """
    cache, model = _cache_of(args, kwargs), _model_of(module)
    turn = _turn_of(model)
    is_outermost = not turn.is_mine or turn.module in (None, module)
    if is_outermost:
        turn.begin(module)
    if cache is None:
        return
    if is_outermost:
        try:
            put(model, _state_of_pass(model, cache))
        except ValueError:
            turn.end()
            raise
        turn.start = cache.get_seq_length()
        turn.has_positions = kwargs.get("position_ids") is not None
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        turn.positions = kwargs["position_ids"]


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RetrievalCache | None:
    """The retrieval cache among the arguments of a pass, by name or by position."""
    values = (cache_argument(kwargs), *args)
    return next((value for value in values if isinstance(value, RetrievalCache)), None)


def _state_of_pass(model: Any, cache: RetrievalCache) -> dict[str, Any]:
    """What the cache keeps, and in the first pass of a call what ``generate`` prepared."""
    state, call = cache.model_state.values(), current_request(model)
    if call.cache is not cache or not call.prepared_state:
        return state
    prepared, call.prepared_state = call.prepared_state, None
    return state | prepared


@not_compiled
def _after_pass(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Keep the model's state in its cache, and let other threads go on, also after a failure."""
    cache, model = _cache_of(args, kwargs), _model_of(module)
    turn = _turn_of(model)
    if not turn.is_mine or turn.module is not module:
        return
    try:
        # A pass that failed has no output, and the cache has not gone on.
        if output is not None and cache is not None:
            _keep(model, cache, turn, kwargs.get("attention_mask"))
    finally:
        turn.end()


def _keep(model: nn.Module, cache: RetrievalCache, turn: _Turn, mask: Any) -> None:
    """Keep what ``model`` keeps after a pass, whose attention mask was ``mask``, in ``cache``."""
    state, now = cache.model_state, take(model)
    start, end = turn.start, cache.get_seq_length()
    rows = cache.retrieval_layers[0].batch_size
    shift = next((name for name in now if is_shift(name)), None)
    # Positions of a caller's own loop may have passed the model by.
    is_own = turn.has_positions and end - start > 1 and not is_using(cache)
    positions, cuts = turn.positions, None
    if positions is not None and positions.shape[-1] != end - start:
        positions = None
    has_mask = mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (rows, end))
    is_new = is_own or state.changed(now)
    if shift is not None and is_new and has_mask and positions is not None:
        cuts = shifts(positions, mask, start, state.shift, rows)
        if not state.changed(now):
            now[shift] = cuts[:, -1:].long()
    state.note(now, start, end, rows, cuts)
