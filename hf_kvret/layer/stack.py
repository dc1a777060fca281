"""The layers of a cache as one: the forward pass under way, and how all of them go back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.layer.layer import RetrievalLayer, check_count
from hf_kvret.layer.snapshots import Snapshot, Snapshots


class CantGoBackError(RuntimeError):
    """Layers can't go back as far as they are asked to, and no snapshot lies there."""


class LayerStack:
    """Layers of a cache, linked with those below, and the forward pass under way.

    Args:
        layers: one for each layer of the model.

    Attributes:
        lowest: the first one that attends: a pass begins with it.
        has_read_ahead: LosslessSteps has, so another pass would go on behind tokens of nobody.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        attending = (RetrievalLayer, DynamicLayer)
        self._attending = [layer for layer in layers if isinstance(layer, attending)]
        self.lowest = self._attending[0]
        self._ours = [layer for layer in layers if isinstance(layer, RetrievalLayer)]
        for layer, below in zip(self._ours[1:], self._ours, strict=False):
            layer.stand_on(below)
        self._thread = threading.get_ident()
        self.has_read_ahead = False
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
            if self.has_read_ahead:
                # States of the model may be ahead already, so that the round is lost.
                self._ours[0].edited()
            self._refuse_pass(fault)
        self._thread = threading.get_ident()

    def crop(self, tokens_to_remove: int, snapshots: Snapshots) -> int:
        """Drop a broken pass and the newest tokens of every layer, or of none.

        Layers that can't go back become those of the newest of the ``snapshots`` at or before that
        point. Returns how many tokens more were dropped so. ``tokens_to_remove`` is negative.

        Raises:
            CantGoBackError: there is no such snapshot.
            RuntimeError: the pass broke off while a layer took its tokens in, or another thread is
                in the middle of it.
            ValueError: a positive number, or more tokens than are held.
        """
        fault = self.fault()
        if fault is not None:
            self._check_thread()
        # From the top: a store may compute rows from those of the layer below.
        ours = self._ours[::-1]
        if any(layer.is_torn for layer in ours):
            raise RuntimeError(
                f"{fault}, and it broke off while a layer took its tokens in: start with a new "
                "cache or cache.reset()"
            )
        held = self.held()
        check_count(tokens_to_remove, held)
        target, snapshot = held + tokens_to_remove, Snapshot(0, {})
        foreign = foreign_layers_of(self._layers)
        if (why := _why_stuck(foreign, fault, held, target)) is not None:
            newest = snapshots.newest(target)
            if newest is None:
                oldest = "there is no snapshot"
                if snapshots.held:
                    oldest = f"the oldest snapshot has {snapshots.lengths[0]} tokens"
                raise CantGoBackError(
                    f"{why}, and {oldest}: start with a new cache or cache.reset(); the option "
                    "snapshots keeps more of them"
                )
            snapshot, target = newest, newest.length
        others = [layer for number, layer in foreign.items() if number not in snapshot.layers]
        for layer in (*others, *ours):
            length = layer.get_seq_length() if layer in self._attending else held
            # Layers of transformers that can't go back refuse to drop even no tokens.
            if (count := target - length) or layer in ours:
                layer.crop(count)
        snapshot.restore(foreign)
        for layer in ours if snapshot.layers else ():
            # A captured step has the addresses of what was there.
            layer.edited()
        # Shorter now, the lowest layer may be as long as before a pass that reached it.
        self.forget_pass()
        return held + tokens_to_remove - target

    def held(self) -> int:
        """Tokens that all layers hold: those of a broken pass don't count."""
        # A pass that broke off in its last layer reached all of them.
        lengths = [layer.past_len for layer in self._ours if layer.pending_attention]
        return min(lengths + [layer.get_seq_length() for layer in self._attending])

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
            self._check_thread()
            raise RuntimeError(
                f"layer {self._layers.index(self._newest)} was given tokens but its attention was "
                "never called: the model does not use hf_kvret's attention, or a forward pass "
                f"broke off. Call hf_kvret.attach(model) or model.set_attn_implementation"
                f"({method!r}) before the forward pass (generate does it by itself), and drop the "
                "pass with cache.crop(0), or start with a new cache. If it is attached, it changes "
                "the keys after the cache: use cache_implementation='dynamic'"
            )
        if isinstance(layer, RetrievalLayer):
            self._newest = layer

    def check_pass(self) -> None:
        """RuntimeError where the last forward pass did not reach all layers, or reached ahead."""
        if (fault := self.fault()) is not None:
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
        if self.has_read_ahead:
            return "LosslessSteps has read tokens ahead, which its close() drops"
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


def _why_stuck(foreign: Mapping[int, Any], fault: str | None, held: int, target: int) -> str | None:
    """Why layers ``foreign`` of transformers can't go back from ``held`` to ``target`` tokens.

    None where all can. Of a pass with a ``fault`` some may have seen tokens.
    """
    for layer in foreign.values():
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            if fault is not None:
                return f"{fault}, and a recurrent state of this model may be ahead"
            # While it drafts, transformers keeps a past that such a layer can go back in.
            records = getattr(layer, "record_past", False) and layer.is_croppable
            if target < held and not records:
                return "a recurrent state of this model can't go back"
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
            count, left = layer.get_seq_length() - target, min(layer.sliding_window - 1, target)
            # Where too few rows before the window are kept, it would be cut short without a word.
            if count > 0 and layer.keys.shape[-2] < left + count:
                return (
                    f"a sliding window of {layer.sliding_window} does not track past states for "
                    f"{count} tokens, so it can't go back"
                )
    return None
