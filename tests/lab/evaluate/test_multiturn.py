"""Questions in turn: what the cache holds before each of them, and what comes out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvret.lab.evaluate.needles import magic_wording
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.multiturn import MultiTurn
from hf_kvret.lab.report.results import Results

from .runs import greedy, run_eval

_run = partial(run_eval, "multiturn")
LENGTH, TURNS, ANSWER = 420, 2, 3


def test_right_answers_come_before_the_next_question_whatever_was_said(
    tmp_path: Path, tiny_model_dir: Path, subject: Subject
) -> None:
    caches = ["full", "paris:top_k=4096:dense_below=0:recent=16:flush=24"]
    picture = tmp_path / "turns.png"
    arguments = ["--model", str(tiny_model_dir), "--context", str(LENGTH), "--turns", str(TURNS)]
    arguments += ["--samples", "2", "--answer-tokens", str(ANSWER), "--mode", "both"]
    more = ["--plot", str(picture), "--caches", ",".join(caches)]
    cells = _run(tmp_path / "m.json", *arguments, *more)
    assert picture.stat().st_size > 1000
    wording = magic_wording(subject, "multiturn", None, ANSWER)
    rng = np.random.default_rng([42, LENGTH, 1])
    depths = (100 * rng.random(TURNS)).tolist()
    document = wording.document(rng, LENGTH, depths, TURNS, start=0.5)

    def answer(tokens: list[int]) -> str:
        return wording.text(greedy(subject.model, torch.tensor(tokens), ANSWER))

    context = document.context.tolist()
    expected: dict[str, list[str]] = {"turns": [], "forks": []}
    talk = list(context)
    for fact in document.facts:
        expected["forks"].append(answer(context + fact.question))
        talk += fact.question
        expected["turns"].append(answer(talk))
        talk += fact.gold
    assert expected["turns"] != expected["forks"]
    assert len(cells) == 2 * 2
    for one in cells:
        given = [answer["given"] for answer in one["result"]["answers"]]
        assert given[TURNS:] == expected[one["cell"]["mode"]]
        assert one["result"]["right"] == [0.0] * TURNS and one["result"]["mean"] == 0


def test_the_bundled_model_answers_every_turn(tmp_path: Path) -> None:
    flat = "flat:top_k=64:recent=64:flush=64:dense_below=0"
    arguments = ["--model", "needle", "--context", "700", "--turns", "3", "--samples", "1"]
    cells = _run(tmp_path / "m.json", *arguments, "--mode", "both", "--caches", f"full,{flat}")
    for one in cells:
        assert one["result"]["right"] == [1, 1, 1]
        if one["cell"]["cache"] == flat:
            assert one["result"]["read_ratio"] == pytest.approx(64 / (700 - 128), rel=0.2)


def test_full_must_be_named_to_be_compared_with() -> None:
    results = Results("eval multiturn", {"turns": 2})
    numbers = {"right": [1.0, 0.5], "mean": 0.75, "read_ratio": 0.125}
    results.add({"cache": "flat", "mode": "turns", "length": 64}, numbers)
    header, _, line = MultiTurn.table(results).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")][-3:] == [
        *("mean", "over full", "cold rows read, %"),
    ]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["flat", "turns", "64", "100", "50", "75.0", "-", "12.50"]
