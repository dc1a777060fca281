"""Options of AQUA-KV, and the plan of a layer: anchors, predicted layers, and in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.shared import ArtifactConfig
from hf_kvret.methods.aqua.learned import (
    BITS,
    GROUPS,
    METHOD,
    NOT_CODED,
    learned_options,
    needs_positions,
)
from hf_kvret.models.ranks import part_of
from hf_kvret.options.declare import OneOf, option

USUAL_BITS = 2
"""The default without an artifact."""

_STORES = ("auto", "device", "host")


@dataclass(frozen=True)
class AquaConfig(ArtifactConfig):
    """AQUA-KV's options beside those of every retrieval cache that needs an artifact.

    All cold tokens are attended to: ``top_k`` changes nothing. Stores that keep selected rows
    (``"resident"``), attend on the CPU (``"cpu"``) or have a codec (``"higgs"``) are refused.

    Attributes:
        top_k: changes nothing, since all cold tokens are attended to.
        bits: bits for each coded number: 2, 3 or 4. 16 keeps rows as they are. ``None``: as in the
            artifact, or 2 with ``predictor="none"``.
        first_bits: bits in anchors, the layers that nothing predicts. ``None``: as in the artifact.
            Without predictors, or with ``bits=16``, it is ``bits``.
        group: numbers that share a scale, a power of two from 8 to 1024. ``None``: as in the
            artifact, or the largest that divides a row.
        predictor: ``"artifact"``, or ``"none"``: keys after RoPE and values are coded as they are.
    """

    method: ClassVar[str] = METHOD
    way_out: ClassVar[str] = " or predictor='none'"
    # Section 3.3: four tokens in full precision, and up to 128 recent ones gather. Then the authors
    # code all of these; here the newest one stays.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"sink": 4, "recent": 1, "flush": 127, "dense_below": 0}
    }

    top_k: int | float | None = 1.0
    rest: Literal["mean"] | None = None
    recent: int = 64
    flush: int = 64
    # A number once a cache has it.
    bits: int | None = option(None, OneOf(*BITS, None))  # type: ignore[assignment]
    first_bits: int | None = option(None, OneOf(*BITS, None))
    group: int | None = option(None, OneOf(*GROUPS, None))
    predictor: str = option("artifact", OneOf("artifact", "none"))

    def __post_init__(self) -> None:
        if self.predictor is None:
            # The command line parses "none" to None.
            object.__setattr__(self, "predictor", "none")
        super().__post_init__()
        if self.predictor == "none" and self.artifact is not None:
            raise ValueError(
                f"artifact={self.artifact!r} with predictor='none', which uses no artifact: leave "
                "one out"
            )

    @classmethod
    def why_not(cls, name: str, value: Any) -> list[str]:
        """Only plain stores of bytes, and nothing that needs a selection or rows as they were."""
        if name == "store" and value not in _STORES:
            return [
                "AQUA-KV reads all cold tokens at each step and rebuilds them on the device, with "
                "codes of its own, so no store can keep selected rows, attend elsewhere or code "
                f"them once more; choose {', '.join(map(repr, _STORES))}"
            ]
        if name == "rest" and value is not None:
            return ["aqua attends to all tokens, nothing is left out; leave it out"]
        if name == "select_every" and value != 1:
            return ["aqua attends to all tokens, nothing is selected; leave it out"]
        if name == "lossless" and value:
            return ["aqua keeps rows in codes; take a method that retrieves, as 'paris'"]
        return []

    @property
    def row_bits(self) -> int:
        if self.bits is None:
            raise ValueError(
                "bits=None: they are the artifact's, which these options have not read; take the "
                "options of a cache, AquaKVCache(config, options).options, or give bits"
            )
        return self.bits

    def check_weights(self, model: Any) -> None:
        """ValueError also for a tensor parallel model, whose heads can't predict each other."""
        if self.predictor == "none":
            return
        if not part_of(model).is_whole:
            raise ValueError(
                "all KV heads of a token predict together, and each rank of this tensor parallel "
                "model has some of them: pass predictor='none'"
            )
        super().check_weights(model)

    @property
    def lacks_artifact(self) -> bool:
        return self.predictor == "artifact" and super().lacks_artifact

    def filled_in(self) -> Self:
        """These options with bits: as set, else the artifact's, else the default.

        Raises:
            ValueError: no artifact is named, or it lacks them.
            OSError: the artifact can't be read.
        """
        if self.bits is not None:
            return self
        has_artifact = self.predictor == "artifact"
        return self.replace(bits=learned_options(self.load()).bits if has_artifact else USUAL_BITS)

    def exact(self) -> Self:
        return super().exact().replace(first_bits=None)


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """How one layer is stored.

    Attributes:
        options: of the cache.
        layer: number of the layer in the model.
        bits: 2, 3, 4, or 16 for uncoded rows.
        previous: the layer whose reconstruction predicts this one; None for an anchor, and for an
            uncoded layer.
        predicts_next: whether the layer above is predicted from this one.
        artifact: the artifact; None where nothing is predicted.
        lowest: whether it is the artifact's first layer, which keeps the positions for all.
    """

    options: AquaConfig
    layer: int
    bits: int
    previous: int | None = None
    predicts_next: bool = False
    artifact: CalibrationArtifact | None = None
    lowest: bool = False

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
        return LayerPlan(options, layer, options.bits)
    artifact = options.load()
    layers = sorted(map(int, artifact.options["layers"]))
    if layer not in layers:
        raise ValueError(
            f"the aqua artifact of {artifact.model.name} has no layer {layer}: make it again with "
            "`hf-kvret calibrate aqua`"
        )
    bits, previous = _role(options, artifact, layer)
    above = layers[layers.index(layer) + 1 :]
    predicts_next = bool(above) and _role(options, artifact, above[0])[1] is not None
    lowest = layer == layers[0]
    return LayerPlan(options, layer, bits, previous, predicts_next, artifact, lowest)


def _role(options: AquaConfig, artifact: CalibrationArtifact, layer: int) -> tuple[int, int | None]:
    """Bits, and the layer that predicts this one, if any does."""
    settings = artifact.options["layers"][str(layer)]
    assert options.bits is not None
    is_anchor = settings["previous"] is None
    if options.bits == NOT_CODED:
        # Nothing is coded, except anchors if the options say so.
        return (options.first_bits if is_anchor else None) or NOT_CODED, None
    if is_anchor:
        return options.first_bits or settings["bits"], None
    return options.bits, settings["previous"]
