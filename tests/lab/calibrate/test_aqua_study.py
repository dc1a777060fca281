"""AQUA-KV's study of a layer: what is fitted to which tokens, reconstructions, anchors, figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hf_kvret.lab.calibrate.aqua import AquaCalibration, Rows, fit_linear, predict
from hf_kvret.lab.calibrate.study import Carried, LayerFindings
from hf_kvret.lab.calibrate.taps import LayerTokens
from hf_kvret_kernels import higgs
from hf_kvret_model_patches.rope import Rope

from .draws import CPU, DIM, HEADS, NO_ROPE, ROPE, draw

WIDTH = HEADS * DIM
SEQUENCES = (300, 200, 150)


def heads(rows: torch.Tensor) -> torch.Tensor:
    """``[n, W]`` as the model makes them, ``[1, H, n, D]``."""
    return rows.view(len(rows), HEADS, DIM).transpose(0, 1)[None]


def tokens(key: torch.Tensor, value: torch.Tensor, rope: Rope = NO_ROPE) -> LayerTokens:
    after = rope.rotate(heads(key), torch.arange(len(key)))
    return LayerTokens(torch.zeros_like(after), after, heads(value))


@dataclass
class Chain:
    """Layers of keys and values ``[n, W]`` for each sequence; each follows from the one below."""

    layers: list[list[tuple[torch.Tensor, torch.Tensor]]]

    @classmethod
    def of(cls, count: int = 3, offset: float = 0.0, dtype: torch.dtype = torch.float32) -> Chain:
        layers = []
        total = sum(SEQUENCES)
        key, value = draw(total, WIDTH, seed=0), draw(total, WIDTH, seed=1)
        for layer in range(count):
            shown = (key + offset).to(dtype), (value - offset).to(dtype)
            parts = [x.split(SEQUENCES) for x in shown]
            layers.append(list(zip(*parts, strict=True)))
            mix = [draw(WIDTH, WIDTH, seed=10 * layer + n) / WIDTH**0.5 for n in (2, 3, 4)]
            fresh = [0.3 * draw(total, WIDTH, seed=10 * layer + n) for n in (5, 6)]
            key = key @ mix[0] + fresh[0]
            value = 0.7 * (key @ mix[1] + value @ mix[2]) + fresh[1]
        return cls(layers)

    def rows(self, layer: int, side: int, sinks: int = 4) -> torch.Tensor:
        """All keys (0) or values (1) beyond the sinks."""
        return torch.cat([part[side][sinks:] for part in self.layers[layer]])

    def study(
        self, held_out: int = 1, device: str = "cpu", rope: Rope = NO_ROPE, **options: Any
    ) -> list[LayerFindings]:
        calibration, carried = AquaCalibration(**options), None
        result = []
        for number, layer in enumerate(self.layers):
            study = calibration.study(2 * number + 1, rope, torch.device(device))
            for n, part in enumerate(layer):
                study.add(tokens(*part, rope), n >= len(layer) - held_out)
            result.append(study.finish(lambda done: None, carried))
            carried = result[-1].carried
        return result


LEARNED = sum(SEQUENCES[:2]) - 8


def part(findings: LayerFindings, name: str) -> dict[str, torch.Tensor]:
    """Tensors of one predictor."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): x for k, x in findings.tensors.items() if k.startswith(prefix)}


def carried(findings: LayerFindings) -> Carried:
    assert findings.carried is not None
    return findings.carried


def recoded(x: torch.Tensor, bits: int, group: int = WIDTH, seed: int = 0) -> torch.Tensor:
    codec = higgs.HiggsCodec(bits, group, seed=seed)
    return codec.decode(*codec.encode(x), torch.float32)


def share(error: torch.Tensor, of: torch.Tensor) -> float:
    return float(error.square().sum() / (of - of.mean(0)).square().sum())


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 3, "first_bits": 2, "group": 8, "seed": 5}, {"anchor_mean": True}],
    ids=str,
)
def test_what_is_carried_follows_from_the_artifact(options: dict[str, Any]) -> None:
    """Reconstruction from tensors and options alone, as a cache would do it."""
    chain = Chain.of(offset=2.0)
    made, below = AquaCalibration(**options), None
    for number, findings in enumerate(chain.study(**options)):
        key, value = (chain.rows(number, side) for side in (0, 1))
        bits, group = findings.settings["bits"], findings.settings["group"]
        near: dict[str, torch.Tensor] = {}
        for name, exact in (("key", key), ("value", value)):
            predictor, predicted = part(findings, name), torch.zeros_like(exact)
            if below is None:
                assert (set(predictor) == {"bias"}) == made.anchor_mean
                predicted = predicted + predictor.get("bias", 0.0)
            elif name == "key":
                predicted = predict(predictor, below["key"])
            else:
                predicted = predict(predictor, torch.cat([near["key"], below["value"]], dim=1))
            near[name] = predicted + recoded(exact - predicted, bits, group, made.seed)
            result = carried(findings)[name]
            # Codes at the border of two points may differ by rounding; next to none do.
            far = (result - near[name]).abs().amax(1) > 1e-4
            assert result.shape == exact.shape and far.float().mean() < 0.01, (number, name)
        below = carried(findings)
        assert int(below["layer"]) == 2 * number + 1


