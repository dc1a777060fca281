"""Perplexity through a cache: the number that one forward pass over the window gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.ppl import Perplexity
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.report.results import Results

from .runs import results_by_cache

REGIONS = "dense_below=0:recent=8:flush=8"
LENGTH, START = 60, 40


@pytest.mark.parametrize("step", [1, 4])
def test_it_equals_one_forward_pass(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject, step: int
) -> None:
    covering, tight = f"paris:top_k=1.0:{REGIONS}", f"flat:top_k=1:{REGIONS}"
    picture = tmp_path / "p.png"
    arguments = ["--model", str(tiny_model_dir), "--text", str(tiny_text), "--windows", "2"]
    arguments += ["--context", str(LENGTH), "--prefill", str(START / LENGTH)]
    arguments += ["--caches", f"full,{covering},{tight}", "--step", str(step)]
    rows = results_by_cache("ppl", tmp_path / "p.json", *arguments, "--plot", str(picture))
    losses = []
    for window in text_windows(subject, "test", tiny_text, LENGTH, 2):
        with torch.inference_mode():
            logits = subject.model(window[None], use_cache=False).logits[0, START - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[START:]))
    expected = float(sum(losses) / 2)
    for cache in ("full", covering):
        assert rows[cache]["nats"] == pytest.approx(expected, abs=1e-3)
        assert rows[cache]["ppl"] == pytest.approx(math.exp(expected), rel=1e-3)
        assert rows[cache]["tokens"] == 2 * (LENGTH - START) and rows[cache]["windows"] == 2
    # All rows were cold but for those in the window, and all were read but for the sinks.
    assert 0.8 < rows[covering]["read_ratio"] < 1 and rows[tight]["read_ratio"] < 0.1
    # A budget of one token must matter, or nothing is tested.
    assert abs(rows[tight]["nats"] - expected) > 2e-3
    assert picture.stat().st_size > 1000


def test_full_must_be_named_to_be_compared_with() -> None:
    results = Results("eval ppl", {"text": "t.txt"})
    numbers = {"ppl": 8.0, "nats": 2.0, "tokens": 5, "read_ratio": None}
    sizes = {"device_bytes": 10, "host_bytes": 30, "full_bytes": 40}
    for cache, length, nats in (("flat", 64, 2.0), ("flat", 128, 2.5), ("full", 128, 2.0)):
        results.add({"cache": cache, "length": length}, numbers | sizes | {"nats": nats})
    lines = [line.strip("|").split("|") for line in Perplexity.table(results).splitlines()[2:]]
    assert [cell.strip() for cell in lines[0]] == [
        *("flat", "64", "8.000", "-", "-", "25.0%", "100.0%", "5"),
    ]
    assert lines[1][3].strip() == "+0.5000"
