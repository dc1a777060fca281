"""SlidingStep: the part of a sliding-window layer of transformers in replayed decode steps."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvret.core.window import Place


class SlidingStep:
    """As ``LayerStep``, for a layer that keeps the newest tokens alone.

    Such a layer makes its tensors anew at each step. Once the window is full they have the same
    shape each time, so what a captured step made is copied back to where the next one reads.
    Which of these tokens is padding is not told to it: a padded batch is not for it.
    """

    def __init__(self, layer: DynamicSlidingWindowLayer) -> None:
        self.layer = layer
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def is_plain(self) -> bool:
        """Whether the window is full, so that a step changes no shape."""
        layer = self.layer
        if not layer.is_initialized or layer.record_past:
            return False
        return int(layer.keys.shape[-2]) == layer.sliding_window - 1

    @property
    def capture_obstacle(self) -> str | None:
        """None: its steps can be captured."""
        return None

    def set_place(self, place: Place | None) -> None:
        """None: the step is over, and what it left behind goes where the next one reads."""
        layer = self.layer
        if place is not None and self._held is not None and layer.keys is not self._held[0]:
            # Usual steps came in between, and made theirs.
            self._held = None
        if place is None and self._held is not None:
            keys, values = self._held
            keys.copy_(layer.keys)
            values.copy_(layer.values)
            layer.keys, layer.values = keys, values

    @torch.inference_mode(False)
    def before_capture(self) -> None:
        """A step is about to be captured: it reads and writes tensors that stay."""
        layer = self.layer
        self._held = layer.keys.clone(), layer.values.clone()
        layer.keys, layer.values = self._held
        self._length = layer.cumulative_length

    def captured(self) -> None:
        """It was."""

    def capture_failed(self) -> None:
        """It was not, and the device did nothing: the host is put back to before the capture."""
        assert self._held is not None, "before_capture comes first"
        self.layer.keys, self.layer.values = self._held
        self.layer.cumulative_length = self._length
        self._held = None

    def replayed(self) -> None:
        """The captured step was replayed."""
        self.layer.cumulative_length += 1
