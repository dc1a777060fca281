"""Options of A2ATS."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from hf_kvret.options.config import RetrievalConfig, check_source

_BUDGETS = ("head", "union")


@dataclass(frozen=True)
class A2ATSConfig(RetrievalConfig):
    """A2ATS's options beside those of every retrieval cache.

    Attributes:
        artifact: folder or hub id of the calibration artifact that belongs to the model; None for
            the folder ``a2ats`` in the model's own folder.
        revision: of the artifact on the hub; None for its main branch.
        artifact_sha256: of the artifact that is meant, as `hf-kvret inspect` shows it: any other
            is refused; None for whatever is there.
        budget_of: ``"head"``: the best tokens of a KV head, by the largest softmax weight that its
            query heads give them; ``"union"``: each of the G query heads chooses ``budget // G``
            tokens, and all heads of the group attend to all of these, as published.
    """

    top_k: int | float | None = 0.06
    recent: int = 64
    artifact: str | None = None
    revision: str | None = None
    artifact_sha256: str | None = None
    budget_of: str = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.artifact, os.PathLike):
            object.__setattr__(self, "artifact", os.fspath(self.artifact))
        check_source(self.artifact, self.revision, self.artifact_sha256)
        if self.budget_of not in _BUDGETS:
            raise ValueError(
                f"budget_of={self.budget_of!r}: choose {' or '.join(map(repr, _BUDGETS))}"
            )

    @property
    def lacks_artifact(self) -> bool:
        """Whether the model's folder must have it."""
        return self.artifact is None

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The published selection: each query head chooses 3%, and a group attends to all of these.

        ``top_k`` is for the four query heads of a group of the models there; pass ``0.03 * G`` for
        others. They agree in part, so about half as many rows are read.
        """
        return cls.from_options(**{"budget_of": "union", "top_k": 0.12, **changes})
