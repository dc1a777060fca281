"""How long prompts are read: attending to everything, or to what probes of a group choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hf_kvret.options.declare import OneOf, check_options, integer, option, real


@dataclass(frozen=True)
class PromptRecipe:
    """Which of the earlier tokens a group of 512 queries of a long prompt attends to.

    Attributes:
        top_k: tokens that a group chooses among those before it, per KV head: a share or a count.
            The first 64 tokens and the 512 before the group come on top.
        floor: the least number of tokens that a group chooses.
        above: only longer contexts are read by retrieval.
        exact: last tokens of a prompt that attend to everything, since a question stands there.
        probes: tokens of a group that choose for it, or ``"all"``. ``"all"`` also finds the tokens
            that one query inside the prompt needs, at half the cost of attending to everything.
    """

    top_k: int | float = option(
        0.125, integer(1, "tokens"), real(note="a share; an int is a count", above=0, most=1)
    )
    floor: int = option(2048, integer(0, "tokens"))
    above: int = option(16_384, integer(0, "tokens"))
    exact: int = option(512, integer(0, "tokens"))
    probes: int | Literal["all"] = option(16, integer(1, "queries"), OneOf("all"))

    def __post_init__(self) -> None:
        check_options(self, prefix="prompt: ")

    @classmethod
    def of(cls, option: Any) -> PromptRecipe | None:
        """What the option ``prompt`` asks for; None where prompts attend to everything.

        Raises:
            ValueError: an unknown name, key or value.
        """
        if option in ("exact", "retrieve"):
            return cls() if option == "retrieve" else None
        names = ", ".join(field.name for field in fields(cls))
        if not isinstance(option, Mapping):
            raise ValueError(
                f"prompt={option!r}: choose 'exact' or 'retrieve', or give a dictionary with any "
                f"of {names}"
            )
        for name in option:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"prompt has no {name!r}: choose among {names}")
        return cls(**option)

    def budget(self, before: int) -> int:
        """Tokens that a group attends to among the ``before`` ones before it, at most all."""
        count = self.top_k if isinstance(self.top_k, int) else -(-before * self.top_k // 1)
        return min(before, max(int(count), self.floor))


PromptOption = str | Mapping[str, Any]
