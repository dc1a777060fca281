"""Documents of needles, which studies read where no text is given."""

from __future__ import annotations

import numpy as np
import torch

from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.subject import Subject

_TOKENS_PER_NEEDLE = 128


def needle_tokens(length: int, asking: int, seed: int) -> torch.Tensor:
    """``[length]`` int64: a document of needles, then questions with answers, ``asking`` or more.

    ValueError where ``length`` is too short for both.
    """
    language, rng = NeedleLanguage(), np.random.default_rng(seed)
    keys, values = language.pairs(rng, 1)
    turn = language.questions(keys).shape[1] + values.shape[1]
    turns = -(-asking // turn)
    keys, values = language.pairs(rng, max(turns, length // _TOKENS_PER_NEEDLE))
    document, _ = language.document(rng, length - turns * turn, keys, values)
    asked = rng.permutation(len(keys))[:turns]
    questions = np.concatenate([language.questions(keys[asked]), values[asked]], axis=1)
    return torch.from_numpy(np.concatenate([document, questions.reshape(-1)]))


def check_needles(subject: Subject) -> None:
    """ValueError for a model that does not read the language of needles."""
    language, known = NeedleLanguage(), subject.model.config.vocab_size
    if known != language.vocab_size:
        raise ValueError(
            f"--model {subject.name} has {known} token ids, the language of needles "
            f"{language.vocab_size}: give --text FILE, or take --model needle"
        )
