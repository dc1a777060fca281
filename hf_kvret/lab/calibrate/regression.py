"""Regressions that make AQUA-KV's predictors: linear, reduced-rank, and with one hidden layer.

Shutova et al. (2025), section 3.2 and table 1, "Predictor Architecture". Linear ones solve a ridge
regression in closed form; the others start from it. All matrices are fitted in fp64 and rounded;
then the bias is recomputed so that the rounded predictor has zero mean error, because keys can have
offsets far beyond their spread. Matrices may be kept in 4 bits (``pack_matrix``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_kvret.methods.aqua.predictors import CODE_PARTS, GROUP, unpacked

_TOP = 15
"""The largest code of 4 bits."""

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

    def at(self, index: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(inputs [m, in], targets [m, out])`` of some rows; without inputs, in is 0."""
        y = self.targets[index].to(self.device).float()
        inputs = [x[index].to(self.device).float() for x in self.inputs]
        return torch.cat(inputs, dim=1) if inputs else y[:, :0], y

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
            terms = x.sum(0), y.sum(0), x.mT @ x, x.mT @ y
            for total, term in zip(sums, terms, strict=True):
                total += term
        self.input_mean, self.target_mean, gram, cross = (total / len(rows) for total in sums)
        self.gram = gram - torch.outer(self.input_mean, self.input_mean)
        self.cross = cross - torch.outer(self.input_mean, self.target_mean)


def _ridged(gram: torch.Tensor, ridge: float) -> torch.Tensor:
    """The Gram matrix with ``ridge`` times its mean diagonal added to its diagonal."""
    size = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return gram + (ridge * size) * torch.eye(len(gram)).to(gram)


def fit_linear(rows: Rows, *, ridge: float, bits: int) -> dict[str, torch.Tensor]:
    """``weight`` and ``bias`` by ridge regression; the bias is not shrunk.

    Args:
        rows: what to learn from.
        ridge: in units of the mean variance of an input, more than 0.
        bits: 16 for bf16, 4 for GPTQ.
    """
    moments = Moments(rows)
    gram = _ridged(moments.gram, ridge)
    weight = _encode("weight", _solution(moments, gram), gram, bits)
    product = unpacked(weight)["weight"].double()
    return _on_cpu({**weight, "bias": moments.target_mean - product @ moments.input_mean})


def fit_low_rank(rows: Rows, *, ridge: float, rank: int, bits: int) -> dict[str, torch.Tensor]:
    """``down``, ``up`` and ``bias`` by reduced-rank ridge regression (Reinsel & Velu, 1998).

    Arguments as of ``fit_linear``; ``rank`` is at most the number of outputs.
    """
    moments = Moments(rows)
    gram = _ridged(moments.gram, ridge)
    down, up = _reduce(_solution(moments, gram), gram, rank)
    tensors = _encode("down", down, gram, bits)
    down_matrix = unpacked(tensors)["down"].double()
    tensors |= _encode("up", up, down_matrix @ gram @ down_matrix.mT, bits)
    product = unpacked(tensors)["up"].double() @ down_matrix
    return _on_cpu({**tensors, "bias": moments.target_mean - product @ moments.input_mean})


def predict(tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
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
    parts = zip(CODE_PARTS, pack_matrix(matrix, gram), strict=True)
    return {f"{name}.{part}": x for part, x in parts}


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as they are saved: fp64 becomes fp32."""
    return {
        name: (x.float() if x.dtype == torch.float64 else x).cpu().contiguous()
        for name, x in tensors.items()
    }


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
        seed: of the order of rows and of the first weights of the other units.
        progress: called with the rows of every step.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = min(hidden // 2, rows.targets.shape[1])
    moments = Moments(rows)
    gram = _ridged(moments.gram, ridge)
    down, up = _reduce(_solution(moments, gram), gram, rank)
    tiny = torch.finfo(torch.float32).tiny
    spread = moments.gram.diagonal().mean().clamp_min(tiny).sqrt()
    squares = sum((y.double() - moments.target_mean).square().sum() for _, y in rows.blocks())
    scale = (torch.as_tensor(squares) / rows.targets.numel()).sqrt().clamp_min(tiny)
    # In these units inputs of the gelu are about 1, and so are inputs and targets.
    unit = ((down @ moments.gram) * down).sum(1).clamp_min(tiny).sqrt()
    first, last = down * (spread / unit[:, None]), up * (unit / scale)
    spare = torch.randn(hidden - 2 * rank, rows.width, generator=generator, dtype=torch.float64)
    spare = spare.to(first.device) / math.sqrt(rows.width)
    silent = last.new_zeros(len(last), len(spare))
    weights = [torch.cat([first, -first, spare]), first.new_zeros(hidden)]
    weights += [torch.cat([last, -last, silent], 1), last.new_zeros(len(last))]
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


def pack_matrix(
    matrix: torch.Tensor, gram: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(codes uint8 [a, b / 2], scale fp16 [a, b / g], low fp16 [a, b / g])`` of a matrix.

    Element ``[i, j]`` is ``low[i, j // g] + scale[i, j // g] * code[i, j]``; codes of columns 2j
    and 2j + 1 are in the low and the high half of byte j; g is the largest power of two up to
    ``GROUP`` that divides b.

    Frantar et al., *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers* (2022), section 3. Columns are rounded one after the other; the error of a column
    is compensated by those not rounded yet, as far as inputs are correlated. The Gram matrix is
    that of the ridge regression, so rounding minimizes the same loss as the regression.

    Args:
        matrix: ``[a, b]`` fp64, b even.
        gram: ``[b, b]`` fp64, second moments of the matrix's inputs, positive definite but for
            rounding.

    Raises:
        ValueError: an odd number of columns.
    """
    a, b = matrix.shape
    if b % 2:
        raise ValueError(f"a predictor with {b} inputs: two 4-bit codes share a byte, use 16 bits")
    group = min(GROUP, b & -b)
    spread = _spread(gram)
    remainder, codes = matrix.clone(), torch.empty_like(matrix)
    scales, lows = [], []
    for start in range(0, b, group):
        end = start + group
        block = remainder[:, start:end]
        low = block.amin(1).half().double()
        scale = ((block.amax(1) - low) / _TOP).half().double()
        errors = torch.zeros_like(block)
        for n, column in enumerate(range(start, end)):
            code = ((block[:, n] - low) / scale.where(scale > 0, 1.0)).round().clamp(0, _TOP)
            codes[:, column] = code
            errors[:, n] = (block[:, n] - low - scale * code) / spread[column, column]
            # Columns that are not rounded yet make up for the error of this one.
            block[:, n + 1 :] -= torch.outer(errors[:, n], spread[column, column + 1 : end])
        remainder[:, end:] -= errors @ spread[start:end, end:]
        scales.append(scale)
        lows.append(low)
    pairs = codes.to(torch.uint8).view(a, b // 2, 2)
    code_bytes = pairs[..., 0] | (pairs[..., 1] << 4)
    return code_bytes, torch.stack(scales, 1).half(), torch.stack(lows, 1).half()


def _spread(gram: torch.Tensor) -> torch.Tensor:
    """How later inputs compensate the error of one: U of ``gram^-1 = U^T U``."""
    # GPTQ's damping is 1e-2; the Gram matrix of a ridge regression needs much less.
    factor = torch.linalg.cholesky(_ridged(gram, 1e-6))
    inverse = torch.cholesky_inverse(factor)
    return torch.linalg.cholesky(inverse, upper=True)
