"""The self-test passes here, notices planted faults, and its report is fit to be shown."""

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import cli
from hf_kvret.lab.selftest import checks, command
from hf_kvret.lab.selftest.checks import (
    FAILED,
    GROUPS,
    METHODS,
    PASSED,
    SKIPPED,
    Bundled,
    Check,
    Skip,
    cache_checks,
    kernel_checks,
    replayed,
    run_check,
    step_checks,
)
from hf_kvret.lab.selftest.command import every_check, run_checks
from hf_kvret.registry import registered_methods
from hf_kvret.stores import DISK, STORES
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import taped
from hf_kvret_kernels import host_library, host_step
from hf_kvret_kernels.catalog import OPERATIONS

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[3] / "kernels" / "hf_kvret_kernels"
needs_library = pytest.mark.skipif(
    bool(host_library.why_not()), reason="the compiled library is not here"
)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts and small shapes, which take the same code."""
    monkeypatch.setattr(checks, "_PROMPT_LEN", 60)
    monkeypatch.setattr(checks, "_STEPS", 6)
    for name, size in {"length": 230, "top_k": 40, "candidates": 115, "listed": 90}.items():
        monkeypatch.setitem(checks._SIZES, name, size)


class Small(Bundled):
    """A tiny model in the place of the bundled one, which takes longer."""

    @cached_property
    def model(self) -> PreTrainedModel:
        model = MODELS["llama"].build().to(self.dtype)
        hf_kvret.attach(model)
        return model


def first_named(some: Any, *words: str) -> list[Check]:
    """For each of these words the first check whose name has it."""
    listed = list(some)
    return [next(one for one in listed if word in one.name) for word in words]


def test_every_operation_with_a_triton_kernel_is_checked() -> None:
    folders = {path.parent.name for path in KERNELS.glob("*/triton*.py")}
    checked = {operation.name.partition(".")[0] for operation in OPERATIONS}
    assert folders - checked == set()
    assert checked - folders == {"copy_pages", "gather_scores"}


def test_every_method_and_every_store_is_checked() -> None:
    names = [one.name for one in cache_checks(Bundled(CPU))]
    assert {name.partition(",")[0] for name in names} == set(registered_methods())
    for store in (*STORES, DISK):
        methods = {name.partition(",")[0] for name in names if f"store={store!r}" in name}
        takes = {
            each for each in METHODS if registered_methods()[each].Config.takes("store", store)
        }
        assert methods == takes
    modes = {name.rpartition(" ")[2] for name in names}
    assert {"crop_deep", "prefix_reuse", "beams", "saved"} <= modes


def test_each_group_has_checks_with_a_remedy_on_either_device() -> None:
    for device in ("cpu", "cuda"):
        some = list(every_check(torch.device(device)))
        assert list(dict.fromkeys(one.group for one in some)) == list(GROUPS)
        assert all(one.remedy for one in some)


@needs_library
@pytest.mark.usefixtures("short")
def test_compiled_operations_pass_with_every_instruction_set() -> None:
    names = "block_lse", "higgs.gather_attention"
    some = [one for one in kernel_checks(CPU) if one.name.startswith(names)]
    assert len(some) == 6 * len(host_library.paths())
    assert {one.status for one in run_checks(some, CPU)} == {PASSED}


@pytest.mark.usefixtures("short")
def test_steps_and_caches_pass() -> None:
    some = [
        *first_named(step_checks(Bundled(CPU)), "paris, store='device'"),
        *first_named(cache_checks(Small(CPU)), "saved", "native"),
    ]
    verdicts = run_checks(some, CPU)
    assert {one.status for one in verdicts} == {PASSED}, [one.detail for one in verdicts]


@pytest.mark.slow
def test_all_of_it_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    assert " 0 failed, " in capsys.readouterr().out


@needs_library
@pytest.mark.usefixtures("short")
def test_a_wrong_kernel_is_noticed_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def wrong(real: Callable[..., Any], *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*given)
        out[..., -1] *= 2.0
        return out, lse

    monkeypatch.setattr(host_library, "attend", partial(wrong, host_library.attend))
    some = [one for one in OPERATIONS if one.name in ("gather_attention", "gather_scores")]
    monkeypatch.setattr(checks, "OPERATIONS", some)
    report = tmp_path / "report.md"
    words = ["selftest", "--device", "cpu", "--only", "kernels", "--report", str(report)]
    assert cli.main(words) == 1
    output = capsys.readouterr().out
    assert "kernels: gather_attention, bf16, portable" in output
    assert "gather_scores" not in output
    assert "HF_KVRET_CPU_PATH=" in output and "Please report it" in output
    content = json.loads(report.read_text(encoding="utf-8").split("```json")[1].strip("`\n"))
    assert {one["status"] for one in content["failed"]} == {FAILED}
    assert content["versions"]["torch"] == torch.__version__ and content["gpu"] is None


@needs_library
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("method", ["flat", "paris"])
def test_a_step_that_searches_wrongly_is_noticed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = host_step._pack_step

    def other(query: Any, window: Any, cold: Any, scores: Any, *given: Any) -> Any:
        # The scale of the scores: attention goes to other tokens.
        return real(query, window, cold, (0.8 * scores[0], *scores[1:]), *given)

    monkeypatch.setattr(host_step, "_pack_step", other)
    some = first_named(step_checks(Bundled(CPU)), f"{method}, store='device'")
    (verdict,) = run_checks(some, CPU)
    assert verdict.status == FAILED and "of the steps have other logits" in verdict.detail


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_replayed_steps_of_flat_select_what_usual_ones_do() -> None:
    pytest.importorskip("triton")
    with taped():
        assert "of 6 steps replayed" in replayed(Small(CPU), "flat", "device")


def test_what_a_check_raises_becomes_its_verdict() -> None:
    def fail() -> str:
        raise RuntimeError(f"no such symbol\nin {Path.home()}/x.so")

    def leave() -> str:
        raise Skip("no GPU")

    verdicts = [run_check(Check("steps", "a", run, "")) for run in (fail, leave, lambda: "fine")]
    assert [(one.status, one.detail) for one in verdicts] == [
        (FAILED, "RuntimeError: no such symbol in ~/x.so"),
        (SKIPPED, "no GPU"),
        (PASSED, "fine"),
    ]


def test_nothing_runs_on_a_gpu_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    some = [
        Check("kernels", name, lambda name=name: ran.append(name) or name, "") for name in "abc"
    ]
    monkeypatch.setattr(command, "device_fault", lambda device: "misaligned" if ran[1:] else None)
    verdicts = run_checks(some, torch.device("cuda"))
    assert ran == ["a", "b"]
    assert [one.status for one in verdicts] == [PASSED, FAILED, SKIPPED]
    assert verdicts[1].detail == "misaligned"
    assert verdicts[2].detail == "the GPU does not go on after 'b'"


def test_without_the_library_nothing_is_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(host_library.PATH_VARIABLE, "/home/anna/none.so")
    host_library.opened.cache_clear()
    words = ["selftest", "--device", "cpu", "--only", "kernels,steps,memory"]
    try:
        assert cli.main([*words, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert cli.main(words) == 0
    finally:
        host_library.opened.cache_clear()
    assert {one["status"] for one in content["checks"]} == {SKIPPED}
    assert content["device"] == "cpu" and "none.so" in content["cpu_kernels"]
    assert "skipped. Nothing could be checked here." in capsys.readouterr().out
