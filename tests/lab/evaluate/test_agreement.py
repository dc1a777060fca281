"""Agreement: equal tokens, KL and recall are what an independent computation finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret.lab.evaluate.reader import divergence
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.tasks.agreement import Agreement, _rounds
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.report.results import Results

from .runs import greedy, results_by_cache

SMALL = "dense_below=0:recent=16:flush=16"
LENGTH, NEW = 160, 12


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
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    subject: Subject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flat, paris = f"flat:top_k=8:{SMALL}", f"paris:top_k=1.0:{SMALL}"
    picture = tmp_path / "a.png"
    arguments = ["--model", str(tiny_model_dir), "--text", str(tiny_text), "--windows", "2"]
    arguments += ["--context", str(LENGTH), "--new-tokens", str(NEW), "--plot", str(picture)]
    more = ["--caches", f"full,{flat},{paris}"]
    rows = results_by_cache("agreement", tmp_path / "a.json", *arguments, *more)
    assert picture.stat().st_size > 1000
    forced, free, firsts, kls = [], [], [], []
    for context in text_windows(subject, "test", tiny_text, LENGTH, 2):
        fed = greedy(subject.model, context, 1 + NEW)
        with torch.inference_mode():
            whole = subject.model(torch.cat([context, torch.tensor(fed[:-1])])[None]).logits[0]
        logits, expected = _flat(subject, context, fed[:-1]), torch.tensor(fed[1:])
        kls.append(divergence(whole[-NEW:], logits))
        forced += (logits.argmax(-1) == expected).tolist()
        own = (_flat(subject, context, None).argmax(-1) == expected).tolist()
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
    tables = capsys.readouterr().out
    assert "| layer: recall, mass of best |" in tables
    assert tables.count("1.000, 1.000 of 1.000") == 2


def test_without_recall_the_picture_is_about_divergence(tmp_path: Path) -> None:
    results = Results("eval agreement", {"new_tokens": NEW})
    numbers = {"forced_equal": 1, "free_equal": 1, "kl_mean": 0.1, "kl_max": 0.2, "layers": []}
    numbers |= {"first_divergence": [3], "read_ratio": None}
    numbers |= dict.fromkeys(("overlap", "mass", "best_mass"))
    results.add({"cache": "static", "length": 4}, numbers)
    assert "layer:" not in Agreement.table(results)
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
