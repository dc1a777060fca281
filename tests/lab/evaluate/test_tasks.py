"""``hf-kvret eval TASK``: numbers are what plain forward passes of the model give."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.needles import magic_wording
from hf_kvret.lab.evaluate.reader import divergence
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks import ruler
from hf_kvret.lab.evaluate.tasks.agreement import Agreement, _rounds
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.report.results import Results

from .runs import flat_logits, greedy

SMALL = "dense_below=0:recent=16:flush=16"
Rows = list[tuple[dict[str, Any], dict[str, Any]]]
Run = Callable[..., Rows]


@pytest.fixture
def evaluate(tmp_path: Path, tiny_model_dir: Path) -> Run:
    """Cells and rows of a run of a task, of the tiny model unless another is named."""

    def run(task: str, *words: object) -> Rows:
        file = tmp_path / "x.json"
        place = ["--model", tiny_model_dir, "--json", file]
        assert main(["eval", task, *map(str, (*place, *words))]) == 0
        return list(Results.load(file))

    return run


@pytest.fixture
def drawn(evaluate: Run, tmp_path: Path) -> Run:
    """As ``evaluate``, with a picture."""

    def run(*words: object) -> Rows:
        rows = evaluate(*words, "--plot", tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
        return rows

    return run


def by_cache(rows: Rows) -> dict[str, dict[str, Any]]:
    return {cell["cache"]: row for cell, row in rows}


LENGTH, NEW = 160, 12


def test_agreement_is_that_of_an_independent_run(
    drawn: Run, tiny_text: Path, subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    flat, paris = f"flat:top_k=8:{SMALL}", f"paris:top_k=1.0:{SMALL}"
    words = ["--text", tiny_text, "--windows", 2, "--context", LENGTH, "--new-tokens", NEW]
    rows = by_cache(drawn("agreement", *words, "--caches", f"full,{flat},{paris}"))
    forced, free, firsts, kls = [], [], [], []
    for context in text_windows(subject, "test", tiny_text, LENGTH, 2):
        fed = greedy(subject.model, context, 1 + NEW)
        with torch.inference_mode():
            whole = subject.model(torch.cat([context, torch.tensor(fed[:-1])])[None]).logits[0]
        logits = flat_logits(subject, context, NEW, fed[:-1])
        expected = torch.tensor(fed[1:])
        kls.append(divergence(whole[-NEW:], logits))
        forced += (logits.argmax(-1) == expected).tolist()
        own = (flat_logits(subject, context, NEW).argmax(-1) == expected).tolist()
        free += own
        firsts.append([*own, False].index(False))
    result = rows[flat]
    # A budget of 8 must matter, or nothing is tested.
    assert sum(forced) < len(forced)
    assert result["forced_equal"] == pytest.approx(sum(forced) / len(forced))
    assert result["free_equal"] == pytest.approx(sum(free) / len(free))
    assert result["first_divergence"] == firsts
    # Both sums are fp32 over 400 tokens, in another order.
    assert result["kl_mean"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-3)
    assert result["kl_max"] == pytest.approx(float(torch.cat(kls).max()), rel=1e-3)
    assert result["overlap"] == 1 and result["mass"] == result["best_mass"] < 1
    assert result["contexts"] == 2 and result["tokens"] == 2 * NEW
    for cache in ("full", paris):
        assert rows[cache]["forced_equal"] == rows[cache]["free_equal"] == 1
        assert rows[cache]["first_divergence"] == [NEW, NEW]
        assert 0 <= rows[cache]["kl_mean"] <= rows[cache]["kl_max"] < 1e-6
    assert [layer["layer"] for layer in rows[paris]["layers"]] == [0, 1]
    assert rows["full"]["overlap"] is None and rows["full"]["layers"] == []
    assert capsys.readouterr().out.count("1.000, 1.000 of 1.000") == 2


def test_without_recall_the_picture_of_agreement_is_about_divergence(tmp_path: Path) -> None:
    results = Results("eval agreement", {"new_tokens": NEW})
    results.add({"cache": "static", "length": 4}, {"kl_mean": 0.1, "layers": []})
    Agreement.plot(tmp_path / "kl.png", results)
    assert (tmp_path / "kl.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("equal", "accepted"),
    [
        # A wrong draft ends a round, and full attention's own token takes its place.
        ([True] * 3 + [False] + [True] * 33, [3, 16, 16]),
        ([True] * 40, [16, 16]),
        ([False] * 17, [0, 0]),
        ([True] * 9, [9]),
        ([True, False, True], [1]),
    ],
)
def test_accepted_drafts_are_counted_by_rounds(equal: list[bool], accepted: list[int]) -> None:
    assert _rounds(equal) == accepted


@pytest.mark.parametrize("step", [1, 4])
def test_perplexity_is_that_of_one_forward_pass(
    step: int, drawn: Run, tiny_text: Path, subject: Subject
) -> None:
    length, start, regions = 60, 40, "dense_below=0:recent=8:flush=8"
    covering, tight = f"paris:top_k=1.0:{regions}", f"flat:top_k=1:{regions}"
    words = ["--text", tiny_text, "--windows", 2, "--context", length, "--step", step]
    words += ["--prefill", start / length, "--caches", f"full,{covering},{tight}"]
    rows = by_cache(drawn("ppl", *words))
    losses = []
    for window in text_windows(subject, "test", tiny_text, length, 2):
        with torch.inference_mode():
            logits = subject.model(window[None], use_cache=False).logits[0, start - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[start:]))
    expected = float(sum(losses) / 2)
    for cache in ("full", covering):
        assert rows[cache]["nats"] == pytest.approx(expected, abs=1e-3)
        assert rows[cache]["ppl"] == pytest.approx(math.exp(expected), rel=1e-3)
        assert rows[cache]["tokens"] == 2 * (length - start) and rows[cache]["windows"] == 2
    # All rows were cold but for those in the window, and all were read but for the sinks.
    assert 0.8 < rows[covering]["read_ratio"] < 1 and rows[tight]["read_ratio"] < 0.1
    # A budget of one token must matter, or nothing is tested.
    assert abs(rows[tight]["nats"] - expected) > 2e-3


def test_needles_are_answered_as_plain_forward_passes_do(
    drawn: Run, tiny_text: Path, subject: Subject
) -> None:
    covering, tight = f"paris:top_k=4096:{SMALL}", f"flat:top_k=8:{SMALL}"
    words = ["--essays", tiny_text, "--context", 340, "--depths", 62.5, "--samples", 2]
    words += ["--questions", "both", "--answer-tokens", 4]
    rows = drawn("niah", *words, "--caches", f"full,{covering},{tight}")
    assert len(rows) == 2 * 3
    full, whole, few = (
        [row for cell, row in rows if cell["cache"] == cache] for cache in ("full", covering, tight)
    )
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


FLAT = "flat:top_k=64:recent=64:flush=64:dense_below=0"
NEEDLE = ["--model", "needle", "--caches", f"full,{FLAT}"]
NIAH = ["--context", 600, "--depths", 40, "--samples", 2, "--distractors", 9]


def test_the_bundled_model_finds_its_needles(evaluate: Run) -> None:
    full, flat = by_cache(evaluate("niah", *NEEDLE, *NIAH)).values()
    assert full["score"] == flat["score"] == 1
    cold = 600 - 64 - 64
    assert flat["read_ratio"] == pytest.approx(64 / cold, rel=0.2)
    # flat reads the keys of all cold tokens, and whole rows of the window and of what it selected.
    share = (cold / 2 + 64 + 128) / 600
    assert flat["step_bytes"] / flat["full_bytes"] == pytest.approx(share, rel=0.15)


def test_right_answers_come_before_the_next_question_whatever_was_said(
    drawn: Run, subject: Subject
) -> None:
    length, turns, count = 420, 2, 3
    words = ["--context", length, "--turns", turns, "--samples", 2, "--answer-tokens", count]
    caches = f"full,paris:top_k=4096:{SMALL}"
    rows = drawn("multiturn", *words, "--mode", "both", "--caches", caches)
    wording = magic_wording(subject, "multiturn", None, count)
    rng = np.random.default_rng([42, length, 1])
    depths = (100 * rng.random(turns)).tolist()
    document = wording.document(rng, length, depths, turns, start=0.5)

    def answer(tokens: list[int]) -> str:
        return wording.text(greedy(subject.model, torch.tensor(tokens), count))

    context = document.context.tolist()
    expected: dict[str, list[str]] = {"turns": [], "forks": []}
    talk = list(context)
    for fact in document.facts:
        expected["forks"].append(answer(context + fact.question))
        talk += fact.question
        expected["turns"].append(answer(talk))
        talk += fact.gold
    assert expected["turns"] != expected["forks"]
    assert len(rows) == 2 * 2
    for cell, row in rows:
        given = [answer["given"] for answer in row["answers"]]
        assert given[turns:] == expected[cell["mode"]]
        assert row["right"] == [0.0] * turns and row["mean"] == 0


def test_the_bundled_model_answers_every_turn(evaluate: Run) -> None:
    words = ["--context", 700, "--turns", 3, "--samples", 1, "--mode", "both"]
    for cell, row in evaluate("multiturn", *NEEDLE, *words):
        assert row["right"] == [1, 1, 1]
        if cell["cache"] == FLAT:
            assert row["read_ratio"] == pytest.approx(64 / (700 - 128), rel=0.2)


RULER = ["--context", 1100, "--samples", 1]


def test_ruler_asks_in_both_places_and_a_covering_cache_answers_as_full_attention(
    drawn: Run, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("niah_single_1", "vt"):
        monkeypatch.setitem(ruler.TASKS, name, replace(ruler.TASKS[name], max_new_tokens=4))
    passes = watch(ruler, "begin", lambda *given, whole: (whole, len(given[3])))
    words = ["--tasks", "niah_single_1,vt", "--questions", "both"]
    rows = drawn("ruler", *RULER, *words, "--caches", f"full,flat:top_k=1.0:{SMALL}")
    results = {tuple(cell.values()): row for cell, row in rows}
    assert len(results) == 2 * 2 * 2
    for (_, *place), result in results.items():
        assert result["answers"] == results["full", *place]["answers"] and any(result["answers"])
        assert len(result["scores"]) == 1 and 0 <= result["score"] <= 100
        assert result["read_ratio"] == pytest.approx(1.0, abs=0.1)
    # Inside comes first: the question is read with the text, and else fed after it.
    assert passes[0] == (True, 0) and passes[2][0] is False and passes[2][1] > 0


def test_an_answer_to_ruler_ends_when_its_score_is_full(
    evaluate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def right_after_three(task: str, text: str, references: tuple[str, ...]) -> float:
        calls.append(text)
        return float(len(calls) == 3)

    monkeypatch.setattr(ruler, "sample_score", right_after_three)
    monkeypatch.setattr(ruler, "end_tokens", lambda subject: frozenset())
    evaluate("ruler", *RULER, "--tasks", "vt", "--caches", "full")
    # Three tokens, then the finished answer once more.
    assert len(calls) == 4 and calls[2] == calls[3]
