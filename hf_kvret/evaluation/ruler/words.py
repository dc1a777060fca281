"""Words to draw from: the lists of the package wonderwords, as RULER reads them.

RULER's keys are drawn from the sorted list of all "adjective-noun" pairs. It has six million
entries; :class:`Pairs` is that list without making it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import overload


def _read(name: str) -> list[str]:
    """The words of one list, in the file's order and with its repetitions."""
    try:
        import wonderwords  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "RULER draws its words from the lists of wonderwords, which is not installed: "
            "pip install wonderwords, or in the checkout pip install -c constraints.txt '.[eval]'",
            name=error.name,
        ) from error
    text = files("wonderwords.assets").joinpath(f"{name}list.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


def adjective_noun_pairs() -> Pairs:
    """All "adjective-noun" pairs, sorted, without repetitions.

    Raises:
        ModuleNotFoundError: wonderwords is not installed.
    """
    return Pairs(_read("adjective"), _read("noun"))


def single_words() -> list[str]:
    """All nouns, adjectives and verbs, sorted, without repetitions (8,166 in wonderwords 3.0.1).

    Raises:
        ModuleNotFoundError: wonderwords is not installed.
    """
    return sorted({*_read("noun"), *_read("adjective"), *_read("verb")})


class Pairs(Sequence[str]):
    """``sorted({f"{first}-{second}" ...})`` as a sequence that makes its entries on demand.

    Entries with the same first word are neighbours and sorted by the second, with one exception:
    if a first word and a hyphen begin another first word ("blue", "blue-eyed"), their entries mix.
    Such families are made in full, the others are computed from the position.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        self._seconds = sorted(set(seconds))
        self._blocks: list[str | list[str]] = []
        families: list[list[str]] = []
        for stem in sorted({f"{first}-" for first in firsts}):
            if families and stem.startswith(families[-1][0]):
                families[-1].append(stem)
            else:
                families.append([stem])
        for family in families:
            if len(family) == 1:
                self._blocks.append(family[0])
            else:
                mixed = {stem + second for stem in family for second in self._seconds}
                self._blocks.append(sorted(mixed))
        sizes = [
            len(self._seconds) if isinstance(block, str) else len(block) for block in self._blocks
        ]
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside {len(self)} pairs")
        number = bisect_right(self._ends, position)
        inside = position - (self._ends[number - 1] if number else 0)
        block = self._blocks[number]
        return block + self._seconds[inside] if isinstance(block, str) else block[inside]
