"""Calibration, layer after layer: what is learned from, how a method learns, and the run."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import check_no_foreign_artifact
from hf_kvret.artifacts.identity import ModelIdentity
from hf_kvret.lab.calibrate.taps import LayerTokens, check_rope, input_device, tap_attention
from hf_kvret.lab.evaluate.reader import check_positions
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.models.compatibility import check_model, retrieval_layers, retrieval_shapes
from hf_kvret.models.ranks import check_calibration
from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.rope import Rope

# Bytes of tokens that are held at the same time; more take fewer passes.
_MOST_HELD = 2 << 30

Progress = Callable[[int], object]
Carried = Mapping[str, torch.Tensor]
"""Tensors that a layer passes to the next one, by name."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences of token ids, and what they are.

    Attributes:
        sequences: ``[n]`` int64 each, none empty.
        held_out: how many of the last are not learned from; fewer than there are.
        description: plain JSON.

    Raises:
        ValueError: ``held_out`` leaves nothing to learn from.
    """

    sequences: list[torch.Tensor]
    held_out: int
    description: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < len(self.sequences):
            raise ValueError(
                f"held_out={self.held_out} of {len(self.sequences)} sequences: at least one must "
                "be left to learn from"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True, eq=False)
class LayerFindings:
    """Results for one layer.

    Attributes:
        tensors: by name, without the layer prefix; on the CPU.
        settings: what the method needs to know of the layer, plain JSON.
        quality: figures of the layer by name, for people.
        carried: tensors for the next layer, on the CPU; not part of the artifact. None if layers
            don't depend on each other.
    """

    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[str, float | int | str | None] = field(default_factory=dict)
    carried: Carried | None = None


class LayerStudy(ABC):
    """Collects the tokens of one layer, sequence by sequence, and learns from them."""

    @abstractmethod
    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        """Add a sequence of one row, from position 0 on, without padding.

        Sequences that are ``held_out`` are for figures of quality only, and come last. Every layer
        gets the same sequences in the same order. Tensors must be copied.
        """

    @abstractmethod
    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        """Learn. Calls ``progress`` with finished units of work, ``work`` in all.

        Layers finish in ascending order. ``carried`` is that of the findings of the layer before,
        read-only; None for the first layer.
        """

    @property
    @abstractmethod
    def work(self) -> int:
        """Approximate units of work of ``finish``."""


class Calibration(ABC):
    """How a method is calibrated: its options, and a study for each layer.

    Attributes:
        method: name, as of the cache.
        tensors_held: by a study, of those as large as the keys of all tokens.
    """

    method: ClassVar[str]
    tensors_held: ClassVar[int] = 2

    def check(self, lengths: Sequence[int]) -> None:
        """ValueError if training sequences of these lengths are too little.

        Called before the reading.
        """
        if not sum(lengths):
            raise ValueError("no tokens to learn from: add sequences that are not held out first")

    @abstractmethod
    def study(self, layer: int, rope: Rope, device: torch.device) -> LayerStudy:
        """A new study of layer number ``layer`` with RoPE ``rope``, on ``device``."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All options that affect the result, plain JSON; saved in the artifact."""


def calibrate(
    model: PreTrainedModel,
    corpus: Corpus,
    calibration: Calibration,
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    progress: bool = True,
) -> CalibrationArtifact:
    """Learn what a method needs to know about ``model``; write the artifact to ``out``.

    First a trial checks that RoPE can be undone on queries and keys. Then the texts pass through
    the model once for as many layers as 2 GiB hold the tokens of. Layers learn in ascending order,
    each with the tensors carried by the one before.

    Args:
        model: in eval mode, on one device or several (``device_map``).
        corpus: what to learn from.
        calibration: of a method.
        out: a folder, made if needed. An artifact of the same method in it is replaced.
        name: of the model in the artifact; None for where it was loaded from.
        progress: show progress bars and how long it will take, on stderr.

    Returns:
        the artifact, saved. It covers the layers with full attention.

    Raises:
        ValueError: a model that no cache can serve, whose RoPE can't be undone, or that is in
            training mode, split over processes or on no device; longer sequences than it has
            positions; the ``config.json`` of something else in ``out``; what the method refuses, as
            too few tokens.
        FileExistsError: ``out`` is a file.
    """
    folder = Path(out).expanduser()
    check_no_foreign_artifact(folder, calibration.method)
    if model.training:
        raise ValueError("the model is in training mode, where dropout acts: call model.eval()")
    check_model(model)
    check_calibration(model)
    check_positions(model, max(map(len, corpus.sequences)))
    train_count = len(corpus.sequences) - corpus.held_out
    calibration.check([len(ids) for ids in corpus.sequences[:train_count]])
    # Layers that slide or are recurrent never retrieve.
    ours = retrieval_layers(model.config)
    ropes = {layer: rope for layer, rope in check_rope(model).items() if layer in ours}
    width = max(shape.width for shape in retrieval_shapes(model.config).values())
    nbytes = calibration.tensors_held * width * model.dtype.itemsize * corpus.tokens
    layers_at_once = max(1, _MOST_HELD // nbytes)
    identity = ModelIdentity.of(model, name)
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    quality: list[dict[str, Any]] = []
    carried = None
    for first in range(0, len(ropes), layers_at_once):
        some = dict(list(ropes.items())[first : first + layers_at_once])
        studies = _read(model, corpus, calibration, some, progress)
        for layer in some:
            study = studies.pop(layer)
            with tqdm(total=study.work, desc=f"layer {layer}", disable=not progress) as bar:
                result = study.finish(bar.update, carried)
            # Its tokens are freed before the next one learns.
            del study
            carried, settings[str(layer)] = result.carried, result.settings
            tensors |= {f"layers.{layer}.{name}": x for name, x in result.tensors.items()}
            quality.append({"layer": layer, **result.quality})
    artifact = CalibrationArtifact(
        method=calibration.method,
        model=identity,
        tensors=tensors,
        data=corpus.description,
        options={**calibration.options(), "layers": settings},
        quality=quality,
    )
    artifact.save_pretrained(folder)
    return artifact


def _read(
    model: PreTrainedModel,
    corpus: Corpus,
    calibration: Calibration,
    ropes: Mapping[int, Rope],
    progress: bool,
) -> dict[int, LayerStudy]:
    """One pass over all sequences; studies of the layers in ``ropes``."""
    studies: dict[int, LayerStudy] = {}
    train_count = len(corpus.sequences) - corpus.held_out
    title = f"reading for layers {', '.join(map(str, ropes))}"
    with tqdm(total=corpus.tokens, desc=title, unit="tok", disable=not progress) as bar:
        for index, ids in enumerate(corpus.sequences):

            def take(
                layer: int, tokens: LayerTokens, held_out: bool = index >= train_count
            ) -> None:
                if layer not in ropes:
                    return
                if layer not in studies:
                    # Weights may be elsewhere (offloading), so the tokens tell the device.
                    studies[layer] = calibration.study(layer, ropes[layer], tokens.key.device)
                studies[layer].add(tokens, held_out)

            with torch.no_grad(), tap_attention(model, take):
                decoder_of(model)(ids[None].to(input_device(model)), use_cache=False)
            bar.update(len(ids))
    return studies
