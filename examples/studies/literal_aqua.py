"""AQUA-KV as its paper states it: slow, plain torch, one function for each step of its algorithms.

This rendering was written from the paper alone (Cache Me If You Must: Adaptive Key-Value
Quantization for Large Language Models). It is the yardstick that ``examples/studies/literal.py``
holds the library to. Algorithm, section and appendix numbers are the paper's.

``n`` is the number of tokens, ``width`` all KV heads of a layer side by side (``Hkv * D``). Keys
are before the rotary embedding (section 3.3). Values of a token never mix with another token's.

The paper leaves three things open. A width that is not a power of two is cut into groups of the
largest power of two that divides it. Predictors have a bias, which the regularizer spares. The
regularizer's rate is a share of the inputs' mean square.
"""

import dataclasses

import torch

GROUP = 1024
BITS = 2
FIRST_LAYER_BITS = 4
SINK_TOKENS = 4
BUFFER_TOKENS = 128
REGULARIZER = 1e-3


def hadamard(size: int) -> torch.Tensor:
    """Returns Sylvester's orthonormal matrix [size, size], fp64; ``size`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / size**0.5


def gaussian_grid(
    points: int, samples: int = 200_000, rounds: int = 200, seed: int = 0
) -> torch.Tensor:
    """Section 2.1, HIGGS: returns the points [points, 2] that round pairs of normal values best.

    Lloyd's iteration finds them on ``samples`` drawn pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
    grid = pairs[:points].clone()
    for _ in range(rounds):
        nearest = torch.cdist(pairs, grid).argmin(dim=-1)
        counts = torch.bincount(nearest, minlength=points).clamp(min=1)
        grid = torch.zeros_like(grid).index_add_(0, nearest, pairs) / counts[:, None]
    return grid


def group_size(width: int) -> int:
    """Section 4.1: returns the number of values that share a scale, at most 1,024."""
    return min(GROUP, width & -width)


def quantize(x: torch.Tensor, grid: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """``Q^-1(Q(x))`` of HIGGS (section 2.1): returns the rounded ``x`` [n, width].

    ``grid`` [points, 2] has ``2 ** (2 * bits)`` points. ``signs`` [group] are the random signs of
    the randomized Hadamard transform. A group of a token is divided by its root mean square, so
    that its rotated values are about normal. This scale has 16 bits: 2 + 16 / 1024 are table 1's
    2.02.
    """
    group = len(signs)
    groups = x.double().reshape(-1, group)
    scale = groups.square().mean(dim=-1, keepdim=True).sqrt().half().double().clamp(min=1e-12)
    rotated = (groups * signs / scale) @ hadamard(group)
    pairs = rotated.reshape(-1, 2)
    nearest = torch.cat([torch.cdist(chunk, grid).argmin(dim=-1) for chunk in pairs.split(65536)])
    rounded = grid[nearest].reshape(-1, group)
    return ((rounded @ hadamard(group).T) * signs * scale).reshape(x.shape).to(x.dtype)


@dataclasses.dataclass
class Linear:
    """A predictor ``f(x) = x @ weight + bias`` of ``weight`` [inputs, outputs] and ``bias``."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def fit_linear(x: torch.Tensor, y: torch.Tensor, rate: float = REGULARIZER) -> Linear:
    """``argmin_f |f(x) - y|^2`` in closed form (section 3.2), with the rate of appendix A."""
    x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
    centred = x - x_mean
    gram = centred.T @ centred
    ridge = rate * gram.diagonal().mean() * torch.eye(len(gram), dtype=x.dtype)
    weight = torch.linalg.solve(gram + ridge, centred.T @ (y - y_mean))
    return Linear(weight, y_mean - x_mean @ weight)


@dataclasses.dataclass
class Higgs:
    """The quantizer ``Q`` of one bit width: its grid and its signs."""

    grid: torch.Tensor
    signs: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantize(x, self.grid, self.signs)


def encode_decode(
    keys: torch.Tensor,
    values: torch.Tensor,
    previous: tuple[torch.Tensor, torch.Tensor],
    predictors: tuple[Linear, Linear],
    q: Higgs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithms 2 and 3: returns the reconstruction [n, width] of a layer above the first."""
    predict_keys, predict_values = predictors
    old_keys, old_values = previous
    expected_keys = predict_keys(old_keys)
    rec_keys = expected_keys + q(keys - expected_keys)
    expected_values = predict_values(torch.cat([old_values, rec_keys], dim=-1))
    rec_values = expected_values + q(values - expected_values)
    return rec_keys, rec_values


def calibrate(
    layers: list[tuple[torch.Tensor, torch.Tensor]], q: Higgs, q_first: Higgs | None
) -> list[tuple[Linear, Linear]]:
    """Algorithm 1: returns the two predictors of every layer above the first.

    ``layers`` holds the keys and values [n, width] of each layer, without the first 4 tokens of
    each text. ``q_first`` (section 4.1: 4 bits) rounds the first layer; None keeps it as it is.
    """
    predictors = []
    previous = first_layer(layers[0], q_first)
    for keys, values in layers[1:]:
        predict_keys = fit_linear(previous[0], keys)
        expected = predict_keys(previous[0])
        rec_keys = expected + q(keys - expected)
        predict_values = fit_linear(torch.cat([previous[1], rec_keys], dim=-1), values)
        predictors.append((predict_keys, predict_values))
        previous = encode_decode(keys, values, previous, predictors[-1], q)
    return predictors


def first_layer(
    layer: tuple[torch.Tensor, torch.Tensor], q_first: Higgs | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 4.1, first layer: returns its keys and values, at the first layer's bits."""
    keys, values = layer
    return (keys, values) if q_first is None else (q_first(keys), q_first(values))


def reconstruct(
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    predictors: list[tuple[Linear, Linear]],
    q: Higgs,
    q_first: Higgs | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Algorithm 4, lines 5 and 11 to 14: returns what each layer reads once it is encoded."""
    reconstructions = [first_layer(layers[0], q_first)]
    for (keys, values), pair in zip(layers[1:], predictors, strict=True):
        reconstructions.append(encode_decode(keys, values, reconstructions[-1], pair, q))
    return reconstructions


def compressed_tokens(length: int) -> range:
    """Section 3.3: returns the tokens that are encoded: full buffers after the first 4 tokens."""
    full_buffers = max(length - SINK_TOKENS, 0) // BUFFER_TOKENS
    return range(SINK_TOKENS, SINK_TOKENS + full_buffers * BUFFER_TOKENS)
