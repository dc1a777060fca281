"""The needle language: documents of noise with key/value needles in them, and questions.

A needle is ``K k1 k2 v1 v2``: the key ``k1 k2`` has the value ``v1 v2``. A question is
``Q k1 k2 ->`` and its answer is ``v1 v2``. Everything else is noise with Zipf frequencies.
The bundled model speaks this language and no other; answering needs exactly what a
retrieval cache may lose, one row among many thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NeedleLanguage:
    """Token ids and sizes of the language; the defaults are those of the bundled model."""

    vocab_size: int = 512
    pad: int = 0
    bos: int = 1
    needle: int = 2
    question: int = 3
    arrow: int = 4
    first_key: int = 8
    first_value: int = 136
    first_noise: int = 264
    value_len: int = 2
    zipf_exponent: float = 1.1

    @property
    def n_keys(self) -> int:
        return self.first_value - self.first_key

    @property
    def n_values(self) -> int:
        return self.first_noise - self.first_value

    @property
    def most_needles(self) -> int:
        """Distinct keys of two tokens."""
        return self.n_keys**2

    @property
    def question_len(self) -> int:
        """Tokens of a question about a key of two tokens."""
        return 4

    def least_length(self, count: int) -> int:
        """Tokens of the shortest document with ``count`` needles, whose keys have two tokens."""
        return 1 + count * (3 + self.value_len + 1)

    def noise(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """``[size]`` int64 noise tokens, the r-th most frequent with weight ``r ** -exponent``."""
        ranks = np.arange(1, self.vocab_size - self.first_noise + 1)
        weights = ranks**-self.zipf_exponent
        return self.first_noise + rng.choice(len(ranks), size=size, p=weights / weights.sum())

    def pairs(
        self, rng: np.random.Generator, count: int, key_len: int = 2
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distinct keys ``[count, key_len]`` and values ``[count, value_len]``, int64."""
        space = self.n_keys**key_len
        if count > space:
            raise ValueError(f"count={count} distinct keys of {key_len} tokens: only {space} exist")
        codes = rng.choice(space, size=count, replace=False)
        digits = [(codes // self.n_keys**i) % self.n_keys for i in range(key_len)]
        values = rng.integers(self.n_values, size=(count, self.value_len))
        return np.stack(digits, axis=1) + self.first_key, values + self.first_value

    def document(
        self, rng: np.random.Generator, length: int, keys: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A document of ``length`` tokens that starts with BOS and holds every needle.

        Returns ``tokens [length]`` and the sorted starts ``[needles]`` of the needles; the
        i-th needle in the text is row i of ``keys`` and ``values``.
        """
        count = len(keys)
        needle_len = 1 + keys.shape[1] + values.shape[1]
        noise_len = length - 1 - count * needle_len
        if noise_len < count:
            raise ValueError(
                f"length={length} cannot hold {count} needles of {needle_len} tokens and as much "
                f"noise: use at least {1 + count * (needle_len + 1)}"
            )
        gaps = np.sort(rng.choice(noise_len, size=count, replace=False)) + 1
        starts = 1 + gaps - 1 + np.arange(count) * needle_len
        tokens = np.empty(length, dtype=np.int64)
        is_noise = np.ones(length, dtype=bool)
        rows = starts[:, None] + np.arange(needle_len)[None]
        is_noise[rows] = False
        is_noise[0] = False
        tokens[0] = self.bos
        tokens[rows] = np.concatenate([np.full((count, 1), self.needle), keys, values], axis=1)
        tokens[is_noise] = self.noise(rng, int(is_noise.sum()))
        return tokens, starts

    def questions(self, keys: np.ndarray) -> np.ndarray:
        """``[count, key_len + 2]`` prompts ``Q key ->``; the answer is the needle's value."""
        count = len(keys)
        head, tail = np.full((count, 1), self.question), np.full((count, 1), self.arrow)
        return np.concatenate([head, keys, tail], axis=1)
