"""The layers of a cache as a whole, and the forward pass that goes through them."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from hf_kvret.layer.hybrid import check_window
from hf_kvret.layer.layer import RetrievalLayer


class LayerStack:
    """Layers of a cache, linked with those below, and the forward pass under way.

    Args:
        layers: one for each layer of the model.

    Attributes:
        lowest: the first one that attends: a pass begins with it.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        attending = (RetrievalLayer, DynamicLayer)
        self._attending = [layer for layer in layers if isinstance(layer, attending)]
        self.lowest = self._attending[0]
        ours = [layer for layer in layers if isinstance(layer, RetrievalLayer)]
        for layer, below in zip(ours[1:], ours, strict=False):
            layer.below = below
        self._thread = threading.get_ident()
        self.forget_pass()

    def forget_pass(self) -> None:
        """Nothing is under way."""
        self._newest: RetrievalLayer | None = None
        # By layer and state that got tokens before any attention did, how many tokens the lowest
        # attention layer held then: as many as now, where it never got them.
        self._leading: dict[tuple[int, str], int] = {}

    def begin_pass(self) -> None:
        """Note the thread of a new pass; RuntimeError where the last one did not end."""
        fault = self._attention_fault()
        if fault is not None:
            self._check_thread()
            self._refuse_pass(fault)
        self._thread = threading.get_ident()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop a broken pass and the newest tokens of every layer, of none where one refuses."""
        if (fault := self.fault()) is not None:
            self._check_thread()
            self._check_way_back(fault)
        held = min(layer.get_seq_length() for layer in self._attending)
        for layer in self._attending:
            check_window(layer, layer.get_seq_length() - held - tokens_to_remove)
        # A state refuses, or a sliding window that is full: they come first.
        others = [layer for layer in self._layers if not isinstance(layer, RetrievalLayer)]
        others.sort(key=lambda layer: type(layer) is DynamicLayer)
        # From the top: a store may compute rows from those of the layer below.
        ours = [layer for layer in reversed(self._layers) if isinstance(layer, RetrievalLayer)]
        for layer in (*others, *ours):
            surplus = layer.get_seq_length() - held if layer in self._attending else 0
            layer.crop(tokens_to_remove - surplus)
        # Shorter now, the lowest layer may be as long as before a pass that reached it.
        self.forget_pass()

    def _check_way_back(self, fault: str) -> None:
        """RuntimeError where no layer can tell what it held before a pass that broke off."""
        why = ""
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._layers):
            why = "a recurrent state of this model may be ahead, which can't go back"
        if any(isinstance(layer, RetrievalLayer) and layer.is_torn for layer in self._layers):
            why = "it broke off while a layer took its tokens in"
        if why:
            raise RuntimeError(f"{fault}, and {why}: start with a new cache or cache.reset()")

    def note_state(self, number: int, state: str) -> None:
        """Note a layer's state that is ahead until the lowest attention layer gets the tokens.

        RuntimeError where it got some before, and no attention did: that pass broke off.
        """
        if any(key >= (number + 1, "") or key == (number, state) for key in self._ahead()):
            self.check_pass()
        if self._leads(number):
            self._leading[number, state] = self.lowest.get_seq_length()

    def _ahead(self) -> list[tuple[int, str]]:
        """Layers and states that got tokens which the lowest attention layer did not get yet."""
        length = self.lowest.get_seq_length() if self._leading else 0
        return [key for key, held in self._leading.items() if held == length]

    def _leads(self, number: int) -> bool:
        """Whether a layer's state gets tokens before any attention does.

        In the lowest attention layer it may come before or behind; behind, lengths differ. A model
        with one such layer doesn't tell.
        """
        lowest = self._layers.index(self.lowest)
        if number != lowest or len(self._attending) == 1:
            return number < lowest
        return len({layer.get_seq_length() for layer in self._attending}) == 1

    def enter(self, layer: Any, method: str) -> None:
        """Note ``layer`` as the one that gets tokens; ``method`` is the cache's name.

        RuntimeError where another layer got tokens and its attention was never called.
        """
        if self._newest is not None and self._newest.pending_attention:
            self._refuse_next(method)
        if isinstance(layer, RetrievalLayer):
            self._newest = layer

    def _refuse_next(self, method: str) -> None:
        assert self._newest is not None, "a layer waits"
        self._check_thread()
        raise RuntimeError(
            f"layer {self._layers.index(self._newest)} was given tokens but its attention was "
            "never called: the model does not use hf_kvret's attention, or a forward pass broke "
            f"off. Call hf_kvret.attach(model) or model.set_attn_implementation({method!r}) "
            "before the forward pass (generate does it by itself), and drop the pass with "
            "cache.crop(0), or start with a new cache. If it is attached, it changes the keys "
            "after the cache: use cache_implementation='dynamic'"
        )

    def check_pass(self) -> None:
        """RuntimeError where the last forward pass did not reach all layers."""
        fault = self.fault()
        if fault is not None:
            self._refuse_pass(fault)

    @staticmethod
    def _refuse_pass(fault: str) -> NoReturn:
        raise RuntimeError(
            f"{fault}: finish the forward pass first or, where it broke off in the middle, drop it "
            "with cache.crop(0), or start with a new cache or cache.reset()"
        )

    def fault(self) -> str | None:
        """The sign that a forward pass did not reach all layers; None if there is none."""
        fault = self._attention_fault()
        if fault is None and (ahead := self._ahead()):
            return f"the state of layer {max(ahead)[0]} is ahead of the layers that attend"
        return fault

    def _attention_fault(self) -> str | None:
        for number, layer in enumerate(self._layers):
            if isinstance(layer, RetrievalLayer) and layer.pending_attention:
                return f"layer {number} was given tokens and has not attended yet"
        lengths = [layer.get_seq_length() for layer in self._attending]
        if len(set(lengths)) > 1:
            return f"the layers hold different numbers of tokens ({', '.join(map(str, lengths))})"
        return None

    def _check_thread(self) -> None:
        """RuntimeError in the middle of another thread's pass."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "another thread is in the middle of a forward pass with this cache, or broke off "
                "there: a cache serves one thread at a time. Give each thread a cache of its own "
                "(cache.fork() shares what is held), or start again with cache.reset()"
            )
