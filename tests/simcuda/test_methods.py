"""Every method and store on a simulated GPU: nothing is found, and decode steps wait for nothing."""

from __future__ import annotations

import pytest

from hf_kvret.testing.simcuda import Wait

from .cases import Case, cases, run

pytest.importorskip("triton")

QUICK = (Case("flat", "host", "graph"), Case("lrqk", "device"))
# These work on the CPU at every step, and say so.
WORK_ON_THE_HOST = {"cpu"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in cases()
    ],
)
def test_nothing_is_wrong_and_decode_steps_wait_for_nothing(case: Case) -> None:
    gpu, logits = run(case)
    assert not gpu.findings
    assert all(bool(each.isfinite().all()) for each in logits)
    assert gpu.launches
    if case.store not in WORK_ON_THE_HOST:
        assert [wait for wait in gpu.waits_in("decode") if not is_due(case, wait)] == []


def is_due(case: Case, wait: Wait) -> bool:
    """Before a capture, once after each flush, pending copies are waited for."""
    return case.mode == "graph" and "replay/layer_step.py" in wait.site
