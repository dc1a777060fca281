"""AQUA-KV with every kind of artifact: spaces, anchors, bits, and what is refused."""

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
from hf_kvret.methods.aqua.config import layer_plan
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged

from .aqua_caches import attached, make_cache, read, reference, rows_of, stores_of

ArtifactOf = Callable[..., str]


@pytest.mark.parametrize("options", [{}, {"space": "after"}, {"anchor_mean": True}], ids=str)
def test_every_artifact_decodes_to_what_calibration_says(
    options: dict[str, Any], llama: PreTrainedModel, artifact_of: ArtifactOf
) -> None:
    artifact = artifact_of("aqua", "llama", **options)
    cache = make_cache(llama, artifact)
    exact = make_cache(llama, artifact, bits=16)
    for each in (cache, exact):
        read(llama, each, prompt(2, 60))
    rotated = options.get("space") == "after"
    for store, other, expected in zip(
        stores_of(cache), stores_of(exact), reference(cache, artifact), strict=True
    ):
        for x, full in zip(rows_of(store), rows_of(other), strict=True):
            assert (x - full).square().sum() < 0.03 * full.square().sum()
        lent = store._reconstruct(0, len(store))
        torch.testing.assert_close([lent.keys, lent.values], expected, rtol=1e-5, atol=1e-5)
        turned = torch.equal(rows_of(store)[0], lent.keys.unflatten(2, (2, -1)).transpose(1, 2))
        assert turned == rotated
    assert all(len(store._positions) == 0 for store in stores_of(cache)) == rotated


@pytest.mark.parametrize("name", ["smollm3", "glm", "gpt2", "gpt_oss"])
def test_every_kind_of_rotation_is_undone_and_redone(name: str, artifact_of: ArtifactOf) -> None:
    """Layers without RoPE, a partial and interleaved one, learned positions, YaRN; padded rows."""
    model = attached(MODELS[name].build())
    caches = [make_cache(model, artifact_of("aqua", name), bits=bits) for bits in (4, 16)]
    ids, mask = ragged((60, 41))
    for cache in caches:
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        read(model, cache, ids, attention_mask=mask, position_ids=places)
    valid = mask[:, None, :52, None]
    for coded, full in zip(*map(stores_of, caches), strict=True):
        for x, expected in zip(rows_of(coded), rows_of(full), strict=True):
            missed = ((x - expected) * valid).square().sum()
            assert missed < 0.03 * (expected * valid).square().sum()


def test_the_plan_of_layers(artifact_of: ArtifactOf) -> None:
    artifact = artifact_of("aqua", "smollm3", bits=2)

    def plans(**changes: Any) -> list[tuple[int, int | None, bool]]:
        options = AquaConfig(artifact=artifact, **changes)
        made = [layer_plan(options, layer) for layer in range(3)]
        return [(plan.bits, plan.previous, plan.predicts_next) for plan in made]

    assert plans() == [(4, None, True), (2, 0, True), (2, 1, False)]
    assert plans(bits=3, first_bits=16) == [(16, None, True), (3, 0, True), (3, 1, False)]
    assert plans(bits=16) == 3 * [(16, None, False)]
    assert plans(bits=16, first_bits=4)[0] == (4, None, False)
    with pytest.raises(ValueError, match="has no layer 7"):
        layer_plan(AquaConfig(artifact=artifact), 7)
    with pytest.raises(ValueError, match="name no artifact"):
        layer_plan(AquaConfig(), 0)


