"""Codewords in plain torch: nearest ones, tables of scores, look-ups."""

from __future__ import annotations

import torch

from hf_kvret_kernels.ids import check_code_range
from hf_kvret_kernels.relevance.naive import log_shares
from hf_kvret_kernels.soft_cap import soft_cap_

# Scores that ``encode`` holds at once, of one head: 2 MiB stay in a processor's cache.
_MOST_SCORES = 1 << 19
# Codewords of a tile: only the tile with the best score is searched word by word.
_TILE = 64


def half_norms(codebook: torch.Tensor) -> torch.Tensor:
    """``[H, C]`` fp32: ``|c|^2 / 2`` of ``codebook [H, C, D]``."""
    return codebook.float().square().sum(-1) / 2


def encode(x: torch.Tensor, codebook: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.encode``; a chunk of tokens at a time."""
    B, H, n, _ = x.shape
    C = codebook.shape[1]
    codes = torch.empty(B, H, n, dtype=torch.int16, device=x.device)
    tile = _TILE if C % _TILE == 0 else 1
    # Words of a tile lie C / tile columns apart, so that tiles are compared along rows of memory.
    words = codebook.unflatten(1, (-1, tile)).transpose(1, 2).flatten(1, 2)
    offsets = norms.unflatten(1, (-1, tile)).transpose(1, 2).flatten(1).unsqueeze(1)
    step = max(1, _MOST_SCORES // max(1, B * C))
    for h in range(H if B else 0):
        columns = words[h].float().T.contiguous()
        for start in range(0, n, step):
            chunk = x[:, h, start : start + step].float().flatten(0, 1)
            scores = torch.addmm(offsets[h], chunk, columns, beta=-1).unflatten(1, (tile, -1))
            best = scores.amax(1).argmax(1)
            if tile > 1:
                members = scores.gather(2, best[:, None, None].expand(-1, tile, 1)).squeeze(2)
                best = best * tile + members.argmax(1)
            codes[:, h, start : start + step] = best.to(torch.int16).unflatten(0, (B, -1))
    return codes


def score_table(query: torch.Tensor, codebook: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.score_table``; of a query that is scaled already."""
    B, Hq, Q, _ = query.shape
    H, C, D = codebook.shape
    rows = query.reshape(B, H, Hq // H * Q, D).transpose(0, 1).flatten(1, 2)
    table = soft_cap_(torch.bmm(rows, codebook.float().transpose(1, 2)), softcap)
    return table.view(H, B, Hq // H, Q, C).transpose(0, 1).reshape(B, Hq, Q, C)


def check_valid_codes(codes: torch.Tensor, words: int, valid: torch.Tensor | None) -> None:
    """WrongIdError where a code of ``codes [B, H, n]`` is of no word and its token is valid."""
    if valid is not None:
        codes = codes.masked_fill(~valid[:, None], 0)
    check_code_range(codes, words)


def code_counts(codes: torch.Tensor, codewords: int, valid: torch.Tensor | None) -> torch.Tensor:
    """``[B, H, C]`` int32: how many valid tokens of ``codes [B, H, n]`` have each code."""
    B, H, _ = codes.shape
    check_valid_codes(codes, codewords, valid)
    if valid is None:
        indices, ones = codes.long(), torch.ones_like(codes, dtype=torch.int32)
    else:
        token_mask = valid[:, None].expand_as(codes)
        indices, ones = codes.long().masked_fill(~token_mask, 0), token_mask.int()
    counts = torch.zeros(B, H, codewords, dtype=torch.int32, device=codes.device)
    return counts.scatter_add_(2, indices, ones)


def best_shares(table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[B, H, Q, C]``: the largest of the group's log-softmaxes that a token of each code has.

    Args:
        table: ``[B, Hq, Q, C]`` fp32 scores.
        counts: ``[B, H, C]`` int32 tokens of each code.
    """
    B, Hq, Q, C = table.shape
    H = counts.shape[1]
    groups = table.reshape(B, H, Hq // H, Q, C)
    lse = (groups + counts.float().log()[:, :, None, None]).logsumexp(-1, keepdim=True)
    return log_shares(groups, lse).amax(dim=2)


def lookup(table: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.lookup``."""
    B, Hq, Q, C = table.shape
    H, n = codes.shape[1:]
    check_valid_codes(codes, C, valid)
    indices = codes.long()
    if valid is not None:
        indices = indices.masked_fill(~valid[:, None], 0)
    groups = table.reshape(B, H, Hq // H * Q, C)
    scores = groups.gather(3, indices[:, :, None].expand(B, H, Hq // H * Q, n))
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
    return scores.view(B, Hq, Q, n)
