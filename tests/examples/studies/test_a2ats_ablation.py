"""A2ATS taken apart by one command: four artifacts, and numbers that are those of the caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import pytest
import torch
from a2ats_ablation import EXACT_KEYS, FULL_METHOD, MEASUREMENT, PARTS, SWITCHES
from a2ats_parts import ExactKeysCache

from hf_kvret import A2ATSCache
from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.evaluation.following import full_choices
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.evaluation.texts import read_text, token_ids

REGIONS: dict[str, Any] = {"dense_below": 0, "recent": 16, "flush": 16}
A2ATS = ":".join(["a2ats", *(f"{name}={value}" for name, value in REGIONS.items())])
LENGTH, NEW, BUDGET, LEARNED = 300, 12, 15, 600
OWNERS = ("head, 10", "union, 10", "head, 0.2", "union, 0.2")

Found = dict[tuple[str, str], dict[str, Any]]


def _run(measured: Any, path: Path, *arguments: str) -> Found:
    return {key[:2]: one for key, one in measured(MEASUREMENT, path, *arguments).items()}


def _small(*, text: Path | None, model: str) -> list[str]:
    arguments = ["--model", model, "--caches", A2ATS, "--context", str(LENGTH)]
    arguments += ["--text", str(text)] if text else []
    arguments += ["--top-k", str(BUDGET), "--new-tokens", str(NEW), "--step", "4"]
    arguments += ["--budgets", "10,0.2", "--codewords", "16", "--rounds", "3"]
    arguments += ["--rope-window", "100", "--calibration-tokens", str(LEARNED)]
    arguments += ["--calibration-length", "150", "--uuid-tokens", "150"]
    return [*arguments, "--inputs", "2", "--input-tokens", "120", "--input-codewords", "16"]


def _arguments(model: Path, text: Path) -> list[str]:
    return _small(text=text, model=str(model))


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
    """A folder with artifacts and the table of all parts, and their numbers."""
    folder = tmp_path_factory.mktemp("ablation")
    outputs = ["--table", str(folder / "a.md")]
    return folder, _run(
        measured, folder / "a.json", *_arguments(tiny_model_dir, tiny_text), *outputs
    )


def _followed(
    subject: Subject,
    text: Path,
    artifact: Path,
    cache_class: type[A2ATSCache] = A2ATSCache,
    **options: Any,
) -> tuple[A2ATSCache, float]:
    """A cache that has followed the first context after the calibration's tokens, and the share of
    first choices that are full attention's."""
    ids = token_ids(subject.need_tokenizer("test"), read_text(text))
    window = torch.cat([ids[:1], ids[LEARNED : LEARNED + LENGTH + NEW - 1]])
    cache = cache_class(
        config=subject.model.config,
        artifact=str(artifact),
        track_recall=True,
        **{"top_k": BUDGET, **REGIONS, **options},
    )
    logits = []
    with torch.inference_mode():
        subject.model(window[None, :LENGTH], past_key_values=cache)
        for step in window[LENGTH:].split(4):
            logits.append(subject.model(step[None], past_key_values=cache).logits[0])
    right = full_choices(subject.model, window, start=LENGTH)
    return cache, float((torch.cat(logits).argmax(-1) == right).double().mean())


def _check(found: dict[str, Any], cache: A2ATSCache, equal: float) -> None:
    recalls = [one for layer in cache.retrieval_layers for one in layer.counters.recalls]
    for name in ("overlap", "mass", "best_mass"):
        mean = sum(getattr(one, name) for one in recalls) / len(recalls)
        assert found[name] == pytest.approx(mean, rel=1e-5), name
    stats = cache.stats()["layers"]
    selected = sum(one["selected"] for one in stats)
    assert found["read_ratio"] == pytest.approx(selected / sum(one["cold_rows"] for one in stats))
    assert found["equal"] == pytest.approx(equal)


def test_one_command_measures_all_parts(whole: tuple[Path, Found]) -> None:
    folder, found = whole
    assert set(found) == {
        *(("switches", name) for name in (*SWITCHES, EXACT_KEYS)),
        *(("errors", name) for name in SWITCHES),
        ("alike", "before RoPE"),
        ("alike", "after RoPE"),
        *(("budget_of", name) for name in OWNERS),
    }
    for (part, _), one in found.items():
        if part in ("switches", "budget_of"):
            assert 0 < one["overlap"] <= 1 and 0 < one["mass"] <= one["best_mass"] + 1e-6
            assert 0 < one["read_ratio"] < 0.25
            by_layer = sum(layer["overlap"] for layer in one["layers"]) / 2
            assert by_layer == pytest.approx(one["overlap"])
    assert "of 2 layers." in (folder / "a.md").read_text()


