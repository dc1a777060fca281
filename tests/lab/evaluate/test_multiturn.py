"""Questions in turn: what the cache holds before each of them, and what comes out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_kvret.lab.evaluate.needles import Document, Wording, magic_wording
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.multiturn import MultiTurn
from hf_kvret.lab.report.results import Results

from .runs import greedy, run_eval

_run = partial(run_eval, "multiturn")
COVERING = "top_k=4096:dense_below=0:recent=16:flush=24"
LENGTH, TURNS, ANSWER = 900, 3, 5


def _small(tiny_model_dir: Path) -> list[str]:
    arguments = ["--model", str(tiny_model_dir), "--context", str(LENGTH)]
    return [*arguments, "--turns", str(TURNS), "--samples", "2", "--answer-tokens", str(ANSWER)]


def _second_document(subject: Subject) -> tuple[Wording, Document]:
    """The document that the command makes as its second sample."""
    wording = magic_wording(subject, "multiturn", None, ANSWER)
    rng = np.random.default_rng([42, LENGTH, 1])
    depths = (100 * rng.random(TURNS)).tolist()
    return wording, wording.document(rng, LENGTH, depths, TURNS, start=0.5)


def _greedy(subject: Subject, tokens: list[int]) -> list[int]:
    return greedy(subject.model, torch.tensor(tokens), ANSWER)


def _given(cells: list[dict[str, Any]], cache: str, mode: str) -> list[list[str]]:
    """Answers by sample and turn."""
    (one,) = [
        c["result"] for c in cells if (c["cell"]["cache"], c["cell"]["mode"]) == (cache, mode)
    ]
    given = [answer["given"] for answer in one["answers"]]
    return [given[:TURNS], given[TURNS:]]


def test_right_answers_come_before_the_next_question_whatever_was_said(
    tmp_path: Path, tiny_model_dir: Path, subject: Subject
) -> None:
    caches = f"full,flat:{COVERING},paris:{COVERING}"
    picture = tmp_path / "turns.png"
    arguments = [*_small(tiny_model_dir), "--mode", "both", "--plot", str(picture)]
    cells = _run(tmp_path / "m.json", *arguments, "--caches", caches)
    assert len(cells) == 2 * 3 and picture.stat().st_size > 1000
    wording, document = _second_document(subject)
    context = document.context.tolist()
    turns, forks = [], []
    talk = list(context)
    for fact in document.facts:
        forks.append(wording.text(_greedy(subject, context + fact.question)))
        talk += fact.question
        turns.append(wording.text(_greedy(subject, talk)))
        talk += fact.gold
    assert turns[0] == forks[0] and turns != forks
    for cache in caches.split(","):
        assert _given(cells, cache, "turns")[1] == turns
        assert _given(cells, cache, "forks")[1] == forks
    for one in cells:
        assert one["result"]["right"] == [0.0] * TURNS and one["result"]["mean"] == 0


def test_the_bundled_model_answers_every_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    covering = "top_k=4096:dense_below=0"
    caches = ["full", "flat", f"flat:{covering}", f"paris:{covering}"]
    arguments = ["--model", "needle", "--context", "2K", "--turns", "5", "--samples", "1"]
    arguments += ["--top-k", "64", "--mode", "both", "--caches", ",".join(caches)]
    cells = _run(tmp_path / "m.json", *arguments)
    for mode in ("turns", "forks"):
        of = {c["cell"]["cache"]: c["result"] for c in cells if c["cell"]["mode"] == mode}
        assert of["full"]["mean"] >= 0.9 and len(of["full"]["right"]) == 5
        assert of["flat"]["mean"] >= of["full"]["mean"] - 0.1
        assert of["flat"]["read_ratio"] == pytest.approx(64 / 1750, rel=0.05)
        for cache in caches[2:]:
            assert of[cache]["answers"] == of["full"]["answers"]
            assert of[cache]["right"] == of["full"]["right"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    turns = [f"turn {turn}" for turn in range(1, 6)]
    assert header == ["cache", "mode", "length", *turns, "mean", "over full", "cold rows read, %"]
    assert len(lines) == 2 + 8


def test_full_must_be_named_to_be_compared_with() -> None:
    results = Results("eval multiturn", {"turns": 2})
    numbers = {"right": [1.0, 0.5], "mean": 0.75, "read_ratio": 0.125}
    results.add({"cache": "flat", "mode": "turns", "length": 64}, numbers)
    last = MultiTurn.table(results).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["flat", "turns", "64", "100", "50", "75.0", "-", "12.50"]
