"""The part of a layer in decode steps that are captured and replayed, and in those before them.

The first decode step of a layer compiles what later steps will launch. Triton compiles a kernel
again where an argument that it is compiled for changes, as some do with the number of tokens; that
takes seconds, and would break a capture.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import add

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from hf_kvret.contracts.index import CapturableIndex, capture_obstacle_of
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.layer.window import Capture
from hf_kvret.observe.observers import counters_of
from hf_kvret_kernels._dispatch import Growth, Window, growing


class Step:
    """What a layer does where its steps are replayed; the base does nothing.

    Attributes:
        capture_obstacle: why the layer's steps can't be captured; None: they can.
    """

    capture_obstacle: str | None = None

    def is_plain(self) -> bool:
        """Whether the next step of one token does the same on the same memory."""
        raise NotImplementedError

    def set_capture(self, capture: Capture | None) -> None:
        """A captured step begins, whose token goes where ``capture`` says; None: it is over."""

    def before_capture(self) -> None:
        """Prepare for capturing a step."""

    def captured(self) -> None:
        """The capture succeeded."""

    def capture_failed(self) -> None:
        """The capture failed and the device did nothing: restore the host's state before it."""

    def before_replay(self) -> None:
        """The captured step is about to be replayed."""


class LayerStep(Step):
    """Keeps the host state of one layer right when its step is replayed or its capture fails.

    Python code runs once, during capture, and updates host state for the first replay; before each
    later replay ``before_replay`` does.
    """

    def __init__(self, layer: RetrievalLayer) -> None:
        self.layer = layer
        self._before: tuple[int, ...] = ()
        self._length = 0
        self._counts: tuple[int, ...] = ()

    @property
    def kv(self) -> LayerKV:
        """What the layer holds, at least one token."""
        assert self.layer.kv is not None, "a layer without tokens has no step to capture"
        return self.layer.kv

    @property
    def layout(self) -> tuple[object, ...]:
        """What a captured step does not survive a change of."""
        kv = self.kv
        # The index itself, so that no other one takes its place in memory.
        return self.layer.moves, kv.window.keys.data_ptr(), kv.cold_len, kv.index

    def is_plain(self) -> bool:
        """Whether a step of one token only appends it and selects, without a flush or a build.

        Then the next step does the same on the same memory, one column further.
        """
        kv = self.layer.kv
        if kv is None or self.layer.pending_attention or not kv.length or kv.step_flushes():
            return False
        window = kv.window
        roomy = window.sink + window.length < window.capacity
        return roomy and (kv.built or not kv.cold_len)

    @property
    def capture_obstacle(self) -> str | None:  # type: ignore[override]
        for subscriber in self.layer.subscribers:
            if subscriber.capture_obstacle:
                return subscriber.capture_obstacle
        kv = self.kv
        index = kv.index
        if not kv.cold_len or kv.store is None:
            # Nothing is selected yet, but hooks on each pass would miss the replayed ones.
            return capture_obstacle_of(index) if kv.watches else None
        return capture_obstacle_of(index) or kv.store.capture_obstacle

    def set_capture(self, capture: Capture | None) -> None:
        """Set where the token of a captured step goes; None: behind the others, as usual."""
        self.kv.window.capture = capture
        # A step that broke off before its attention leaves a token, which must hold no memory.
        self.kv.window.take_new()

    def before_capture(self) -> None:
        """Prepare for capturing a step; waits for pending copies."""
        if isinstance(self.kv.index, CapturableIndex):
            self.kv.index.before_capture()
        if self.kv.store is not None:
            self.kv.store.before_capture()
        self._length, self._before = self.kv.window.length, counters_of(self.layer).numbers()

    def captured(self) -> None:
        """The capture succeeded: remember how the counters changed."""
        now = counters_of(self.layer).numbers()
        self._counts = tuple(new - old for new, old in zip(now, self._before, strict=True))

    def capture_failed(self) -> None:
        self.layer.pending_attention = False
        if isinstance(self.kv.index, CapturableIndex):
            self.kv.index.capture_failed()
        self.kv.window.length = self._length
        counters_of(self.layer).set(self._before)

    def before_replay(self) -> None:
        self.kv.window.length += 1
        if isinstance(self.kv.index, CapturableIndex):
            self.kv.index.before_replay()
        counters = counters_of(self.layer)
        counters.set(tuple(map(add, counters.numbers(), self._counts)))


