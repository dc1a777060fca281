"""Kernels compiled before the tokens come that need them.

A kernel is compiled anew where an argument that it is compiled for changes, which takes seconds.
Some of these arguments follow the number of tokens. Within ``growing`` an operation that launches
such a kernel also compiles what it would launch for more tokens: with the arguments at hand, so
that these count as they will, but for those that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Window(NamedTuple):
    """A window to attend to.

    Attributes:
        tokens: in it.
        masked: whether there is a mask of valid ones, whose rows then begin at multiples of 16.
    """

    tokens: int
    masked: bool


class Growth(NamedTuple):
    """What steps to come may have to do with.

    Attributes:
        more: candidates of a choice, at most, beside those that there are now.
        counts: numbers of tokens to choose, the present one among them, ascending.
        windows: in any order.
    """

    more: int
    counts: tuple[int, ...]
    windows: tuple[Window, ...]

    def choices(self, length: int, count: int) -> list[tuple[int, int]]:
        """``(length, count)`` of choices to come, which now are of ``count`` from ``length``.

        Lengths go by doubles: what is launched depends on their size, not on their value.
        """
        lengths = [length]
        while lengths[-1] < length + self.more:
            lengths.append(min(2 * max(1, lengths[-1]), length + self.more))
        counts = {count, *(each for each in self.counts if each > count)}
        return [(one, each) for one in lengths for each in sorted(counts) if each <= one]


_growth: ContextVar[Growth | None] = ContextVar("growth", default=None)


@contextmanager
def growing(growth: Growth) -> Iterator[None]:
    """Context in which operations compile what ``growth`` will ask for; not within a capture."""
    token = _growth.set(growth)
    try:
        yield
    finally:
        _growth.reset(token)


def growth() -> Growth | None:
    """What to compile ahead for; None: nothing."""
    return _growth.get()


def compile_ahead(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Compile what ``kernel[grid](*arguments, **constants)`` would launch, and load it.

    Once a process: Triton keeps what it has compiled. A dtype among ``arguments`` is for a pointer
    to numbers of it that begin at a multiple of 16 bytes. Raises what the launch would raise.
    """
    compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **constants)
    if compiled is not None:
        # Asking for a launcher loads it, so that no later capture has to. The interpreter has none.
        compiled[1, 1, 1]
