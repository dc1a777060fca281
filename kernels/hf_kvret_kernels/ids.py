"""Ids are never trusted: what is said of one that names nothing.

An id is the number of a token, or -1 for none. The compiled library and torch on a CPU refuse any
other, by the error here. A Triton kernel takes it for -1: nothing is read or written for it, and no
step waits for the device to tell.
"""

from __future__ import annotations

import torch


class WrongIdError(ValueError):
    """An id names no token, or a code no codeword.

    Attributes:
        number: the id or code.
        count: how many tokens or codewords there are.
        noun: what they are.
        culprit: who gave the number; empty where nobody said.
    """

    def __init__(self, number: int, count: int, noun: str = "tokens", culprit: str = "") -> None:
        self.number, self.count, self.noun, self.culprit = number, count, noun, culprit
        name, none = ("id", ", or -1 for none") if noun == "tokens" else ("code", "")
        said = f"{culprit} named {name}" if culprit else name
        super().__init__(
            f"{said} {number} of {count} {noun}: allowed are 0 to {count - 1}{none}"
            if count
            else f"{said} {number}, and there are no {noun}: allowed is -1 for none"
        )

    def by(self, culprit: str) -> WrongIdError:
        """The same error, which says who gave the number."""
        return WrongIdError(self.number, self.count, self.noun, culprit)

    def __reduce__(self) -> tuple[type[WrongIdError], tuple[int, int, str, str]]:
        return WrongIdError, (self.number, self.count, self.noun, self.culprit)


def check_id_range(ids: torch.Tensor, tokens: int) -> None:
    """WrongIdError where one of integer ``ids`` is not -1 to ``tokens - 1``; looks at the data."""
    _check(ids, -1, tokens, "tokens")


def check_code_range(codes: torch.Tensor, words: int) -> None:
    """WrongIdError where one of integer ``codes`` is not 0 to ``words - 1``; looks at the data."""
    _check(codes, 0, words, "codewords")


def _check(numbers: torch.Tensor, least: int, count: int, noun: str) -> None:
    if not numbers.numel():
        return
    lowest, highest = (int(bound) for bound in numbers.aminmax())
    for wrong in (highest, lowest):
        if not least <= wrong < count:
            raise WrongIdError(wrong, count, noun)