def test_the_artifacts_are_what_they_are_called(whole: tuple[Path, Found]) -> None:
    home = whole[0] / "a-artifacts"
    assert len(list(home.iterdir())) == 4
    for name, (space, aware, *_) in SWITCHES.items():
        artifact = CalibrationArtifact.from_pretrained(home / name.replace(", ", "-"))
        told = artifact.options
        assert (told["space"], told["query_aware"]) == (space, aware)
        assert (told["codewords"], told["rounds"], told["window"]) == (16, 3, 100)
        # A plain codebook's metric is the identity.
        metric = artifact.tensors["layers.0.metric"]
        assert torch.equal(metric, torch.eye(64).expand_as(metric)) == (not aware)
        errors = whole[1]["errors", name]["layers"]
        assert [one["layer"] for one in errors] == [0, 1]
        quality = [one["score_error"] for one in artifact.quality]
        assert [one["score_error"] for one in errors] == quality


def test_each_row_is_measured_with_its_own_artifact(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    for name in SWITCHES:
        folder = whole[0] / "a-artifacts" / name.replace(", ", "-")
        _check(whole[1]["switches", name], *_followed(subject, tiny_text, folder))
    exact = whole[0] / "a-artifacts" / "windowed-plain"
    # Only the space of an artifact counts, so any of the windowed ones will do.
    cache, equal = _followed(subject, tiny_text, exact, ExactKeysCache)
    _check(whole[1]["switches", EXACT_KEYS], cache, equal)
    found = [whole[1]["switches", name]["overlap"] for name in (*SWITCHES, EXACT_KEYS)]
    assert len(set(found)) == 5


def test_heads_and_unions_are_measured_with_the_full_method(
    whole: tuple[Path, Found], subject: Subject, tiny_text: Path
) -> None:
    folder = whole[0] / "a-artifacts" / FULL_METHOD.replace(", ", "-")
    for name in OWNERS:
        owner, _, budget = name.partition(", ")
        options = {"budget_of": owner, "top_k": float(budget) if "." in budget else int(budget)}
        _check(whole[1]["budget_of", name], *_followed(subject, tiny_text, folder, **options))
    # Query heads agree in part.
    assert (
        whole[1]["budget_of", "union, 0.2"]["read_ratio"]
        < whole[1]["budget_of", "head, 0.2"]["read_ratio"]
    )


def test_a_budget_of_everything_finds_everything(
    measured: Any, whole: tuple[Path, Found], tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", "switches", "--top-k", "1.0"]
    found = _run(
        measured, tmp_path / "b.json", *arguments, "--artifacts", str(whole[0] / "a-artifacts")
    )
    for one in found.values():
        assert one["overlap"] == one["equal"] == 1 and one["mass"] == pytest.approx(1)


def test_artifacts_that_fit_are_used_and_others_refused(
    measured: Any,
    refused: Any,
    whole: tuple[Path, Found],
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr(calibrated, "calibrate", forbidden)
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--parts", "switches"]
    arguments += ["--artifacts", str(whole[0] / "a-artifacts")]
    found = _run(measured, tmp_path / "b.json", *arguments)
    assert found["switches", FULL_METHOD] == whole[1]["switches", FULL_METHOD]
    for changed, message in (
        (("--codewords", "8"), "codewords was 16, now 8"),
        (("--calibration-tokens", "450"), "tokens was 600, now 450"),
        (("--dtype", "bfloat16"), "dtype was 'float32', now 'bfloat16'"),
    ):
        error = refused(MEASUREMENT, *arguments, *changed)
        assert "holds an artifact of another calibration" in error and message in error


def test_parts_without_a_cache_are_measured_once(tiny_model_dir: Path, tiny_text: Path) -> None:
    study = MEASUREMENT(text=tiny_text, model=str(tiny_model_dir), budgets=(9,), context=(64,))
    cells = study.cells_of([A2ATS, f"{A2ATS}:sink=0"])
    counts = {part: sum(cell["part"] == part for cell in cells) for part in PARTS}
    assert counts == {"switches": 10, "errors": 4, "alike": 2, "budget_of": 4}


def test_without_a_text_documents_of_needles_are_read(measured: Any, tmp_path: Path) -> None:
    arguments = [*_small(text=None, model="needle"), "--parts", "alike"]
    found = _run(measured, tmp_path / "n.json", *arguments)
    assert len(found) == 2
    assert found["alike", "before RoPE"]["inputs"] == ["needles 1", "needles 2"]


def test_tables_name_the_winner_and_dash_what_was_not_run(measured, tmp_path: Path) -> None:
    results = Results("eval a2ats-ablation", {})
    numbers: dict[str, Any] = {"overlap": 0.5, "mass": 0.25, "best_mass": 0.75, "equal": 0.875}
    numbers |= {"read_ratio": 0.06, "layers": [{"layer": 1, "overlap": 0.5}]}
    for name, length in (("windowed, plain", 64), ("rotated, plain", 128)):
        cell = {"cache": "a2ats", "part": "switches", "variant": name, "length": length}
        results.add(cell, numbers)
    for name, errors in (("query-aware", [0.1, 0.4, None]), ("plain", [0.2, 0.3, 0.5])):
        layers = [{"layer": n, "score_error": error} for n, error in enumerate(errors)]
        cell = {"cache": "a2ats", "part": "errors", "variant": f"windowed, {name}"}
        results.add(cell, {"layers": layers})
    for place, alike in (("before RoPE", [0.9, 0.7, 0.6]), ("after RoPE", [0.8, 0.75, 0.5])):
        matrix = [[1, alike[0], alike[1]], [alike[0], 1, alike[2]], [alike[1], alike[2], 1]]
        cell = {"cache": "a2ats", "part": "alike", "variant": place}
        inputs = ["text 1", "text 2", "UUIDs"]
        results.add(cell, {"inputs": inputs, "layers": [{"layer": 0, "alike": matrix}]})
    lines = [line for line in MEASUREMENT.table(results).splitlines() if line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown, none = ["0.500", "0.250 of 0.750", "0.875", "6.0%"], ["-"] * 4
    assert rows[2] == ["a2ats", "windowed, plain", "WRoPE", *shown, *none, "85.9"]
    assert rows[3] == ["a2ats", "rotated, plain", "Baseline", *none, *shown, "81.4"]
    assert rows[6] == ["a2ats", "windowed, plain", "64", "0.500"]
    assert rows[10:14] == [
        ["0", "0.1000", "0.2000"],
        ["1", "0.4000", "0.3000"],
        ["2", "-", "0.5000"],
        ["mean", "0.2500", "0.3333"],
    ]
    assert (
        lines[14] == "windowed: query-aware codebooks miss less than plain ones in 1 of 2 layers."
    )
    assert rows[17] == ["0", "0.900", "0.650", "0.800", "0.625"]
    assert lines[19:] == [
        "text / text: codebooks are more alike before RoPE than after it in 1 of 1 layers.",
        "text / UUIDs: codebooks are more alike before RoPE than after it in 1 of 1 layers.",
    ]
    MEASUREMENT.plot(tmp_path / "p.png", results)
    names = ["p-alike.png", "p-errors.png", "p-inputs.png", "p.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--caches", "flat,a2ats"), "--caches flat: a2ats-ablation is about a2ats, so name"),
        (("--caches", "a2ats:artifact=x"), "chooses artifact itself, leave it out; --artifacts"),
        (("--parts", "switch"), "--parts: unknown: switch; choose among switches, errors"),
        (("--budgets", "4,4"), "--budgets: the same value twice in '4,4'"),
        (("--inputs", "1"), "--inputs: '1' is no whole number from 2"),
        (("--input-codewords", "121"), "--input-codewords 121 of --input-tokens 120"),
        (("--inputs", "900", "--parts", "alike"), "--inputs 900 of --input-tokens 120"),
        (("--artifacts", "a:b"), "--artifacts a:b: a colon"),
        (("--calibration-tokens", "150"), "at least two, one of them measures errors"),
        (("--calibration-tokens", "1M", "--parts", "errors"), "--calibration-tokens 1048576"),
        (("--context", "300,1M"), "tokens beside those of the calibration"),
        (("--calibration-text", "missing.txt"), "--calibration-text missing.txt: no such file"),
        (("--model", "needle"), "a2ats-ablation needs a tokenizer"),
    ],
)
def test_mistakes_are_one_line_each(
    refused: Any, tiny_model_dir: Path, tiny_text: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(MEASUREMENT, *_arguments(tiny_model_dir, tiny_text), *arguments)


def test_nothing_cold_is_refused(
    refused: Any, whole: tuple[Path, Found], tiny_model_dir: Path, tiny_text: Path
) -> None:
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", "a2ats"]
    arguments += ["--artifacts", str(whole[0] / "a-artifacts")]
    assert "nothing was cold" in refused(MEASUREMENT, *arguments)
