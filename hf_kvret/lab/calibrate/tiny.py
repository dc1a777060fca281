"""Calibration artifacts of tiny models, made in a moment: for tests of methods that need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Calibration, Corpus, calibrate

_SEQUENCES, _LENGTH = 3, 200


def tiny_artifact(model: PreTrainedModel, method: str, folder: Path, **options: Any) -> str:
    """The path of an artifact for ``model`` in ``folder``, learned from 600 random tokens.

    ``options``: of the calibration, in place of those that make it short.
    """
    generator = torch.Generator().manual_seed(0)
    text_config = model.config.get_text_config(decoder=True)
    shape = (_SEQUENCES, _LENGTH)
    texts = list(torch.randint(3, text_config.vocab_size, shape, generator=generator))
    # Positions of three parts, which attention does not get.
    pictures = "mrope_section" in (getattr(text_config, "rope_parameters", None) or {})
    calibration: Calibration
    if method == "a2ats":
        options.setdefault("space", "rotated" if pictures else "windowed")
        short = {"codewords": 32, "distance": 32, "rounds": 5}
        calibration = A2ATSCalibration(**short | options)
    else:
        options.setdefault("space", "after" if pictures else "before")
        calibration = AquaCalibration(**options)
    calibrate(model, Corpus(texts, 0, {"text": "random"}), calibration, folder, progress=False)
    return str(folder)
