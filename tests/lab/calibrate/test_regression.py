"""Predictors of AQUA-KV: the closed form, rounding and offsets."""

import pytest
import torch

from hf_kvret.lab.calibrate.aqua import Rows, fit_linear, predict

from .draws import CPU, draw


def correlated(n: int, width: int, seed: int) -> torch.Tensor:
    """Inputs that go together: a few directions have most of the variance."""
    mix = draw(width, width, seed=seed + 1) * torch.logspace(0, -2, width)[:, None]
    return draw(n, width, seed=seed) @ mix


def rows(n: int = 400, inputs: int = 16, outputs: int = 8, noise: float = 0.1) -> Rows:
    x, weight = correlated(n, inputs, seed=0), draw(outputs, inputs, seed=2)
    y = x @ weight.T + noise * draw(n, outputs, seed=3) + 2.0
    return Rows([x[:, :10], x[:, 10:]], y, CPU)


def whole(given: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    _, x, y = next(given.blocks())
    return x.double(), y.double()


def test_linear_predictors_are_ridge_regression_with_a_free_bias() -> None:
    given, ridge = rows(), 0.02
    x, y = whole(given)
    result = fit_linear(given, ridge=ridge)
    centred = x - x.mean(0)
    gram = centred.T @ centred / len(x)
    gram += ridge * gram.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    expected = torch.linalg.solve(gram, centred.T @ (y - y.mean(0)) / len(x)).T
    assert result["weight"].dtype == torch.bfloat16 and result["bias"].dtype == torch.float32
    # bf16 rounds by up to 2^-9 of a number.
    assert torch.allclose(result["weight"].double(), expected, rtol=2**-8, atol=1e-6)
    assert (y - predict(result, x)).mean(0).abs().max() < 1e-5


def test_rounded_predictors_have_no_mean_error_whatever_the_offsets() -> None:
    plain = rows()
    # Inputs a thousand spreads from 0: a weight's rounding would shift the prediction.
    given = Rows([x + 300.0 for x in plain.inputs], plain.targets, CPU)
    _, x, y = next(given.blocks())
    # Products of fp32 numbers of 300 and weights of about 1 are off by 1e-4.
    assert (y - predict(fit_linear(given, ridge=1e-3), x)).mean(0).abs().max() < 2e-3


def test_inputs_that_give_no_solution_are_refused() -> None:
    given = rows()
    given.inputs[0][3, 2] = float("nan")
    with pytest.raises(ValueError, match="inputs have NaN or infinity, or go together too closely"):
        fit_linear(given, ridge=1e-3)
    twice = Rows([given.inputs[1], given.inputs[1] * 3], given.targets, CPU)
    with pytest.raises(ValueError, match=r"give a larger ridge \(1e-3 is usual\)"):
        fit_linear(twice, ridge=1e-30)
