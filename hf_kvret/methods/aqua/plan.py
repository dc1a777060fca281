"""LayerPlan: which layers are anchors, which are predicted, and in how many bits."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.methods.aqua.coding import NOT_CODED
from hf_kvret.methods.aqua.config import AquaConfig
from hf_kvret.methods.aqua.learned import needs_positions


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """How one layer is stored.

    Attributes:
        options: of the cache.
        layer: number of the layer in the model.
        bits: 2, 3, 4, or 16 for uncoded rows.
        lowest_bits: the same, if there is no retrieval layer below.
        previous: the layer whose reconstruction predicts this one; None for an anchor, and for an
            uncoded layer.
        feeds: whether the layer above is predicted from this one.
        artifact: the artifact; None where nothing is predicted.
        lowest: whether it is the artifact's first layer, which keeps the positions for all.
    """

    options: AquaConfig
    layer: int
    bits: int
    lowest_bits: int
    previous: int | None = None
    feeds: bool = False
    artifact: CalibrationArtifact | None = None
    lowest: bool = False

    @property
    def learned_groups(self) -> tuple[int | None, int | None]:
        """Group sizes of keys and values in the calibration; None if not coded."""
        if self.artifact is None:
            return None, None
        settings = self.artifact.options["layers"][str(self.layer)]
        return settings.get("group"), settings.get("value_group")

    def bits_of(self, lowest: bool) -> int:
        """Bits of the layer, or where it is the ``lowest`` that retrieves."""
        return self.lowest_bits if lowest else self.bits

    @property
    def codes_offsets(self) -> bool:
        """Whether keys are coded as they are, without a prediction or a mean being taken off."""
        takes_mean = self.artifact is not None and self.artifact.options.get("anchor_mean", False)
        return self.bits != NOT_CODED and self.previous is None and not takes_mean

    @property
    def keeps_positions(self) -> bool:
        """Whether this layer keeps the positions, for all layers."""
        return self.artifact is not None and self.lowest and needs_positions(self.artifact)


def layer_plan(options: AquaConfig, layer: int) -> LayerPlan:
    """The plan of model layer number ``layer``.

    Raises:
        ValueError: no artifact is named, or it lacks the layer.
        OSError: the artifact can't be read.
    """
    options = options.filled_in()
    assert options.bits is not None
    if options.predictor == "none":
        return LayerPlan(options, layer, options.bits, options.first_bits or options.bits)
    artifact = options.load()
    layers = sorted(map(int, artifact.options["layers"]))
    if layer not in layers:
        raise ValueError(
            f"the aqua artifact of {artifact.model.name} has no layer {layer}: make it again with "
            "`hf-kvret calibrate aqua`"
        )
    index = layers.index(layer)
    bits, previous = _role(options, artifact, layers, index)
    above = index + 1 < len(layers) and _role(options, artifact, layers, index + 1)[1] is not None
    return LayerPlan(options, layer, bits, bits, previous, above, artifact, lowest=index == 0)


def _role(
    options: AquaConfig, artifact: CalibrationArtifact, layers: list[int], index: int
) -> tuple[int, int | None]:
    """Bits, and the layer that predicts this one, if any does."""
    all_settings = artifact.options["layers"]
    settings = all_settings[str(layers[index])]
    assert options.bits is not None
    is_anchor = options.anchor_every is not None and index % options.anchor_every == 0
    if options.bits == NOT_CODED:
        # Nothing is coded, except anchors if the options say so.
        first = options.first_bits if settings["previous"] is None or is_anchor else None
        return first or NOT_CODED, None
    if settings["previous"] is None:
        return options.first_bits or settings["bits"], None
    if is_anchor:
        # A predicted layer in the artifact; as an anchor it gets the bits of the first layer.
        return options.first_bits or all_settings[str(layers[0])]["bits"], None
    return options.bits, settings["previous"]
