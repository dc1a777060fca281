"""The machine code of a decode step's kernels gets no worse: spills, registers, CTAs, loads, loops.

The limits in ``machine_code_limits.json`` are what the kernels have with one version of triton and
its ptxas; others make other code, so they only warn. After a change that makes kernels better, or
adds one, ``python tests/kernels/test_machine_code.py`` writes the limits anew.
"""

import json
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from machine_code import COUNTS, Launch, check_tools, compile_parts, label_of, tool_versions
from step_kernels import MULTIPROCESSORS, PARTS, PROMPT_PARTS, WIDE_PARTS

LIMITS = Path(__file__).with_name("machine_code_limits.json")
CHEAP = ("count",)
CONTEXTS, BATCHES = (131_072, 1 << 20), (1, 8)
AT_LEAST = ("ctas_at_batch_1", "widest_load_bytes", "load_bytes")
Figures = dict[str, int]
KERNELS = Path(__file__).parents[2] / "kernels" / "hf_kvret_kernels"
# These belong to prompts, flushes, AQUA-KV, latent attention and variants that no rule takes.
OTHERS = {
    *("centroid.denominators", "centroid.relevance", "codebook.table"),
    *("codebook.encode", "codebook.merge", "paris.encode", "paris.count"),
    "block_lse.block_lse",
    *("higgs.higgs", "higgs.decode"),
    *("paged_triton.gather", "paged_triton.copy"),
}


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """The launches that the cheapest part makes."""
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    return compile_parts(CHEAP, CONTEXTS[0], 1)


def test_cheap_kernels_keep_their_limits(launches: list[Launch]) -> None:
    check(launches)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_all_kernels_keep_their_limits(context: int, batch: int) -> None:
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    check(compile_parts(tuple(PARTS), context, batch))


@pytest.mark.slow
@pytest.mark.parametrize("part", WIDE_PARTS)
def test_long_rows_and_large_groups_spill_nothing(part: str) -> None:
    """Rows of up to 576 numbers, groups of up to 128 query heads."""
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    launches = compile_parts((part,), CONTEXTS[0], 1)
    names = {launch.kernel.partition(" ")[0] for launch in launches}
    search = {"paris.bonus", "paris.collide", "paris.rank"}
    assert search | {"paris.encode", "paris.count"} <= names
    for launch in launches:
        assert launch.spill_bytes == 0, launch.kernel
        assert launch.ctas_at_once >= 2, launch.kernel


@pytest.mark.slow
@pytest.mark.parametrize("part", PROMPT_PARTS)
def test_the_probes_of_a_prompt_fill_a_device_and_spill_nothing(part: str) -> None:
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    for launch in compile_parts((part,), 32_768, 1):
        assert launch.spill_bytes == 0 and "16" in launch.load_widths, launch.kernel
        assert launch.ctas >= 4 * MULTIPROCESSORS and launch.ctas_at_once >= 4, launch.kernel


def test_every_limit_can_be_broken(launches: list[Launch]) -> None:
    for launch in launches:
        for name, figure in figures_of(launch).items():
            worse = figure + 1 if name in AT_LEAST else figure - 1
            limits = {launch.part: {launch.kernel: figures_of(launch) | {name: worse}}}
            assert len(faults([launch], limits)) == 1
            assert f"{name} {figure}" in faults([launch], limits)[0]


def test_a_kernel_without_limits_is_a_fault(launches: list[Launch]) -> None:
    assert all("has no limits" in fault for fault in faults(launches, {}))
    assert len(faults(launches, {})) == len(launches)


def test_other_versions_warn_and_hold_no_limits(launches: list[Launch]) -> None:
    with pytest.warns(UserWarning, match="triton 0"):
        check(launches, {"triton": "0", "ptxas": "0", "limits": {}})


def test_every_kernel_has_limits_or_is_known_to_be_no_part_of_these_steps() -> None:
    limits = json.loads(LIMITS.read_text())["limits"]
    limited = {kernel.partition(" ")[0] for part in limits.values() for kernel in part}
    assert all_kernels() - limited == OTHERS and limited <= all_kernels()


def all_kernels() -> set[str]:
    """Labels of the Triton kernels of all operations."""
    kernels = set()
    for file in KERNELS.rglob("*.py"):
        module = ".".join(file.relative_to(KERNELS.parent).with_suffix("").parts)
        names = re.findall(r"\ndef (_\w+_kernel)\(", file.read_text())
        kernels |= {label_of(module, name) for name in names}
    return kernels


def check(launches: Iterable[Launch], pinned: dict[str, Any] | None = None) -> None:
    """Fail with all faults, under the versions that the limits were made with; else warn."""
    pinned = json.loads(LIMITS.read_text()) if pinned is None else pinned
    result = faults(launches, pinned["limits"])
    versions = tool_versions()
    if any(versions[name] != pinned[name] for name in versions):
        warnings.warn(
            f"triton {pinned['triton']} and ptxas {pinned['ptxas']} have limits, here are "
            f"{versions['triton']} and {versions['ptxas']}: {result or 'no limit is broken'}",
            stacklevel=2,
        )
        return
    assert not result, "\n".join(result)


def faults(launches: Iterable[Launch], limits: dict[str, dict[str, Figures]]) -> list[str]:
    """A line for each figure that is worse than its limit."""
    lines = []
    for launch in launches:
        place = f"{launch.part}, {launch.kernel}, {launch.context} tokens, batch {launch.batch}"
        own_limits = limits.get(launch.part, {}).get(launch.kernel)
        if own_limits is None:
            lines.append(f"{place}: has no limits; run python tests/kernels/{Path(__file__).name}")
            continue
        for name, figure in figures_of(launch).items():
            limit, at_least = own_limits[name], name in AT_LEAST
            if figure < limit if at_least else figure > limit:
                word = "at least" if at_least else "at most"
                lines.append(f"{place}: {name} {figure}, allowed {word} {limit}")
    return lines


def figures_of(launch: Launch) -> Figures:
    """What is limited; CTAs at batch 1 alone."""
    figures = {
        "spill_bytes": launch.spill_bytes,
        "registers": launch.registers,
        "load_bytes": launch.load_bytes,
        "widest_load_bytes": max(map(int, launch.load_widths), default=0),
        "loads": sum(launch.load_widths.values()),
    }
    for name in ("instructions", *COUNTS):
        figures[f"loop_{name}"] = launch.loop_counts[name]
        figures[name] = launch.counts[name]
    return figures | ({"ctas_at_batch_1": launch.ctas} if launch.batch == 1 else {})


def write_limits() -> None:
    """What all kernels have now, the worst of all contexts and batches; prints what got worse."""
    check_tools()
    sizes = [(context, batch) for batch in BATCHES for context in CONTEXTS]
    launches = [one for size in sizes for one in compile_parts(tuple(PARTS), *size)]
    if LIMITS.is_file():
        print("\n".join(faults(launches, json.loads(LIMITS.read_text())["limits"])))
    limits: dict[str, dict[str, Figures]] = {}
    for launch in launches:
        own_limits = limits.setdefault(launch.part, {}).setdefault(launch.kernel, {})
        for name, figure in figures_of(launch).items():
            worst = min if name in AT_LEAST else max
            own_limits[name] = worst(figure, own_limits.get(name, figure))
    LIMITS.write_text(json.dumps(tool_versions() | {"limits": limits}, indent=1) + "\n")


if __name__ == "__main__":
    write_limits()
