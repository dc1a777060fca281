"""Document and answer as HTML. All text in it comes from strangers and is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from app_parts.answers import Answer, Highlights, Part, highlights
from app_parts.uploads import visible

# Texts of up to so many tokens are shown as a whole; of longer ones what got most of the attention,
# with its neighbours, and the edges of the text.
WHOLE = 1_000
EXCERPT = 600
CONTEXT = 16
_EDGE = 16
# Gaps that are shorter are shown.
_LEAST_GAP = 8
_BINS = 160
# Gradio fills values into a template: these can't be taken for its signs.
_TEMPLATE = {ord("{"): "&#123;", ord("}"): "&#125;", ord("$"): "&#36;", ord("`"): "&#96;"}

LEGEND = (
    '<div class="kvret-legend">'
    '<span><mark style="--s: 1">retrieved</mark> <mark style="--s: .2">retrieved</mark>: the '
    "stronger, the more attention it got</span>"
    '<span><i class="sink">sink</i> <i class="recent">recent</i>: always read</span>'
    "<span>plain: not read</span></div>"
)


def escaped(text: str) -> str:
    """``text`` as HTML that shows it; signs that hide or turn others are shown as numbers."""
    return html.escape(visible(text), quote=True).translate(_TEMPLATE)


def notice(text: str, level: str = "info") -> str:
    """A message; ``level`` is ``info`` or ``error``."""
    assert level in ("info", "error")
    role = "alert" if level == "error" else "status"
    return f'<div class="kvret-notice {level}" role="{role}">{escaped(text)}</div>'


def answer_html(answer: Answer, part: Part) -> str:
    """The answer, the chosen tokens of it set off."""
    first, last = part.tokens.start, part.tokens.stop
    before, chosen, after = (
        escaped("".join(answer.texts[slice(*place)]))
        for place in ((0, first), (first, last), (last, None))
    )
    is_whole = len(part.tokens) == len(answer.texts)
    middle = f"<span>{chosen}</span>" if is_whole else f"<b>{chosen}</b>"
    return f'<div class="kvret-answer" dir="auto">{before}{middle}{after}</div>'


def numbers_html(answer: Answer) -> str:
    """How much was read, and how quickly."""
    full, read = answer.full_bytes / 1e6, answer.step_bytes / 1e6
    cells = [
        (f"{answer.read_ratio:.1%}", "of the cache's rows read per token"),
        (f"{read:.2f} of {full:.2f} MB", "read per token, search included"),
        (f"{answer.rate:.1f}", "tokens a second"),
    ]
    parts = (f"<div><b>{escaped(number)}</b><span>{text}</span></div>" for number, text in cells)
    note = "" if answer.dense is None else notice(answer.dense)
    return f'<div class="kvret-numbers">{"".join(parts)}</div>{note}'


def document_html(answer: Answer, part: Part) -> str:
    """The text by token, with what ``part`` retrieved; of a long text the parts that matter."""
    marks = highlights(answer, part)
    strength = np.sqrt(marks.shares / max(marks.shares.max(initial=0.0), 1e-12))
    out, end = [], 0
    text = Text(answer, marks, strength)
    shown = shown_slots(marks.shares, marks.counts > 0, answer.document_len)
    for first, last in _runs(shown):
        if first > end:
            out.append(_gap(marks.counts[end:first]))
        out.append(text.stretch(first, last))
        end = last
    body = f'<div class="kvret-text" dir="auto">{"".join(out)}</div>'
    return f"{_shares(marks)}{_map(marks, strength)}{LEGEND}{body}"


def shown_slots(shares: np.ndarray, hits: np.ndarray, document_len: int) -> np.ndarray:
    """``[slots]`` bool: what is shown of a text, the most attended to first where not all fits."""
    total = len(shares)
    if total <= WHOLE:
        return np.ones(total, dtype=bool)
    shown = np.zeros(total, dtype=bool)
    shown[:_EDGE] = True
    # The end of the document, with question and answer.
    shown[max(total - EXCERPT // 2, document_len - _EDGE) :] = True
    for slot in np.argsort(-shares, kind="stable")[: int(hits.sum())]:
        if shown.sum() >= EXCERPT:
            break
        shown[max(0, slot - CONTEXT) : slot + CONTEXT + 1] = True
    for first, last in list(_runs(~shown)):
        if last - first < _LEAST_GAP:
            shown[first:last] = True
    return shown


class Text:
    """Pieces of a text, and how each looks."""

    def __init__(self, answer: Answer, marks: Highlights, strength: np.ndarray) -> None:
        self.texts, self.marks, self.strength = answer.all_texts, marks, strength
        self.borders = {answer.document_len: "question", len(answer.prompt): "answer"}

    def css_class(self, slot: int) -> str:
        """``hit``, ``sink``, ``recent`` or nothing."""
        marks = self.marks
        if marks.counts[slot]:
            return "hit"
        return "sink" if marks.sinks[slot] else "recent" if marks.recent[slot] else ""

    def stretch(self, first: int, last: int) -> str:
        """Slots ``first`` to ``last - 1``; neighbours that look alike are one element."""
        out = []
        while first < last:
            if first in self.borders:
                out.append(f'<div class="kvret-border">{self.borders[first]}</div>')
            stop = first + 1
            while stop < last and stop not in self.borders and self._goes_on(first, stop):
                stop += 1
            out.append(self._element(first, stop))
            first = stop
        return "".join(out)

    def _goes_on(self, first: int, slot: int) -> bool:
        # Later tokens of one character have no piece of their own.
        if not self.texts[slot]:
            return True
        return self.css_class(first) == self.css_class(slot) != "hit"

    def _element(self, first: int, stop: int) -> str:
        text, marks = escaped("".join(self.texts[first:stop])), self.marks
        hits = [slot for slot in range(first, stop) if marks.counts[slot]]
        if not hits:
            name = self.css_class(first)
            return f'<i class="{name}">{text}</i>' if name else text
        count, share = int(marks.counts[hits].max()), float(marks.shares[hits].sum())
        title = f"token {first:,}: {share:.1%} of the attention, in {count} of {marks.selections}"
        strength = float(self.strength[hits].max())
        return f'<mark style="--s: {strength:.3f}" title="{title} selections">{text}</mark>'


def _gap(counts: np.ndarray) -> str:
    hits = int((counts > 0).sum())
    weak = f", {hits:,} of them retrieved with little attention" if hits else ""
    return f'<div class="kvret-gap">{len(counts):,} tokens not shown{weak}</div>'


def _shares(marks: Highlights) -> str:
    if not marks.selections:
        return ""
    sinks, recent = marks.near_shares
    share, count = f"{marks.shares.sum():.0%}", f"{int((marks.counts > 0).sum()):,}"
    result = f"{share} of the attention went to {count} retrieved tokens"
    near = f"{sinks:.0%} to sinks, {recent:.0%} to recent tokens"
    return f'<div class="kvret-shares">{result}, {near}.</div>'


def _map(marks: Highlights, strength: np.ndarray) -> str:
    """A strip from the text's start to its end: where the attention lies."""
    total = max(1, len(strength))
    edges = np.linspace(0, total, min(_BINS, total) + 1).astype(int)
    width = 100 / (len(edges) - 1)
    bins = []
    for number, (first, last) in enumerate(pairwise(edges)):
        most = float(strength[first:last].max(initial=0.0))
        near = bool(marks.sinks[first:last].any() or marks.recent[first:last].any())
        if most > 0 or near:
            name = "hit" if most > 0 else "recent"
            style = f"left: {number * width:.3f}%; width: {width:.3f}%; --s: {most:.3f}"
            bins.append(f'<i class="{name}" style="{style}"></i>')
    label = "Where the attention to retrieved tokens lies, from the start of the text to its end"
    return f'<div class="kvret-map" role="img" aria-label="{label}">{"".join(bins)}</div>'


def _runs(marks: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last slot + 1 of each run of True."""
    padded = np.concatenate([[False], marks, [False]]).astype(np.int8)
    steps = np.diff(padded)
    starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    yield from zip(starts.tolist(), stops.tolist(), strict=True)
