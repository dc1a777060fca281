"""Every study on its smallest setting: the cells, what stands in them, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import misses
import pytest
import torch
from a2ats_ablation import A2ATSAblation
from aqua_ablation import AquaAblation
from ctkvr_ablation import CTkvrAblation
from latent_heads import LatentHeads
from lrqk_factors import ALTERNATING, PER_HEAD, LRQKFactors
from misses import Generation, Misses
from paris_ablation import ParisAblation
from rest_tokens import RestTokens

from hf_kvret.lab.program.scripts import run_script

Rows = dict[tuple[Any, ...], dict[str, Any]]
Run = Callable[..., tuple[Rows, str]]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def smallest(smallest: Run) -> Run:
    """As there, without the cache of a cell, which comes first."""

    def run(study: Any, *more: str) -> tuple[Rows, str]:
        rows, table = smallest(study, *more)
        return {cell[1:]: row for cell, row in rows.items()}, table

    return run


def test_paris(smallest: Run) -> None:
    rows, table = smallest(ParisAblation, "--windows", "1")
    recalls = {variant: row["overlap"] for (_, variant, _), row in rows.items()}
    assert recalls["all on"] > recalls["rotation off"]
    assert recalls["stage 2 alone"] >= recalls["all on"]
    drift = {variant: row for (part, variant, _), row in rows.items() if part == "drift"}
    assert list(drift) == ["paris", "prefill clusters", "refitted clusters"]
    assert all([one["end"] for one in row["stretches"]] == [16, 32] for row in drift.values())
    for row in rows.values():
        assert 0.0 < row["overlap"] <= 1.0 and row["mass"] <= row["best_mass"] + 1e-6
    assert "candidate ratio" in table and "recall, first" in table


def test_ctkvr(smallest: Run) -> None:
    rows, table = smallest(CTkvrAblation)
    updates = {variant: row for (part, variant, _), row in rows.items() if part == "update"}
    assert len(updates) == 7 and updates["every 1, of recalled keys"]["list_builds"] >= 0
    assert all(len(row["stretches"]) == 2 for row in updates.values())
    ranks = {variant: row for (part, variant, _), row in rows.items() if part == "rerank"}
    assert ranks["auto, ratio 2"]["overlap"] >= ranks["lists"]["overlap"]
    assert ranks["auto, ratio 2"]["rerank_ratio"] > 1.0
    assert "C', recalled centroids" in table and "| turn 2 |" in table


def test_a2ats(smallest: Run) -> None:
    rows, table = smallest(A2ATSAblation)
    recalls = {name: row["overlap"] for (part, name, *_), row in rows.items() if part == "switches"}
    # Exact keys lose nothing to codewords.
    assert recalls["windowed, exact keys"] >= recalls["windowed, query-aware"]
    errors = rows["errors", "windowed, query-aware"]["layers"]
    assert all(one["score_error"] > 0.0 for one in errors)
    (layer, *_) = rows["alike", "before RoPE"]["layers"]
    assert layer["alike"][0][0] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < layer["alike"][0][1] < 1.0
    assert "paper's accuracy, table 2" in table and "before RoPE: needles / needles" in table


def test_aqua(smallest: Run) -> None:
    rows, table = smallest(AquaAblation)
    bits = {name: row for (part, name, *_), row in rows.items() if part == "bits"}
    full = bits["full"]
    assert full["bits"] == full["full_bits"] == 32.0
    # Two bits, a scale for each group, and a first layer of four.
    assert 2.0 < bits["aqua, 2 bits"]["bits"] < 4.0
    losses = [abs(bits[f"higgs, {count} bits"]["nats"] - full["nats"]) for count in (2, 4)]
    assert losses[0] > losses[1]
    assert bits["aqua, 2 bits"]["predictor_bytes"] > 0 == bits["higgs, 2 bits"]["predictor_bytes"]
    explained = rows["variance", "exact"]["layers"]
    assert all(one["key_explained"] <= 1.0 for one in explained if one.get("key_explained"))
    assert "bits a value" in table and "keys explained, layer" in table


def test_lrqk(smallest: Run) -> None:
    rows, table = smallest(LRQKFactors)
    layers = {variant: row["layers"] for (_, variant, _), row in rows.items()}
    for name in ALTERNATING:
        for ours, theirs in zip(layers[PER_HEAD], layers[name], strict=True):
            pairs = zip(ours["errors"], theirs["errors"], strict=True)
            assert all(one <= other + 1e-6 for one, other in pairs)
    for own in layers.values():
        assert all(0.0 < one["recall"] <= 1.0 and one["mass"] <= 1.0 for one in own)
    assert "closed form no worse than ALS in any head (up to 1e-06): 9 of 9" in table


def test_latent_heads(smallest: Run) -> None:
    rows, table = smallest(LatentHeads)
    together, groups = (rows["tokens", f"{size}, 8", 512] for size in (16, 4))
    assert together["union"] == together["rows"] == 8.0 and together["selections"] == 1
    assert groups["rows"] == 8.0 < groups["union"] <= 32.0 and groups["selections"] == 4
    assert rows["tokens", "16, 16", 512]["kl"] < together["kl"]
    assert "| 16 (all) " in table and "KL at 32 rows in all" in table


def test_rest_tokens(smallest: Run) -> None:
    rows, table = smallest(RestTokens)
    nothing, mean = (rows["tokens", f"0.05, {rest}", 512] for rest in ("nothing", "mean"))
    assert nothing["rows"] == pytest.approx(0.05, abs=0.01) and 0.0 < nothing["lost"] < 1.0
    assert mean["kl"] < nothing["kl"] and mean["step_bytes"] < mean["full_bytes"]
    assert "5%: KL +- s.e., equal" in table and "5%: mass of the cold ones lost" in table


def test_misses(smallest: Run) -> None:
    ((key, row),) = smallest(Misses)[0].items()
    assert key == (256, 16, 1.0)
    assert 0.0 < row["miss_ratio"] < 1.0 and row["equal_tokens"] == 24
    assert [one["end"] for one in row["stretches"]] == [8, 16, 24]
    # All steps count alike, so the mean of stretches is the whole.
    ratios = [one["miss_ratio"] for one in row["stretches"]]
    assert sum(ratios) / 3 == pytest.approx(row["miss_ratio"])
    assert row["saved_ratio"] == pytest.approx(1 - row["bus_bytes"] / row["plain_bus_bytes"])


def test_misses_stop_at_a_token_that_a_buffer_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(misses.Generation, "first_difference", lambda self, other: 5)
    assert run_script(Misses, ["--smallest"]) == 1
    assert "a store must not change a result" in capsys.readouterr().out


def test_generations_differ_where_a_token_or_the_best_one_does() -> None:
    def run(tokens: list[int], choices: list[int]) -> Generation:
        return Generation(torch.tensor(tokens), torch.tensor(choices), [], None, 0.0)  # type: ignore[arg-type]

    one = run([1, 2, 3], [1, 2, 3, 4])
    assert one.first_difference(run([1, 2, 3], [1, 2, 3, 4])) is None
    assert one.first_difference(run([1, 5, 3], [1, 2, 3, 4])) == 1
    assert one.first_difference(run([1, 2, 3], [1, 2, 3, 9])) == 3
