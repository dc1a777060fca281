"""Who is told of a layer's decode steps, and what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall


class StepRecord(NamedTuple):
    """A step of a layer with cold tokens, for its subscribers.

    Attributes:
        number: of the layer in the model.
        kv: of the layer, after the step.
        query: ``[B, Hq, Q, Dk]`` of the search.
        call: of the attention.
        cold: the tokens that were searched.
        ids: ``[B, H, Q, K]`` int32 that the query attended to, -1 for none; None: all of them.
    """

    number: int
    kv: LayerKV
    query: torch.Tensor
    call: AttentionCall
    cold: ColdTokens
    ids: torch.Tensor | None


class Subscriber(ABC):
    """Called with the record of every step of a layer.

    Attributes:
        capture_obstacle: why it can't be called in a captured step, whose Python code does not run
            again when it is replayed; None: all that it does is work of the device, or is counted.
    """

    capture_obstacle: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, record: StepRecord) -> None:
        """Take in a step; what is raised breaks off the forward pass."""

    @abstractmethod
    def reset(self) -> None:
        """The layer forgets all tokens."""
