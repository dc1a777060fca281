"""What may stand for the cold tokens that a query does not select, by the names of ``rest``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RestKind(NamedTuple):
    """What a value of the option ``rest`` asks for, and what goes with it.

    Attributes:
        estimates: the index is asked for estimates of the logits in every step.
        again: the selected rows are read a second time.
        fused: the C++ kernels' step has it.
        blocks: ``rest_blocks`` may divide it.
        factors: ``rest_artifact`` may correct it.
    """

    estimates: bool = False
    again: bool = False
    fused: bool = False
    blocks: bool = False
    factors: bool = False


REST_KINDS: Mapping[str | None, RestKind] = {
    None: RestKind(fused=True),
    "mean": RestKind(fused=True, blocks=True),
    "left_out": RestKind(again=True),
    "index": RestKind(estimates=True, factors=True),
    "sample": RestKind(estimates=True),
}
