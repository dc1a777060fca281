"""What an AQUA-KV artifact must hold of a layer, as its options and settings say."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.layer_checks import Expected, check_layer_settings, damaged, told_layers
from hf_kvret.methods.aqua.gptq import GROUP
from hf_kvret.methods.aqua.predictor_options import BITS, GROUPS, PredictorOptions

_MATRIX = (torch.bfloat16,)
_BIAS = (torch.float32,)
_SCALE = (torch.float16,)
_CODES = (torch.uint8,)


class LayerSettings(NamedTuple):
    """Settings of a layer; the module ``calibrator`` describes them."""

    previous: int | None
    heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, artifact: CalibrationArtifact, layer: int) -> Self:
        """Those that an artifact tells of layer number ``layer``.

        Raises:
            ValueError: one is missing, of another type, out of its range, or contradicts others.
        """
        kinds = dict.fromkeys(("heads", "head_dim", "value_head_dim", "bits"), int)
        settings = check_layer_settings(artifact, layer, kinds)
        previous, bits = settings.get("previous", ""), settings["bits"]
        lower = [number for number in told_layers(artifact) if number < layer]
        # An anchor, or predicted from the layer below.
        sound = previous is None or (type(previous) is int and previous == max(lower, default=None))
        sound &= settings.get("role") == ("anchor" if previous is None else "predicted")
        sound &= bits in BITS and (previous is None or bits == artifact.options.get("bits"))
        dims = settings["heads"], settings["head_dim"], settings["value_head_dim"]
        sound &= min(dims[:2]) > 0 and dims[2] >= 0
        groups = {"group": dims[1], "value_group": dims[2]}
        for name, dim in groups.items():
            group = settings.get(name)
            is_group = type(group) is int and group in GROUPS and dims[0] * dim % group == 0
            sound &= is_group if dim else group is None
        if not sound:
            names = ("role", "previous", "bits", "heads", "head_dim", "value_head_dim", *groups)
            told = ", ".join(f"{name}={settings.get(name)!r}" for name in names)
            raise damaged(artifact, f"is damaged at layer {layer} ({told})")
        return cls(previous, *dims)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of a token, by side; 0 where values are in their keys."""
        return {"key": self.heads * self.head_dim, "value": self.heads * self.value_head_dim}


def expected_tensors(
    options: PredictorOptions, layer: LayerSettings, below: LayerSettings | None, pairs: int
) -> dict[str, Expected]:
    """What each tensor of a layer must be, by name.

    Args:
        options: of the calibration.
        layer: settings of the layer.
        below: those of the layer that predicts it; None in an anchor.
        pairs: frequencies of its RoPE.
    """
    tensors = {"inv_freq": Expected(_BIAS, (pairs,))}
    for side, width in layer.widths.items():
        if not width:
            continue
        if below is None:
            parts = {"bias": Expected(_BIAS, (width,))} if options.anchor_mean else {}
        else:
            parts = _predictor(options, _inputs(options, side, layer, below), width)
        tensors |= {f"{side}.{name}": one for name, one in parts.items()}
    return tensors


def _inputs(
    options: PredictorOptions, side: str, layer: LayerSettings, below: LayerSettings
) -> int:
    """Numbers that a side is predicted from."""
    if side == "key":
        return below.widths["key"] if options.key_inputs == "keys" else 0
    names = options.value_inputs.split("+")
    parts = {"keys": layer.widths["key"], "values": below.widths["value"]}
    return sum(width for name, width in parts.items() if name in names)


def _predictor(options: PredictorOptions, inputs: int, outputs: int) -> dict[str, Expected]:
    if not inputs:
        return {}
    if options.predictor == "mlp":
        hidden = options.hidden or 2 * outputs
        return {
            "hidden.weight": Expected(_MATRIX, (hidden, inputs)),
            "hidden.bias": Expected(_BIAS, (hidden,)),
            "out.weight": Expected(_MATRIX, (outputs, hidden)),
            "bias": Expected(_BIAS, (outputs,)),
        }
    matrices = {"weight": (outputs, inputs)}
    if options.predictor == "low_rank":
        matrices = {"down": (options.rank, inputs), "up": (outputs, options.rank)}
    tensors = {"bias": Expected(_BIAS, (outputs,))}
    for name, shape in matrices.items():
        tensors |= _matrix(name, shape, options.predictor_bits)
    return tensors


def _matrix(name: str, shape: tuple[int, int], bits: int) -> dict[str, Expected]:
    if bits != 4:
        return {name: Expected(_MATRIX, shape)}
    rows, columns = shape
    groups = columns // min(GROUP, columns & -columns)
    return {
        f"{name}.codes": Expected(_CODES, (rows, columns // 2)),
        f"{name}.scale": Expected(_SCALE, (rows, groups)),
        f"{name}.low": Expected(_SCALE, (rows, groups)),
    }
