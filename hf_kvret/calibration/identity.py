"""Identity of an artifact's model: facts that must agree, and a sample of the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvret.integration.model_facts import in_words, model_facts
from hf_kvret.integration.weights import WeightSample, sample_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelIdentity:
    """The model that something was learned from.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: ``model_type``, counts and widths,
            kinds of layers, and RoPE under ``rope.<parameter>``, or
            ``rope.<kind of layer>.<parameter>``. Plain JSON.
        weights: sampled numbers.
    """

    name: str
    facts: Mapping[str, Any]
    weights: tuple[WeightSample, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, name: str | None = None) -> ModelIdentity:
        """The identity of ``model``.

        Args:
            model: reads a few hundred numbers of its weights.
            name: as in ``ModelIdentity``; None for where the model was loaded from. Of a folder
                on this machine only the last part is taken, because artifacts are shared.

        Raises:
            ValueError: the weights hold NaN or infinity.
        """
        name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        if Path(name).exists():
            name = Path(name).resolve().name
        return cls(name, model_facts(model.config), sample_weights(model))

    @property
    def sha256(self) -> str:
        """Hex digest of the facts, equal for all models of an architecture. Weights are left out,
        because the same weights may be in another dtype."""
        plain = json.dumps(self.facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()

    def difference(self, config: PreTrainedConfig) -> str:
        """The first fact in which the model with ``config`` differs, in words; empty if none."""
        facts = model_facts(config)
        for name in [*self.facts, *(name for name in facts if name not in self.facts)]:
            theirs, ours = self.facts.get(name), facts.get(name)
            if theirs != ours:
                return in_words(name, theirs, ours)
        return ""

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON, with the digest."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "facts": dict(self.facts),
            "weights": [sample.as_json() for sample in self.weights],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelIdentity:
        """The inverse of ``as_json``.

        Raises:
            KeyError, TypeError, ValueError: a part is missing, of another kind, or the digest is
                not that of the facts.
        """
        weights = tuple(WeightSample.from_json(sample) for sample in plain["weights"])
        identity = cls(str(plain["name"]), dict(plain["facts"]), weights)
        if identity.sha256 != plain["sha256"]:
            raise ValueError("the model's sha256 is not that of its facts")
        return identity
