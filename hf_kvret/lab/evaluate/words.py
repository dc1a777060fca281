"""Words to draw from: the lists of the package wonderwords, as RULER reads them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from importlib.resources import files
from itertools import accumulate


def single_words() -> list[str]:
    """All nouns, adjectives and verbs, sorted, without repetitions (8,166 in wonderwords 3.0.1)."""
    return sorted({*_word_list("noun"), *_word_list("adjective"), *_word_list("verb")})


def adjective_noun_pairs() -> Pairs:
    """All six million "adjective-noun" pairs, sorted, without repetitions."""
    return Pairs(_word_list("adjective"), _word_list("noun"))


def _word_list(name: str) -> list[str]:
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


class Pairs:
    """``sorted({f"{first}-{second}" ...})``, whose entries are made on demand.

    Entries with the same first word are neighbours and sorted by the second, with one exception:
    if a first word and a hyphen begin another first word ("blue", "blue-eyed"), their entries mix.
    Such families are made in full, the others are computed from the index.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        endings = sorted(set(seconds))
        families: list[list[str]] = []
        for stem in sorted({f"{first}-" for first in firsts}):
            if families and stem.startswith(families[-1][0]):
                families[-1].append(stem)
            else:
                families.append([stem])
        # Each block has the text that begins all of its entries, and what follows it.
        self._blocks = [
            (family[0], endings)
            if len(family) == 1
            else ("", sorted({stem + ending for stem in family for ending in endings}))
            for family in families
        ]
        self._ends = list(accumulate(len(block) for _, block in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside {len(self)} pairs")
        number = bisect_right(self._ends, index)
        stem, block = self._blocks[number]
        # The difference is negative, so it counts from the block's end.
        return stem + block[index - self._ends[number]]
