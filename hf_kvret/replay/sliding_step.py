"""SlidingStep: the part of a sliding-window layer of transformers in replayed decode steps."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvret.layer.window import Place


class SlidingStep:
    """As ``LayerStep``, for a layer that keeps the newest tokens only.

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

    @property
    def capture_obstacle(self) -> str | None:
        """None: its steps can be captured."""
        return None

    def set_place(self, place: Place | None) -> None:
        """None: the step is over; copy its results to where the next one reads."""
        layer = self.layer
        if place is not None and self._buffers is not None and layer.keys is not self._buffers[0]:
            # Usual steps ran in between and replaced the tensors.
            self._buffers = None
        if place is None and self._buffers is not None:
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

    def captured(self) -> None:
        """The capture succeeded; nothing to do."""

    def capture_failed(self) -> None:
        """The capture failed and the device did nothing: restore the host's state before it."""
        assert self._buffers is not None, "before_capture comes first"
        self.layer.keys, self.layer.values = self._buffers
        self.layer.cumulative_length = self._length
        self._buffers = None

    def replayed(self) -> None:
        """The captured step was replayed."""
        self.layer.cumulative_length += 1
