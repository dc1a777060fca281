"""Frame: the tensors that a captured decode step reads, at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_kvret.layer.window import Capture, Window, wide_mask
from hf_kvret.models.versions import CACHE_NAMES

# Arguments of a decode step whose values differ from step to step.
_PER_STEP = ("input_ids", "position_ids", "cache_position")
_MASK = "attention_mask"


class Frame:
    """Inputs of one captured step, refilled before each replay, and its output.

    Args:
        inputs: keywords of the model's forward pass for a step of one token.
        window: of the lowest layer.

    Attributes:
        inputs: the same with the frame's own tensors, and without the mask, which ``capture`` has.
        capture: where the layers put the token.
        shape: sizes and flags that the captured work depends on.
        edits: sum of the layers' edit counts at the time of capture.
        output: the model's output from the capture.
        replay: runs the captured work again; None before the capture.
    """

    def __init__(self, inputs: dict[str, Any], window: Window) -> None:
        inference = torch.is_inference_mode_enabled()
        device, batch = window.keys.device, len(window.sink_slots)
        tensors, self._rest = _parts(inputs)
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.inputs = {**self._rest, **self._tensors}
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
        self.edits = -1
        self.output: Any = None
        self.replay: Callable[[], None] | None = None
        self._next_column = -1

    @staticmethod
    def refusal(inputs: dict[str, Any]) -> str | None:
        """Why steps with these inputs can't be captured; None if they can."""
        if inputs.get("position_ids") is None:
            return "the model is not told position_ids, so it counts tokens on the host"
        for name, value in _parts(inputs)[1].items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if not plain and name not in CACHE_NAMES:
                return f"the model is given {name}, a {type(value).__name__}"
        for name in ("output_hidden_states", "output_attentions"):
            if inputs.get(name):
                return f"{name}=True"
        return None

    def fits(self, inputs: dict[str, Any]) -> bool:
        """Whether ``inputs`` differ from the frame's only in the values of tensors."""
        tensors, rest = _parts(inputs)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        own_shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        padded = inputs.get(_MASK) is not None
        alike = padded == (self.capture.slots is not None)
        alike = alike and self._inference == torch.is_inference_mode_enabled()
        return alike and shapes == own_shapes and rest == self._rest

    def fill(self, inputs: dict[str, Any], window: Window) -> None:
        """Copy the values of ``inputs`` and the state of ``window`` before the step to the device.

        Without padding these are a few numbers, because the rest has not changed.
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


def _parts(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that change from step to step, without the mask; and the other arguments."""
    tensors = {name: inputs[name] for name in _PER_STEP if inputs.get(name) is not None}
    rest = {name: x for name, x in inputs.items() if name not in (*_PER_STEP, _MASK)}
    return tensors, rest
