"""The benches' modules by plain names, as their scripts import them, with little work."""

import sys

import pytest

from hf_kvret.lab.bench import timing

from ..conftest import ROOT

sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

import kernel_clock


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls follow each other at once: quick, and nothing here looks at how true a time is."""
    monkeypatch.setattr(timing, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_clock, "_CPU_FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(kernel_clock, "_CPU_SIDE", 32)
    monkeypatch.setattr(kernel_clock, "CALM_SECONDS", 0.0)
