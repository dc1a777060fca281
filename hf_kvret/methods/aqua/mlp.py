"""Predictors of AQUA-KV with one hidden layer, trained from the linear solution."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_kvret.methods.aqua.predictors import Rows, predict, reduced_regression

BATCH = 2048
_RATE = 1e-3


def fit_mlp(
    rows: Rows,
    *,
    ridge: float,
    hidden: int,
    steps: int,
    seed: int,
    progress: Callable[[int], object] = lambda count: None,
) -> dict[str, torch.Tensor]:
    """``hidden.weight``, ``hidden.bias``, ``out.weight`` and ``bias``.

    The paper's perceptron without layer norm, which makes no difference (table 5). Training starts
    at the linear solution: ``gelu(x) - gelu(-x) = x``, so pairs of opposite units reproduce the
    reduced-rank regression, and the other units start with output weight 0. Adam on the mean
    squared error, with a learning rate that decays to 0.

    Args:
        rows: what to learn from.
        ridge: of the linear solution.
        hidden: units, at least 2.
        steps: of ``BATCH`` rows; 0 leaves the linear solution of rank ``hidden // 2``.
        seed: of the order of rows and of the first weights of the rest.
        progress: called with the rows of every step.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(hidden // 2, rows.targets.shape[1])
    moments, down, up = reduced_regression(rows, ridge, rank)
    tiny = torch.finfo(torch.float32).tiny
    spread = moments.gram.diagonal().mean().clamp_min(tiny).sqrt()
    scale = _target_spread(rows, moments.target_mean).clamp_min(tiny)
    # Units in which inputs of the gelu are about 1, and so are inputs and targets.
    unit = ((down @ moments.gram) * down).sum(1).clamp_min(tiny).sqrt()
    first, last = down * (spread / unit[:, None]), up * (unit / scale)
    rest = torch.randn(hidden - 2 * rank, rows.width, generator=generator, dtype=torch.float64)
    rest = rest.to(first.device) / math.sqrt(rows.width)
    no_say = last.new_zeros(len(last), len(rest))
    weights = [torch.cat([first, -first, rest]), first.new_zeros(hidden)]
    weights += [torch.cat([last, -last, no_say], 1), last.new_zeros(len(last))]
    weights = [x.float().contiguous().requires_grad_() for x in weights]
    centre, aim = moments.input_mean.float(), moments.target_mean.float()
    adam = torch.optim.Adam(weights, lr=_RATE)
    for step in range(steps):
        adam.param_groups[0]["lr"] = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        x, y = rows.at(torch.randint(len(rows), (BATCH,), generator=generator))
        x, y = (x - centre) / spread.float(), (y - aim) / scale.float()
        with torch.enable_grad():
            outputs = F.linear(F.gelu(F.linear(x, *weights[:2])), *weights[2:])
            loss = F.mse_loss(outputs, y)
            adam.zero_grad()
            loss.backward()
        adam.step()
        progress(BATCH)
    inner, offset, outer, _ = (x.detach().double() for x in weights)
    inner = (inner / spread).bfloat16()
    tensors = {
        "hidden.weight": inner,
        "hidden.bias": (offset - inner.double() @ moments.input_mean).float(),
        "out.weight": (outer * scale).bfloat16(),
        "bias": torch.zeros_like(aim),
    }
    total = torch.zeros_like(moments.target_mean)
    for x, y in rows.blocks():
        total += (y - predict(tensors, x)).double().sum(0)
    tensors["bias"] = (total / len(rows)).float()
    return {name: x.cpu().contiguous() for name, x in tensors.items()}


def _target_spread(rows: Rows, mean: torch.Tensor) -> torch.Tensor:
    """The root mean square of targets about their mean, one number."""
    total = sum((y.double() - mean).square().sum() for _, y in rows.blocks())
    return (torch.as_tensor(total) / rows.targets.numel()).sqrt()
