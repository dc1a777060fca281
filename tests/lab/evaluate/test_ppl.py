"""Perplexity through a cache: the number that one forward pass over the window gives."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.ppl import Perplexity
from hf_kvret.lab.report.results import Results

from .runs import results_by_cache

_run = partial(results_by_cache, "ppl")
REGIONS = "dense_below=0:recent=16:flush=16"
COVERING = f"top_k=1.0:{REGIONS}"
LENGTH, WINDOWS = 150, 2


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--context", str(LENGTH)]
    return [*arguments, "--windows", str(WINDOWS)]


def _one_pass(subject: Subject, text: Path, start: int) -> float:
    """Mean loss in nats of the tokens from ``start`` on, by one forward pass a window."""
    tokenizer = subject.need_tokenizer("test")
    ids = torch.tensor([0, *tokenizer(text.read_text())["input_ids"]])
    assert tokenizer.bos_token_id == 0
    losses = []
    for number in range(WINDOWS):
        window = ids[number * LENGTH : (number + 1) * LENGTH]
        with torch.inference_mode():
            logs = subject.model(window[None], use_cache=False).logits[0].log_softmax(-1)
        losses += [-float(logs[place - 1, window[place]]) for place in range(start, LENGTH)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("step", [1, 4])
def test_it_equals_one_forward_pass(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject, step: int
) -> None:
    caches = ["full", "static", f"flat:{COVERING}", f"paris:{COVERING}"]
    picture = tmp_path / "p.png"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", ",".join(caches)]
    arguments += ["--prefill", "0.4", "--step", str(step), "--plot", str(picture)]
    found = _run(tmp_path / "p.json", *arguments)
    expected = _one_pass(subject, tiny_text, start=60)
    for cache in caches:
        assert found[cache]["nats"] == pytest.approx(expected, abs=1e-3)
        assert found[cache]["ppl"] == pytest.approx(math.exp(expected), rel=1e-3)
        assert found[cache]["tokens"] == WINDOWS * 90 and found[cache]["windows"] == WINDOWS
    # All rows were cold but for those in the window, and all were read but for the sinks.
    assert 0.9 < found[f"flat:{COVERING}"]["read_ratio"] < 1
    assert picture.stat().st_size > 1000


def test_a_small_budget_gives_another_number(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise agreement with full attention would say nothing about what is measured."""
    caches = [f"flat:top_k=1:{REGIONS}", f"flat:{COVERING}"]
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", f"full,{','.join(caches)}"]
    found = _run(tmp_path / "p.json", *arguments)
    assert abs(found[caches[0]]["nats"] - found["full"]["nats"]) > 2e-3
    assert found[caches[0]]["read_ratio"] < 0.05
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    column = rows[0].index("nats over full")
    assert [row[column] for row in rows[2:]] == [
        f"{found[cache]['nats'] - found['full']['nats']:+.4f}" for cache in ("full", *caches)
    ]


def test_without_full_there_is_nothing_to_compare_with() -> None:
    results = Results("eval ppl", {"text": "t.txt"})
    numbers = {"ppl": 8.0, "nats": 2.0, "tokens": 5, "read_ratio": None}
    sizes = {"device_bytes": 10, "host_bytes": 30, "full_bytes": 40}
    results.add({"cache": "flat", "length": 64}, numbers | sizes)
    last = Perplexity.table(results).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["flat", "64", "8.000", "-", "-", "25.0%", "100.0%", "5"]
