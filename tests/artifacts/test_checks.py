"""Options of a calibration: values of another kind are refused where they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_kvret.artifacts.checks import check_kinds
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("codewords", 16.0, "int"),
        ("codewords", True, "int"),
        ("codewords", torch.tensor(16), "int"),
        ("rounds", "3", "int"),
        ("seed", None, "int"),
        ("tolerance", "1e-4", "float"),
        ("query_aware", 1, "bool"),
        ("space", None, "str"),
    ],
)
def test_options_of_a2ats_have_their_kinds(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(TypeError, match=rf"{option}=.* is of type .*: pass {allowed}$"):
        A2ATSCalibration(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("bits", 2.0, "int"),
        ("first_bits", 4.0, "int or str"),
        ("group", 64.0, "int or None"),
        ("anchor_every", "2", "int or None"),
        ("rank", "16", "int"),
        ("ridge", "1e-3", "float"),
        ("anchor_mean", "no", "bool"),
        ("backbone", 3, "str"),
    ],
)
def test_options_of_aqua_have_their_kinds(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(TypeError, match=rf"{option}=.* is of type .*: pass {allowed}$"):
        AquaCalibration(**{option: value})


def test_an_int_will_do_for_a_float() -> None:
    assert A2ATSCalibration(tolerance=0).tolerance == 0
    assert AquaCalibration(ridge=1).ridge == 1


def test_values_of_any_declared_kind_pass() -> None:
    @dataclass
    class Options:
        many: int | None
        name: str

    for many in (None, 3):
        check_kinds(Options(many, "x"))
    with pytest.raises(TypeError, match=r"many=2\.5 is of type float: pass int or None"):
        check_kinds(Options(2.5, "x"))  # type: ignore[arg-type]
