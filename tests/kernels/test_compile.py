"""Every Triton kernel compiles to machine code for GPUs that are not at hand.

The interpreter accepts much that the compiler refuses. Here ``compile_target.py`` calls the
operations as on a GPU, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_target.py")
TARGETS = ("sm80", "sm90")
# Kernels by operation; the compiler knows ``best`` as ``_best_kernel``.
EXPECTED = {
    "block_lse": "block_lse",
    "centroid": "denominators relevance similarity take mark keep",
    "codebook": "encode merge count share denominator table lookup scores",
    "gather_attention": "attend copy",
    "gather_scores": "gather_scores",
    "higgs": "higgs decode attend",
    "merge": "merge",
    "prompt_attention": "attend",
    "step_attention": "finish",
    "paged": "gather copy",
    "proxy": "scores total share",
    "top_k": "best count border compact",
    "relevance": "best chunk share count border compact",
    "latents": "attend gather_scores finish gather copy fetch",
    "resident": "assign fetch",
    "paris": "rotate encode count bonus collide compact rerank rerank_wide",
}
KEEP_TO_REGISTERS = {"sm80": {"codebook"}, "sm90": {"codebook", "latents"}}


@pytest.mark.slow
@pytest.mark.parametrize("operation", EXPECTED)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str, operation: str) -> None:
    names = compiled(target, operation)
    assert {f"_{name}_kernel" for name in EXPECTED[operation].split()} <= names
    if operation in KEEP_TO_REGISTERS[target]:
        assert "spills" not in names


def test_products_and_sums_are_one_instruction() -> None:
    assert {"_merge_kernel", "fused"} <= compiled("sm90", "merge")


def compiled(target: str, operation: str) -> set[str]:
    """Names of the kernels of an operation, all compiled; ``"fused"``, if any multiplies and adds
    at once; ``"spills"``, if any does not keep to its registers.
    """
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_ALWAYS_COMPILE"] = "1"
    command = [sys.executable, str(SCRIPT), target, operation]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())
