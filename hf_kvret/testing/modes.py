"""Modes of use: every way in which generate, or a loop of one's own, works with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_kvret.testing import direct_modes, generate_modes
from hf_kvret.testing.scenario import CacheMaker, Outcome, Scenario, attempt


@dataclass(frozen=True)
class Mode:
    """One way to use a cache.

    Attributes:
        name: key in ``MODES``.
        play: uses the cache of a scenario and records what came out.
        direct: the mode calls the model itself, not only through ``generate``; a cache that
            needs the model prepared for that must have it done.
        obstacle: says why a model can't do it where transformers would not raise.
    """

    name: str
    play: Callable[[Scenario], None]
    direct: bool
    obstacle: Callable[[PreTrainedModel], str | None] | None = None

    def run(self, model: PreTrainedModel, make_cache: CacheMaker | None = None) -> Outcome:
        """Return what `model` gives with the caches of `make_cache` (None: the reference)."""
        scenario = Scenario(model, make_cache)
        self.play(scenario)
        return scenario.outcome

    def reference(self, model: PreTrainedModel) -> Outcome | str:
        """What `model` gives with transformers' own cache, or the reason why it can't."""
        reason = None if self.obstacle is None else self.obstacle(model)
        if reason is not None:
            return reason
        outcome = attempt(self.play, model, None)
        if isinstance(outcome, str):
            return f"transformers' own cache fails too: {outcome}"
        return outcome

    def supports(self, model: PreTrainedModel) -> str | None:
        """None where the mode works on `model`, otherwise the reason why it can't (by trial)."""
        outcome = self.reference(model)
        return outcome if isinstance(outcome, str) else None


def _modes() -> dict[str, Mode]:
    return {
        play.__name__: Mode(play.__name__, play, direct, module.OBSTACLES.get(play))
        for module, direct in ((generate_modes, False), (direct_modes, True))
        for play in module.PLAYS
    }


MODES: dict[str, Mode] = _modes()
"""All modes by name, those of ``generate`` first."""
