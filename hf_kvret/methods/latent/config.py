"""Options of absorbed dense attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from hf_kvret.config import RetrievalConfig


@dataclass(frozen=True)
class LatentConfig(RetrievalConfig):
    """Nothing is selected and nothing goes cold: of the options only those of prompts matter.

    ``prefill_chunk`` and ``max_draft`` are as for every cache. Sizes of regions, budget and store
    have no meaning, since all tokens stay in the window.
    """

    retrieves: ClassVar[bool] = False

    @property
    def dense_len(self) -> int:
        """Longer than any cache."""
        return sys.maxsize

    @property
    def rest_obstacle(self) -> str:
        """See ``RetrievalConfig``."""
        return "latent attends to all tokens, nothing is left out"

    @property
    def group_obstacle(self) -> str:
        """See ``RetrievalConfig``."""
        return "latent selects nothing, it attends to all tokens"
