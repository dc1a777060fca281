"""What codebooks of A2ATS are learned with: saved in the artifact, and read again with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret.artifacts.option_kinds import check_kinds
from hf_kvret_kernels import codebook

_LAST_POSITION = 2**31 - 1

SPACES = ("windowed", "rotated")
CODEWORD_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CodebookOptions:
    """How the codebooks of each KV head are made, one codebook for all inputs.

    Attributes:
        codewords: C, of each KV head, at most the number of training tokens; the paper has 4096.
        window: b, the position to which queries are rotated (equation 10).
        rounds: most rounds of k-means; 300 is the authors' choice.
        tolerance: shift at which k-means stops.
        space: ``"windowed"``: keys before RoPE; ``"rotated"``: after it, for study (table 2).
        query_aware: whether errors are weighted by the queries' second moments (equations 13 to
            15); False for study.
        compare: also make a plain codebook, to report its error; takes twice the time.
        codeword_dtype: of the codewords in the artifact and in memory, ``"bfloat16"`` or
            ``"float32"``. Codewords are learned in fp32 and rounded; reported errors are those of
            the rounded ones.
        seed: of k-means.

    Raises:
        TypeError: an option of another kind than above.
        ValueError: one that is out of its range.
    """

    codewords: int = 4096
    window: int = 2048
    rounds: int = 300
    tolerance: float = 1e-4
    space: str = "windowed"
    query_aware: bool = True
    compare: bool = True
    codeword_dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        if not 1 <= self.codewords <= codebook.MOST_CODEWORDS:
            raise ValueError(f"codewords={self.codewords}: 1 to {codebook.MOST_CODEWORDS}")
        for name in ("window", "rounds", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.window > _LAST_POSITION:
            raise ValueError(f"window={self.window}: at most {_LAST_POSITION}")
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance={self.tolerance}: 0 or more, 1e-4 is usual")
        if self.space not in SPACES:
            raise ValueError(f"space={self.space!r}: choose {' or '.join(map(repr, SPACES))}")
        if self.codeword_dtype not in CODEWORD_DTYPES:
            raise ValueError(
                f"codeword_dtype={self.codeword_dtype!r}: choose "
                f"{' or '.join(map(repr, CODEWORD_DTYPES))}"
            )
