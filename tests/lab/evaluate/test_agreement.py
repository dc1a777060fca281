"""Agreement: equal tokens, KL and recall are what an independent computation finds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.agreement import Agreement, _rounds
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.report.results import Results

from .runs import greedy, results_by_cache

_run = partial(results_by_cache, "agreement")
SMALL = "dense_below=0:recent=16:flush=16"
LENGTH, NEW = 160, 12


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--context", str(LENGTH)]
    return [*arguments, "--windows", "2", "--new-tokens", str(NEW)]


def _flat(subject: Subject, context: torch.Tensor, forced: list[int] | None) -> torch.Tensor:
    """``[NEW, vocab]`` of flat with 8 tokens, fed ``forced`` or, after its first, its own."""
    cache = FlatKVCache(subject.model.config, top_k=8, dense_below=0, recent=16, flush=16)
    rows = []
    with torch.inference_mode():
        logits = subject.model(context[None], past_key_values=cache).logits[0, -1]
        for step in range(NEW):
            last = forced[step] if forced else int(logits.argmax())
            logits = subject.model(torch.tensor([[last]]), past_key_values=cache).logits[0, -1]
            rows.append(logits)
    return torch.stack(rows)


def test_the_numbers_are_those_of_an_independent_run(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject
) -> None:
    flat = f"flat:top_k=8:{SMALL}"
    caches = f"full,{flat},paris:top_k=8:{SMALL}"
    picture = tmp_path / "a.png"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", caches]
    rows = _run(tmp_path / "a.json", *arguments, "--plot", str(picture))
    assert picture.stat().st_size > 1000
    forced, free, firsts, divergences = [], [], [], []
    for context in text_windows(subject, "test", tiny_text, LENGTH, 2):
        fed = greedy(subject.model, context, 1 + NEW)
        with torch.inference_mode():
            whole = subject.model(torch.cat([context, torch.tensor(fed[:-1])])[None]).logits[0]
        logits, expected = _flat(subject, context, fed[:-1]), fed[1:]
        divergences.append(
            torch.nn.functional.kl_div(
                logits.log_softmax(-1),
                whole[-NEW:].log_softmax(-1),
                log_target=True,
                reduction="none",
            ).sum(-1)
        )
        forced += (logits.argmax(-1) == torch.tensor(expected)).tolist()
        own = (_flat(subject, context, None).argmax(-1) == torch.tensor(expected)).tolist()
        free += own
        firsts.append(own.index(False) if False in own else NEW)
    result = rows[flat]
    # A budget of 8 must matter, or nothing is tested.
    assert sum(forced) < len(forced)
    assert result["forced_equal"] == pytest.approx(sum(forced) / len(forced))
    assert result["free_equal"] == pytest.approx(sum(free) / len(free))
    assert result["first_divergence"] == firsts
    # Both sums are fp32 over 400 tokens, in another order.
    assert result["kl_mean"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-3)
    assert result["kl_max"] == pytest.approx(float(torch.cat(divergences).max()), rel=1e-3)
    assert result["overlap"] == 1 and result["mass"] == result["best_mass"] < 1
    assert result["contexts"] == 2 and result["tokens"] == 2 * NEW


def test_full_attention_and_full_budgets_agree_wholly(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = [f"flat:top_k=1.0:{SMALL}", f"paris:top_k=1.0:{SMALL}"]
    caches = ["full", "static", *ours]
    picture = tmp_path / "kl.png"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", ",".join(caches)]
    rows = _run(tmp_path / "a.json", *arguments)
    for cache in caches:
        result = rows[cache]
        assert result["forced_equal"] == result["free_equal"] == 1
        assert result["first_divergence"] == [NEW, NEW]
        assert 0 <= result["kl_mean"] <= result["kl_max"] < 1e-6
    for cache in ours:
        assert [layer["layer"] for layer in rows[cache]["layers"]] == [0, 1]
        for layer in rows[cache]["layers"]:
            assert layer["overlap"] == 1 and layer["mass"] == pytest.approx(1)
    assert rows["full"]["overlap"] is None and rows["full"]["layers"] == []
    tables = capsys.readouterr().out
    assert "| layer: recall, mass of best |" in tables
    assert tables.count("1.000, 1.000 of 1.000") == 4
    # Without recall the picture is about KL.
    results = Results("eval agreement", {"new_tokens": NEW})
    results.add({"cache": "static", "length": 4}, rows["static"])
    assert "layer:" not in Agreement.table(results)
    Agreement.plot(picture, results)
    assert picture.stat().st_size > 1000


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
