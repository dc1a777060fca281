"""Splitting an essay into sentences, between which needles are put.

RULER uses NLTK's punkt. Where NLTK and its data are installed, so do we; nothing is ever
downloaded. Elsewhere a splitter of ours is used, which puts needles at slightly different places
of the same text; :func:`sentence_splitter` says which one it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# An end mark, what closes behind it, and blanks before something that can begin a sentence.
_END = re.compile(r"""[.!?]+["'”’)\]]*(\s+)(?=["'“‘(\[]*[A-Z0-9])""")

# Capitals with a dot are initials, but for "I".
_INITIAL = re.compile(r"[A-HJ-Z]")
_ABBREVIATION = re.compile(
    r"al|approx|capt|cf|co|col|dr|e\.g|etc|fig|gen|gov|hon|i\.e|inc|jr|ltd?|messrs|mrs?|ms|no|pp?|"
    r"prof|rev|sen|sgt|sr|st|viz|vol|vs",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Splitter:
    """A way to split a text: its name, and a function from a text to its sentences in order."""

    name: str
    split: Callable[[str], list[str]]


def _ends_with_abbreviation(text: str) -> bool:
    """Whether the text, which stops before a single dot, stops with what dots don't end."""
    last = text[max(text.rfind(" "), text.rfind("\n")) + 1 :].lstrip("\"'“‘([")
    return bool(_INITIAL.fullmatch(last) or _ABBREVIATION.fullmatch(last))


def split_simply(text: str) -> list[str]:
    """The sentences of an English text, without the blanks between them.

    A sentence ends at a dot, question or exclamation mark that blanks and a capital or a digit
    follow; abbreviations such as "Dr." and initials don't end one. Joined by single blanks the
    sentences are the text again, if that has only single blanks. An empty text has none.
    """
    sentences = []
    start = 0
    for match in _END.finditer(text):
        marks = match.group().rstrip()
        # The last 40 characters hold the last word; a copy of all before it would cost n squared.
        if marks == "." and _ends_with_abbreviation(
            text[max(start, match.start() - 40) : match.start()]
        ):
            continue
        sentences.append(text[start : match.start(1)])
        start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def best_splitter() -> Splitter:
    """NLTK's punkt if it is installed with its data, else :func:`split_simply`."""
    try:
        import nltk
    except ModuleNotFoundError:
        return Splitter("simple", split_simply)
    try:
        nltk.tokenize.sent_tokenize("Is it here? It is.")
    except LookupError:
        # NLTK is here without its data.
        return Splitter("simple", split_simply)
    return Splitter(f"nltk {nltk.__version__} punkt", nltk.tokenize.sent_tokenize)


def sentence_splitter() -> str:
    """Name of the splitter that :func:`generate` uses here: "simple", or NLTK's with its version.

    Results on essay haystacks should name it: the two put needles at slightly different places.
    """
    return best_splitter().name
