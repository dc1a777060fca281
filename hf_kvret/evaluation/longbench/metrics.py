"""LongBench's scores of one answer against one reference, each in 0..1.

They give the numbers of THUDM/LongBench at 2e00731 (LongBench/metrics.py) with the packages of its
requirements.txt, oddities included, because published scores have them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher


def word_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 over words with their counts; case, punctuation and a, an, the don't count."""
    given, wanted = _plain_words(answer), _plain_words(reference)
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of a summary, as the package ``rouge`` 1.0.1 computes it.

    Sentences end at every full stop. For each pair of sentences, the words of one longest common
    subsequence are taken; their union is a set, and it is divided by the number of *different*
    words of each text. Case and punctuation count. A sentence of blanks counts as one empty word.
    0 for an answer or a reference without a sentence.

    The package reconstructs the subsequence by recursion and so fails, which LongBench scores as 0,
    where two sentences have about a thousand words together; this one doesn't.
    """
    given, wanted = _sentences(answer), _sentences(reference)
    if not given or not wanted:
        return 0.0
    union = {
        word for theirs in wanted for ours in given for word in _common_subsequence(theirs, ours)
    }
    precision = len(union) / len({word for words in given for word in words})
    recall = len(union) / len({word for words in wanted for word in words})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / number of class names in the answer, if the reference is among them, else 0.

    Names that are a part of the reference don't count, but for one that follows another such name
    directly: the original deletes from the list that it walks along.
    """
    found = [name for name in classes if name in answer]
    place = 0
    while place < len(found):
        if found[place] in reference and found[place] != reference:
            del found[place]
        place += 1
    return 1 / len(found) if reference in found else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the integers in the answer that are the number in ``Paragraph 7``.

    Raises:
        ValueError: the reference names no paragraph.
    """
    number = re.search(r"Paragraph (\d+)", reference)
    if number is None:
        raise ValueError(f"the reference {reference!r} is not of the form 'Paragraph 7'")
    return count(answer, number[1])


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the integers in the answer that are the reference, digit by digit."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Likeness of the first line without a backtick, # or //, in hundredths.

    ``fuzzywuzzy.fuzz.ratio`` without python-Levenshtein, which LongBench doesn't ask for: difflib's
    ratio, rounded. With python-Levenshtein it is another measure, ``rapidfuzz.fuzz.ratio``.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def _plain_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _sentences(text: str) -> list[list[str]]:
    return [part.split() or [""] for part in text.split(".") if part]


def _common_subsequence(first: list[str], second: list[str]) -> set[str]:
    """The words of the longest common subsequence that a walk from the end finds.

    Where two are equally long it goes back in ``second`` first.
    """
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for place, other in enumerate(second):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        lengths.append(row)
    words = set()
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            words.add(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
