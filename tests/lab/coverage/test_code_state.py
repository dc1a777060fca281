"""The state of the code changes with what a trial runs, and with nothing else."""

from __future__ import annotations

import pytest

from hf_kvret.lab.coverage import code_state
from hf_kvret.lab.coverage.code_state import state_of

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
    names = [name for name, _ in code_state._sources()]
    assert len(names) == len(set(names)) > 150
    for part in (
        *("cache.py/.", "layer/layer.py", "attention/attention.py", "models/versions.py"),
        *("stores/cpu.py", "flat/index.py", "trial.py/.", "hf_kvret_kernels/merge/naive.py"),
        "hf_kvret_model_patches/latent.py",
    ):
        assert part in names
    other = ("triton", "evaluation", "benchmark", "aqua/", "cli.py", "__pycache__")
    assert not [name for name in names if any(part in name for part in other)]