def test_predictors_are_fitted_to_reconstructions_not_to_what_the_model_made() -> None:
    chain = Chain.of()
    first, second, _ = chain.study(bits=2, first_bits=2)
    learned = slice(LEARNED)
    below, here = carried(first), carried(second)
    key, value = (chain.rows(1, side)[learned] for side in (0, 1))
    expected = fit_linear(Rows([below["key"][learned]], key, CPU), ridge=1e-3)
    for name, x in expected.items():
        assert torch.equal(second.tensors[f"key.{name}"], x), name
    inputs = [here["key"][learned], below["value"][learned]]
    expected = fit_linear(Rows(inputs, value, CPU), ridge=1e-3)
    for name, x in expected.items():
        assert torch.equal(second.tensors[f"value.{name}"], x), name
    exact = fit_linear(Rows([chain.rows(0, 0)[learned]], key, CPU), ridge=1e-3)
    assert not torch.allclose(exact["weight"], second.tensors["key.weight"], atol=1e-2)


def test_sinks_are_left_out() -> None:
    chain, other = Chain.of(2), Chain.of(2)
    for layer in other.layers:
        for key, value in layer:
            key[:4] += 1000.0
            value[:4] -= 1000.0
    for one, two in zip(chain.study(), other.study(), strict=True):
        assert all(torch.equal(x, two.tensors[name]) for name, x in one.tensors.items())
        assert one.quality == two.quality
    assert carried(chain.study(sinks=0)[0])["key"].shape == (sum(SEQUENCES), WIDTH)
    assert carried(chain.study(sinks=64)[0])["key"].shape == (sum(SEQUENCES) - 192, WIDTH)


def test_nothing_is_learned_from_what_is_held_out() -> None:
    chain, other = Chain.of(), Chain.of()
    for layer in other.layers:
        for x in layer[-1]:
            x *= -3.0
    options = {"first_bits": "auto", "anchor_mean": True}
    for one, two in zip(chain.study(**options), other.study(**options), strict=True):
        assert all(torch.equal(x, two.tensors[name]) for name, x in one.tensors.items())
        assert one.settings == two.settings and one.quality != two.quality


def test_keys_are_those_before_or_after_rope() -> None:
    chain = Chain.of(1)
    before, after = (
        chain.study(rope=ROPE, space=space, first_bits=16)[0] for space in ("before", "after")
    )
    # Rotated and turned back, which rounds.
    torch.testing.assert_close(carried(before)["key"], chain.rows(0, 0), rtol=1e-4, atol=1e-4)
    seen = [tokens(*one, ROPE).key[0] for one in chain.layers[0]]
    rows = torch.cat([x[:, 4:].transpose(0, 1).flatten(1) for x in seen])
    assert torch.equal(carried(after)["key"], rows)
    assert torch.equal(carried(after)["value"], chain.rows(0, 1))


def test_an_anchor_is_left_in_16_bits_where_4_would_lose_it_to_an_offset() -> None:
    for offset, bits in ((0.0, 4), (2.0, 4), (10.0, 16)):
        anchor = Chain.of(1, offset=offset).study(first_bits="auto")[0]
        assert anchor.settings["bits"] == anchor.quality["bits"] == bits, offset
        # With its mean taken off there is no offset.
        centred = Chain.of(1, offset=offset).study(first_bits="auto", anchor_mean=True)[0]
        assert centred.settings["bits"] == 4
        assert centred.quality["key_error"] == pytest.approx(0.0077, rel=0.15)
    # Also where nothing is held out to measure.
    assert Chain.of(1, offset=10.0).study(0, first_bits="auto")[0].settings["bits"] == 16


def test_figures_are_shares_of_the_held_out_variance() -> None:
    chain = Chain.of(2, offset=1.0)
    anchor, predicted = chain.study()
    held = slice(LEARNED, None)
    key, value = (chain.rows(0, side)[held] for side in (0, 1))
    for name, exact in (("key", key), ("value", value)):
        expected = share(exact - recoded(exact, 4), exact)
        assert anchor.quality[f"{name}_error"] == pytest.approx(expected, rel=1e-3)
    assert anchor.quality["key_explained"] is None
    key, value = (chain.rows(1, side)[held] for side in (0, 1))
    below, here = (
        {name: x[held] for name, x in carried(one).items() if x.ndim} for one in (anchor, predicted)
    )
    inputs = {"key": below["key"], "value": torch.cat([here["key"], below["value"]], dim=1)}
    for name, exact in (("key", key), ("value", value)):
        left = exact - predict(part(predicted, name), inputs[name])
        explained = 1 - share(left - left.mean(0), exact)
        figures = {figure: predicted.quality[f"{name}_{figure}"] for figure in FIGURES}
        assert figures["explained"] == pytest.approx(explained, abs=1e-5)
        assert figures["error"] == pytest.approx(share(exact - here[name], exact), rel=1e-4)
        plain = share(exact - recoded(exact, 2), exact)
        assert figures["error_unpredicted"] == pytest.approx(plain, rel=1e-3)
        assert 0.5 < figures["explained"] < 1 and figures["error"] < 0.6 * plain


FIGURES = ("explained", "error", "error_unpredicted")
