"""Words to draw from: the lists of the package wonderwords, as RULER reads them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files


def single_words() -> list[str]:
    """All nouns, adjectives and verbs, sorted, without repetitions (8,166 in wonderwords 3.0.1)."""
    return sorted({*_word_list("noun"), *_word_list("adjective"), *_word_list("verb")})


def adjective_noun_pairs() -> Pairs:
    """All six million "adjective-noun" pairs."""
    return Pairs(_word_list("adjective"), _word_list("noun"))


class Pairs:
    """Every ``f"{first}-{second}"``, by first and then by second word; made on demand."""

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        self._firsts = sorted({f"{first}-" for first in firsts})
        self._seconds = sorted(set(seconds))

    def __len__(self) -> int:
        return len(self._firsts) * len(self._seconds)

    def __getitem__(self, index: int) -> str:
        first, second = divmod(index, len(self._seconds))
        return self._firsts[first] + self._seconds[second]


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
