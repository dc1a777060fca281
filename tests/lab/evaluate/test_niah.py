"""Needle in a haystack, from the command line to table and picture."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_kvret.lab.evaluate.needles import Document, Wording, magic_wording
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.niah import NeedleInHaystack, percents
from hf_kvret.lab.report.results import Results

from .runs import greedy, run_eval

_run = partial(run_eval, "niah")
# Everything beyond 40 tokens is cold and all of it is selected.
COVERING = "top_k=4096:dense_below=0:recent=16:flush=24"
TIGHT = "top_k=8:dense_below=0:recent=16:flush=24"


def _by_cache(cells: list[dict[str, Any]], cache: str) -> list[dict[str, Any]]:
    return [one["result"] for one in cells if one["cell"]["cache"] == cache]


def test_the_command_gives_what_plain_forward_passes_give(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    subject: Subject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caches = ["full", f"flat:{COVERING}", f"paris:{COVERING}", f"flat:{TIGHT}"]
    arguments = ["--model", str(tiny_model_dir), "--essays", str(tiny_text), "--context", "400"]
    arguments += ["--depths", "0,62.5", "--samples", "2", "--questions", "both"]
    arguments += ["--answer-tokens", "6", "--caches", ",".join(caches)]
    picture = tmp_path / "niah.png"
    cells = _run(tmp_path / "niah.json", *arguments, "--plot", str(picture))
    assert len(cells) == 2 * 2 * 4
    full = _by_cache(cells, "full")
    for cache in caches[1:3]:
        covering = _by_cache(cells, cache)
        assert [one["answers"] for one in covering] == [one["answers"] for one in full]
        # Sinks are rows of the store too, and are never selected.
        inside = _by_cache([one for one in cells if one["cell"]["questions"] == "inside"], cache)
        assert all(0.98 < one["read_ratio"] <= 1 for one in inside)
    tight = _by_cache(cells, caches[3])
    assert all(0 < one["read_ratio"] < 0.3 for one in tight)
    assert [one["answers"] for one in tight] != [one["answers"] for one in full]
    assert picture.stat().st_size > 1000
    header = "| cache | question | 400 | mean | over full | cold rows read, % |"
    shown = capsys.readouterr().out
    assert "A length's mean is of 2 depths." in shown
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.startswith("|")]
    assert lines[0] == header and lines[2] == "| full | inside | 0.0 | 0.0 | +0.0 | 100.00 |"
    assert len(lines) == 2 + 2 * 4

    wording = magic_wording(subject, "niah", tiny_text, 6)
    rng = np.random.default_rng([42, 400, 62_500, 1])
    document = wording.document(rng, 400, [62.5], 1, start=0.5)
    prompt = torch.cat([document.context, torch.tensor(document.facts[0].question)])
    expected = wording.text(greedy(subject.model, prompt, 6))
    at_depth = [one for one in cells if one["cell"]["depth"] == 62.5]
    for one in _by_cache(at_depth, "full"):
        assert one["answers"][1] == {"expected": document.facts[0].answer, "given": expected}
        assert one["score"] == 0


def test_the_bundled_model_finds_its_needles(tmp_path: Path) -> None:
    arguments = ["--model", "needle", "--context", "2K", "--depths", "20,90"]
    arguments += ["--samples", "1", "--distractors", "12", "--questions", "both"]
    covering = "top_k=4096:dense_below=0"
    caches = f"full,flat,flat:{covering},paris:{covering}"
    cells = _run(tmp_path / "n.json", *arguments, "--top-k", "64", "--caches", caches)
    score = {
        cache: np.mean([one["score"] for one in _by_cache(cells, cache)])
        for cache in caches.split(",")
    }
    assert score["full"] >= 0.9
    assert score["flat"] >= score["full"] - 0.1
    full = [one["answers"] for one in _by_cache(cells, "full")]
    for method in ("flat", "paris"):
        answers = [one["answers"] for one in _by_cache(cells, f"{method}:{covering}")]
        assert answers == full
    # 64 of the about 1,790 cold tokens.
    read = [one["read_ratio"] for one in _by_cache(cells, "flat")]
    assert all(ratio == pytest.approx(64 / 1790, rel=0.05) for ratio in read)
    # flat reads the keys of all cold tokens, and whole rows of the window and of what it selected.
    share = [one["step_bytes"] / one["full_bytes"] for one in _by_cache(cells, "flat")]
    assert share == pytest.approx([(1790 / 2 + 64 + 260) / 2048] * len(share), rel=0.05)


def test_without_its_needle_a_question_gets_no_right_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Wording.document

    def without(self: Wording, *arguments: Any, **named: Any) -> Document:
        document = whole(self, *arguments, **named)
        context, needle = document.context.tolist(), document.facts[0].needle
        place = next(i for i in range(len(context)) if context[i : i + 5] == needle)
        del context[place : place + 5]
        return Document(torch.tensor(context), document.facts)

    monkeypatch.setattr(Wording, "document", without)
    arguments = ["--model", "needle", "--context", "512", "--depths", "40", "--samples", "4"]
    (cell,) = _run(tmp_path / "n.json", *arguments, "--distractors", "9", "--caches", "full")
    assert cell["result"]["score"] == 0


def test_full_must_be_named_to_be_compared_with(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_model_dir), "--context", "300", "--depths", "50"]
    _run(tmp_path / "n.json", *arguments, "--samples", "1", "--caches", "flat")
    row = capsys.readouterr().out.split("| flat")[1].splitlines()[0]
    # Shorter than dense_below: nothing was cold.
    assert [cell.strip() for cell in row.split("|")[1:]] == ["inside", "0.0", "0.0", "-", "-", ""]


def table_of_scores(scores: dict[tuple[str, int, int], float]) -> str:
    """The table of finished cells, by cache, length and depth."""
    results = Results("eval niah", {})
    for (cache, length, depth), score in scores.items():
        cell = {"cache": cache, "questions": "inside", "length": length, "depth": depth}
        results.add(cell, {"score": score, "read_ratio": None})
    return NeedleInHaystack.table(results)


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells behind cache and question in each line."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {cells[0]: cells[2:-1] for cells in lines if len(cells) > 2}


def test_cells_that_are_not_finished_are_not_shown_as_if_they_were() -> None:
    depths = (0, 50, 100)
    scores = {(cache, 64, depth): 1.0 for depth in depths for cache in ("full", "flat")}
    table = table_of_scores(scores)
    assert rows_of(table)["flat"] == ["100.0", "100.0", "+0.0"]
    assert table.endswith("\n\nA length's mean is of 3 depths.")
    # The run ends in the middle of the second length.
    scores |= {("full", 128, 0): 1.0, ("full", 128, 50): 0.0}
    table = table_of_scores(scores)
    assert rows_of(table)["full"] == ["100.0", "50.0 (2 of 3)", "80.0 (5 of 6)", "+0.0"]
    assert rows_of(table)["flat"] == ["100.0", "-", "100.0 (3 of 6)", "+0.0"]
    assert "(n of m) is a mean of n cells where others have m" in table


def test_depths_are_percents() -> None:
    assert percents("0, 12.5,100") == (0, 12.5, 100)
    for bad in ("", "-1", "101", "a", "5,5", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            percents(bad)
