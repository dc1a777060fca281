"""The operations that ``bench kernels`` knows. One more is a `KernelOp` there."""

from __future__ import annotations

from collections.abc import Sequence

from hf_kvret.benchmark.kernels_attention import ATTENTION_OPS, HIGGS_OPS
from hf_kvret.benchmark.kernels_codebook import CODEBOOK_OPS, SEARCH_OPS
from hf_kvret.benchmark.kernels_paris import PARIS_OPS
from hf_kvret.benchmark.kernels_work import KernelOp

OPS: dict[str, KernelOp] = {
    op.name: op for op in (*CODEBOOK_OPS, *SEARCH_OPS, *PARIS_OPS, *HIGGS_OPS, *ATTENTION_OPS)
}
"""By name."""


def choose_ops(wanted: Sequence[str]) -> dict[str, KernelOp]:
    """The operations by name; ``"codebook"`` stands for all whose names begin with ``codebook.``.

    Raises:
        ValueError: an unknown name, one twice, or none.
    """
    found: dict[str, KernelOp] = {}
    for name in wanted:
        some = [known for known in OPS if known == name or known.startswith(f"{name}.")]
        if not some:
            raise ValueError(f"--ops {name}: choose of {', '.join(OPS)}")
        twice = [known for known in some if known in found]
        if twice:
            raise ValueError(f"--ops {','.join(wanted)}: {twice[0]} is named twice")
        found |= {known: OPS[known] for known in some}
    if not found:
        raise ValueError(f"--ops is empty: choose of {', '.join(OPS)}")
    return found
