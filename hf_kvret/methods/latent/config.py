"""Options of absorbed dense attention."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_kvret.options.config import RetrievalConfig

_MEANINGFUL = {"prefill_chunk", "max_draft", "graph"}


@dataclass(frozen=True)
class LatentConfig(RetrievalConfig):
    """Nothing is selected and nothing goes cold: of the options only those of passes matter.

    ``prefill_chunk``, ``max_draft`` and ``graph`` are as for every cache. Sizes of regions, budget
    and store have no meaning, since all tokens stay in the window.

    Raises:
        ValueError: an option without a meaning that is not its default.
    """

    retrieves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.takes(field.name, value):
                raise ValueError(
                    f"{field.name}={value!r} has no meaning: latent keeps all tokens on the "
                    "model's device and attends to all of them; leave it out, or take a method "
                    "that retrieves, as cache_implementation='flat'"
                )

    @classmethod
    def takes(cls, name: str, value: Any) -> bool:
        """Only options of passes, and defaults."""
        return name in _MEANINGFUL or value == getattr(cls, name)

    @property
    def dense_len(self) -> int:
        """Longer than any cache."""
        return sys.maxsize

    @property
    def even_len(self) -> int:
        """See ``RetrievalConfig``; nothing ever goes cold."""
        return 8192

    @property
    def group_obstacle(self) -> str:
        """See ``RetrievalConfig``."""
        return "latent selects nothing, it attends to all tokens"

    def exact(self) -> Self:
        """These options: they are exact."""
        return self
