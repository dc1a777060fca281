"""Tokens as ids of codewords: which is nearest, and scores of all tokens by looking ids up.

A codebook belongs to a KV head and is shared by all inputs. A step multiplies the query with the C
codewords once; after that the score of a token is an entry of a table. On CUDA tensors nothing
waits for the host and no shape depends on data.

Paper: A2ATS, equations 17, 20 and 21. Dimensions: B batch, H KV heads, Hq query heads, G = Hq / H,
Q queries at once, C codewords, n tokens, D head dim.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import (
    FLOATS,
    check_no_grad,
    check_softcap,
    check_tensor,
    check_valid,
    run,
)
from hf_kvret_kernels.codebook.naive import half_norms as half_norms

# Ids are int16.
MOST_CODEWORDS = 1 << 15
# A row of latent attention fits: 512 elements and a rotated key.
MOST_DIM = 1024
_BOOK_DTYPES = (torch.float32, torch.bfloat16)


def encode(
    x: torch.Tensor,
    codebook: torch.Tensor,
    *,
    norms: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, n]`` int16: the nearest codeword, ``argmin_c |x - c|^2`` (equation 17).

    That is ``argmax_c x . c - |c|^2 / 2``. Of codewords that are equally near it is the first.
    Sums are fp32; with x and codebook in bf16 the products are exact, otherwise they are as good
    as fp32 ones. A row with NaN gets 0. The n x C scores never exist at once.

    To encode ``x @ L`` without computing it, pass ``codebook @ L.mT`` and the half norms of
    ``codebook``.

    Args:
        x: ``[B, H, n, D]`` fp32, bf16 or fp16, any strides; n may be 0, D at most 1024.
        codebook: ``[H, C, D]`` fp32 or bf16, C from 1 to 32768.
        norms: ``[H, C]`` fp32 of ``half_norms``, for callers that encode often; None computes them.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_no_grad(x=x, codebook=codebook)
    check_tensor("x", x, (None,) * 4, FLOATS)
    _check_codebook(codebook, x.shape[1], x.shape[3], x.device)
    if norms is None:
        norms = half_norms(codebook)
    check_tensor("norms", norms, codebook.shape[:2], (torch.float32,), x.device)
    return run(__name__, "encode", backend, x, codebook, norms)


def score_table(
    query: torch.Tensor,
    codebook: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, Hq, Q, C]`` fp32: the score of each query and codeword (equation 21).

    A token's score is the entry of its id, so scale and cap are applied here, C times instead of
    n times. ``"naive"`` is a matrix product of torch; ``"triton"`` is the kernel of
    ``proxy.relevance``, for which the codewords are the keys, read once and in their own dtype, or
    one in tiles for codewords of more than 256 numbers. Sums are fp32.

    Args:
        query: ``[B, Hq, Q, D]`` fp32, bf16 or fp16, any strides, in the codebook's space; query
            head h reads codebook ``h // (Hq // H)``.
        codebook: ``[H, C, D]`` fp32 or bf16, H a divisor of Hq; copied if it is not contiguous.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_no_grad(query=query, codebook=codebook)
    check_tensor("query", query, (None,) * 4, FLOATS)
    heads = codebook.shape[0] if codebook.ndim else 0
    _check_codebook(codebook, heads, query.shape[3], query.device)
    if not heads or query.shape[1] % heads:
        raise ValueError(f"codebook has {heads} heads: must divide the {query.shape[1]} of query")
    check_softcap(softcap)
    scaled = query.float() * scale
    return run(__name__, "score_table", backend, scaled, codebook, softcap)


def lookup(
    table: torch.Tensor,
    codes: torch.Tensor,
    *,
    valid: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, Hq, Q, n]`` fp32: ``table``'s entry for each token; -inf for tokens not valid.

    For selection by each query head (A2ATS unites what they select).

    Args:
        table: ``[B, Hq, Q, C]`` fp32, any strides, as ``score_table`` gives it; query head h reads
            the codes of head ``h // (Hq // H)``.
        codes: ``[B, H, n]`` int16, any strides, 0 to C - 1 wherever valid. Torch looks at them;
            Triton takes tokens of other codes for such as are not valid.
        valid: ``[B, n]`` bool, any strides, or None for all valid.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        WrongIdError: a ValueError, with ``"naive"``: a code of no codeword.
    """
    _check_look_up(table, codes, valid)
    return run(__name__, "lookup", backend, table, codes, valid)


def lookup_scores(
    table: torch.Tensor,
    codes: torch.Tensor,
    *,
    valid: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, n]`` fp32: the largest log-softmax over tokens of the group's query heads.

    -inf for tokens that are not valid. The softmax of each query head is over the valid tokens.
    Tokens of one code score alike, so with N_c of them its denominator is the sum over codewords
    of ``N_c * exp(table_c)``, and the comparison of the G heads is made once for each codeword:
    a token costs one look-up, not G. ``top_k`` takes the best. Arguments and errors are those of
    ``lookup``.
    """
    _check_look_up(table, codes, valid)
    counts = run(__name__, "code_counts", backend, codes, table.shape[3], valid)
    shares = run(__name__, "best_shares", backend, table, counts)
    return run(__name__, "lookup", backend, shares, codes, valid)


def _check_codebook(codebook: torch.Tensor, heads: int, dim: int, device: torch.device) -> None:
    check_tensor("codebook", codebook, (heads, None, dim), _BOOK_DTYPES, device)
    if not 1 <= codebook.shape[1] <= MOST_CODEWORDS:
        raise ValueError(
            f"codebook has C={codebook.shape[1]} codewords: pass 1 to {MOST_CODEWORDS}"
        )
    if not 1 <= dim <= MOST_DIM:
        raise ValueError(f"head dim D is {dim}: pass vectors of 1 to {MOST_DIM} numbers")


def _check_look_up(table: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None) -> None:
    check_tensor("table", table, (None,) * 4, (torch.float32,))
    if not 1 <= table.shape[3] <= MOST_CODEWORDS:
        raise ValueError(f"table has C={table.shape[3]} codewords: pass 1 to {MOST_CODEWORDS}")
    check_tensor("codes", codes, (len(table), None, None), (torch.int16,), table.device)
    if not codes.shape[1] or table.shape[1] % codes.shape[1]:
        raise ValueError(
            f"codes have {codes.shape[1]} heads: must divide the {table.shape[1]} query heads"
        )
    check_valid(valid, (len(codes), codes.shape[2]), codes.device)
