"""Options of a calibration: what is wrong is refused where it is given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Calibration


@pytest.mark.parametrize(
    ("cls", "option", "value", "words"),
    [
        (A2ATSCalibration, "codewords", 16.0, r"TypeError: .* an int .*, got 16\.0"),
        (A2ATSCalibration, "codewords", torch.tensor(16), r"TypeError: .*got tensor\(16\)"),
        (A2ATSCalibration, "codewords", 0, "ValueError: .* at least 1 and at most 32768"),
        (A2ATSCalibration, "distance", 2**31, "ValueError: .* at least 0 and at most 2.1"),
        (A2ATSCalibration, "tolerance", float("nan"), "ValueError: .* at least 0 and below inf"),
        (A2ATSCalibration, "query_aware", 1, "TypeError: .* True or False, got 1"),
        (A2ATSCalibration, "codeword_dtype", "half", "ValueError: .*'bfloat16' or 'float32'"),
        (A2ATSCalibration, "space", None, "ValueError: .*choose 'windowed' or 'rotated'"),
        (AquaCalibration, "bits", 5, "ValueError: .*choose 2, 3, 4 or 16"),
        (AquaCalibration, "first_bits", "four", "ValueError: .*choose 2, 3, 4, 16 or 'auto'"),
        (AquaCalibration, "group", 12, "ValueError: .*choose 8, 16, .*1024 or None"),
        (AquaCalibration, "ridge", 0.0, "ValueError: .*must be above 0"),
        (AquaCalibration, "space", "rotated", "ValueError: .*choose 'before' or 'after'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(
    cls: type[Calibration], option: str, value: Any, words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=option) as raised:
        cls(**{option: value})
    assert re.match(words, f"{raised.typename}: {raised.value}")
