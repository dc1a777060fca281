"""Checks the English of pages: sentences of at most 30 words, and no word that we avoid.

``python docs/site/prose.py`` names what is wrong in all pages that are written by hand, and ends
with 1 where there is anything. ``--count`` prints lines, words and the longest sentence instead.
Arguments are pages, in place of all. Code, and what a program writes into a page, is left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MAX_WORDS = 30
# Cards of models and artifacts, results and notebooks are written by programs.
_MADE = re.compile(
    r"docs/results/(?!README).*\.md|(hf_kvret|tests|kernels)/|.*/(aqua|a2ats)/README"
)
_MADE_PART = re.compile(
    r"<!-- made by [^\n]*from here -->.*?<!-- made by [^\n]*to here -->", re.DOTALL
)
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_FENCE = re.compile(r"^ *(`{3,}).*?^ *\1", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^(?: {4,}|\t).*\n)+", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
# A sentence ends with a full stop before a blank and a capital, a digit, code or a link.
_END = re.compile(
    r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[\"')*]*\s+(?=[\"'(*`A-Z0-9\[])|\n{2,}"
)
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +|^#+ +|^> ?", re.MULTILINE)

# One word, one meaning; the reader's word before ours.
AVOIDED: dict[str, str] = {
    r"stand-ins?": "a token for what is not selected",
    r"unselected|left[- ]out tokens?": "tokens that are not selected",
    r"noting|hands? (?:them|it) on to": "say which hook it is",
    r"anew|under way|ahead of time": "again, in progress, before",
    r"haystacks?": "documents with needles",
    r"batch rows?|rows? of (?:a|the) batch|ragged rows?|padded rows?": "sequences",
    r"learned (?:attention )?sinks?": "attention sink logits",
    r"as (?:ever|always|they stand)": "as before, unchanged",
    r"the former|the latter|thereof|hence|wherein|whereby": "the noun itself",
    r"(?:is|are|was|were) told": "takes, knows, is given",
    r"lies? in the hands|comes? to nothing|a mood of": "plain words",
    r"simply|easily|obviously|of course|very": "nothing: leave it out",
    r"utiliz\w+|leverag\w+|seamless\w*|blazing\w*|powerful|robust": "plain words",
}
# Openings that need the sentence before.
OPENINGS: dict[str, str] = {
    r"Of (?:these|those|them|all|the|which|what)\b": "begin with the subject",
    r"What (?:is|are|was|were|it|a|the|they|can|does|do)\b(?![^.]*\?$)": "begin with the subject",
    r"Nor\b|So does\b|So do\b|So is\b|As is\b|As are\b": "begin with the subject",
}


class Fault(NamedTuple):
    """A fault of a page: where, the sentence, and what to do."""

    line: int
    what: str
    sentence: str


def pages() -> list[Path]:
    """The tracked pages that are written by hand."""
    listing = subprocess.run(
        ["git", "ls-files", "*.md", "docs/results/*.notes.txt"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [line for line in listing.stdout.splitlines() if not _MADE.match(line)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def by_hand(text: str) -> str:
    """The page with blanks in place of code and of what a program wrote; lines stay."""
    for pattern in (_FRONT, _MADE_PART, _FENCE, _INDENTED):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"<!--.*?-->", "", text)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The line on which each sentence begins, and its words."""
    # A cell of a table, a heading and an item of a list are paragraphs of their own.
    lines = []
    for line in by_hand(text).splitlines():
        if line.startswith("|"):
            lines.append((" \v ".join(line.strip("| ").split(" | ")), True))
        else:
            lines.append((line, bool(_ITEM.match(line))))
    paragraph: list[tuple[int, str]] = []
    for number, (line, begins) in enumerate([*lines, ("", True)], start=1):
        if (begins or not line.strip()) and paragraph:
            yield from _of_paragraph(paragraph)
            paragraph = []
        if line.strip():
            paragraph.append((number, line))


def _of_paragraph(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    text, starts = "", []
    for number, line in lines:
        starts.append((len(text), number))
        text += _ITEM.sub("", line).strip() + "\n"
    text = text.replace("\n", " ")
    position = 0
    for cell in re.split(r"(\v)", text):
        begin = 0
        for end in [*(match.end() for match in _END.finditer(cell)), len(cell)]:
            number = max(line for start, line in starts if start <= position + begin)
            sentence = _LINK.sub(r"\1", cell[begin:end]).strip(" \v")
            if sentence:
                yield number, sentence
            begin = end
        position += len(cell)


def length(sentence: str) -> int:
    """Words of a sentence; a piece of code counts as one."""
    plain = re.sub(r"`[^`]*`", "code", sentence)
    return sum(any(map(str.isalnum, word)) for word in plain.split())


def faults(text: str) -> list[Fault]:
    """The faults of a page."""
    results = []
    for line, sentence in sentences(text):
        words = length(sentence)
        if words > MAX_WORDS:
            results.append(Fault(line, f"{words} words, at most {MAX_WORDS}", sentence))
        plain = re.sub(r"`[^`]*`", "", sentence)
        for word, better in AVOIDED.items():
            if match := re.search(rf"\b(?:{word})\b", plain, re.IGNORECASE):
                results.append(Fault(line, f"{match[0]!r}: {better}", sentence))
        for opening, better in OPENINGS.items():
            # A heading, or the head of a column, may ask.
            if sentence.endswith((".", ":")) and (match := re.match(opening, plain)):
                results.append(Fault(line, f"begins with {match[0]!r}: {better}", sentence))
    return results


def count(paths: list[Path]) -> str:
    """Pages, lines and words by hand, and the longest sentence."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    hand = [by_hand(text) for text in texts]
    # Code counts as lines; parts that a program wrote into a page do not.
    lines = sum(_MADE_PART.sub("", text).count("\n") for text in texts)
    words = sum(len(text.split()) for text in hand)
    longest = max((length(sentence), sentence) for text in texts for _, sentence in sentences(text))
    results = [one for text in texts for one in faults(text)]
    long = sum(one.what.endswith(f"at most {MAX_WORDS}") for one in results)
    return (
        f"{len(paths)} pages, {lines:,} lines, {words:,} words; "
        f"longest sentence {longest[0]} words; {long} above {MAX_WORDS} words; "
        f"{len(results) - long} words and openings that we avoid\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all that are written by hand")
    parser.add_argument("--count", action="store_true", help="lines, words, the longest sentence")
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.pages] or pages()
    if arguments.count:
        sys.stdout.write(count(paths))
        return 0
    results = [(path, one) for path in paths for one in faults(path.read_text(encoding="utf-8"))]
    for path, one in results:
        sys.stdout.write(f"{path.relative_to(ROOT)}:{one.line}: {one.what}\n    {one.sentence}\n")
    sys.stdout.write(f"{len(paths)} pages, {len(results)} faults\n")
    return bool(results)


if __name__ == "__main__":
    sys.exit(main())
