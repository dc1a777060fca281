"""LongBench's results as a table and as bars: tasks, means, and what was read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hf_kvret.evaluation.longbench.tasks import LONG_TASKS
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

# A row of the table: a task and one of LongBench-E's buckets, or "" where there are none.
Row = tuple[str, str]
Column = tuple[str, str]
Scores = dict[tuple[Row, str, str], float | None]


def score_table(results: Results) -> str:
    """Scores in 0..100 by task and cache, their means, and the means less those of ``full``.

    LongBench-E has a row for each task and length. ``-`` where something was not run.
    """
    scores, columns, rows = _scores(results), _columns(results), _rows(results)
    lines = [
        [_label(*row), *(_shown(scores.get((row, *column))) for column in columns)] for row in rows
    ]
    for part in dict.fromkeys(part for _, part in rows):
        of_part = [row for row in rows if row[1] == part]
        means = {column: _mean(scores, of_part, column) for column in columns}
        lines.append([_label("mean", part), *(_shown(means[column]) for column in columns)])
        over = [_less(means[column], means.get(("full", column[1]))) for column in columns]
        lines.append([_label("mean less full", part), *over])
    lines.append(["cold rows read", *(_read_share(results, column) for column in columns)])
    header = ["task", *(f"{cache}, {questions}" for cache, questions in columns)]
    return markdown_table(header, lines)


def score_bars(results: Results) -> tuple[list[str], dict[str, list[float | None]]]:
    """The table's rows without the means, and their scores by cache and set-up."""
    scores, rows = _scores(results), _rows(results)
    bars = {
        f"{cache}, {questions}": [scores.get((row, cache, questions)) for row in rows]
        for cache, questions in _columns(results)
    }
    return [_label(*row) for row in rows], bars


def _columns(results: Results) -> list[Column]:
    return list(dict.fromkeys((cell["cache"], cell["questions"]) for cell, _ in results))


def _rows(results: Results) -> list[Row]:
    return list(dict.fromkeys(row for row, _, _ in _scores(results)))


def _scores(results: Results) -> Scores:
    """By row, cache and questions; tasks in LongBench's order."""
    scores: Scores = {}
    for task in LONG_TASKS:
        for cell, result in results:
            if cell["task"] == task:
                for part, score in (result["buckets"] or {"": result["score"]}).items():
                    scores[(task, part), cell["cache"], cell["questions"]] = score
    return scores


def _mean(scores: Scores, rows: Sequence[Row], column: Column) -> float | None:
    """The mean over all rows; None while one is missing, as means of different tasks mislead.

    A task that has no sample of a length anywhere is left out.
    """
    rows = [
        row
        for row in rows
        if any(key[0] == row and score is not None for key, score in scores.items())
    ]
    found = [scores.get((row, *column)) for row in rows]
    known = [score for score in found if score is not None]
    return fmean(known) if known and len(known) == len(found) else None


def _read_share(results: Results, column: Column) -> str:
    ratios = [
        result["read_ratio"]
        for cell, result in results
        if (cell["cache"], cell["questions"]) == column and result["read_ratio"] is not None
    ]
    return f"{fmean(ratios):.2%}" if ratios else "-"


def _label(task: str, part: str) -> str:
    return f"{task} {part}".strip()


def _shown(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def _less(score: float | None, full: float | None) -> str:
    return "-" if score is None or full is None else f"{score - full:+.2f}"
