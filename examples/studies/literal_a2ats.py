"""A2ATS as its paper states it: slow, plain torch, one function for each equation.

This rendering was written from the paper alone (A2ATS: Retrieval-Based KV Cache Reduction via
Windowed Rotary Position Embedding and Query-Aware Vector Quantization). It is the yardstick that
``examples/studies/literal.py`` holds the library to. Vectors are rows and equations are numbered as
in the paper.

``d`` is the head dim, ``n`` the number of cached tokens, ``m`` the number of queries and ``c`` the
number of codewords. All keys and queries here are before the rotary embedding.

The paper leaves three things open: a codeword that loses all its keys stays where it was, the
rounds of k-means are a parameter, and the query heads that share a key head share one ``H``.
"""

import math

import torch

FIXED_DISTANCE = 2048
CODEWORDS = 4096
SINK_TOKENS = 4
RECENT_TOKENS = 64
TOP_K_RATIO = 0.03


def rotation_matrix(position: int, inv_freq: torch.Tensor) -> torch.Tensor:
    """Equation 1: returns ``R_i`` [d, d], with ``d = 2 * len(inv_freq)``.

    Channel ``j`` is paired with channel ``j + d / 2``, as in the checkpoints of transformers.
    """
    half = len(inv_freq)
    angles = position * inv_freq
    matrix = torch.zeros(2 * half, 2 * half, dtype=inv_freq.dtype)
    for pair in range(half):
        cosine, sine = math.cos(angles[pair]), math.sin(angles[pair])
        matrix[pair, pair] = cosine
        matrix[pair, pair + half] = sine
        matrix[pair + half, pair] = -sine
        matrix[pair + half, pair + half] = cosine
    return matrix


def rotary_scores(
    query: torch.Tensor, position: int, keys: torch.Tensor, inv_freq: torch.Tensor
) -> torch.Tensor:
    """Equation 3: returns ``q_i R_{i-j} k_j^T`` [n].

    The query [d] stands at ``position``, the keys [n, d] at 0 to n - 1.
    """
    half = len(inv_freq)
    distances = position - torch.arange(len(keys), dtype=inv_freq.dtype)
    angles = distances[:, None] * inv_freq
    first, second = query[:half], query[half:]
    rotated = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        dim=-1,
    )
    return (rotated * keys).sum(dim=-1)


def windowed_query(
    query: torch.Tensor, inv_freq: torch.Tensor, b: int = FIXED_DISTANCE
) -> torch.Tensor:
    """Equation 12: returns ``q R_b`` [m, d]; a key stays as it is before the rotary embedding."""
    return query @ rotation_matrix(b, inv_freq)


def second_moment(windowed_queries: torch.Tensor) -> torch.Tensor:
    """Equation 10: returns ``H = E[q^T q]`` [d, d] of the queries [m, d] that share the keys."""
    return windowed_queries.T @ windowed_queries / len(windowed_queries)


def cholesky_factor(moment: torch.Tensor) -> torch.Tensor:
    """Section 4.2: returns the lower ``L`` [d, d] of ``H = L L^T``.

    The paper takes H for positive definite. A model whose queries leave dims out has another one
    (Gemma-3), so 1e-6 of its root mean square entry is added to the diagonal.
    """
    ridge = 1e-6 * moment.square().mean().sqrt() * torch.eye(len(moment), dtype=moment.dtype)
    return torch.linalg.cholesky(moment + ridge)


def square_distances(z: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Equation 5: returns ``|z_i - c_j|^2`` [n, c]."""
    return (z.square().sum(-1, keepdim=True) - 2 * z @ centres.T + centres.square().sum(-1)).clamp(
        min=0
    )


def first_centres(z: torch.Tensor, codewords: int, seed: int) -> torch.Tensor:
    """k-means++: returns keys [c, d], drawn with the square of their distance to those before."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(z), (1,), generator=generator))]
    nearest = (z - z[chosen[0]]).square().sum(-1)
    for _ in range(codewords - 1):
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
        nearest = torch.minimum(nearest, (z - z[chosen[-1]]).square().sum(-1))
    return z[chosen]


def k_means(z: torch.Tensor, centres: torch.Tensor, rounds: int) -> torch.Tensor:
    """Equation 4 by Lloyd's iteration: returns ``C^z`` [c, d] after at most ``rounds`` rounds."""
    for _ in range(rounds):
        assigned = nearest_codewords(z, centres)
        moved = centres.clone()
        for codeword in assigned.unique().tolist():
            moved[codeword] = z[assigned == codeword].mean(dim=0)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def nearest_codewords(z: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Equation 5: returns ``f(z; C^z)`` [n], int64, 4,096 keys at a time to spare memory."""
    return torch.cat([square_distances(chunk, centres).argmin(dim=-1) for chunk in z.split(4096)])


def build_codebook(
    keys: torch.Tensor,
    windowed_queries: torch.Tensor,
    codewords: int = CODEWORDS,
    rounds: int = 300,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 15 to 19: returns the codebook ``C`` [c, d] and ``L`` [d, d], ``H = L L^T``."""
    factor = cholesky_factor(second_moment(windowed_queries.double())).to(keys.dtype)
    z = keys @ factor
    z_codebook = k_means(z, first_centres(z, codewords, seed), rounds)
    return torch.linalg.solve_triangular(factor, z_codebook, upper=False, left=False), factor


def encode(keys: torch.Tensor, codebook: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Equation 20: returns the codeword ``s_j`` [n] of each key, nearest in the norm of ``H``."""
    return nearest_codewords(keys @ factor, codebook @ factor)


def codebook_error(keys: torch.Tensor, codebook: torch.Tensor, factor: torch.Tensor) -> float:
    """Equation 13: returns ``J'(C)`` as a share of the keys' own ``E[k H k^T]``."""
    z = keys @ factor
    residual = z - codebook[encode(keys, codebook, factor)] @ factor
    return float(residual.square().sum() / z.square().sum())


def select(
    scores: torch.Tensor, top_k: int, w: int = RECENT_TOKENS, sinks: int = SINK_TOKENS
) -> torch.Tensor:
    """Appendix A: returns a mask [n] of the first 4, the last 64 and the ``top_k`` best others."""
    n = len(scores)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[:sinks] = True
    mask[max(n - w, 0) :] = True
    others = scores.masked_fill(mask, -torch.inf)
    mask[others.topk(min(top_k, int((~mask).sum()))).indices] = True
    return mask


def attend(
    scores: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Equation 2 over selected tokens: returns ``softmax(u * scaling) V`` [d]."""
    return (scores * scaling).masked_fill(~mask, -torch.inf).softmax(dim=-1) @ values