class SlidingStep(Step):
    """Does the same as ``LayerStep`` for a layer that keeps the newest tokens only.

    Such a layer makes new tensors at each step. Once the window is full they always have the same
    shape, so the results of a captured step are copied back to where the next one reads. The layer
    does not know which of its tokens are padding, so padded batches are not supported.
    """

    def __init__(self, layer: DynamicSlidingWindowLayer) -> None:
        self.layer = layer
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def is_plain(self) -> bool:
        """Whether the window is full, so that a step changes no shape."""
        layer = self.layer
        if not layer.is_initialized or layer.record_past:
            return False
        return int(layer.keys.shape[-2]) == layer.sliding_window - 1

    def set_capture(self, capture: Capture | None) -> None:
        """None: the step is over; copy its results to where the next one reads."""
        layer = self.layer
        if capture is not None and self._buffers is not None and layer.keys is not self._buffers[0]:
            # Usual steps ran in between and replaced the tensors.
            self._buffers = None
        if capture is None and self._buffers is not None:
            keys, values = self._buffers
            keys.copy_(layer.keys)
            values.copy_(layer.values)
            layer.keys, layer.values = keys, values

    @torch.inference_mode(False)
    def before_capture(self) -> None:
        """Prepare for capturing a step: it must read and write tensors that stay."""
        layer = self.layer
        self._buffers = layer.keys.clone(), layer.values.clone()
        layer.keys, layer.values = self._buffers
        self._length = layer.cumulative_length

    def capture_failed(self) -> None:
        assert self._buffers is not None, "before_capture comes first"
        self.layer.keys, self.layer.values = self._buffers
        self.layer.cumulative_length = self._length
        self._buffers = None

    def before_replay(self) -> None:
        self.layer.cumulative_length += 1


class StateStep(Step):
    """Sees that a layer with convolutional or recurrent states keeps them where they are.

    transformers writes them in place. Like a sliding window, it does not know padding.
    """

    def __init__(self, layer: LinearAttentionCacheLayerMixin) -> None:
        self.layer = layer

    def is_plain(self) -> bool:
        return all(self.layer.has_previous_state.values()) and not self.layer.record_past


def warming_up(
    layer: RetrievalLayer, query: torch.Tensor, call: AttentionCall
) -> AbstractContextManager[None]:
    """Context of ``layer.attend(query, ...)``: kernels are compiled for later steps, too.

    For those up to the length that was announced, or to twice as many tokens as there are where
    fewer were announced. Once for each shape of ``query [B, Hq, Q, *]`` and as many tokens; never
    within a capture, and not in a step that flushes, after which the next one does it.
    """
    kv = layer.kv
    if kv is None or not kv.cold_len or query.shape[2] > layer.config.max_draft:
        return nullcontext()
    length = kv.length + (query.shape[2] if layer.pending_attention else 0)
    lengths = kv.compiled_len
    if length <= lengths.get(query.shape, 0) or kv.step_flushes():
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        return nullcontext()
    final_len = layer.final_len if layer.final_len > length else 2 * length
    lengths[query.shape] = final_len
    return growing(_growth(kv, query.shape[2], call.scoring.valid is not None, final_len))


def _growth(kv: LayerKV, queries: int, padded: bool, final_len: int) -> Growth:
    """The sizes that steps of ``queries`` queries will have, up to ``final_len`` tokens."""
    config, window, cold_len = kv.config, kv.window, kv.cold_len
    last = max(cold_len, final_len - config.recent)
    lengths = [cold_len]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    counts = tuple(sorted({config.budget(length) for length in lengths}))
    # A flush leaves the shortest window. What is captured reads all of it, and goes by a mask.
    shortest, longest = window.sink + config.recent + queries, window.sink + kv.most_recent
    masked = padded or not window.sinks_full
    windows = [Window(tokens, masked) for tokens in range(shortest, longest + 1)]
    if config.graph is not False and queries == 1:
        windows.append(Window(longest, masked=True, appends=True))
    return Growth(last - cold_len, counts, tuple(windows))
