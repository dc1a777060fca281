"""Every method and store on a simulated GPU: nothing is found, and logits are those of a CPU.

Decode steps wait for nothing.
"""

import pytest

from ..simulated_gpu.simulation import Finding, Wait
from .cases import Case, cases, check_logits, run

pytest.importorskip("triton")

QUICK = (
    Case("flat", "host", "graph", steps=5, layers=1),
    Case("paris", "device", "eager", "deepseek_v3", steps=5, layers=1),
)
# These work on the CPU at every step.
WORK_ON_THE_HOST = {"cpu", "disk"}
# The others keep something on the host at every step.
REPLAYED = {"flat", "paris", "lrqk"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in dict.fromkeys((*QUICK, *cases()))
    ],
)
def test_nothing_is_wrong_and_decode_steps_wait_for_nothing(case: Case) -> None:
    outcome = run(case)
    gpu = outcome.gpu
    assert [finding for finding in gpu.findings if not is_known(case, finding)] == []
    check_logits(outcome)
    phases = {phase for phase, _ in gpu.launches}
    assert {"decode", "flush"} <= phases or (case.method == "latent" and "decode" in phases)
    if case.mode == "graph" and case.method in REPLAYED and case.store not in WORK_ON_THE_HOST:
        assert outcome.replays > 0
    if case.store not in WORK_ON_THE_HOST:
        assert [wait for wait in gpu.waits_in("decode") if not is_due(case, wait)] == []


def is_known(case: Case, finding: Finding) -> bool:
    """Coded rows are not as long as a whole load, and masks of a block begin where it does."""
    if finding.kind != "alignment":
        return False
    return "higgs" in case.store or case.method == "aqua" or " valid_ptr " in finding.text


def is_due(case: Case, wait: Wait) -> bool:
    """Before a capture, once after each flush, pending copies are waited for."""
    return case.mode == "graph" and "replay/layer_step.py" in wait.site
