"""Codes of 2, 3, 4, 6 or 8 bits in bytes.

Codes are put, the first one lowest, into words of whole bytes: one byte holds four codes of 2 bits,
two of 4 or one of 8; three bytes hold eight codes of 3 bits or four of 6. A row's bytes lie in
planes: all lowest bytes of its words, then all middle and all highest ones, where words have three.
So reading neighbouring words reads neighbouring bytes, whatever the width.
"""

from __future__ import annotations

import torch

# Bits of a code: codes of a word, bytes of a word.
WORDS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 6: (4, 3), 8: (1, 1)}


def pack(codes: torch.Tensor, code_bits: int) -> torch.Tensor:
    """``[..., n * code_bits / 8]`` uint8 of the rows ``codes [..., n]``.

    Args:
        codes: integers of any dtype, 0 to ``2^code_bits - 1``; n fills whole words.
        code_bits: 2, 3, 4, 6 or 8.
    """
    per_word, planes = WORDS[code_bits]
    shifts = code_bits * torch.arange(per_word, dtype=torch.int32, device=codes.device)
    words = (codes.int().unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)
    lanes = 8 * torch.arange(planes, dtype=torch.int32, device=codes.device)
    return ((words.unsqueeze(-2) >> lanes[:, None]) & 255).to(torch.uint8).flatten(-2)


def unpack(codes: torch.Tensor, code_bits: int) -> torch.Tensor:
    """The inverse of ``pack``: ``[..., n]`` int32 of ``codes [..., n * code_bits / 8]`` uint8."""
    per_word, planes = WORDS[code_bits]
    lanes = 8 * torch.arange(planes, dtype=torch.int32, device=codes.device)
    bytes_ = codes.int().unflatten(-1, (planes, codes.shape[-1] // planes))
    words = (bytes_ << lanes[:, None]).sum(-2, dtype=torch.int32)
    shifts = code_bits * torch.arange(per_word, dtype=torch.int32, device=codes.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << code_bits) - 1)).flatten(-2)
