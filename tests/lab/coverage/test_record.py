"""Records keep trials with what made them, and go stale with the code that a trial runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_kvret.lab.coverage import record
from hf_kvret.lab.coverage.record import Record, Setup, state_of, try_types
from hf_kvret.lab.coverage.trial import Trial

SOURCE = '''
"""A module."""

def add(a, b=1):
    """A sum."""
    return a + b
'''
SAME = {
    "comment": SOURCE.replace("return", "# Why.\n    return"),
    "docstrings": SOURCE.replace("A sum", "The sum").replace('"""A module."""', ""),
    "layout": SOURCE.replace("(a, b=1)", "(\n    a,\n    b=1,\n)"),
}
OTHER = {
    "operator": SOURCE.replace("a + b", "a - b"),
    "default": SOURCE.replace("b=1", "b=2"),
    "type of a number": SOURCE.replace("b=1", "b=1.0"),
    "name": SOURCE.replace("add", "plus"),
    "text that is no docstring": SOURCE.replace("return a", "x = 'A sum.'\n    return a"),
    "line": SOURCE.replace("    return", "    a = a\n    return"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_only_a_reader_sees_does_not_count(change: str) -> None:
    assert SAME[change] != SOURCE
    assert state_of([("one.py", SAME[change])]) == state_of([("one.py", SOURCE)])


@pytest.mark.parametrize("change", OTHER)
def test_a_change_of_code_counts(change: str) -> None:
    assert state_of([("one.py", OTHER[change])]) != state_of([("one.py", SOURCE)])


def test_names_count_and_the_order_of_files_does_not() -> None:
    one, two = ("one.py", SOURCE), ("two.py", "x = 1")
    assert state_of([one, two]) == state_of([two, one])
    assert state_of([one, two]) != state_of([one])
    assert state_of([one]) != state_of([("other.py", SOURCE)])
    assert state_of([("a.py", "x = 1"), ("b.py", "")]) != state_of(
        [("a.py", ""), ("b.py", "x = 1")]
    )


def test_the_sources_are_those_of_a_trial_on_a_cpu() -> None:
    names = [name for name, _ in record._sources()]
    assert len(names) == len(set(names)) > 100
    for part in (
        *("cache.py/.", "layer/layer.py", "attention/attention.py", "models/versions.py"),
        *("stores/cpu.py", "flat/index.py", "trial.py/.", "hf_kvret_kernels/merge/naive.py"),
        "hf_kvret_model_patches/latent.py",
    ):
        assert part in names
    other = ("triton", "evaluation", "benchmark", "aqua/", "cli.py", "__pycache__")
    assert not [name for name in names if any(part in name for part in other)]


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
    try_types(["a"], path, again=True, report=said.append)
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
