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
from hf_kvret.lab.evaluate.tasks.niah import NeedleInHaystack, percent
from hf_kvret.lab.report.results import Results

from .runs import greedy, run_eval

_run = partial(run_eval, "niah")
# Everything beyond 40 tokens is cold.
REGIONS = "dense_below=0:recent=16:flush=24"


def _by_cache(cells: list[dict[str, Any]], cache: str) -> list[dict[str, Any]]:
    return [one["result"] for one in cells if one["cell"]["cache"] == cache]


def test_the_command_gives_what_plain_forward_passes_give(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject
) -> None:
    covering, tight = f"paris:top_k=4096:{REGIONS}", f"flat:top_k=8:{REGIONS}"
    arguments = ["--model", str(tiny_model_dir), "--essays", str(tiny_text), "--context", "340"]
    arguments += ["--depths", "62.5", "--samples", "2", "--questions", "both"]
    arguments += ["--answer-tokens", "4", "--caches", f"full,{covering},{tight}"]
    picture = tmp_path / "niah.png"
    cells = _run(tmp_path / "niah.json", *arguments, "--plot", str(picture))
    assert len(cells) == 2 * 3 and picture.stat().st_size > 1000
    full, whole, few = (_by_cache(cells, cache) for cache in ("full", covering, tight))
    assert [one["answers"] for one in whole] == [one["answers"] for one in full]
    assert [one["answers"] for one in few] != [one["answers"] for one in full]
    # Sinks are rows of the store too, and are never selected.
    assert 0.98 < whole[0]["read_ratio"] <= 1 and 0 < few[0]["read_ratio"] < 0.3

    wording = magic_wording(subject, "niah", tiny_text, 4)
    rng = np.random.default_rng([42, 340, 62_500, 1])
    document = wording.document(rng, 340, [62.5], 1, start=0.5)
    prompt = torch.cat([document.context, torch.tensor(document.facts[0].question)])
    given = wording.text(greedy(subject.model, prompt, 4))
    for one in full:
        assert one["answers"][1] == {"expected": document.facts[0].answer, "given": given}
        assert one["score"] == 0


NEEDLE = ["--model", "needle", "--context", "600", "--depths", "40", "--samples", "2"]
NEEDLE += ["--distractors", "9", "--caches", "full,flat:top_k=64:recent=64:flush=64:dense_below=0"]


def test_the_bundled_model_finds_its_needles(tmp_path: Path) -> None:
    full, flat = (one["result"] for one in _run(tmp_path / "n.json", *NEEDLE))
    assert full["score"] == flat["score"] == 1
    cold = 600 - 64 - 64
    assert flat["read_ratio"] == pytest.approx(64 / cold, rel=0.2)
    # flat reads the keys of all cold tokens, and whole rows of the window and of what it selected.
    assert flat["step_bytes"] / flat["full_bytes"] == pytest.approx(
        (cold / 2 + 64 + 128) / 600, rel=0.15
    )


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
    assert [one["result"]["score"] for one in _run(tmp_path / "n.json", *NEEDLE)] == [0, 0]


def test_the_table_has_means_and_their_distance_from_full() -> None:
    results = Results("eval niah", {})
    scores = {("full", 64, 0): 1.0, ("full", 64, 50): 0.5, ("full", 128, 0): 1.0}
    scores |= {("flat", 64, 0): 0.5, ("flat", 64, 50): 0.0, ("alone", 128, 50): 1.0}
    for (cache, length, depth), score in scores.items():
        cell = {"cache": cache, "questions": "inside", "length": length, "depth": depth}
        results.add(cell, {"score": score, "read_ratio": None if cache == "full" else 0.125})
    header, _, *lines = NeedleInHaystack.table(results).splitlines()
    assert [" ".join(line.split()) for line in (header, *lines)] == [
        "| cache | question | 64 | 128 | mean | over full | cold rows read, % |",
        "| full | inside | 75.0 | 100.0 | 83.3 | +0.0 | - |",
        "| flat | inside | 25.0 | - | 25.0 | -50.0 | 12.50 |",
        "| alone | inside | - | 100.0 | 100.0 | - | 12.50 |",
    ]


def test_depths_are_percents() -> None:
    assert [percent(text) for text in ("0", " 12.5", "100")] == [0, 12.5, 100]
    for bad in ("", "-1", "101", "a", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="write percents from 0 to 100"):
            percent(bad)
