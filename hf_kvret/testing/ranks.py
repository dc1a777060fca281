"""Conformance on several ranks: a tensor parallel model must give what one process gives.

    outcomes = run_on_ranks(model, [RankCase("paris", "beams", {"top_k": 8})], ranks=2)

The ranks are processes of this machine, which speak by gloo.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret import attach, registered_methods, restore
from hf_kvret.testing.conformance import LOGIT_TOLERANCE, cold_rows_read, first_difference
from hf_kvret.testing.modes import MODES, Mode
from hf_kvret.testing.scenario import FAILURES, Outcome, describe

_MODEL, _CASES, _LOG = "model", "cases.json", "log"
_COLLECTIVE_SECONDS = 60
_FOREIGN = "stock"
"""The method that is transformers' own cache."""


@dataclass(frozen=True)
class RankCase:
    """A method and a mode of use, and options of the cache.

    Attributes:
        method: by name; ``"stock"`` is transformers' own cache.
        mode: one of ``MODES``, or ``"file.py:function"`` for one of your own, which gets a
            ``Scenario`` and a folder that all ranks see.
        options: of the cache.
    """

    method: str
    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankOutcome:
    """What came out of a case on all ranks.

    Attributes:
        equal: each rank gave what one process gives, and some cold row was read.
        detail: else what differed or was missing; ``"refused: ..."`` where each rank raised the
            same error.
        alike: the ranks gave the same tokens as each other.
    """

    equal: bool
    detail: str = ""
    alike: bool = True


CaseResult = tuple[dict[str, torch.Tensor], int] | str
"""Of a case in one process: values, and cold rows that were read; or an error in one line."""


def run_on_ranks(
    model: PreTrainedModel, cases: Sequence[RankCase], ranks: int, seconds: float = 240
) -> list[RankOutcome]:
    """What each of ``cases`` gives on as many processes as ``ranks``, compared with this one.

    Args:
        model: on the CPU; its folder is read by each rank, with ``tp_plan="auto"``.
        cases: in order, with one load of the model.
        ranks: processes.
        seconds: until the ranks are given up, after this process is done.

    Raises:
        RuntimeError: a rank ended without results; the message has the end of its output.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save_pretrained(folder / _MODEL)
        (folder / _CASES).write_text(json.dumps([asdict(case) for case in cases]))
        command = [sys.executable, "-m", __spec__.name, scratch, str(ranks)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            # Read from the folder too, so that settings are those of the ranks.
            alone = run_cases(_load(folder), cases, folder / "alone")
            end = f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = "did not end"
        finally:
            process.kill()
        if process.returncode != 0:
            output = (folder / _LOG).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the ranks {end}: {output}")
        each = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    return [compare(alone[i], [results[i] for results in each]) for i in range(len(cases))]


def _load(folder: Path, **options: Any) -> PreTrainedModel:
    path = folder / _MODEL
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def run_cases(
    model: PreTrainedModel,
    cases: Sequence[RankCase],
    folder: Path,
    finish: Callable[[], object] = lambda: None,
) -> list[CaseResult]:
    """What each case gives with ``model``, in this process.

    Args:
        model: in eval mode.
        cases: in order.
        folder: for modes that write files.
        finish: called after each case.
    """
    results = []
    for number, case in enumerate(cases):
        results.append(_run_case(model, case, folder / str(number)))
        finish()
    return results


def _mode(name: str, folder: Path) -> Mode:
    if name in MODES:
        return MODES[name]
    path, _, function = name.rpartition(":")
    play = runpy.run_path(path)[function]
    return Mode(function, partial(play, folder=folder), direct=False)


def _run_case(model: PreTrainedModel, case: RankCase, folder: Path) -> CaseResult:
    mode, is_ours = _mode(case.mode, folder), case.method != _FOREIGN

    def make_cache() -> Any:
        return registered_methods()[case.method](model.config, **case.options)

    try:
        if is_ours and mode.direct:
            attach(model)
        outcome = mode.run(model, make_cache if is_ours else None)
    except (*FAILURES, AssertionError) as error:
        return describe(error)
    finally:
        restore(model)
    return outcome.values, sum(map(_cold_rows, outcome.caches)) if is_ours else 1


def _cold_rows(cache: Any) -> int:
    """Cold rows that were selected; of a method without selection those that it holds."""
    layers = [layer.kv for layer in cache.retrieval_layers if layer.kv is not None]
    without = sum(kv.cold_len for kv in layers if kv.index is None)
    return cold_rows_read(cache) + without


def compare(alone: CaseResult, each: Sequence[CaseResult]) -> RankOutcome:
    """What ``each`` process gave, compared with one that had the model ``alone``."""
    errors = [result for result in each if isinstance(result, str)]
    if errors:
        same = len(errors) == len(each) and len(set(errors)) == 1
        return RankOutcome(False, f"refused: {errors[0]}" if same else f"raised: {errors}", same)
    if isinstance(alone, str):
        return RankOutcome(False, f"one process raised {alone}, and the ranks did not")
    values = [result[0] for result in each if not isinstance(result, str)]
    read = sum(result[1] for result in each if not isinstance(result, str))
    alike = all(first_difference(Outcome(x), Outcome(values[0]), 0.0) is None for x in values)
    for rank, own in enumerate(values):
        difference = first_difference(Outcome(own), Outcome(alone[0]), LOGIT_TOLERANCE)
        if difference is not None:
            return RankOutcome(False, f"rank {rank}: {difference}", alike)
    return RankOutcome(read > 0, "" if read else "no cold row was read", alike)


def _main(folder: Path, ranks: int) -> None:
    """Run all ranks, each forked behind the imports, which take most of the time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {**address, "WORLD_SIZE": str(ranks)}
    start_processes(_run_rank, (folder,), ranks, start_method="fork")


def _run_rank(rank: int, folder: Path) -> None:
    """Write what the cases give to ``<rank>.pt``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    model = _load(folder, tp_plan="auto")
    cases = [RankCase(**case) for case in json.loads((folder / _CASES).read_text())]
    results = run_cases(model, cases, folder / "ranks", distributed.barrier)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
