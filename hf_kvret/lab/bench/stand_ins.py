"""Artifacts for models with random weights, so that methods that need one can be timed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_kvret.lab.bench.filling import random_tokens
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import Calibration
from hf_kvret.lab.evaluate.caches import CacheChoice

# The methods' own sizes, learned in the least time: what they say changes no times.
_SIZES: dict[str, Calibration] = {
    "a2ats": A2ATSCalibration(rounds=0, compare=False),
    "aqua": AquaCalibration(),
}
# More than the codewords of "a2ats", in sequences that most models have positions for.
_TOKENS, _LENGTH = 5120, 2560


def make_stand_ins(
    models: Iterable[PreTrainedModel], choices: Iterable[CacheChoice], folder: Path, seed: int
) -> None:
    """Put artifacts for the ``choices`` that name none where each model's own are looked for.

    They are learned from random tokens, below ``folder``, which becomes the place that the models'
    configurations name.
    """
    lacking = {choice.method for choice in choices if choice.lacks_artifact}
    for model in models if lacking else ():
        home = folder / str(model.config.num_hidden_layers)
        model.config._name_or_path = str(home)
        text = model.config.get_text_config(decoder=True)
        length = min(_LENGTH, getattr(text, "max_position_embeddings", None) or _LENGTH)
        count = -(-_TOKENS // length)
        texts = list(random_tokens(model, count, length, seed).cpu())
        for method in sorted(lacking):
            corpus = Corpus(texts, 0, {"text": "random tokens"})
            with torch.inference_mode(False):
                calibrate(model, corpus, _SIZES[method], home / method)
