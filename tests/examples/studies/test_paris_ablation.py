"""ParisKV taken apart: the variants are what they are called, the numbers those of the caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from paris_ablation import DRIFT, MEASUREMENT, SWITCHES
from paris_ablation import variant as made_variant
from prefill_clusters import PrefillClusterCache, RefittedClusterCache

from hf_kvret import FlatKVCache, ParisConfig, ParisKVCache
from hf_kvret.evaluation.contexts import text_windows
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.methods.paris.ablations import UncorrectedParisKVCache, UnrotatedParisKVCache

PARIS = "paris:dense_below=0:recent=16:flush=16"
LENGTH, NEW, BUDGET = 400, 8, 20


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--caches", PARIS]
    arguments += ["--context", str(LENGTH), "--top-k", str(BUDGET), "--new-tokens", str(NEW)]
    return [*arguments, "--step", "4", "--drift-tokens", "20", "--every", "8", "--clusters", "16"]


@pytest.fixture(scope="module")
def subject(tiny_model_dir: Path) -> Subject:
    return load_subject(str(tiny_model_dir))


def _recalls(subject: Subject, text: Path, cache: Any) -> list[Any]:
    """Recalls of a cache that follows the text in steps of 4."""
    (window,) = text_windows(subject, "test", text, LENGTH, NEW, 1, None)
    with torch.inference_mode():
        subject.model(window[None, :LENGTH], past_key_values=cache)
        for step in window[LENGTH:].split(4):
            subject.model(step[None], past_key_values=cache)
    return [one for layer in cache.retrieval_layers for one in layer.counters.recalls]


def test_one_command_measures_all_parts(
    measured: Any,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    subject: Subject,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = ["--parts", "ratios,drift,switches", "--ratios", "0.1,1"]
    arguments = [*_arguments(tiny_model_dir, tiny_text), *parts]
    found = measured(MEASUREMENT, tmp_path / "p.json", *arguments)
    variants = ["as shipped", *SWITCHES]
    assert set(found) == {
        *(("switches", name, LENGTH) for name in variants),
        *(("ratios", ratio, LENGTH) for ratio in ("0.1", "1")),
        *(("drift", name, LENGTH) for name in DRIFT),
    }
    # The same cache by two ways, and against one that is made and followed here.
    assert found["switches", "all on", LENGTH] | {"seconds_with_recall": 0} == found[
        "ratios", "0.1", LENGTH
    ] | {"seconds_with_recall": 0}
    options = ParisConfig(
        top_k=BUDGET,
        dense_below=0,
        recent=16,
        flush=16,
        track_recall=True,
        schedule=((math.inf, 0.1, 0.5),),
    )
    recalls = _recalls(subject, tiny_text, ParisKVCache(subject.model.config, options))
    for name in ("overlap", "mass", "best_mass"):
        mean = sum(getattr(one, name) for one in recalls) / len(recalls)
        assert found["ratios", "0.1", LENGTH][name] == pytest.approx(mean, rel=1e-6)
    for (part, variant, _), one in found.items():
        assert 0 < one["overlap"] <= 1 and one["mass"] <= one["best_mass"] + 1e-6
        expected = 1.0 if variant.startswith("stage 2") or variant == "1" else 0.1
        if part != "switches" or variant != "as shipped":
            assert one["candidate_ratio"] == pytest.approx(expected, rel=0.03)
    assert found["switches", "as shipped", LENGTH]["candidate_ratio"] == pytest.approx(
        0.5, rel=0.03
    )
    ends = [one["end"] for one in found["drift", "prefill clusters", LENGTH]["stretches"]]
    assert ends == [8, 16, 20]
    tables = capsys.readouterr().out
    lines = [line for line in tables.splitlines() if line.startswith("|")]
    assert len(lines) == (2 + len(variants)) + (2 + 2) + (2 + len(DRIFT))


def test_all_candidates_and_a_full_budget_find_everything(
    measured: Any, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--top-k", "1.0"]
    arguments += ["--parts", "ratios,drift"]
    for one in measured(MEASUREMENT, tmp_path / "p.json", *arguments, "--ratios", "0.1").values():
        assert one["overlap"] == 1 and one["mass"] == pytest.approx(1)
        assert one["equal"] == 1


def test_exact_reranking_of_all_candidates_is_exact_top_k(
    measured: Any, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, subject: Subject
) -> None:
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", "drift", "--ratio", "1"]
    found = measured(
        MEASUREMENT,
        tmp_path / "p.json",
        *arguments,
        "--drift-tokens",
        str(NEW),
        "--every",
        str(NEW),
    )
    flat = FlatKVCache(
        subject.model.config,
        top_k=BUDGET,
        dense_below=0,
        recent=16,
        flush=16,
        track_recall=True,
    )
    recalls = _recalls(subject, tiny_text, flat)
    best = sum(one.best_mass for one in recalls) / len(recalls)
    for name in ("prefill clusters", "refitted clusters"):
        one = found["drift", name, LENGTH]
        assert one["overlap"] == 1 and one["mass"] == pytest.approx(best, rel=1e-5)


def test_the_variants_are_what_they_are_called(subject: Subject) -> None:
    options = ParisConfig(top_k=7, recent=33, group_reduce="max")
    config = subject.model.config

    def made(choice: Any) -> Any:
        return choice.make(config, 100)

    assert made(made_variant("switches", "as shipped", options, 0.2)).options == options
    at = options.with_candidates(0.4)
    assert [row[1:] for row in at.schedule] == [(0.4, 0.5), *[(0.4, 0.4)] * 4]
    assert made(made_variant("ratios", "0.4", options)).options == at
    for name, (cache_class, changes) in {
        "all on": (ParisKVCache, {}),
        "one tier": (ParisKVCache, {"tiers": (1.0,)}),
        "subspaces of 4": (ParisKVCache, {"subspace_dim": 4}),
        "rotation off": (UnrotatedParisKVCache, {}),
        "center off": (ParisKVCache, {"center": False}),
        "rotation and center off": (UnrotatedParisKVCache, {"center": False}),
        "mean query": (ParisKVCache, {"group_reduce": "mean"}),
        "alpha off": (UncorrectedParisKVCache, {}),
    }.items():
        cache = made(made_variant("switches", name, options, 0.4))
        assert type(cache) is cache_class and cache.options == at.replace(**changes)
    alone = made(made_variant("switches", "stage 2 alone, alpha off", options, 0.4))
    assert type(alone) is UncorrectedParisKVCache and alone.options == options.with_candidates(1.0)
    for name, kind in (
        ("prefill clusters", PrefillClusterCache),
        ("refitted clusters", RefittedClusterCache),
    ):
        cache = made(made_variant("drift", name, options, 0.3, clusters=9))
        assert type(cache) is kind and cache.options.candidate_ratio == 0.3
        assert (cache.options.top_k, cache.options.recent, cache.options.clusters) == (7, 33, 9)
        index = cache.make_index(cache.options, 0)
        paris = made(made_variant("drift", "paris", options, 0.3, clusters=9))
        other = paris.make_index(paris.options, 0)
        assert index.cost(5000, 7).candidates == other.cost(5000, 7).candidates == 1500


def test_a_text_that_changes_its_subject_can_follow(
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
) -> None:
    for name in ("prefill clusters", "refitted clusters"):
        monkeypatch.delitem(DRIFT, name)
    other = tmp_path / "other.txt"
    other.write_text("0123456789 abcdef " * 40)
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--ratios", "0.2"]
    arguments += ["--parts", "ratios,drift"]
    same = measured(MEASUREMENT, tmp_path / "same.json", *arguments)
    changed = measured(MEASUREMENT, tmp_path / "changed.json", *arguments, "--then", str(other))
    key = ("ratios", "0.2", LENGTH)
    assert same[key]["overlap"] == changed[key]["overlap"]
    key = ("drift", "paris", LENGTH)
    assert same[key]["overlap"] != changed[key]["overlap"]


def test_what_was_not_run_shows_as_a_dash(tmp_path: Path) -> None:
    results = Results("eval paris-ablation", {})
    numbers = {"overlap": 0.5, "mass": 0.25, "best_mass": 0.75, "candidate_ratio": 0.1}
    for variant, length in (("all on", 64), ("one tier", 128)):
        cell = {"cache": "paris", "part": "switches", "variant": variant, "length": length}
        results.add(cell, numbers)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in MEASUREMENT.table(results).splitlines()
    ]
    shown = ["0.500", "0.250 of 0.750", "10.0%"]
    assert rows[2:] == [
        ["paris", "all on", *shown, "-", "-", "-"],
        ["paris", "one tier", "-", "-", "-", *shown],
    ]
    MEASUREMENT.plot(tmp_path / "p.png", results)
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--caches", "full,paris"), "--caches full: paris-ablation is about paris, so name"),
        (("--parts", "ratio"), "--parts: unknown: ratio; choose among switches, ratios, drift"),
        (("--ratios", "0.1,0"), "--ratios: '0' is no number above 0, at most 1"),
        (("--every", "18"), "--every 18 is no multiple of --step 4"),
        (("--then", "missing.txt"), "--then missing.txt: no such file"),
        (("--caches", "paris"), "nothing was cold"),
    ],
)
def test_mistakes_are_one_line_each(
    refused: Any, tiny_model_dir: Path, tiny_text: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(MEASUREMENT, *_arguments(tiny_model_dir, tiny_text), *arguments)
