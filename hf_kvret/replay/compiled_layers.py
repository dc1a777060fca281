"""Decoder layers compiled for decode steps, around one operation that is the cache and attention.

Beside attention and matrix products, a stock layer is dozens of kernels, which ``torch.compile``
fuses where it can trace the layer as a whole. It can't trace what a retrieval cache does, whose
lengths differ at every step. So a compiled layer gets a ``StandIn`` for its cache and a ``Marker``
for its mask, by which our attention knows to be the operation ``hf_kvret::attend``. That does the
work of a usual step, with the cache, mask and keywords that the layer's caller left for its thread.
No layer number and no tensor that grows is in the graph: layers that are alike share one.

In the first step each layer runs as it is, and records how it calls its attention. The second step
compiles. Prompts and drafts run the layers as they are.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
import types
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import lookup_backend
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.latent import LatentLayer
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.compatibility import reader_count
from hf_kvret.models.products import speed_up_graph
from hf_kvret.models.ranks import is_split
from hf_kvret.models.versions import cache_argument
from hf_kvret.replay.replayable import has_hooks, is_compiled
from hf_kvret_model_patches.decoders import decoder_of

BACKEND: Any = "inductor"
"""Compiles the layers: a ``backend`` of ``torch.compile``."""

_log = logging.getLogger("hf_kvret.replay")
# Graphs of one model: one for each type of layer and batch size.
_MOST_GRAPHS = 64
# Seconds of compiling after which the log says what goes on.
_PATIENCE = 5
_GOES_ON = "torch compiles the layers of %s for more than %d s: 'compile': False does without"
_PLAIN = "the layers of %s are not compiled: %s"
_COMPILED = "the layers of %s were compiled for decode steps of %d sequences in %.1f s"
# One thread compiles at a time: the limit of graphs belongs to the process.
_compiling = threading.Lock()
_OUTPUTS = ("output_hidden_states", "output_attentions")


class StandIn:
    """In place of the cache in a compiled layer, which does without all but this method."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values as they are: ``hf_kvret::attend`` gives them to the cache."""
        return key, value


class Marker:
    """In place of the mask in a compiled layer: attention is to be ``hf_kvret::attend``."""


_STAND_IN, _MARKER = StandIn(), Marker()


class _Now(threading.local):
    """What a thread is doing.

    Attributes:
        steps: whose step is under way; None: layers run as they are.
        attend: what ``hf_kvret::attend`` does, in a compiled layer.
        calls: of attention in the layer that records them, each with its module, mask and other
            keywords; None: none does.
    """

    steps: CompiledSteps | None = None
    attend: Callable[..., torch.Tensor] | None = None
    calls: list[tuple[nn.Module, Any, dict[str, Any]]] | None = None


NOW = _Now()


