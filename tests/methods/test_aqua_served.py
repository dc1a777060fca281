"""What an artifact was calibrated with serves, unless a cache is told otherwise."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from .aqua_caches import attached, learn, read

ArtifactOf = Callable[..., str]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return attached(MODELS["llama"].build())


@pytest.fixture(scope="module")
def artifact_of(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ArtifactOf:
    """An artifact that was calibrated with these options, made when it is asked for."""
    made: dict[str, str] = {}

    def find(**options: Any) -> str:
        key = str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("aqua")
            made[key] = learn(model, folder, texts=2, **{"bits": 2, **options})
        return made[key]

    return find


def _cache(model: PreTrainedModel, **options: Any) -> AquaKVCache:
    return AquaKVCache(model.config, **{**COVERING_OPTIONS, **options})


def _bits(model: PreTrainedModel, cache: AquaKVCache) -> list[int]:
    """Of each layer, once tokens are cold."""
    read(model, cache, prompt(1, 60))
    return [layer["bits"] for layer in cache.stats()["layers"]]


@pytest.mark.parametrize("bits", [2, 3, 16])
def test_the_bits_of_the_artifact_serve(
    bits: int, model: PreTrainedModel, artifact_of: ArtifactOf
) -> None:
    cache = _cache(model, artifact=artifact_of(bits=bits))
    assert cache.options.bits == cache.options.row_bits == bits
    served = _bits(model, cache)
    assert served[0] == (16 if bits == 16 else 4)
    assert set(served[1:]) == {bits}


def test_bits_that_are_asked_for_win(model: PreTrainedModel, artifact_of: ArtifactOf) -> None:
    cache = _cache(model, artifact=artifact_of(bits=16), bits=2)
    assert cache.options.bits == 2
    assert _bits(model, cache) == [4, *[2] * (len(cache.layers) - 1)]
    whole = _cache(model, artifact=artifact_of(bits=2), bits=16)
    assert set(_bits(model, whole)) == {16}


def test_generate_serves_with_them_too(model: PreTrainedModel, artifact_of: ArtifactOf) -> None:
    output = model.generate(  # type: ignore[operator]
        prompt(1, 60),
        cache_implementation="aqua",
        cache_config={**COVERING_OPTIONS, "artifact": artifact_of(bits=3)},
        max_new_tokens=2,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.past_key_values.options.bits == 3
    assert [x["bits"] for x in output.past_key_values.stats()["layers"]][1:] == [3]


def test_without_predictors_two_bits_of_higgs_serve(model: PreTrainedModel) -> None:
    options = _cache(model, predictor="none").options
    assert isinstance(options, AquaConfig)
    assert (options.bits, options.backbone) == (2, "higgs")


def test_the_backbone_of_the_artifact_serves_even_where_its_predictors_knew_none(
    model: PreTrainedModel, artifact_of: ArtifactOf
) -> None:
    """With ``--bits 16`` the backbone of anchors was the only one, and another went unnoticed."""
    artifact = artifact_of(bits=16, backbone="minmax")
    options = _cache(model, artifact=artifact, bits=2).options
    assert isinstance(options, AquaConfig) and options.backbone == "minmax"
    chosen = _cache(model, artifact=artifact, bits=2, backbone="higgs").options
    assert isinstance(chosen, AquaConfig) and chosen.backbone == "higgs"
    with pytest.raises(ValueError, match=r"backbone='higgs'.*learned with 'minmax'"):
        _cache(model, artifact=artifact_of(backbone="minmax"), backbone="higgs")


def test_a_cache_that_was_saved_keeps_its_bits(
    model: PreTrainedModel, artifact_of: ArtifactOf, tmp_path: Path
) -> None:
    """Also where the artifact says 16."""
    cache = _cache(model, artifact=artifact_of(bits=16), bits=2, backbone="higgs")
    _bits(model, cache)
    cache.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "cache.json").read_text())["options"]
    assert (saved["bits"], saved["backbone"]) == (2, "higgs")
    loaded = AquaKVCache.from_pretrained(tmp_path, model.config, artifact=artifact_of(bits=16))
    assert loaded.options == cache.options
    assert loaded.stats()["layers"][1]["bits"] == 2
    assert torch.equal(*(read(model, each, prompt(1, 1, salt=1)) for each in (cache, loaded)))
    unset = _cache(model, artifact=artifact_of(bits=16))
    _bits(model, unset)
    unset.save_pretrained(tmp_path / "unset")
    assert json.loads((tmp_path / "unset" / "cache.json").read_text())["options"]["bits"] == 16
    assert unset.fork().options.bits == 16


@pytest.mark.parametrize(("name", "value"), [("bits", None), ("bits", 5), ("backbone", "quanto")])
def test_an_artifact_that_does_not_tell_them_is_refused(
    name: str, value: Any, model: PreTrainedModel, artifact_of: ArtifactOf, tmp_path: Path
) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact_of(bits=2))
    dataclasses.replace(whole, options={**whole.options, name: value}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"has {name}={value!r}, known are"):
        _cache(model, artifact=str(tmp_path))


def test_fewer_sinks_than_calibration_left_out_are_told(
    model: PreTrainedModel, artifact_of: ArtifactOf, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = artifact_of(sinks=8)
    with caplog.at_level(logging.WARNING):
        _cache(model, artifact=artifact, sink=8)
        assert not caplog.records
        for _ in range(2):
            _cache(model, artifact=artifact, sink=3)
    assert [record.getMessage() for record in caplog.records] == [
        "sink=3, and the aqua artifact was learned without the first 8 tokens of a sequence, which "
        "its predictors don't fit: pass sink=8 to keep them uncoded"
    ]


def test_options_alone_do_not_guess_the_bits_of_an_artifact(artifact_of: ArtifactOf) -> None:
    options = AquaConfig(artifact=artifact_of(bits=16))
    assert options.bits is None
    with pytest.raises(ValueError, match="take the options of a cache"):
        _ = options.row_bits
    assert options.replace(keep="rows").row_bits == options.exact().row_bits == 16


@pytest.mark.parametrize(
    ("bits", "told"), [(2, "codes have 2 bits a number"), (16, "rows are kept as they are")]
)
def test_the_model_card_says_what_serves(bits: int, told: str, artifact_of: ArtifactOf) -> None:
    card = (Path(artifact_of(bits=bits)) / "README.md").read_text()
    assert f"Unless the options name other `bits`, {told}" in card
