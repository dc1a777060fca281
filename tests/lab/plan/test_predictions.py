"""Predicted bytes are those of caches that really hold the tokens."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import RetrievalCache
from hf_kvret.lab.bench.filling import LayerRows, fill_randomly, random_tokens, serving
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lab.plan.prediction import Predictor
from hf_kvret.testing import LATENT_MODELS, MODELS

# Sizes without contents are exact at the length asked for; on the line pages and room are rounded.
CLOSE = {"rel": 0.01}
SMALL = {"top_k": 48, "store": "device"}
# Windows of a few tokens, so that short prompts have cold ones.
SHORT = ":sink=4:recent=32:flush=32:dense_below=0:max_draft=16"


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return random_model(load_shape("tiny").config, torch.float32, "cpu", 0)


def check(model: PreTrainedModel, name: str, length: int, batch: int = 1) -> None:
    """The prediction is that of a cache that read ``length`` tokens and decoded one more."""
    choice = choose_cache(name, SMALL)
    cache = choice.make(model.config, length + 1)
    assert isinstance(cache, RetrievalCache)
    with serving(model, cache):
        feed(model, cache, random_tokens(model, batch, length, 0), 0)
        feed(model, cache, random_tokens(model, batch, 1, 1), length)
    report = cache.memory()
    nbytes = Predictor(model.config, choice, model.dtype).at(length).of_batch(batch)
    assert report.index or report.store_device or report.store_host or choice.method == "latent"
    assert nbytes.index == pytest.approx(report.index, **CLOSE)
    assert nbytes.window == pytest.approx(report.window + report.other_layers, **CLOSE)
    assert nbytes.shared == report.shared
    assert nbytes.device == pytest.approx(report.device, **CLOSE)
    assert nbytes.host == pytest.approx(report.host, **CLOSE)


@pytest.mark.parametrize(
    "name",
    [
        *("flat", "paris:store=host:select_every=3", "paris:store=resident"),
        *("paris:store=higgs-host:bits=3", "lrqk:store=higgs", "ctkvr:store=cpu"),
        "aqua:predictor=none:first_bits=4:store=host",
    ],
)
def test_bytes_are_those_of_a_filled_cache(name: str, tiny: PreTrainedModel) -> None:
    check(tiny, name + SHORT, 300)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_layers_that_slide_keep_what_they_keep(name: str) -> None:
    model, cache = MODELS[name].build(), "flat:store=host:snapshots={}" + SHORT
    check(model, cache.format(0), 200)
    choices = [choose_cache(cache.format(count), SMALL) for count in (0, 2, 4)]
    none, two, four = (Predictor(model.config, one, model.dtype).at(200).host for one in choices)
    assert four - none == 2 * (two - none) > 0


@pytest.mark.parametrize("name", ["latent", "flat:store=host" + SHORT])
def test_latent_rows_are_counted_once(name: str) -> None:
    check(LATENT_MODELS["deepseek_v3"].build(), name, 200)


def test_an_artifact_gives_codes_their_size(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = tiny_artifact(model, "a2ats", tmp_path / "a2ats")
    check(model, f"a2ats:artifact={folder}" + SHORT, 200)


def filled(model: PreTrainedModel, name: str, length: int) -> RetrievalCache:
    """A cache with ``length`` random rows and a decoded token, which no model has read."""
    cache = choose_cache(name, SMALL).make(model.config, length + 1)
    assert isinstance(cache, RetrievalCache)
    with serving(model, cache):
        rows = [LayerRows(2, 64, 64, 1.0, 1.0)] * model.config.num_hidden_layers
        place = {"device": model.device, "dtype": model.dtype}
        fill_randomly(model.config, cache, rows, 1, length, 0, **place)
        feed(model, cache, random_tokens(model, 1, 1, 1), length)
    return cache


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("flat:store=host", 9_000),
        pytest.param("paris:store=host", 36_000, marks=pytest.mark.slow),
        ("lrqk:store=device", 9_000),
        pytest.param("ctkvr:store=host", 130_000, marks=pytest.mark.slow),
    ],
)
def test_the_line_leads_to_the_bytes_of_a_longer_cache(
    name: str, length: int, tiny: PreTrainedModel
) -> None:
    predictor = Predictor(tiny.config, choose_cache(name, SMALL), tiny.dtype)
    assert length > predictor.even_len
    nbytes, report = predictor.at(length), filled(tiny, name, length).memory()
    assert nbytes.device == pytest.approx(report.device, **CLOSE)
    assert nbytes.host == pytest.approx(report.host, **CLOSE)


@pytest.mark.parametrize("name", ["paris:store=host", "paris:preset=paper:store=device"])
def test_a_step_of_paris_reads_what_its_tables_say(name: str, tiny: PreTrainedModel) -> None:
    choice = choose_cache(name)
    by_line, whole = (Predictor(tiny.config, choice, tiny.dtype) for _ in range(2))
    whole.even_len = 100_000
    # The schedule changes at 30K cold tokens.
    for length in (29_000, 100_000):
        got, want = by_line.at(length), whole.at(length)
        assert got.read_device == pytest.approx(want.read_device, rel=0.01)
        assert got.read_bus == pytest.approx(want.read_bus, rel=0.01)


def test_predicted_rows_are_handed_on_from_layer_to_layer(tmp_path: Path) -> None:
    config = copy.deepcopy(load_shape("tiny").config)
    config.num_hidden_layers = 3
    model = random_model(config, torch.float32, "cpu", 0)
    folder = tiny_artifact(model, "aqua", tmp_path / "aqua")
    check(model, f"aqua:artifact={folder}" + SHORT, 200)
