"""Predictors of AQUA-KV: closed forms, reduced rank, GPTQ, the perceptron; rounding and offsets."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.lab.calibrate.regression import (
    BLOCK,
    Rows,
    fit_linear,
    fit_low_rank,
    fit_mlp,
    pack_matrix,
    predict,
)
from hf_kvret.methods.aqua.predictors import GROUP, unpack_matrix, unpacked

CPU = torch.device("cpu")


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(n: int, width: int, seed: int) -> torch.Tensor:
    """Inputs that go together: a few directions have most of the variance."""
    mix = draw(width, width, seed=seed + 1) * torch.logspace(0, -2, width)[:, None]
    return draw(n, width, seed=seed) @ mix


def rows(n: int = 400, inputs: int = 16, outputs: int = 8, noise: float = 0.1) -> Rows:
    x, weight = correlated(n, inputs, seed=0), draw(outputs, inputs, seed=2)
    y = x @ weight.T + noise * draw(n, outputs, seed=3) + 2.0
    return Rows([x[:, :10], x[:, 10:]], y, CPU)


def whole(given: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = given.at(slice(None))
    return x.double(), y.double()


def loss(tensors: dict[str, torch.Tensor], given: Rows) -> float:
    x, y = given.at(slice(None))
    return float((y - predict(unpacked(tensors), x)).square().mean())


def test_linear_predictors_are_ridge_regression_with_a_free_bias() -> None:
    given, ridge = rows(), 0.02
    x, y = whole(given)
    result = fit_linear(given, ridge=ridge, bits=16)
    centred = x - x.mean(0)
    gram = centred.T @ centred / len(x)
    gram += ridge * gram.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    expected = torch.linalg.solve(gram, centred.T @ (y - y.mean(0)) / len(x)).T
    assert result["weight"].dtype == torch.bfloat16 and result["bias"].dtype == torch.float32
    # bf16 rounds by up to 2^-9 of a number.
    assert torch.allclose(result["weight"].double(), expected, rtol=2**-8, atol=1e-6)
    mean_error = (y - predict(result, x)).mean(0)
    assert mean_error.abs().max() < 1e-5


def test_a_stronger_ridge_makes_smaller_weights() -> None:
    sizes = [float(fit_linear(rows(), ridge=r, bits=16)["weight"].norm()) for r in (1e-4, 1.0)]
    assert sizes[1] < 0.8 * sizes[0]


def test_blocks_add_up_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows()
    assert len(given) < BLOCK
    one = fit_linear(given, ridge=1e-3, bits=16)
    monkeypatch.setattr("hf_kvret.lab.calibrate.regression.BLOCK", 37)
    many = fit_linear(given, ridge=1e-3, bits=16)
    assert torch.equal(one["weight"], many["weight"])
    assert torch.allclose(one["bias"], many["bias"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("kind", ["linear", "low_rank", "mlp"])
def test_rounded_predictors_have_no_mean_error_whatever_the_offsets(kind: str, bits: int) -> None:
    plain = rows()
    # Inputs a thousand spreads from 0: a weight's rounding would shift the prediction.
    given = Rows([x + 300.0 for x in plain.inputs], plain.targets, CPU)
    if kind == "linear":
        result = fit_linear(given, ridge=1e-3, bits=bits)
    elif kind == "low_rank":
        result = fit_low_rank(given, ridge=1e-3, rank=6, bits=bits)
    else:
        result = fit_mlp(given, ridge=1e-3, hidden=16, steps=5, seed=0)
    x, y = given.at(slice(None))
    near = predict(unpacked(result), x)
    # Products of fp32 numbers of 300 and weights of about 1 are off by 1e-4.
    assert (y - near).mean(0).abs().max() < 2e-3
    bare = predict({**unpacked(result), "bias": torch.zeros_like(result["bias"])}, x)
    assert (bare - bare.mean(0)).norm() > 0


def test_all_of_the_rank_is_the_linear_predictor() -> None:
    given = rows()
    x, _ = given.at(slice(None))
    linear = fit_linear(given, ridge=1e-3, bits=16)
    full = fit_low_rank(given, ridge=1e-3, rank=8, bits=16)
    assert full["down"].shape == (8, 16) and full["up"].shape == (8, 8)
    difference = predict(full, x) - predict(linear, x)
    # Two matrices in bf16 instead of one.
    assert difference.norm() < 0.01 * predict(linear, x).norm()


def test_low_rank_loses_least_where_inputs_are() -> None:
    given, rank = rows(noise=0.0), 3
    result = fit_low_rank(given, ridge=1e-6, rank=rank, bits=16)
    x, y = whole(given)
    weight = fit_linear(given, ridge=1e-6, bits=16)["weight"].double()
    u, s, vh = torch.linalg.svd(weight)
    cut = (u[:, :rank] * s[:rank]) @ vh[:rank]
    centred = x - x.mean(0)
    plain = ((y - y.mean(0)) - centred @ cut.T).square().mean()
    assert loss(result, given) < 0.9 * plain
    # The best of all products of this rank: the tail of the fitted values' spectrum.
    spectrum = torch.linalg.svdvals(y - y.mean(0)).square() / y.numel()
    assert loss(result, given) == pytest.approx(float(spectrum[rank:].sum()), rel=0.05)


def test_codes_are_packed_as_documented() -> None:
    matrix, x = draw(5, 192, seed=0).double(), correlated(500, 192, seed=4).double()
    codes, scale, low = pack_matrix(matrix, x.T @ x / 500)
    # The largest power of two that divides 192 is 64.
    assert codes.shape == (5, 96) and scale.shape == low.shape == (5, 3)
    assert (codes.dtype, scale.dtype, low.dtype) == (torch.uint8, torch.float16, torch.float16)
    result = unpack_matrix(codes, scale, low)
    for i, j in ((0, 0), (4, 1), (2, 63), (3, 64), (1, 191)):
        byte = int(codes[i, j // 2])
        code = byte >> 4 if j % 2 else byte & 15
        group = i, j // 64
        assert float(result[i, j]) == float(low[group]) + float(scale[group]) * code
    wide = pack_matrix(draw(2, 512, seed=1).double(), torch.eye(512, dtype=torch.float64))
    assert wide[1].shape == (2, 512 // GROUP)


def test_without_correlations_codes_are_the_nearest() -> None:
    matrix = draw(6, 32, seed=0).double()
    codes, scale, low = pack_matrix(matrix, torch.eye(32, dtype=torch.float64))
    error = (unpack_matrix(codes, scale, low).double() - matrix).abs()
    # Half a step, and what fp16 moves the ends by.
    assert (error <= 0.51 * scale.double() + 2e-3).all()


def test_gptq_loses_less_than_rounding_each_number() -> None:
    x = correlated(2000, 64, seed=0).double()
    matrix, gram = draw(32, 64, seed=9).double(), x.T @ x / 2000
    parts = pack_matrix(matrix, gram)
    nearest = unpack_matrix(*pack_matrix(matrix, torch.eye(64, dtype=torch.float64))).double()
    error = ((unpack_matrix(*parts).double() - matrix) @ x.T).norm()
    assert error < 0.6 * ((nearest - matrix) @ x.T).norm()


def test_a_constant_matrix_and_silent_inputs_are_packed() -> None:
    gram = torch.zeros(8, 8, dtype=torch.float64)
    for value in (0.0, 0.5):
        matrix = torch.full((3, 8), value, dtype=torch.float64)
        assert torch.equal(unpack_matrix(*pack_matrix(matrix, gram)).double(), matrix)


def test_an_odd_number_of_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="9 inputs: two 4-bit codes share a byte, use 16 bits"):
        pack_matrix(draw(3, 9, seed=0).double(), torch.eye(9, dtype=torch.float64))


def test_four_bits_cost_little_of_what_is_explained() -> None:
    given = rows(n=2000, inputs=32, outputs=16, noise=0.3)
    _, y = whole(given)
    spread = float((y - y.mean(0)).square().mean())
    plain = loss(fit_linear(given, ridge=1e-3, bits=16), given)
    coarse = fit_linear(given, ridge=1e-3, bits=4)
    assert sorted(coarse) == ["bias", "weight.codes", "weight.low", "weight.scale"]
    assert plain < loss(coarse, given) < plain + 0.01 * spread
    both = fit_low_rank(given, ridge=1e-3, rank=16, bits=4)
    assert {"down.codes", "up.codes", "up.scale", "down.low"} < set(both)
    assert loss(both, given) < plain + 0.03 * spread


def test_untrained_perceptrons_are_the_linear_predictor() -> None:
    given = rows()
    x, _ = given.at(slice(None))
    linear = predict(fit_linear(given, ridge=1e-3, bits=16), x)
    for hidden in (16, 21):
        result = fit_mlp(given, ridge=1e-3, hidden=hidden, steps=0, seed=0)
        assert result["hidden.weight"].shape == (hidden, 16)
        # Two matrices in bf16 whose opposite units cancel.
        assert (predict(result, x) - linear).norm() < 0.01 * linear.norm()


def test_training_finds_what_is_not_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_kvret.lab.calibrate.regression.BATCH", 256)
    x = draw(1000, 8, seed=0)
    given = Rows([x], x.abs() @ draw(8, 4, seed=1), CPU)
    linear = loss(fit_linear(given, ridge=1e-3, bits=16), given)
    seen: list[int] = []
    options = {"ridge": 1e-3, "hidden": 32, "seed": 0}
    result = fit_mlp(given, **options, steps=1000, progress=seen.append)
    assert loss(result, given) < 0.5 * linear
    assert len(seen) == 1000
    again = fit_mlp(given, **options, steps=1000)
    assert all(torch.equal(result[name], again[name]) for name in result)


def test_a_bias_alone_is_predicted_for_every_row() -> None:
    bias = draw(6, seed=0)
    assert torch.equal(predict({"bias": bias}, torch.empty(3, 0)), bias.expand(3, 6))


def test_inputs_that_give_no_solution_are_refused() -> None:
    given = rows()
    given.inputs[0][3, 2] = float("nan")
    with pytest.raises(ValueError, match="inputs have NaN or infinity, or go together too closely"):
        fit_linear(given, ridge=1e-3, bits=16)
    twice = Rows([given.inputs[1], given.inputs[1] * 3], given.targets, CPU)
    with pytest.raises(ValueError, match=r"give a larger ridge \(1e-3 is usual\)"):
        fit_linear(twice, ridge=1e-30, bits=16)


def test_inputs_that_never_vary_predict_the_mean() -> None:
    given = Rows([torch.full((50, 8), 3.0)], draw(50, 4, seed=0), CPU)
    x, y = given.at(slice(None))
    for tensors in (
        fit_linear(given, ridge=1e-3, bits=16),
        fit_linear(given, ridge=1e-3, bits=4),
        fit_low_rank(given, ridge=1e-3, rank=2, bits=16),
        fit_mlp(given, ridge=1e-3, hidden=8, steps=0, seed=0),
    ):
        near = predict(unpacked(tensors), x)
        assert torch.allclose(near, y.mean(0).expand_as(near), atol=1e-4)
