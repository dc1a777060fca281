"""``hf-kvret selftest``."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_kvret.lab.program.arguments import check_device, file_path, known_names
from hf_kvret.lab.program.options import device_option, option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.results import check_file, describe_environment
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.lab.selftest import checks
from hf_kvret.lab.selftest.checks import FAILED, GROUPS, PASSED, SKIPPED, Check, Verdict
from hf_kvret.saved.folder import replace_file
from hf_kvret_kernels import host_library

_STATUSES = (PASSED, FAILED, SKIPPED)
# Variables of these names change what is computed, or how.
_VARIABLES = ("HF_KVRET_", "TRITON_", "CUDA_", "NVIDIA_TF32", "OMP_", "PYTORCH_")


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Check on this machine that kernels, stores and methods compute what they should.

    It takes the bundled model, and about two minutes. The exit status is 1 where a check fails.
    """

    device: str = device_option()
    only: tuple[str, ...] = option(
        tuple(GROUPS), f"of {', '.join(GROUPS)}", kind=known_names(GROUPS)
    )
    report: Path | None = option(
        None, "write what a bug report needs, as markdown", kind=file_path, metavar="FILE"
    )
    json: bool = option(False, "print JSON instead")


def add_selftest_parser(commands: Any) -> None:
    """Add ``selftest`` to the program's commands."""
    add_command(
        commands,
        "selftest",
        SelfTest,
        run_selftest,
        help="check that kernels, stores and methods compute here what they should",
        examples=("hf-kvret selftest", "hf-kvret selftest --device cuda --report selftest.md"),
    )


def run_selftest(options: SelfTest) -> int:
    """Run the checks and print what became of them; returns 1 where one failed.

    Raises:
        ValueError: a device that is not there.
        OSError: the report can't be written.
    """
    check_device(options.device)
    if options.report is not None:
        check_file("--report", options.report)
    device = torch.device(options.device)
    described = describe(device)
    verdicts = run_checks(list(every_check(device, options.only)), device)
    if options.json:
        print(json.dumps(described | {"checks": [asdict(one) for one in verdicts]}, indent=1))
    else:
        print(summary(verdicts))
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.report, report_text(verdicts, described).encode())
    return int(any(one.status == FAILED for one in verdicts))


def every_check(device: torch.device, groups: Sequence[str] = tuple(GROUPS)) -> Iterator[Check]:
    """Every check of these groups for a device, in the order of ``GROUPS``."""
    bundled = checks.Bundled(device)
    every = itertools.chain(
        checks.kernel_checks(device),
        checks.step_checks(bundled),
        checks.host_row_checks(device),
        checks.stream_checks(bundled),
        checks.cache_checks(bundled),
    )
    return (check for check in every if check.group in groups)


def run_checks(some: Sequence[Check], device: torch.device) -> list[Verdict]:
    """What became of each check; none is made after an error that the device does not survive."""
    verdicts: list[Verdict] = []
    broken = ""
    # More threads take longer for so little work.
    with checks.quietly(), few_threads(), tqdm(some, unit="check", leave=False) as bar:
        for check in bar:
            bar.set_postfix_str(check.name, refresh=False)
            if broken:
                verdicts.append(
                    Verdict(check.group, check.name, SKIPPED, broken, check.remedy, 0.0)
                )
                continue
            verdicts.append(checks.run_check(check))
            fault = device_fault(device)
            if fault is not None:
                # The check may have ended before the GPU came to the fault.
                verdicts[-1] = replace(verdicts[-1], status=FAILED, detail=fault)
                broken = f"the GPU does not go on after {check.name!r}"
    return verdicts


@contextmanager
def few_threads() -> Iterator[None]:
    """torch and the compiled library run on two threads at most."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_fault(device: torch.device) -> str | None:
    """The error of a device that can't finish its work; it ends all work of the process."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return checks.without_folders(f"{type(error).__name__}: {error}")
    return None


def describe(device: torch.device) -> dict[str, Any]:
    """Command, versions, processor, GPU and driver."""
    gpu = None
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        gpu = {
            "name": facts.name,
            "capability": f"sm_{facts.major}{facts.minor}",
            "memory_bytes": facts.total_memory,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return describe_environment() | {
        "device": str(device),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_kernels": checks.without_folders(host_library.why_not())
        or ", ".join(host_library.paths()),
        "variables": {
            name: checks.without_folders(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver, as the kernel module says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    words = (word for word in text.split() if word[:1].isdigit() and "." in word)
    return next(words, None)


def summary(verdicts: Sequence[Verdict]) -> str:
    """A row for each group, and below it what failed and why others were not made."""
    rows = []
    for group, meaning in GROUPS.items():
        some = [one for one in verdicts if one.group == group]
        if some:
            numbers = [str(sum(one.status == status for one in some)) for status in _STATUSES]
            seconds = sum(one.seconds for one in some)
            rows.append((group, *numbers, f"{seconds:.0f}", meaning))
    parts = [markdown_table(("group", *_STATUSES, "seconds", "what is checked"), rows)]
    failed = [one for one in verdicts if one.status == FAILED]
    if failed:
        lines = [(f"{one.group}: {one.name}", one.detail, one.remedy) for one in failed]
        parts.append(markdown_table(("failed", "error", "avoid it by"), lines))
    reasons = Counter(one.detail for one in verdicts if one.status == SKIPPED)
    if reasons:
        parts.append("\n".join(f"- {count} skipped: {why}" for why, count in reasons.items()))
    passed = sum(one.status == PASSED for one in verdicts)
    skipped = len(verdicts) - passed - len(failed)
    counts = f"{passed} passed, {len(failed)} failed, {skipped} skipped."
    if failed:
        counts += " Please report it: run again with --report FILE."
    elif not passed:
        counts += " Nothing could be checked here."
    parts.append(counts)
    return "\n\n".join(parts)


def report_text(verdicts: Sequence[Verdict], described: dict[str, Any]) -> str:
    """Markdown for a bug report: machine, versions, summary, and every failing check as JSON."""
    failed = [asdict(one) for one in verdicts if one.status == FAILED]
    facts = json.dumps(described | {"failed": failed}, indent=1)
    return f"# hf-kvret selftest\n\n{summary(verdicts)}\n\n```json\n{facts}\n```\n"
