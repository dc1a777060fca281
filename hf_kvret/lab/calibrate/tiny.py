"""Calibration artifacts of tiny models, made in a moment: for tests of methods that need one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import Calibration

_SEQUENCES, _LENGTH = 3, 200


def tiny_artifact(model: PreTrainedModel, method: str, folder: Path) -> str:
    """The path of an artifact for ``model`` in ``folder``, learned from 600 random tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    texts = [
        torch.randint(3, vocabulary, (_LENGTH,), generator=generator) for _ in range(_SEQUENCES)
    ]
    calibration = _TINY[method](model.config)
    calibrate(model, Corpus(texts, 0, {"text": "random"}), calibration, folder, progress=False)
    return str(folder)


def _a2ats(config: PreTrainedConfig) -> Calibration:
    space = "rotated" if _puts_images(config) else "windowed"
    return A2ATSCalibration(codewords=32, distance=32, rounds=5, compare=False, space=space)


def _aqua(config: PreTrainedConfig) -> Calibration:
    return AquaCalibration(space="after" if _puts_images(config) else "before")


def _puts_images(config: PreTrainedConfig) -> bool:
    """Whether positions have three parts, which attention does not get."""
    rotation = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return "mrope_section" in rotation


_TINY: dict[str, Callable[[PreTrainedConfig], Calibration]] = {"a2ats": _a2ats, "aqua": _aqua}
