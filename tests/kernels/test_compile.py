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
EXPECTED = {
    "centroid": {
        "_denominators_kernel",
        "_relevance_kernel",
        "_similarity_kernel",
        "_take_kernel",
        "_mark_kernel",
        "_keep_kernel",
    },
    "codebook": {
        "_encode_kernel",
        "_merge_kernel",
        "_count_kernel",
        "_share_kernel",
        "_denominator_kernel",
        "_table_kernel",
        "_lookup_kernel",
        "_scores_kernel",
    },
    "gather_attention": {"_attend_kernel", "_copy_kernel"},
    "gather_scores": {"_gather_scores_kernel"},
    "higgs": {"_higgs_kernel", "_minmax_kernel", "_decode_kernel", "_attend_kernel"},
    "merge": {"_merge_kernel"},
    "prompt_attention": {"_attend_kernel"},
    "mean_tokens": {"_logits_kernel"},
    "step_attention": {"_finish_kernel"},
    "paged": {"_gather_kernel", "_copy_kernel"},
    "proxy": {
        "_scores_kernel",
        "_total_kernel",
        "_share_kernel",
    },
    "top_k": {"_best_kernel", "_count_kernel", "_border_kernel", "_compact_kernel"},
    "relevance": {
        "_best_kernel",
        "_chunk_kernel",
        "_share_kernel",
        "_count_kernel",
        "_border_kernel",
        "_compact_kernel",
    },
    "latents": {
        "_attend_kernel",
        "_gather_scores_kernel",
        "_finish_kernel",
        "_gather_kernel",
        "_copy_kernel",
        "_fetch_kernel",
    },
    "resident": {"_assign_kernel", "_fetch_kernel"},
    "paris": {
        "_rotate_kernel",
        "_encode_kernel",
        "_count_kernel",
        "_bonus_kernel",
        "_collide_kernel",
        "_compact_kernel",
        "_rerank_kernel",
        "_rerank_wide_kernel",
    },
}

KEEP_TO_REGISTERS = {"sm80": {"codebook"}, "sm90": {"codebook", "latents"}}


@pytest.mark.slow
@pytest.mark.parametrize("operation", EXPECTED)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str, operation: str) -> None:
    names = compiled(target, operation)
    assert EXPECTED[operation] <= names
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
