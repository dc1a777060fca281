"""Predictors of AQUA-KV as named tensors: linear, reduced-rank, and with one hidden layer.

Shutova et al. (2025), section 3.2 and table 1, "Predictor Architecture". Linear ones solve a ridge
regression in closed form; the others start from it. All matrices are fitted in fp64 and rounded;
then the bias is recomputed so that the rounded predictor has zero mean error, because keys can have
offsets far beyond their spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_kvret.methods.aqua.gptq import pack_matrix, unpack_matrix

PREDICTORS = ("linear", "low_rank", "mlp")
Tensors = Mapping[str, torch.Tensor]

BLOCK = 8192
"""Rows on the device at a time."""

# Of a matrix in 4 bits, as pack_matrix returns them.
_PARTS = ("codes", "scale", "low")


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs and targets of a predictor, a row for each token; read in blocks, fp32 on a device.

    Attributes:
        inputs: parts ``[n, *]`` that stand side by side, any float dtype, on the CPU.
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
        """Numbers of an input."""
        return sum(part.shape[1] for part in self.inputs)

    def at(self, index: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(inputs [m, in], targets [m, out])`` of some rows; without parts, in is 0."""
        y = self.targets[index].to(self.device).float()
        parts = [part[index].to(self.device).float() for part in self.inputs]
        return torch.cat(parts, dim=1) if parts else y[:, :0], y

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All rows in order."""
        for start in range(0, len(self), BLOCK):
            yield self.at(slice(start, start + BLOCK))


class Moments:
    """Means and centred second moments of rows, in fp64.

    Attributes:
        input_mean, target_mean: ``[in]``, ``[out]``.
        gram: ``[in, in]``, the covariance of inputs.
        cross: ``[in, out]``, that of inputs with targets.
    """

    def __init__(self, rows: Rows) -> None:
        inputs, outputs = rows.width, rows.targets.shape[1]
        shapes = ((inputs,), (outputs,), (inputs, inputs), (inputs, outputs))
        sums = [torch.zeros(n, dtype=torch.float64, device=rows.device) for n in shapes]
        for x, y in rows.blocks():
            x, y = x.double(), y.double()
            for total, part in zip(sums, (x.sum(0), y.sum(0), x.mT @ x, x.mT @ y), strict=True):
                total += part
        self.input_mean, self.target_mean, gram, cross = (total / len(rows) for total in sums)
        self.gram = gram - torch.outer(self.input_mean, self.input_mean)
        self.cross = cross - torch.outer(self.input_mean, self.target_mean)

    def ridged(self, ridge: float) -> torch.Tensor:
        """The Gram matrix with ``ridge`` times its mean diagonal added to it."""
        size = self.gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
        return self.gram + (ridge * size) * torch.eye(len(self.gram)).to(self.gram)


def fit_linear(rows: Rows, *, ridge: float, bits: int) -> dict[str, torch.Tensor]:
    """``weight`` and ``bias`` by ridge regression; the bias is not shrunk.

    Args:
        rows: what to learn from.
        ridge: in units of the mean variance of an input, more than 0.
        bits: 16 for bf16, 4 for GPTQ.
    """
    moments = Moments(rows)
    gram = moments.ridged(ridge)
    weight = _encode("weight", _solution(moments, gram), gram, bits)
    product = unpacked(weight)["weight"].double()
    return _on_cpu({**weight, "bias": moments.target_mean - product @ moments.input_mean})


def fit_low_rank(rows: Rows, *, ridge: float, rank: int, bits: int) -> dict[str, torch.Tensor]:
    """``down``, ``up`` and ``bias`` by reduced-rank ridge regression (Reinsel & Velu, 1998).

    Arguments as of ``fit_linear``; ``rank`` is at most the number of outputs.
    """
    moments = Moments(rows)
    gram = moments.ridged(ridge)
    down, up = _reduce(_solution(moments, gram), gram, rank)
    tensors = _encode("down", down, gram, bits)
    down_matrix = unpacked(tensors)["down"].double()
    tensors |= _encode("up", up, down_matrix @ gram @ down_matrix.mT, bits)
    product = unpacked(tensors)["up"].double() @ down_matrix
    return _on_cpu({**tensors, "bias": moments.target_mean - product @ moments.input_mean})


def unpacked(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The same predictor with matrices of codes as fp32 matrices, for ``predict``."""
    matrices = {}
    for name, x in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part == "codes":
            matrices[matrix] = unpack_matrix(*(tensors[f"{matrix}.{part}"] for part in _PARTS))
        elif part not in _PARTS:
            matrices[name] = x
    return matrices


def predict(tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The prediction for inputs: ``[..., out]`` fp32.

    Args:
        tensors: of one predictor, without ``key.`` or ``value.`` before their names, matrices as
            ``unpacked`` leaves them; on the device of ``x``.
        x: ``[..., in]`` any float dtype.
    """
    x = x.float()
    if set(tensors) == {"bias"}:
        return tensors["bias"].expand(*x.shape[:-1], -1)
    if "down" in tensors:
        return F.linear(
            F.linear(x, tensors["down"].float()), tensors["up"].float(), tensors["bias"]
        )
    if "hidden.weight" in tensors:
        units = F.linear(x, tensors["hidden.weight"].float(), tensors["hidden.bias"])
        return F.linear(F.gelu(units), tensors["out.weight"].float(), tensors["bias"])
    return F.linear(x, tensors["weight"].float(), tensors["bias"])


def reduced_regression(
    rows: Rows, ridge: float, rank: int
) -> tuple[Moments, torch.Tensor, torch.Tensor]:
    """``(moments, down [rank, in], up [out, rank])`` fp64, the columns of ``up`` orthonormal."""
    moments = Moments(rows)
    gram = moments.ridged(ridge)
    return moments, *_reduce(_solution(moments, gram), gram, rank)


def _solution(moments: Moments, gram: torch.Tensor) -> torch.Tensor:
    """``[out, in]``."""
    factor, info = torch.linalg.cholesky_ex(gram)
    if info or not gram.isfinite().all():
        raise ValueError(
            "a predictor's inputs have NaN or infinity, or go together too closely for this ridge: "
            "load the model in bfloat16 or float32, or give a larger ridge (1e-3 is usual)"
        )
    return torch.cholesky_solve(moments.cross, factor).mT


def _reduce(
    weight: torch.Tensor, gram: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(down, up)``: the best rank-``rank`` approximation of ``weight`` on the inputs."""
    _, vectors = torch.linalg.eigh(weight @ gram @ weight.mT)
    up = vectors[:, -rank:].flip(1)
    return up.mT @ weight, up


def _encode(
    name: str, matrix: torch.Tensor, gram: torch.Tensor, bits: int
) -> dict[str, torch.Tensor]:
    if bits == 16:
        return {name: matrix.bfloat16()}
    parts = zip(_PARTS, pack_matrix(matrix, gram), strict=True)
    return {f"{name}.{part}": x for part, x in parts}


def _on_cpu(tensors: Tensors) -> dict[str, torch.Tensor]:
    """As they are saved: fp64 becomes fp32."""
    return {
        name: (x.float() if x.dtype == torch.float64 else x).cpu().contiguous()
        for name, x in tensors.items()
    }