def attend_now(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What ``hf_kvret::attend`` does: take keys and values in, and attend, ``[B, Q, Hq, Dv]``.

    Who follows single operations calls this in its place. Tensors are ``[B, heads, Q, D]``.
    RuntimeError: no compiled layer of this thread is under way.
    """
    if NOW.attend is None:
        raise RuntimeError(
            "hf_kvret::attend was called outside of a decode step: a graph of a compiled layer "
            "runs in hf_kvret.DecodeGraph and in generate alone"
        )
    return NOW.attend(query, key, value)


# Defined as such, an operation takes half the time of a ``custom_op`` to call.
torch.library.define("hf_kvret::attend", "(Tensor query, Tensor key, Tensor value) -> Tensor")
torch.library.impl("hf_kvret::attend", "CompositeExplicitAutograd", attend_now)
attend = torch.ops.hf_kvret.attend.default


@torch.library.register_fake("hf_kvret::attend")
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[-1])


class _RefusedError(Exception):
    """A layer does what a compiled one can't."""


class CompiledLayer:
    """The ``_compiled_call_impl`` of one decoder layer, which copies and pickles leave out."""

    def __init__(self, layers: CompiledLayers, layer: nn.Module, number: int) -> None:
        self._layers, self._layer, self._number = layers, weakref.ref(layer), number
        self._usage: _Usage | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, steps = self._layer(), NOW.steps
        assert layer is not None, "it calls this"
        plain = functools.partial(layer._call_impl, *args, **kwargs)
        if steps is None or steps.layers is not self._layers or self._layers.why is not None:
            return plain()
        held = next(iter(steps.cache.layers[self._number :]), None)
        if not isinstance(held, RetrievalLayer | DynamicLayer):
            # A recurrent layer, or one without attention.
            return plain()
        if self._usage is None:
            return self._record(plain, steps, held, {**dict(enumerate(args)), **kwargs})
        try:
            return self._run(layer, steps, args, kwargs)
        except TorchDynamoException as error:
            if steps.has_attended:
                raise
            self._layers.refuse(_reason(error))
            return plain()

    def _record(
        self, plain: Callable[[], Any], steps: CompiledSteps, held: Any, arguments: dict[Any, Any]
    ) -> Any:
        """Run the layer as it is, and learn how it calls its attention."""
        length, NOW.calls = held.get_seq_length(), []
        try:
            out, calls = plain(), NOW.calls
        finally:
            NOW.calls = None
        steps.has_recorded = True
        try:
            if len(calls) != 1:
                raise _RefusedError(f"a layer attends {len(calls)} times")
            number = getattr(calls[0][0], "layer_idx", None)
            if held.get_seq_length() != length + 1 or number != self._number:
                raise _RefusedError("a layer reads the keys of another one")
            self._usage = _Usage(*calls[0], arguments)
        except _RefusedError as error:
            self._layers.refuse(str(error))
        return out

    def _run(
        self, layer: nn.Module, steps: CompiledSteps, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the compiled layer."""
        usage = self._usage
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        assert usage is not None, "the first step has made it"
        mask = given[usage.mask_at]
        assert mask is not None, "our mask function gives one for every pass"

        def attend_here(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            steps.has_attended = True
            key, value = steps.cache.update(key, value, self._number)
            module, keywords = usage.module(), usage.keywords(given)
            function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
            out: torch.Tensor = function(module, query, key, value, mask, **keywords)[0]
            return out.contiguous()

        def replaced(argument: Any) -> Any:
            if argument is mask or argument is steps.cache:
                return _MARKER if argument is mask else _STAND_IN
            if not isinstance(argument, torch.Tensor):
                return argument
            dense = argument.contiguous()
            # Strides are those that the shape tells: guards are for strides, too.
            return dense if known else dense.view(-1).view(argument.shape)

        known = steps.functions.get(self._number)
        arguments = layer, tuple(map(replaced, args)), {x: replaced(y) for x, y in kwargs.items()}
        is_new = steps.key not in self._layers.ready
        NOW.attend, steps.has_attended = attend_here, False
        try:
            out = (known or (self._layers.compile if is_new else self._layers.run))(*arguments)
        finally:
            NOW.attend = None
        assert steps.has_attended, "the graph has the operation"
        if known is None:
            steps.functions[self._number] = self._layers.function(*arguments)
        return out


class _Usage:
    """How a layer calls its attention: what is the same at every step, and what it passes on.

    Learned of a step that ran as usual, where the layer had these ``arguments`` by position or
    name. _RefusedError: it makes one of the keywords of attention anew.

    Attributes:
        mask_at: position or name of the mask among the arguments.
        module: weakly, the attention.
    """

    def __init__(
        self, module: nn.Module, mask: Any, keywords: dict[str, Any], arguments: dict[Any, Any]
    ) -> None:
        self.module: Any = weakref.ref(module)
        places = [place for place, x in arguments.items() if x is mask and x is not None]
        if not places:
            raise _RefusedError("a layer changes its attention mask")
        self.mask_at = places[0]
        self._constants: dict[str, Any] = {}
        self._passed: list[str] = []
        # Names of parameters, which may be replaced, by that of the keyword.
        self._parameters: dict[str, str] = {}
        own = {id(x): name for name, x in module.named_parameters(recurse=False)}
        for name, value in keywords.items():
            if name in arguments and arguments[name] is value:
                self._passed.append(name)
            elif id(value) in own:
                self._parameters[name] = own[id(value)]
            elif isinstance(value, torch.Tensor):
                raise _RefusedError(f"a layer makes {name} for its attention")
            else:
                self._constants[name] = value

    def keywords(self, arguments: dict[Any, Any]) -> dict[str, Any]:
        """Those of the attention, in a step that gives the layer these arguments."""
        own = {name: getattr(self.module(), of) for name, of in self._parameters.items()}
        return {**self._constants, **own, **{name: arguments[name] for name in self._passed}}


class CompiledLayers:
    """The decoder layers of one model, compiled or to be compiled.

    Attributes:
        why: why they stay as they are; None: they are compiled.
        ready: kinds of steps, see ``CompiledSteps.key``, that compile nothing any more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.why: str | None = None
        self._name = type(model).__name__
        for number, layer in enumerate(_decoder_layers(model)):
            layer._compiled_call_impl = CompiledLayer(self, layer, number)
        self._seconds = 0.0
        self.ready: set[tuple[int, bool]] = set()
        # Graphs belong to a function's code: with its own a model can't use up another's limit.
        self._code = _forward.__code__.replace(co_name=f"forward_of_{self._name}")
        own = types.FunctionType(self._code, globals())
        self._forward = torch.compile(own, backend=_build, fullgraph=True, dynamic=False)

    def run(self, *arguments: Any) -> Any:
        """The output of a layer with ``args`` and ``kwargs``, compiled.

        A mode that follows operations sees those of the layer itself: beneath it torch uses no
        graph, and would never compile the function again.
        """
        followed = torch._C._len_torch_dispatch_stack() > 0
        return (_forward if followed else self._forward)(*arguments)

    def function(self, *arguments: Any) -> Callable[..., Any]:
        """What ``run`` calls once torch's guards have passed, for arguments that it was given."""
        named = dict(zip(("layer", "args", "kwargs"), arguments, strict=True))
        entries = _debug_get_cache_entry_list(self._code)
        codes = [x.code for x in entries if x.guard_manager.check(named)]
        return types.FunctionType(codes[0], globals()) if codes else self.run

    def compile(self, *arguments: Any) -> Any:
        """As ``run``, for the first time with tensors of these shapes."""
        hint = threading.Timer(_PATIENCE, _log.warning, (_GOES_ON, self._name, _PATIENCE))
        start = time.perf_counter()
        hint.start()
        try:
            with _compiling, torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
                return self.run(*arguments)
        finally:
            hint.cancel()
            self._seconds += time.perf_counter() - start

    def end_step(self, steps: CompiledSteps) -> None:
        """A decode step is over: log how long it compiled."""
        if self._seconds:
            _log.info(_COMPILED, self._name, steps.key[0], self._seconds)
            self._seconds = 0.0
        if not steps.has_recorded:
            self.ready.add(steps.key)

    def refuse(self, reason: str) -> None:
        """Leave the layers as they are from here on, and log the reason."""
        self.why = reason
        log_once(logging.WARNING, _PLAIN, self._name, reason)


def _build(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """The backend of ``torch.compile``: ``BACKEND``, with products of our own where quicker."""
    speed_up_graph(graph)
    # Threads that wait for the next loop of a few thousand numbers hinder those of attention.
    own = {"config_patches": {"cpp.threads": 1}} if BACKEND == "inductor" else {}
    return lookup_backend(BACKEND)(graph, inputs, **own)


def _forward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)


class CompiledSteps:
    """Calls a model as ``model(...)`` does; decode steps of one cache run its compiled layers.

    Attributes:
        key: batch size of the step under way, and whether it is in inference mode, as a graph has.
        functions: what layers call, by number, once torch's guards passed, a tenth of a step.
        has_recorded: whether a layer recorded in it how it calls its attention.
        has_attended: whether the newest compiled layer got as far as its attention.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, layers: CompiledLayers
    ) -> None:
        self._model, self.cache, self.layers = model, cache, layers
        self.key = (0, False)
        self.functions: dict[int, Callable[..., Any]] = {}
        self.has_recorded = self.has_attended = False
        # The step before had this state, and saw these parts of modules, which the holders keep.
        self._state = GlobalStateGuard()
        self._seen: list[object] = []
        self._holders: list[Any] = []

    def __call__(self, **inputs: Any) -> Any:
        """The model's output for ``inputs``, the keywords of its forward pass."""
        key = self._key_of(inputs)
        if key is None or self._look(key, inputs):
            return self._model(**inputs)
        self.key, self.has_recorded = key, False
        before, NOW.steps = NOW.steps, self
        try:
            output = self._model(**inputs)
        finally:
            NOW.steps = before
        self.layers.end_step(self)
        return output

    def _look(self, key: tuple[int, bool], inputs: dict[str, Any]) -> bool:
        """Forget the functions if the step is unlike the one before; returns whether hooks run."""
        given: list[object] = [*key]
        for name, x in inputs.items():
            # The last size is left out, as a mask grows from step to step.
            given += (name, x.dtype, *x.shape[:-1]) if isinstance(x, torch.Tensor) else (name, x)
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        seen = [modes, *given, *chain.from_iterable(self._holders)]
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if same and self._state.check():
            return False
        self.functions.clear()
        modules = [one for layer in _decoder_layers(self._model) for one in layer.modules()]
        is_hooked = any(map(has_hooks, modules))
        own = [vars(module) for module in modules]
        parts = [x for one in own for x in one.values() if type(x) in (dict, list)]
        hooks = [x for one in modules for x in (one._forward_hooks, one._forward_pre_hooks)]
        self._holders = [x if isinstance(x, list) else x.values() for x in (*own, *parts, *hooks)]
        seen = [modes, *given, *chain.from_iterable(self._holders)]
        # With hooks, or under a mode, every step is unlike the one before.
        self._seen, self._state = [] if modes or is_hooked else seen, GlobalStateGuard()
        return is_hooked

    def is_ready(self, inputs: dict[str, Any]) -> bool:
        """Whether a call with these inputs compiles nothing."""
        key = self._key_of(inputs)
        return key is None or self.layers.why is not None or key in self.layers.ready

    def _key_of(self, inputs: dict[str, Any]) -> tuple[int, bool] | None:
        """See ``key``; None for what is no decode step, and runs the layers as they are."""
        tokens = inputs.get("input_ids")
        if tokens is None or tokens.shape[1] != 1 or cache_argument(inputs) is not self.cache:
            return None
        unlike = torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type)
        if unlike or any(map(inputs.get, _OUTPUTS)) or not self.cache.get_seq_length():
            return None
        return len(tokens), torch.is_inference_mode_enabled()


_models: weakref.WeakKeyDictionary[nn.Module, CompiledLayers] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def compiled_steps(
    model: PreTrainedModel, cache: RetrievalCache, replayed: bool
) -> CompiledSteps | None:
    """Steps of an attached ``model`` whose layers are compiled; None: they stay as they are.

    The option ``compile`` of ``cache`` decides, and whether steps are replayed from a CUDA graph.
    """
    asked = cache.options.compile
    if asked is False or (asked == "auto" and not (replayed and model.device.type == "cuda")):
        return None
    if (reason := why_not_compiled(model, cache)) is not None:
        level = logging.WARNING if asked is True else logging.INFO
        log_once(level, _PLAIN, type(model).__name__, reason)
        return None
    with _making:
        if model not in _models:
            _models[model] = CompiledLayers(model)
        return CompiledSteps(model, cache, _models[model])


def why_not_compiled(model: PreTrainedModel, cache: RetrievalCache) -> str | None:
    """Why the layers of ``model`` stay as they are; None if no reason is known.

    torch's own reasons show when it compiles.
    """
    layers, text = _decoder_layers(model), model.config.get_text_config(decoder=True)
    if not layers:
        return "its decoder layers are not of a kind that transformers knows"
    if cache.options.follows_model:
        return "its own indexer tells attention what to see, beside queries, keys and values"
    if any(isinstance(layer, LatentLayer) for layer in cache.retrieval_layers):
        return "its attention is latent, and no function of queries, keys and values"
    if reader_count(model.config):
        return "some of its layers read the keys of others"
    if is_split(model):
        return "it is split over processes"
    if model.training:
        return "it is in training mode"
    own = (layer._compiled_call_impl for layer in layers)
    if is_compiled(model) or any(not isinstance(one, CompiledLayer | None) for one in own):
        return "it is compiled already"
    if torch._dynamo.config.disable:
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE)"
    if any(has_hooks(module) for layer in layers for module in layer.modules()):
        return "modules of its layers have hooks, which a graph would leave out"
    if any(getattr(config, name, False) for config in (model.config, text) for name in _OUTPUTS):
        return "its configuration asks for hidden states or attentions"
    return None


def restore_layers(model: nn.Module) -> None:
    """Have the layers of ``model`` run as they are. Harmless where none is compiled."""
    _models.pop(model, None)
    for module in model.modules():
        if isinstance(module._compiled_call_impl, CompiledLayer):
            module._compiled_call_impl = None


def _decoder_layers(model: PreTrainedModel) -> list[Any]:
    modules = decoder_of(model).modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def _reason(error: BaseException) -> str:
    """What torch says first, and about which call."""
    first, *lines = str(error).strip().splitlines() or [""]
    context = [x.partition(":")[2] for x in lines if "Developer debug context:" in x]
    return f"torch.compile: {type(error).__name__}: {first}{''.join(context)}"


@functools.cache
def log_once(level: int, message: str, *arguments: str) -> None:
    """Log a message, once in a process."""
    _log.log(level, message, *arguments)
