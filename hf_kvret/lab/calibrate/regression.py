"""The regression that makes AQUA-KV's predictors (Shutova et al. 2025, section 3.2).

A ridge regression in closed form, in fp64. Weights are rounded to bf16; then the bias is computed
so that the rounded predictor has zero mean error, because keys can have offsets far beyond their
spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 8192
"""Rows on the device at a time."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs and targets of a predictor, a row for each token; read in blocks, fp32 on a device.

    Attributes:
        inputs: tensors ``[n, *]`` that stand side by side, any float dtype, on the CPU.
        targets: ``[n, out]``.
        device: where blocks go.
    """

    inputs: Sequence[torch.Tensor]
    targets: torch.Tensor
    device: torch.device

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def width(self) -> int:
        """Elements of an input."""
        return sum(x.shape[1] for x in self.inputs)

    def at(self, index: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """``(inputs [m, in], targets [m, out])`` of some rows; without inputs, in is 0."""
        y = self.targets[index].to(self.device).float()
        inputs = [x[index].to(self.device).float() for x in self.inputs]
        return torch.cat(inputs, dim=1) if inputs else y[:, :0], y

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All rows in order."""
        for start in range(0, len(self), BLOCK):
            yield self.at(slice(start, start + BLOCK))


def fit_linear(rows: Rows, *, ridge: float) -> dict[str, torch.Tensor]:
    """``weight`` bf16 and ``bias`` fp32 by ridge regression, on the CPU; the bias is not shrunk.

    Args:
        rows: what to learn from.
        ridge: in units of the mean variance of an input, more than 0.

    Raises:
        ValueError: inputs that are not finite, or go together too closely for the ridge.
    """
    input_mean, target_mean, gram, cross = _moments(rows)
    size = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    gram = gram + (ridge * size) * torch.eye(len(gram)).to(gram)
    factor, info = torch.linalg.cholesky_ex(gram)
    if info or not gram.isfinite().all():
        raise ValueError(
            "a predictor's inputs have NaN or infinity, or go together too closely for this ridge: "
            "load the model in bfloat16 or float32, or give a larger ridge (1e-3 is usual)"
        )
    weight = torch.cholesky_solve(cross, factor).mT.bfloat16()
    bias = target_mean - weight.double() @ input_mean
    return {"weight": weight.cpu().contiguous(), "bias": bias.float().cpu()}


def _moments(rows: Rows) -> tuple[torch.Tensor, ...]:
    """Means ``[in]`` of inputs and ``[out]`` of targets, then covariances, all in fp64.

    Those are ``[in, in]`` of inputs, and ``[in, out]`` of inputs with targets.
    """
    inputs, outputs = rows.width, rows.targets.shape[1]
    shapes = ((inputs,), (outputs,), (inputs, inputs), (inputs, outputs))
    sums = [torch.zeros(n, dtype=torch.float64, device=rows.device) for n in shapes]
    for x, y in rows.blocks():
        x, y = x.double(), y.double()
        terms = x.sum(0), y.sum(0), x.mT @ x, x.mT @ y
        for total, term in zip(sums, terms, strict=True):
            total += term
    input_mean, target_mean, gram, cross = (total / len(rows) for total in sums)
    gram = gram - torch.outer(input_mean, input_mean)
    return input_mean, target_mean, gram, cross - torch.outer(input_mean, target_mean)


def predict(tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The prediction for inputs: ``[..., out]`` fp32.

    Args:
        tensors: of one predictor, ``weight`` and ``bias``, or ``bias`` alone; on the device of
            ``x``.
        x: ``[..., in]`` any float dtype.
    """
    if "weight" not in tensors:
        return tensors["bias"].expand(*x.shape[:-1], -1)
    return F.linear(x.float(), tensors["weight"].float(), tensors["bias"])
