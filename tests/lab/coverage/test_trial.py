"""A trial tells a type that is served from one that is not, and keeps what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_kvret import FlatKVCache
from hf_kvret.lab.coverage import record, trial
from hf_kvret.lab.coverage.record import Record, Setup, try_types
from hf_kvret.lab.coverage.scan import default_type, kv_heads
from hf_kvret.lab.coverage.small import VOCAB_SIZE, small_config
from hf_kvret.lab.coverage.trial import Trial
from hf_kvret.models.compatibility import model_layers


@pytest.fixture
def flat_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "registered_methods", lambda: {"flat": FlatKVCache})


def test_a_served_type_is_equal_and_its_rows_are_those_of_the_default(flat_only: None) -> None:
    result = trial.trial("gpt_bigcode")
    assert result.outcome == "equal" and result.methods == {"flat": "equal"}
    assert result.rows == [[result.heads, 64, 64]] and result.heads == 1
    assert default_type("gpt_bigcode").key_dim == 64
    assert 0.0 < result.difference < 3e-4


def test_a_lost_row_is_seen(flat_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**trial.COVERING_OPTIONS, "top_k": 150}
    monkeypatch.setattr(trial, "COVERING_OPTIONS", few)
    result = trial.trial("gpt2")
    assert result.outcome == "differs" and "logits differ" in result.detail
    assert result.methods["flat"].startswith("logits differ")


def test_an_error_of_ours_is_not_taken_for_one_of_transformers(
    flat_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(FlatKVCache, "make_index", broken)
    result = trial.trial("gpt2")
    assert result.outcome == "raised" and "a planted fault" in result.detail


def test_what_transformers_cannot_run_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise ImportError("needs a package")

    monkeypatch.setattr(trial, "small_model", broken)
    result = trial.trial("gpt2")
    assert result.outcome == "not tried"
    assert "needs a package" in result.detail and "there is none" in result.detail


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_a_small_configuration_keeps_kinds_of_layers_and_shapes_of_heads(name: str) -> None:
    config = AutoConfig.for_model(name)
    small = small_config(config)
    assert set(map(type, model_layers(small))) == set(map(type, model_layers(config)))
    text, few = config.get_text_config(), small.get_text_config()
    assert few.head_dim == text.head_dim and few.num_hidden_layers <= 8
    assert kv_heads(small) <= 2 and few.vocab_size == VOCAB_SIZE


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of types in the order of their trials, of which none takes time."""
    names: list[str] = []

    def note(name: str) -> Trial:
        names.append(name)
        return Trial("equal", rows=[[1, 2, 3]])

    monkeypatch.setattr(record, "trial", note)
    return names


def test_a_record_goes_on_where_it_stopped(tmp_path: Path, tried: list[str]) -> None:
    path, said = tmp_path / "trials.json", []
    try_types(["b", "a"], path, report=said.append)
    kept = try_types(["a", "c"], path, report=said.append)
    assert tried == ["b", "a", "c"] and said == ["b: equal", "a: equal", "c: equal"]
    assert Record.read(path) == kept and list(json.loads(path.read_text())["types"]) == list("abc")
    assert (kept.setups["c"].torch, kept.trials["c"].rows) == (torch.__version__, [[1, 2, 3]])
    try_types(["a"], path, reset_on_fork=True, report=said.append)
    assert tried[-1] == "a"


def test_a_run_that_broke_off_keeps_what_it_tried(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first = tmp_path / "trials.json", record.trial

    def broken(name: str) -> Trial:
        if name == "b":
            raise KeyboardInterrupt
        return first(name)

    monkeypatch.setattr(record, "trial", broken)
    with pytest.raises(KeyboardInterrupt):
        try_types(["a", "b", "c"], path)
    monkeypatch.setattr(record, "trial", first)
    bar: list[str] = []

    def progress(names: list[str]) -> list[str]:
        bar.extend(names)
        return names

    try_types(["a", "b", "c"], path, progress=progress)
    assert tried == ["a", "b", "c"] and bar == ["b", "c"]


@pytest.mark.parametrize("changed", ["transformers", "code", "both"])
def test_a_stale_trial_is_made_again_in_its_place(
    changed: str, tmp_path: Path, tried: list[str]
) -> None:
    present, path = Setup.present(), tmp_path / "trials.json"
    old = Setup(
        "4.0.0" if changed != "code" else present.transformers,
        present.torch,
        "0123" if changed != "transformers" else present.code,
    )
    assert old.stale and not present.stale
    trials = {name: Trial("differs") for name in ("a", "b", "not asked for")}
    Record(trials, {"a": old, "b": present, "not asked for": old}).write(path)
    kept = try_types(["a", "b"], path)
    assert tried == ["a"] and kept.setups == {"a": present, "b": present, "not asked for": old}
    assert [kept.trials[name].outcome for name in kept.trials] == ["equal", "differs", "differs"]
    assert Record.read(path) == kept


def test_another_torch_makes_no_trial_stale() -> None:
    assert not replace(Setup.present(), torch="2.11.0").stale


def test_a_change_of_our_code_makes_trials_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup.present()
    monkeypatch.setattr(record, "code_state", lambda: "0123")
    assert setup.stale and Setup.present().code == "0123"


def test_a_file_that_is_no_record_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    for text in ("{}", "[]", '{"types": {"a": {"outcome": "equal"}}}', "no JSON"):
        broken.write_text(text)
        with pytest.raises(ValueError, match=r"no record of trials.*new file"):
            Record.read(broken)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(Record.read().trials))
def test_the_trials_that_are_released_come_out_again(name: str) -> None:
    kept = Record.read()
    if kept.setups[name].transformers != transformers.__version__:
        pytest.skip(f"it was made with transformers {kept.setups[name].transformers}")
    again = trial.trial(name)
    assert (again.outcome, again.part, again.rows) == (
        kept.trials[name].outcome,
        kept.trials[name].part,
        kept.trials[name].rows,
    )
    assert again.methods == kept.trials[name].methods
