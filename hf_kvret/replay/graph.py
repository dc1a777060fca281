"""DecodeGraph: a decode step of a model with a retrieval cache, captured once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.layer.window import Capture, Window, wide_mask
from hf_kvret.models.ranks import is_split
from hf_kvret.models.versions import CACHE_NAMES, DummyLayer, cache_argument
from hf_kvret.replay.compiled_layers import compiled_steps, log_once
from hf_kvret.replay.layer_step import LayerStep, SlidingStep, StateStep, Step
from hf_kvret.replay.recorders import RECORDERS
from hf_kvret.replay.replayable import has_hooks, is_compiled, untested

_EAGER = "decode steps are not replayed from a CUDA graph: %s"
# Arguments of a decode step whose values differ from step to step.
_PER_STEP = ("input_ids", "position_ids", "cache_position")
_MASK = "attention_mask"
# Layers of transformers that can be part of a captured step.
_STEPS: dict[type, Callable[[Any], Step]] = {
    DynamicSlidingWindowLayer: SlidingStep,
    LinearAttentionLayer: StateStep,
}


class Frame:
    """Inputs of one captured step, refilled before each replay, and its output.

    Args:
        inputs: keywords of the model's forward pass for a step of one token.
        window: of the lowest layer.

    Attributes:
        inputs: the same with the frame's own tensors, and without the mask, which ``capture`` has.
        capture: where the layers put the token.
        shape: sizes and flags that the captured work depends on.
        layouts: of the layers, at the time of capture.
        output: the model's output from the capture.
        replay: runs the captured work again; None before the capture.
    """

    def __init__(self, inputs: dict[str, Any], window: Window) -> None:
        inference = torch.is_inference_mode_enabled()
        device, batch = window.keys.device, len(window.sink_slots)
        tensors, self._constants = _split(inputs)
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.inputs = {**self._constants, **self._tensors}
        padded = inputs.get(_MASK) is not None
        # One column for every slot until the window is full.
        slots = window.start + window.capacity - window.sink
        self.capture = Capture(
            column=torch.zeros(1, dtype=torch.long, device=device),
            mask=wide_mask(torch.zeros(batch, window.capacity, dtype=torch.bool, device=device)),
            slots=torch.zeros(batch, slots, dtype=torch.bool, device=device) if padded else None,
        )
        # Tensors made in inference mode can't be written to outside.
        self._inference = inference
        self.shape = (batch, window.capacity, padded, inference)
        self.layouts: list[tuple[object, ...]] = []
        self.output: Any = None
        self.replay: Callable[[], None] | None = None
        self._next_column = -1

    def fits(self, inputs: dict[str, Any]) -> bool:
        """Whether ``inputs`` differ from the frame's only in the values of tensors."""
        tensors, constants = _split(inputs)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        own_shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        padded = inputs.get(_MASK) is not None
        alike = padded == (self.capture.slots is not None)
        alike = alike and self._inference == torch.is_inference_mode_enabled()
        return alike and shapes == own_shapes and constants == self._constants

    def fill(self, inputs: dict[str, Any], window: Window) -> None:
        """Copy the values of ``inputs`` and the state of ``window`` before the step to the device.

        Without padding these are a few numbers, because nothing else has changed.
        """
        for name, target in self._tensors.items():
            target.copy_(inputs[name])
        capture, column = self.capture, window.sink + window.length
        capture.column.fill_(column)
        if capture.slots is not None:
            mask: torch.Tensor = inputs[_MASK]
            capture.slots[:, : mask.shape[1]].copy_(mask)
        if capture.slots is not None or column != self._next_column:
            before = window.validity(capture.slots)
            capture.mask[:, :column] = True if before is None else before
            capture.mask[:, column:].fill_(False)
        capture.mask[:, column] = True if capture.slots is None else capture.slots[:, window.end]
        self._next_column = column + 1


