"""A2ATSCache: windowed RoPE and query-aware vector quantization."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.artifacts.shared import artifact_place
from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.a2ats.config import A2ATSConfig
from hf_kvret.methods.a2ats.index import A2ATSIndex
from hf_kvret.methods.a2ats.learned import check_artifact, load
from hf_kvret.options.config import RetrievalConfig


class A2ATSCache(RetrievalCache):
    """Attends to the tokens whose codewords score best; needs a calibration artifact (A2ATS).

    ``A2ATSCache(config=model.config, artifact="folder-or-hub-id")``. The published attention on the
    CPU is ``store="cpu"``, for this and every other method.
    """

    name: ClassVar[str] = "a2ats"
    Config: ClassVar[type[RetrievalConfig]] = A2ATSConfig
    needs_artifact: ClassVar[bool] = True

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> A2ATSConfig:
        """``options`` with the model's artifact, which must have been made for this architecture.

        Raises:
            OSError, ValueError: no artifact, a damaged one, or that of another model; a model whose
                rotation can't be undone.
        """
        options = super().options_for(options, config)
        options = options.replace(artifact=artifact_place(options.artifact, config, cls.name))
        check_artifact(load(options.artifact, options.revision, options.artifact_sha256), config)
        return options

    @classmethod
    def make_index(cls, options: A2ATSConfig, layer: int) -> A2ATSIndex:
        """A new, empty index for the model layer number ``layer``."""
        return A2ATSIndex(options, layer)

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse a model with other weights than the artifact was made from.

        Raises:
            ValueError: it has.
        """
        options = self.options
        assert isinstance(options, A2ATSConfig) and options.artifact is not None
        load(options.artifact, options.revision, options.artifact_sha256).check_weights(model)
