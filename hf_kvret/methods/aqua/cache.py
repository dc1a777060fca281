"""AquaKVCache: all cold tokens, in about two bits per number."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.shared import made_once
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.store import FirstRows
from hf_kvret.methods.aqua.config import AquaConfig, layer_plan
from hf_kvret.methods.aqua.learned import (
    METHOD,
    NOT_CODED,
    check_artifact,
    default_group,
    learned_options,
)
from hf_kvret.methods.aqua.store import AquaStore
from hf_kvret.models.compatibility import retrieval_shapes
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import PagedStore, Store, StoreChoice

_log = logging.getLogger(__name__)


class AquaKVCache(RetrievalCache):
    """Attends to all tokens; cold ones are stored as coded prediction residuals (AQUA-KV).

    ``AquaKVCache(config=model.config, artifact="folder-or-hub-id")``, or without an artifact
    ``AquaKVCache(config=model.config, predictor="none")``, which is the codec alone.
    """

    name: ClassVar[str] = METHOD
    Config: ClassVar[type[RetrievalConfig]] = AquaConfig
    IndexClass: ClassVar[type[Any] | None] = None
    needs_artifact: ClassVar[bool] = True

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> AquaConfig:
        """``options`` with the model's artifact, which must be for this architecture, and with the
        artifact's bits where the options have none.

        Raises:
            OSError, ValueError: no artifact, a damaged one, or that of another model; a model whose
                rotation can't be undone; a group that doesn't fit.
        """
        options = super().options_for(options, config)
        if options.predictor == "artifact":
            options = options.located(config)
            artifact = options.load()
            check_artifact(artifact, config)
            _warn_of_sinks(options, artifact)
        options = options.filled_in()
        # A group size divides the width of a token's keys in every layer, where it is one of codes.
        first_only = options.group is not None and options.first_bits not in (None, NOT_CODED)
        if options.bits != NOT_CODED or first_only:
            for shape in retrieval_shapes(config).values():
                default_group(shape.width, options.group)
        return options

    @classmethod
    def needs_positions(cls, options: AquaConfig, layer: int) -> str:
        """If keys are coded before RoPE, the store of the first layer keeps positions for all."""
        if not layer_plan(options, layer).keeps_positions:
            return ""
        return (
            "this model does not tell its attention the positions of tokens, and keys are coded "
            "before RoPE: pass position_ids to the model, use predictor='none', or an artifact "
            "made with `hf-kvret calibrate aqua --space after`"
        )

    @classmethod
    def make_store(
        cls, options: AquaConfig, layer: int, stores: StoreChoice, first: FirstRows
    ) -> Store:
        """A new, empty store for the model layer number ``layer``."""
        options = options.filled_in()
        coded_bytes = first.nbytes * options.row_bits // NOT_CODED
        pages = stores.make(replace(first, nbytes=coded_bytes))
        assert isinstance(pages, PagedStore), "AquaConfig refuses the others"
        return AquaStore(layer_plan(options, layer), pages.memory)


def _warn_of_sinks(options: AquaConfig, artifact: CalibrationArtifact) -> None:
    """Warn, once per artifact, if tokens are coded that calibration left out."""
    sinks = learned_options(artifact).sinks

    def warn() -> None:
        _log.warning(
            "sink=%d, and the aqua artifact was learned without the first %d tokens of a sequence, "
            "which its predictors don't fit: pass sink=%d to keep them uncoded",
            *(options.sink, sinks, sinks),
        )

    if options.sink < sinks:
        made_once(artifact, ("sinks", options.sink), warn)