def test_artifacts_of_older_versions_serve(artifact_of: ArtifactOf, tmp_path: Path) -> None:
    """It may have more anchors than the first layer, and names what could be chosen then."""
    model = attached(MODELS["smollm3"].build())
    whole = CalibrationArtifact.from_pretrained(artifact_of("aqua", "smollm3"))
    options = json.loads(json.dumps(whole.options))
    options |= {"backbone": "higgs", "predictor": "linear", "predictor_bits": 16, "rank": 256}
    options |= {"key_inputs": "keys", "value_inputs": "keys+values", "anchor_every": 2}
    options["layers"]["2"] |= {"role": "anchor", "previous": None}
    tensors = {
        name: x
        for name, x in whole.tensors.items()
        if not name.startswith(("layers.2.key", "layers.2.value"))
    }
    old = dataclasses.replace(whole, options=options, tensors=tensors)
    old.save_pretrained(tmp_path / "old")
    cache = make_cache(model, str(tmp_path / "old"))
    read(model, cache, prompt(1, 60))
    assert [store.plan.previous for store in stores_of(cache)] == [None, 0, None]
    assert [store.plan.predicts_next for store in stores_of(cache)] == [True, False, False]
    for name, value in (("backbone", "minmax"), ("predictor", "mlp"), ("predictor_bits", 4)):
        other = dataclasses.replace(old, options={**options, name: value})
        other.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"has {name}={value!r}, and this version reads"):
            make_cache(model, str(tmp_path / name))


def _bare(model: PreTrainedModel, **options: Any) -> AquaKVCache:
    """A cache without bits where ``options`` have none."""
    return AquaKVCache(model.config, **{**COVERING_OPTIONS, **options})


def _bits(model: PreTrainedModel, cache: AquaKVCache) -> list[int]:
    """Bits of each layer, once tokens are cold."""
    read(model, cache, prompt(1, 60))
    return [layer["bits"] for layer in cache.stats()["layers"]]


def test_bits_that_are_asked_for_win(llama: PreTrainedModel, artifact_of: ArtifactOf) -> None:
    """Without an artifact there are two."""
    for learned, asked, expected in (
        *((2, None, [4, 2]), (3, None, [4, 3]), (16, None, [16, 16])),
        *((16, 2, [4, 2]), (2, 16, [16, 16]), (None, None, [2, 2])),
    ):
        options: dict[str, Any] = {} if asked is None else {"bits": asked}
        if learned is None:
            options["predictor"] = "none"
        else:
            options["artifact"] = artifact_of("aqua", "llama", bits=learned)
        cache = _bare(llama, **options)
        assert cache.options.bits == cache.options.row_bits == expected[1]
        assert _bits(llama, cache) == expected


def test_a_saved_cache_keeps_its_bits_and_goes_on_with_its_own_artifact_only(
    llama: PreTrainedModel, artifact_of: ArtifactOf, tmp_path: Path
) -> None:
    artifact = artifact_of("aqua", "llama", bits=16)
    for asked, bits in (({"bits": 2}, 2), ({}, 16)):
        cache, folder = _bare(llama, artifact=artifact, **asked), tmp_path / str(bits)
        _bits(llama, cache)
        cache.save_pretrained(folder)
        assert json.loads((folder / "cache.json").read_text())["options"]["bits"] == bits
        loaded = AquaKVCache.from_pretrained(folder, llama.config, artifact=artifact)
        assert loaded.options == cache.options == cache.fork().options
        assert loaded.stats()["layers"][1]["bits"] == bits
        assert torch.equal(*(read(llama, each, prompt(1, 1, salt=1)) for each in (cache, loaded)))
    with pytest.raises(ValueError, match="bits: not an option that a filled cache can change"):
        AquaKVCache.from_pretrained(tmp_path / "2", llama.config, artifact=artifact, bits=4)
    with pytest.raises(ValueError, match="saved with another artifact"):
        other = artifact_of("aqua", "llama", seed=1)
        AquaKVCache.from_pretrained(tmp_path / "2", llama.config, artifact=other)


def test_fewer_sinks_than_calibration_left_out_are_warned_of(
    llama: PreTrainedModel, artifact_of: ArtifactOf, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = artifact_of("aqua", "llama", sinks=8)
    with caplog.at_level(logging.WARNING):
        _bare(llama, artifact=artifact, sink=8)
        assert not caplog.records
        for _ in range(2):
            _bare(llama, artifact=artifact, sink=3)
    assert [record.getMessage() for record in caplog.records] == [
        "sink=3, and the aqua artifact was learned without the first 8 tokens of a sequence, which "
        "its predictors don't fit: pass sink=8 to keep them uncoded"
    ]
