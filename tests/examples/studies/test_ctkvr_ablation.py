"""CTkvr taken apart: the variants are what they are called, the numbers those of the caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ctkvr_ablation import FIXED, MEASUREMENT, PARTS, UPDATES, centroid_count, changed
from follower import starts_of

from hf_kvret import CTkvrCache, CTkvrConfig
from hf_kvret.evaluation.contexts import text_windows
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import Subject, load_subject

REGIONS: dict[str, Any] = {"dense_below": 0, "recent": 16, "flush": 16, "tokens_per_centroid": 8}
CTKVR = ":".join(["ctkvr", *(f"{name}={value}" for name, value in REGIONS.items())])
LENGTH, NEW, BUDGET, LAYERS = 240, 8, 12, 2
VARIANTS = MEASUREMENT(centroids=("1/4x", "1x"), nprobe=(1, 4), ratios=(2.5,), budgets=(0.04,))

# Of the parts with many variants, those that a command measures here.
FEW = {
    "pending": ("as given", "published lists and pending", "as published"),
    "choice": ("mixed", "first, causal"),
    "update": ("every 8, of all keys", "every 1, of recalled keys", "off, questions"),
}
Found = dict[tuple[str, str], dict[str, Any]]


def _run(measured: Any, path: Path, *arguments: str) -> Found:
    found = measured(MEASUREMENT, path, *arguments)
    return {(part, name): one for (part, name, _), one in found.items()}


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--caches", CTKVR]
    arguments += ["--context", str(LENGTH), "--top-k", str(BUDGET), "--new-tokens", str(NEW)]
    arguments += ["--step", "4", "--centroids", "1/4x,1x", "--nprobe", "1,4"]
    arguments += ["--ratios", "2.5", "--budgets", "0.04"]
    arguments += ["--questions", "2", "--question-tokens", "40", "--answer-tokens", "5"]
    arguments += ["--turns", "3", "--turn-tokens", "36", "--turn-measured", "6"]
    return [*arguments, "--long-tokens", "80", "--every", "40"]


@pytest.fixture(scope="module")
def subject(tiny_model_dir: Path) -> Subject:
    return load_subject(str(tiny_model_dir))


@pytest.fixture(scope="module")
def whole(
    measured: Any,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_text: Path,
) -> tuple[Path, Found]:
    """A folder with the table of all parts, and their numbers."""
    folder = tmp_path_factory.mktemp("ablation")
    outputs = ["--table", str(folder / "a.md")]
    arguments = [*_arguments(tiny_model_dir, tiny_text), *outputs]
    with pytest.MonkeyPatch.context() as patch:
        for part, names in FEW.items():
            patch.setitem(FIXED, part, {name: FIXED[part][name] for name in names})
        return folder, _run(measured, folder / "a.json", *arguments)


def _cache(subject: Subject, **options: Any) -> CTkvrCache:
    known = {**REGIONS, "top_k": BUDGET, "track_recall": True, "questions": False}
    return CTkvrCache(config=subject.model.config, **{**known, **options})


def _recalls(cache: CTkvrCache) -> list[Any]:
    return [one for layer in cache.retrieval_layers for one in layer.counters.recalls]


def _check_means(found: dict[str, Any], recalls: list[Any]) -> None:
    for name in ("overlap", "mass", "best_mass"):
        mean = sum(getattr(one, name) for one in recalls) / len(recalls)
        assert found[name] == pytest.approx(mean, rel=1e-5), name


def test_one_command_measures_all_parts(whole: tuple[Path, Found]) -> None:
    folder, found = whole
    names = {part: FEW.get(part) or VARIANTS.variants(part) for part in PARTS}
    assert set(found) == {(part, name) for part in PARTS for name in names[part]}
    for one in found.values():
        assert 0 < one["overlap"] <= 1 and 0 < one["mass"] <= one["best_mass"] + 1e-6
        assert 0 < one["read_ratio"] < one["candidate_ratio"] <= 1
        assert one["rerank_ratio"] == pytest.approx(one["candidate_ratio"] / one["read_ratio"])
    names = ["p", *(f"p-{part}" for part in PARTS if part != "choice"), "p-generated"]
    assert [path.stem for path in MEASUREMENT.pictures(folder / "p.png")] == names
    lines = [line for line in (folder / "a.md").read_text().splitlines()[:-1] if line]
    assert all(line.startswith("|") for line in lines)
    # A header and a rule for each table; the last part has two tables.
    assert len(lines) == len(found) + len(FEW["pending"]) + 2 * 9


def test_the_same_cache_has_the_same_numbers_in_every_part(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    """And those of a cache that is made and followed here."""
    found = whole[1]
    same = [("centroids", "1x"), ("probes", "4"), ("rerank", "auto, ratio 2.5")]
    plain = [{**found[one], "seconds_with_recall": 0} for one in same]
    assert plain[0] == plain[1] == plain[2]
    (window,) = text_windows(subject, "test", tiny_text, LENGTH, NEW, 1, None)
    cache = _cache(subject)
    with torch.inference_mode():
        subject.model(window[None, :LENGTH], past_key_values=cache)
        for step in window[LENGTH:].split(4):
            subject.model(step[None], past_key_values=cache)
    _check_means(plain[0], _recalls(cache))


def test_a_turn_is_read_in_one_pass_and_measured_after_it(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    (window,) = text_windows(subject, "test", tiny_text, LENGTH, 3 * 42, 1, None)
    for name in FEW["update"]:
        found, cache = whole[1]["update", name], _cache(subject, **UPDATES[name])
        recalls, rest = [], window[LENGTH:]
        with torch.inference_mode():
            subject.model(window[None, :LENGTH], past_key_values=cache)
            cache = cache.fork()
            for number in range(3):
                turn = rest[42 * number : 42 * (number + 1)]
                subject.model(turn[None, :36], past_key_values=cache)
                known = [len(layer.counters.recalls) for layer in cache.retrieval_layers]
                for step in turn[36:].split(1):
                    subject.model(step[None], past_key_values=cache)
                recalls.append(
                    [
                        one
                        for layer, start in zip(cache.retrieval_layers, known, strict=True)
                        for one in layer.counters.recalls[start:]
                    ]
                )
        assert [one["end"] for one in found["stretches"]] == [6, 12, 18]
        for stretch, own in zip(found["stretches"], recalls, strict=True):
            _check_means(stretch, own)
        # With questions, each turn's queries get lists over all keys; of steps, those that wait.
        if "all keys" not in name:
            assert found["list_builds"] == (3 * LAYERS if "questions" in name else 0)
        elif "every 8" in name:
            assert found["list_builds"] > 0


def test_a_question_repeats_a_passage_and_its_continuation_is_measured(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    (window,) = text_windows(subject, "test", tiny_text, LENGTH, 0, 1, None)
    assert starts_of(2, 45, LENGTH) == [80, 160]
    for name in ("on", "off"):
        recalls = []
        for start in (80, 160):
            cache = _cache(subject, questions=name == "on")
            with torch.inference_mode():
                subject.model(window[None], past_key_values=cache)
                # What comes after a fork is no part of the prompt.
                cache = cache.fork()
                subject.model(window[None, start : start + 40], past_key_values=cache)
                for step in window[start + 40 : start + 45].split(1):
                    subject.model(step[None], past_key_values=cache)
            recalls += _recalls(cache)
        found = whole[1]["questions", name]
        _check_means(found, recalls)
        assert found["list_builds"] == (2 * LAYERS if name == "on" else 0)


def test_generated_tokens_are_found_with_the_pending_list_only(whole: tuple[Path, Found]) -> None:
    found = {name: whole[1]["pending", name]["stretches"] for name in FEW["pending"]}
    for stretches in found.values():
        assert [one["end"] for one in stretches] == [40, 80]
        assert all(one["prompt_recall"] > 0 for one in stretches)
    shares = [one["generated_share"] for one in found["as published"]]
    assert 0 < shares[-1] < 1 and shares == sorted(shares)
    # Not every token of the exact top-k: what relevance is shared by heads depends on what else
    # was recalled.
    assert all(one["generated_recall"] > 0.9 for one in found["as given"][1:])
    assert all(one["generated_recall"] > 0.9 for one in found["published lists and pending"][1:])
    assert all(one["generated_recall"] == 0 for one in found["as published"][1:])


def test_lists_made_anew_find_the_prompts_tokens_again(
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
) -> None:
    """Asked for full coverage, lists are made at every flush; after more than C steps it shows."""
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", "pending"]
    arguments += ["--caches", f"{CTKVR}:coverage=1.0", "--long-tokens", "120"]
    kept, left = "published lists, pending and coverage", "published lists and pending"
    few = {name: FIXED["pending"][name] for name in (kept, left, "no pending list")}
    monkeypatch.setitem(FIXED, "pending", few)
    found = _run(measured, tmp_path / "a.json", *arguments)
    ends = [found["pending", name]["stretches"][-1] for name in (kept, left)]
    assert ends[0]["prompt_recall"] > ends[1]["prompt_recall"] + 0.03
    assert found["pending", kept]["list_builds"] > found["pending", left]["list_builds"] == 0
    # New lists hold new tokens too.
    assert found["pending", "no pending list"]["stretches"][-1]["generated_recall"] > 0


def test_a_budget_of_everything_finds_everything(
    measured: Any, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    parts = ("questions", "budget")
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", ",".join(parts)]
    arguments += ["--top-k", "1.0", "--budgets", "1.0"]
    for one in _run(measured, tmp_path / "a.json", *arguments).values():
        assert one["overlap"] == one["equal"] == 1 and one["mass"] == pytest.approx(1)


def test_the_variants_are_what_they_are_called() -> None:
    given = CTkvrConfig(top_k=7, recent=33, list_ratio=3.0)
    plain = given.replace(questions=False)
    length = 1633

    def made(part: str, name: str) -> CTkvrConfig:
        return changed(part, name, given, length)

    for part, name, changes in (
        ("choice", "mixed", {}),
        ("choice", "last", {"choice": "last"}),
        ("choice", "first, causal", {"choice": "first", "causal": True}),
        ("choice", "even", {"choice": "even"}),
        # 1,600 cold tokens have 100 centroids.
        ("centroids", "1/4x", {"centroids": 25, "tokens_per_centroid": 1}),
        ("centroids", "20", {"centroids": 20, "tokens_per_centroid": 1}),
        ("probes", "1", {"nprobe": 1}),
        ("rerank", "codes, ratio 1", {"rerank": "codes", "list_ratio": 1.0}),
        ("rerank", "lists", {"rerank": "lists"}),
        ("budget", "30", {"top_k": 30}),
        ("budget", "0.04", {"top_k": 0.04}),
        ("questions", "on", {"questions": True}),
        ("questions", "off", {}),
        ("update", "off", {"update": 0}),
        ("update", "every 32, of all keys", {"update": 32}),
        ("update", "every 1, of recalled keys", {"update": 1, "update_lists": "recalled"}),
        ("update", "off, questions", {"update": 0, "questions": True}),
        ("pending", "as given", {}),
        ("pending", "no pending list", {"pending": 0}),
        (
            "pending",
            "as published",
            {"update": 1, "update_lists": "recalled", "pending": 0, "coverage": 0.0},
        ),
    ):
        assert made(part, name) == plain.replace(**changes), name
        assert part in ("centroids", "rerank", "budget") or name in VARIANTS.variants(part)
    for part in PARTS:
        assert len({made(part, name) for name in VARIANTS.variants(part)}) == len(
            VARIANTS.variants(part)
        )


def test_centroids_are_counts_or_multiples() -> None:
    assert [centroid_count(text, 96) for text in ("1/8x", "0.5x", "2x", "7")] == [12, 48, 192, 7]
    assert centroid_count("1/8x", 3) == 1
    for text in ("x", "1/0x", "much", "1.5", "-1x", "0"):
        with pytest.raises(ValueError, match="--centroids"):
            centroid_count(text, 96)


def test_without_a_text_documents_of_needles_are_read(measured: Any, tmp_path: Path) -> None:
    arguments = ["--model", "needle", "--caches", CTKVR, "--context", "300", "--top-k", "16"]
    arguments += ["--parts", "probes,questions", "--nprobe", "1,8", "--new-tokens", "12"]
    arguments += ["--questions", "1", "--answer-tokens", "4"]
    found = _run(measured, tmp_path / "n.json", *arguments)
    assert set(found) == {
        ("probes", "1"),
        ("probes", "8"),
        ("questions", "on"),
        ("questions", "off"),
    }
    assert found["probes", "1"]["overlap"] < found["probes", "8"]["overlap"]


def test_what_was_not_run_shows_as_a_dash(tmp_path: Path) -> None:
    results = Results("eval ctkvr-ablation", {})
    numbers: dict[str, Any] = {"overlap": 0.5, "mass": 0.25, "best_mass": 0.75, "equal": 0.875}
    numbers |= {"candidate_ratio": 0.1, "read_ratio": 0.025, "rerank_ratio": 4.0}
    for variant, length in (("2", 64), ("3", 128)):
        results.add(
            {"cache": "ctkvr", "part": "probes", "variant": variant, "length": length}, numbers
        )
    stretch = {"end": 9, "prompt_recall": 0.5, "generated_recall": None}
    results.add(
        {"cache": "ctkvr", "part": "pending", "variant": "as published", "length": 64},
        {**numbers, "stretches": [stretch], "list_builds": 3},
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in MEASUREMENT.table(results).splitlines()
        if line
    ]
    shown, none = ["0.500", "0.250 of 0.750", "0.875", "10.0%", "2.5%"], ["-"] * 5
    assert rows[2:4] == [
        ["ctkvr", "2", *shown, *none, "0.8854"],
        ["ctkvr", "3", *none, *shown, "-"],
    ]
    assert rows[6] == ["ctkvr", "as published", "64", "0.500", "0.500", "3"]
    assert rows[9] == ["ctkvr", "as published", "64", "-", "-", "3"]
    MEASUREMENT.plot(tmp_path / "p.png", results)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p-generated.png",
        "p-pending.png",
        "p.png",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--caches", "flat,ctkvr"), "--caches flat: ctkvr-ablation is about ctkvr, so name"),
        (("--parts", "probe"), "--parts: unknown: probe; choose among choice, centroids"),
        (("--nprobe", "4,4"), "--nprobe: the same value twice in '4,4'"),
        (("--centroids", "1x,much"), "--centroids much: write a count as 512"),
        (("--ratios", "0.5"), "list_ratio=0.5: at least 1"),
        (("--every", "18"), "--every 18 is no multiple of --step 4"),
        (("--question-tokens", "1"), "--question-tokens: '1' is no whole number from 2"),
        (("--question-tokens", "160"), "no room for question and answer"),
        (("--text", "missing.txt"), "--text missing.txt: no such file"),
        (("--context", "300,1M"), "fewer than the"),
        (("--caches", "ctkvr"), "nothing was cold"),
        (("--caches", f"{CTKVR}:pending=0", "--parts", "pending"), "nothing to switch off"),
        (("--model", "needle"), "needs a tokenizer"),
    ],
)
def test_mistakes_are_one_line_each(
    refused: Any, tiny_model_dir: Path, tiny_text: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(MEASUREMENT, *_arguments(tiny_model_dir, tiny_text), *arguments)


def test_a_text_model_without_a_text_is_refused(refused: Any, tiny_model_dir: Path) -> None:
    assert "give --text FILE" in refused(MEASUREMENT, "--model", str(tiny_model_dir))
