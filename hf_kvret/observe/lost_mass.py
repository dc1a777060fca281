"""A warning where a cache leaves out more of the attention than it may."""

from __future__ import annotations

import warnings
from typing import Any

from hf_kvret.layer.missed_mass import MEASURED_STEPS
from hf_kvret.options.config import RetrievalConfig


class LostMassWarning:
    """Warns once of a cache that leaves out more of the attention than its options allow."""

    def __init__(self) -> None:
        self._given = False

    def before_a_pass(self, layers: list[Any], options: RetrievalConfig, tokens: int) -> None:
        """As ``give``, where a pass of so many ``tokens`` may wait for the device.

        A prompt may, and a step that flushes. On a CPU there is nothing to wait for: there it is
        looked at as often as it is measured.
        """
        if options.warn_lost_mass is None or self._given:
            return
        layer = next(layer for layer in layers if hasattr(layer, "counters"))
        regions = layer.regions
        if regions is None:
            return
        on_cpu = regions.window.keys.device.type == "cpu"
        measured = on_cpu and layer.counters.steps % MEASURED_STEPS == 1
        if tokens > 1 or measured or regions.step_flushes():
            self.give(layers, options)

    def give(self, layers: list[Any], options: RetrievalConfig) -> None:
        """Warn if the mean share that a layer lost is above ``options.warn_lost_mass``."""
        if options.warn_lost_mass is None or self._given:
            return
        shares = {
            number: layer.counters.lost_mass() or 0.0
            for number, layer in enumerate(layers)
            if hasattr(layer, "counters")
        }
        worst = max(shares, key=lambda number: shares[number])
        if shares[worst] <= options.warn_lost_mass:
            return
        self._given = True
        more = "" if options.rest else ", or let rest='mean' stand for what is left out"
        above = sum(share > options.warn_lost_mass for share in shares.values())
        warnings.warn(
            f"layer {worst} leaves out {shares[worst]:.0%} of its attention, as its index "
            f"estimates it; {above} of {len(shares)} layers leave out more than "
            f"warn_lost_mass={options.warn_lost_mass}: raise top_k={options.top_k}{more}",
            stacklevel=4,
        )