class DecodeGraph:
    """Calls a model as ``model(...)`` does, and replays steps of one token without its Python code.

    ``generate`` uses it by itself, see the option ``graph``. In your own loop:

        step = DecodeGraph(model, cache)
        logits = step(input_ids=token, position_ids=position, past_key_values=cache).logits

    Between two flushes of the window, steps differ only in one token, its position and its column
    in the window. So the first such step runs as usual, the next is captured as a CUDA graph, and
    the others replay it. A flush, a prompt or drafted tokens run as usual, and after them a step is
    captured again; the generated tokens are the same. Edits of the cache (``crop``,
    ``reorder_cache``) are detected; after a change of the model (hooks, adapters, other weights)
    make a new object. The graph and its memory are freed with this object.

    Args:
        model: switched to our attention (``hf_kvret.attach``), in eval mode.
        cache: the one that every call gets as ``past_key_values``.

    Attributes:
        reason: why the newest step ran as usual, permanently or because of its inputs; None if
            steps are replayed. Logged once.
        captures: how often a step was captured.
        replays: steps that were replayed.
        eager: calls that ran as usual.
        compiled: runs the layers of the model compiled, see the option ``compile``; None: they are
            not.

    Raises:
        TypeError: a cache of another class.
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache) -> None:
        if not isinstance(cache, RetrievalCache):
            raise TypeError(
                f"cache is a {type(cache).__name__}: only steps with a retrieval cache are "
                "replayed; make one, as hf_kvret.ParisKVCache(model.config), or call the model"
            )
        self.reason: str | None = None
        self.captures = self.replays = self.eager = 0
        self._cache = cache
        self._layers = [LayerStep(layer) for layer in cache.retrieval_layers]
        others = foreign_layers_of(cache.layers).values()
        self._others: list[Step] = [_STEPS[type(x)](x) for x in others if type(x) in _STEPS]
        self._frame: Frame | None = None
        # Shape of the last rehearsal, and the layers' edits after the last step of one token: a
        # step is captured only if the one before it ran the same way, through this object.
        self._rehearsal_shape: tuple[Any, ...] = ()
        self._plain_edits = -1
        self._given_up = self._waited = False
        self._recorder: Any = None
        reason = why_not(model, cache)
        self.compiled = compiled_steps(model, cache, replayed=reason is None)
        self._model: Callable[..., Any] = self.compiled or model
        if reason is None:
            try:
                self._recorder = RECORDERS[model.device.type](model.device)
            except RuntimeError as error:
                reason = str(error)
        if reason is not None:
            # No warning where nobody expects a graph: on a CPU, or without any GPU.
            quietly = model.device.type == "cpu" or not torch.cuda.is_available()
            self._give_up(reason, quietly)

    def __call__(self, **inputs: Any) -> Any:
        """The model's output for ``inputs``, the keywords of its forward pass.

        Its tensors are the caller's own: later steps don't change them.
        """
        is_ready = self.compiled is None or self.compiled.is_ready(inputs)
        if not self._given_up and is_ready and self._is_plain(inputs):
            self.reason = self._refusal(inputs)
            if self.reason is None:
                tokens, start = self._cache.tokens, self._cache.get_seq_length()
                tokens.crop(start)
                output = self._step(inputs)
                if len(tokens) <= start:
                    tokens.write(inputs["input_ids"], start)
                return output
            log_once(logging.WARNING, _EAGER, self.reason)
        return self._usual(inputs)

    def _usual(self, inputs: dict[str, Any]) -> Any:
        """Run the model as usual."""
        self._frame = None
        self.eager += 1
        output = self._model(**inputs)
        # After a step of one token, everything outside the window is ready for a captured one.
        self._plain_edits = self._edits() if _tokens(inputs) == 1 else -1
        return output

    def _is_plain(self, inputs: dict[str, Any]) -> bool:
        """Whether this is a step of one token between two flushes."""
        if cache_argument(inputs) is not self._cache or _tokens(inputs) != 1:
            return False
        # With gradients on, a step raises, but a replay would not.
        if torch.is_grad_enabled() or not all(layer.is_plain() for layer in self._steps):
            return False
        batch, mask = len(inputs["input_ids"]), inputs.get("attention_mask")
        if batch != self._cache.retrieval_layers[0].batch_size:
            return False
        return mask is None or mask.shape == (batch, self._cache.get_seq_length() + 1)

    def _refusal(self, inputs: dict[str, Any]) -> str | None:
        """Why a plain step with these inputs is not replayed."""
        if self._others and inputs.get("attention_mask") is not None:
            return "the batch is padded, which layers that slide, or keep a state, do not know"
        if inputs.get("position_ids") is None:
            return "the model gets no position_ids, so it counts tokens on the host"
        for name, value in _split(inputs)[1].items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if not plain and name not in CACHE_NAMES:
                return f"the model is given {name}, a {type(value).__name__}"
        for name in ("output_hidden_states", "output_attentions"):
            if inputs.get(name):
                return f"{name}=True"
        return None

    def _step(self, inputs: dict[str, Any]) -> Any:
        # The window of the lowest layer: all have the same length and sinks.
        frame, window = self._frame, self._layers[0].kv.window
        layouts = [step.layout for step in self._layers]
        if frame is None or frame.layouts != layouts or not frame.fits(inputs):
            self._frame = None
            frame = Frame(inputs, window)
        frame.fill(inputs, window)
        if frame.replay is not None:
            # The host counts a token that the device has not written yet.
            with SIGNALS_WAIT:
                for layer in self._steps:
                    layer.before_replay()
                frame.replay()
        elif self._rehearsal_shape != frame.shape or self._plain_edits != self._edits():
            return self._rehearse(frame)
        elif (why := self._capture(frame)) is not None:
            self._give_up(why)
            return self._usual(inputs)
        else:
            assert frame.replay is not None, "a captured step has a replay"
            frame.replay()
        self.replays += 1
        # Objects other than tensors, such as the cache, are shared.
        return pytree.tree_map_only(torch.Tensor, torch.clone, frame.output)

    def _rehearse(self, frame: Frame) -> Any:
        """Run a step as it will be captured, but for real."""
        self.eager += 1
        output, why = self._recorder.rehearse(lambda: self._forward(frame))
        self._rehearsal_shape, self._plain_edits = frame.shape, self._edits()
        self._keep(frame)
        if why is None:
            self._waited = False
        elif self._waited:
            self._give_up(why)
        else:
            # Initialization at first use may synchronize, so one more try.
            self._waited, self._rehearsal_shape = True, ()
        return output

    def _capture(self, frame: Frame, again: bool = True) -> str | None:
        """Capture a step into ``frame``. On failure returns why and leaves the cache unchanged.

        ``again``: retry once if memory runs out.
        """
        why = next(filter(None, (layer.capture_obstacle for layer in self._steps)), None)
        if why is not None:
            return why
        for layer in self._steps:
            layer.before_capture()
        try:
            frame.output, frame.replay = self._recorder.record(lambda: self._forward(frame))
        except BaseException as error:
            frame.output = frame.replay = None
            for layer in self._steps:
                layer.capture_failed()
            if not isinstance(error, RuntimeError):
                raise
            lines = str(error).strip().splitlines()
            why = f"a step could not be captured: {lines[0] if lines else type(error).__name__}"
            if isinstance(error, torch.OutOfMemoryError):
                # The recorder has emptied the allocator's cache: there may be room now.
                return self._capture(frame, again=False) if again else why
            return why
        for layer in self._steps:
            layer.captured()
        self.captures += 1
        self._keep(frame)
        return None

    def _forward(self, frame: Frame) -> Any:
        """The model's output for the frame's inputs, with the token placed by ``frame.capture``."""
        for layer in self._steps:
            layer.set_capture(frame.capture)
        # A replay would write the ids where they were at the capture; see `__call__`.
        self._cache.tokens.owner, self._cache.tokens.start = self, self._cache.get_seq_length()
        try:
            return self._model(**frame.inputs)
        finally:
            self._cache.tokens.owner = None
            for layer in self._steps:
                layer.set_capture(None)

    @property
    def _steps(self) -> list[Step]:
        return [*self._layers, *self._others]

    def _keep(self, frame: Frame) -> None:
        frame.layouts, self._frame = [step.layout for step in self._layers], frame

    def _edits(self) -> int:
        return sum(step.layer.edits for step in self._layers)

    def _give_up(self, reason: str, quietly: bool = False) -> None:
        self.reason, self._given_up = reason, True
        self._frame = self._recorder = None
        log_once(logging.DEBUG if quietly else logging.WARNING, _EAGER, reason)


def why_not(model: PreTrainedModel, cache: RetrievalCache) -> str | None:
    """Why decode steps of ``model`` with ``cache`` can't be replayed; None if no reason is known.

    Reasons that depend on the layers' stores, which the prompt creates, show at the first step.
    """
    device = model.device
    if cache.options.graph is False:
        return "graph=False"
    if device.type == "meta":
        return "the model's weights are offloaded"
    if device.type not in RECORDERS:
        return f"the model is on {device}, and only {', '.join(RECORDERS)} devices have graphs"
    if {parameter.device for parameter in model.parameters()} != {device}:
        return "the model's weights lie on several devices"
    if is_split(model):
        return "the model is split over processes, and their exchange was not tried in a graph"
    foreign = foreign_layers_of(cache.layers).values()
    others = [x for x in foreign if not (isinstance(x, DummyLayer) or type(x) in _STEPS)]
    if others:
        return f"{len(others)} layers keep a {type(others[0]).__name__}, which grows at each step"
    if model.training:
        return "the model is in training mode"
    if any(has_hooks(module) for module in model.modules()):
        return "modules of the model have hooks, which a replay would not call"
    if is_compiled(model):
        return "the model is compiled"
    if not getattr(getattr(model, "hf_quantizer", None), "is_compileable", True):
        return "the model's quantization can't be captured"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    return untested(model)


def _tokens(inputs: dict[str, Any]) -> int:
    """Tokens of each sequence in this call; 0 for embeddings."""
    tokens = inputs.get("input_ids")
    return 0 if tokens is None else int(tokens.shape[1])


def _split(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that change from step to step, without the mask; and the other arguments."""
    tensors = {name: inputs[name] for name in _PER_STEP if inputs.get(name) is not None}
    constants = {name: x for name, x in inputs.items() if name not in (*_PER_STEP, _MASK)}
    return tensors, constants
