"""A2ATSCache: windowed RoPE and query-aware vector quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.methods.a2ats.config import A2ATSConfig
from hf_kvret.methods.a2ats.index import A2ATSIndex
from hf_kvret.methods.a2ats.learned import load, space_of


class A2ATSCache(RetrievalCache):
    """Attends to the tokens whose codewords score best; needs a calibration artifact (A2ATS).

    ``A2ATSCache(config=model.config, artifact="folder-or-hub-id")``. The published attention on the
    CPU is ``store="cpu"``, for this and every other method.
    """

    name: ClassVar[str] = "a2ats"
    config_class: ClassVar[type[RetrievalConfig]] = A2ATSConfig

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> A2ATSConfig:
        """``options`` with the model's artifact, which must have been made for this architecture.

        Raises:
            OSError, ValueError: no artifact, a damaged one, or that of another model; a model whose
                rotation can't be undone.
        """
        options = super().options_for(options, config)
        if options.artifact is None:
            options = options.replace(artifact=_artifact_beside(config))
        artifact = load(options.artifact, options.revision)
        artifact.check(config)
        space_of(artifact).check_model(config)
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
        assert isinstance(self.options, A2ATSConfig) and self.options.artifact is not None
        load(self.options.artifact, self.options.revision).check_weights(model)


def _artifact_beside(config: PreTrainedConfig) -> str:
    """The artifact in the model's own folder."""
    home = getattr(config, "_name_or_path", "")
    beside = Path(home) / A2ATSCache.name
    if not home or not beside.is_dir():
        raise ValueError(
            "A2ATS needs a calibration artifact of the model: pass artifact='folder-or-hub-id', or "
            f"make one with `hf-kvret calibrate a2ats --model {home or 'MODEL'} --text FILE --out "
            "DIR`"
        )
    return str(beside)
