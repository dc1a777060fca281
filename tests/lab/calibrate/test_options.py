"""Options of a calibration: what is wrong is refused where it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_kvret.artifacts.checks import check_types
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Calibration


@pytest.mark.parametrize(
    ("cls", "option", "value", "allowed"),
    [
        (A2ATSCalibration, "codewords", 16.0, "int"),
        (A2ATSCalibration, "codewords", True, "int"),
        (A2ATSCalibration, "codewords", torch.tensor(16), "int"),
        (A2ATSCalibration, "tolerance", "1e-3", "float"),
        (A2ATSCalibration, "query_aware", 1, "bool"),
        (A2ATSCalibration, "space", None, "str"),
        (AquaCalibration, "bits", 2.0, "int"),
        (AquaCalibration, "first_bits", 4.0, "int or str"),
        (AquaCalibration, "group", "8", "int or None"),
    ],
)
def test_options_have_the_types_of_their_fields(
    cls: type[Calibration], option: str, value: Any, allowed: str
) -> None:
    with pytest.raises(TypeError, match=rf"{option}=.* is of type .*: pass {allowed}$"):
        cls(**{option: value})


def test_values_of_any_declared_type_pass() -> None:
    @dataclass
    class Options:
        many: int | None
        share: float

    for many in (None, 3):
        check_types(Options(many, 0))
    with pytest.raises(TypeError, match=r"many=2\.5 is of type float: pass int or None"):
        check_types(Options(2.5, 0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (A2ATSCalibration, {"codewords": 0}, "codewords=0: 1 to 32768"),
        (A2ATSCalibration, {"codewords": 32769}, "codewords=32769"),
        (A2ATSCalibration, {"distance": -1}, "distance=-1: 0 or more"),
        (A2ATSCalibration, {"distance": 2**31}, "distance=2147483648: at most"),
        (A2ATSCalibration, {"rounds": -1}, "rounds=-1"),
        (A2ATSCalibration, {"seed": -1}, "seed=-1"),
        (A2ATSCalibration, {"tolerance": float("nan")}, "tolerance=nan: 0 or more"),
        (A2ATSCalibration, {"codeword_dtype": "float16"}, "choose one of 'bfloat16', 'float32'"),
        (
            A2ATSCalibration,
            {"space": "plain"},
            "space='plain': choose one of 'windowed', 'rotated'",
        ),
        (AquaCalibration, {"bits": 5}, "bits=5: choose one of 2, 3, 4, 16"),
        (AquaCalibration, {"first_bits": "four"}, "first_bits='four': .* 2, 3, 4, 16, 'auto'"),
        (AquaCalibration, {"group": 12}, "group=12: choose one of None, 8, 16, .*1024"),
        (AquaCalibration, {"space": "rotated"}, "space='rotated': .* 'before', 'after'"),
        (AquaCalibration, {"ridge": 0.0}, "ridge=0.0: more than 0"),
        (AquaCalibration, {"ridge": float("nan")}, "ridge=nan: more than 0"),
        (AquaCalibration, {"sinks": -1}, "sinks=-1: 0 or more"),
    ],
    ids=str,
)
def test_wrong_values_are_named(
    cls: type[Calibration], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**wrong)
