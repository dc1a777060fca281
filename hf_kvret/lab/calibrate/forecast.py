"""Estimates of a calibration's duration, printed once a first part was measured."""

from __future__ import annotations

import sys
import time

from hf_kvret.lab.program.progress import tqdm

# A shorter measurement is too unreliable for an estimate.
_LEAST_SECONDS = 1.0


class Forecast:
    """Writes one estimate for reading and one for learning to stderr, early in each.

    Args:
        layers: number of layers to learn.
        passes: over the texts, each for some of the layers.
        tokens: of all texts.
        show: False writes nothing.
    """

    def __init__(self, layers: int, passes: int, tokens: int, *, show: bool) -> None:
        self._layers, self._passes, self._tokens = layers, passes, tokens
        self._show_reading = self._show_learning = show
        self._started = time.perf_counter()
        self._units = 0

    def begin(self) -> None:
        """Start the clock, for a pass over the texts or for a layer."""
        self._started, self._units = time.perf_counter(), 0

    def read(self, tokens: int) -> None:
        """Report ``tokens`` read since the clock started."""
        if self._show_reading:
            self._show_reading = False
            seconds = self._elapsed() / tokens * self._tokens * self._passes
            passes = "one pass" if self._passes == 1 else f"{self._passes} passes"
            text = f"reading takes about {span(seconds)} ({passes} over {self._tokens:,} tokens)"
            tqdm.write(text, file=sys.stderr)

    def work(self, units: int, total: int) -> None:
        """Report ``units`` more of a layer's ``total`` as done."""
        self._units += units
        if self._show_learning and self._elapsed() >= _LEAST_SECONDS and self._units:
            self._tell_learning(self._elapsed() / self._units * max(total, self._units))

    def finish(self) -> None:
        """Report that a layer is finished."""
        if self._show_learning:
            self._tell_learning(self._elapsed())

    def _tell_learning(self, seconds_of_layer: float) -> None:
        self._show_learning = False
        layers = "one layer" if self._layers == 1 else f"{self._layers} layers"
        seconds = seconds_of_layer * self._layers
        tqdm.write(f"learning takes about {span(seconds)} ({layers})", file=sys.stderr)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def span(seconds: float) -> str:
    """A duration in words: ``a minute``, ``12 minutes``, ``1.5 hours``."""
    if seconds < 60:
        return "a minute" if seconds > 30 else "half a minute" if seconds > 10 else "10 seconds"
    minutes = round(seconds / 60)
    if minutes < 90:
        return "a minute" if minutes == 1 else f"{minutes} minutes"
    return f"{seconds / 3600:.1f} hours"
