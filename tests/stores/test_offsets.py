"""Keys with an offset: seen in every kind of channel, warned of, and never coded by ``"auto"``."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import AquaKVCache, FlatKVCache, ParisKVCache
from hf_kvret.contracts.store import FirstRows
from hf_kvret.methods.aqua.config import AquaConfig, LayerPlan
from hf_kvret.stores import PagedStore, QuantizedStore
from hf_kvret.stores.offsets import MOST_RATIO, offset_ratio, why_in_full
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

CPU = torch.device("cpu")
HEADS, DIM = 2, 64
SMALL: dict[str, Any] = {"top_k": 20, "sink": 2, "recent": 8, "flush": 4, "dense_below": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
# The length of the offset in each KV head. Keys of MODELS["qwen2"] are about 8 long.
NORM = 200.0


def constant(variant: str, heads: int, dim: int) -> torch.Tensor:
    """``[heads, dim]`` of length 1 in each head, in rotated halves as Llama has them."""
    half = dim // 2
    channels = {"slow pair": [half - 1, dim - 1], "fast pair": [0, half], "channel": [dim - 1]}
    offset = torch.zeros(heads, dim)
    if variant == "all channels":
        offset = torch.randn(heads, dim, generator=torch.Generator().manual_seed(3))
    elif variant == "one head":
        offset[0, channels["slow pair"]] = 1.0
    else:
        offset[:, channels[variant]] = 1.0
    return torch.nn.functional.normalize(offset, dim=1)


VARIANTS = ("slow pair", "fast pair", "channel", "all channels", "one head")
# What RoPE turns, so that a mean misses it.
TURNING = ("fast pair", "all channels")


def rotated(keys: torch.Tensor) -> torch.Tensor:
    """Keys ``[..., n, D]`` after RoPE at positions 0 to n - 1."""
    half = keys.shape[-1] // 2
    angles = torch.arange(keys.shape[-2])[:, None] * 1e4 ** -(torch.arange(half) / half)
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def drawn(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, length, DIM, generator=generator)


def ratio(keys: torch.Tensor, valid: torch.Tensor | None = None) -> float:
    result = offset_ratio(FirstRows(CPU, keys.nbytes, keys, valid), centered=False)
    assert result is not None
    return result


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [64, 200, 1500])
def test_an_offset_is_seen_in_any_channels_and_its_size_is_right(variant: str, length: int) -> None:
    norm = 100.0
    offset = constant(variant, HEADS, DIM)[:, None] * norm
    # The keys have 64 numbers of variance one.
    exact = 1 + norm**2 / DIM
    results = ratio(rotated(drawn(length) + offset))
    # A line of 5 frequencies takes some of the rest with it; half of a channel's offset turns away.
    assert exact / 2 <= results <= 2 * exact and results > MOST_RATIO


@pytest.mark.parametrize("length", [32, 33, 64, 200, 1500])
def test_keys_without_an_offset_have_a_small_ratio(length: int) -> None:
    assert 1.0 <= ratio(rotated(drawn(length))) < 3.0
    assert 1.0 <= ratio(drawn(length, batch=3)) < 3.0


@pytest.mark.parametrize("pad_side", ["left", "right"])
def test_padding_does_not_count(pad_side: str) -> None:
    keys, offset = drawn(100, batch=2), constant("slow pair", HEADS, DIM)[:, None] * 100.0
    padded = torch.full((2, HEADS, 60, DIM), 1e4)
    tensors = [padded, keys] if pad_side == "left" else [keys, padded]
    valid = torch.ones(2, 160, dtype=torch.bool)
    valid[:, :60] = pad_side == "right"
    valid[:, 100:] = pad_side == "left"
    assert ratio(torch.cat(tensors, dim=2), valid) == pytest.approx(ratio(keys), rel=1e-5)
    assert ratio(torch.cat(tensors, dim=2)) > 2 * ratio(keys)
    with_offset = [tensor + offset if tensor is keys else tensor for tensor in tensors]
    assert ratio(torch.cat(with_offset, dim=2), valid) > MOST_RATIO


def test_too_few_tokens_tell_nothing_and_a_sequence_of_them_does_not_count() -> None:
    assert offset_ratio(FirstRows(CPU, 0, drawn(31)), centered=False) is None
    none = torch.zeros(1, 100, dtype=torch.bool)
    assert offset_ratio(FirstRows(CPU, 0, drawn(100), none), centered=False) is None
    keys, valid = drawn(100, batch=2), torch.ones(2, 100, dtype=torch.bool)
    valid[1, 20:] = False
    assert ratio(keys, valid) == ratio(keys[:1])


def test_codes_zeros_and_rows_without_numbers_have_no_offset() -> None:
    assert offset_ratio(FirstRows(CPU, 10, None), centered=True) == 1.0
    assert offset_ratio(FirstRows(CPU, 10, drawn(50).to("meta")), centered=True) == 1.0
    assert ratio(torch.zeros(1, HEADS, 50, DIM)) == 1.0
    assert ratio(drawn(50).bfloat16()) == pytest.approx(ratio(drawn(50)), rel=0.02)
    assert ratio(torch.ones(1, HEADS, 64, DIM)) > 1e4 or math.isinf(ratio(torch.ones(1, 1, 64, 8)))


def qwen2(
    variant: str = "", layers: tuple[int, ...] = (0, 1), norm: float = NORM
) -> PreTrainedModel:
    """A small Qwen2 with this offset in the keys of some layers, and no other bias."""
    model = MODELS["qwen2"].build()
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for tensor in (attention.q_proj, attention.k_proj, attention.v_proj):
            tensor.bias.data.zero_()
        if variant and number in layers:
            bias = attention.k_proj.bias.data.view(2, -1)
            bias.copy_(constant(variant, *bias.shape) * norm)
    return model


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    results = [each for each in caplog.records if each.name == "hf_kvret.stores.offsets"]
    assert all(each.levelno == logging.WARNING for each in results)
    return [each.getMessage() for each in results]


def in_full(cache: Any) -> list[bool]:
    """Whether the rows of each layer are in full."""
    classes = [type(layer.kv.store) for layer in cache.retrieval_layers]
    assert set(classes) <= {PagedStore, QuantizedStore}
    return [cls is PagedStore for cls in classes]


@pytest.mark.parametrize("variant", VARIANTS)
def test_around_their_mean_keys_keep_what_turns(variant: str) -> None:
    keys = rotated(drawn(1500) + constant(variant, HEADS, DIM)[:, None] * 100.0)
    result = offset_ratio(FirstRows(CPU, keys.nbytes, keys), centered=True)
    assert result is not None and (result > MOST_RATIO) == (variant in TURNING)


def test_latents_are_judged_as_they_are_coded() -> None:
    keys = drawn(200) + constant("channel", HEADS, DIM)[:, None] * 100.0
    for value_in_key, why in ((0, ""), (32, "its keys have a large offset")):
        assert why_in_full(FirstRows(CPU, keys.nbytes, keys, value_in_key=value_in_key)) == why


@pytest.mark.parametrize("variant", sorted({*VARIANTS} - {*TURNING}))
def test_a_mean_takes_off_what_hardly_turns(
    variant: str, free: Any, caplog: pytest.LogCaptureFixture
) -> None:
    free(1)
    model, ids = qwen2(variant), prompt(1, 200)
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
    full = model.generate(ids, **options).logits[1]
    for store in ("higgs", "auto"):
        cache = FlatKVCache(model.config, store=store, **SMALL | {"top_k": 4096})
        # The second token is the first one that reads coded rows.
        logits = model.generate(ids, past_key_values=cache, **options).logits[1]
        assert in_full(cache) == [False, False]
        # Without the mean they are off by 0.8 or more, and by 0.36 where there is no offset.
        assert (logits - full).norm() < 0.5 * full.norm()
    assert not warnings_of(caplog)


@pytest.mark.parametrize("variant", TURNING)
def test_a_named_store_of_codes_warns_once_with_layer_ratio_and_remedy(
    variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen2(variant)
    cache = FlatKVCache(model.config, store="higgs", **SMALL)
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    assert in_full(cache) == [False, False]
    (message,) = warnings_of(caplog)
    assert "the keys of layer 0 have a large offset" in message
    assert "pass store='device' or bits=16" in message
    cache.reset()
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("store", ["device", "cpu", "higgs"])
def test_nothing_is_said_without_an_offset_or_without_codes(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen2("" if store == "higgs" else "all channels")
    cache = FlatKVCache(model.config, store=store, **SMALL)
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    uncoded = FlatKVCache(model.config, store="higgs", bits=16, **SMALL)
    qwen2("all channels").generate(prompt(1, 200), past_key_values=uncoded, **GREEDY)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("variant", TURNING)
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("chunk", [None, 48])
def test_auto_codes_no_layer_whose_keys_have_an_offset(
    variant: str,
    layers: tuple[int, ...],
    chunk: int | None,
    free: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    free(1)
    model, ids = qwen2(variant, layers), prompt(1, 200)
    cache = FlatKVCache(model.config, prefill_chunk=chunk, **SMALL)
    model.generate(ids, past_key_values=cache, **GREEDY | {"max_new_tokens": 1})
    assert in_full(cache) == [number in layers for number in (0, 1)]
    (message,) = warnings_of(caplog)
    assert f"the keys of layer {layers[0]}" in message and "store='auto' keeps" in message
    reason = cache.stats()["store_reason"]
    assert all((f"layer {number} is in full" in reason) == (number in layers) for number in (0, 1))
    if 0 in layers:
        # Not a bit of them is lost.
        plain = FlatKVCache(model.config, prefill_chunk=chunk, store="device", **SMALL)
        model.generate(ids, past_key_values=plain, **GREEDY | {"max_new_tokens": 1})
        assert torch.equal(cache.layers[0].keys[:], plain.layers[0].keys[:])


def test_auto_codes_a_qwen2_without_an_offset(free: Any, caplog: pytest.LogCaptureFixture) -> None:
    free(1)
    for model in (qwen2(), qwen2("all channels", norm=1.0)):
        cache = ParisKVCache(model.config, **SMALL | {"top_k": 32})
        model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
        assert in_full(cache) == [False, False] and cache.stats()["store"] == "higgs"
    assert not warnings_of(caplog)


def test_a_padded_batch_is_judged_by_its_tokens(free: Any) -> None:
    free(1)
    ids, mask = prompt(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, :150] = 0
    for variant, expected in (("", False), ("fast pair", True)):
        model = qwen2(variant, (1,))
        cache = FlatKVCache(model.config, **SMALL)
        model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert in_full(cache) == [False, expected]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kib", [1, 10**6])
def test_a_fork_and_a_loaded_cache_keep_what_was_in_full(
    layer: int, kib: int, free: Any, tmp_path: Path
) -> None:
    free(1)
    model, ids = qwen2("fast pair", (layer,)), prompt(1, 260)
    cache = FlatKVCache(model.config, **SMALL)
    model.generate(ids[:, :200], past_key_values=cache, **GREEDY | {"max_new_tokens": 1})
    cache.save_pretrained(tmp_path / "saved")
    fork = cache.fork()
    # Neither memory that became free nor none of it changes rows that are there.
    free(kib)
    loaded = FlatKVCache.from_pretrained(tmp_path / "saved", config=model.config)
    again = [loaded]
    loaded.save_pretrained(tmp_path / "again")
    again.append(FlatKVCache.from_pretrained(tmp_path / "again", config=model.config))
    texts = [model.generate(ids, past_key_values=each, **GREEDY) for each in (cache, fork, *again)]
    assert all(torch.equal(text, texts[0]) for text in texts)
    for each in (cache, fork, *again):
        assert in_full(each) == [number == layer for number in (0, 1)]
        assert each.stats()["store"] == "higgs"


def test_rows_in_full_that_memory_has_no_room_for_are_not_coded_on_loading(
    free: Any, tmp_path: Path
) -> None:
    free(10**6)
    model = qwen2("fast pair", (1,))
    cache = FlatKVCache(model.config, **SMALL)
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    assert in_full(cache) == [True, True]
    cache.save_pretrained(tmp_path / "saved")
    free(1)
    loaded = FlatKVCache.from_pretrained(tmp_path / "saved", config=model.config)
    assert in_full(loaded) == [False, True]


def test_auto_codes_nothing_of_which_it_has_seen_too_little(
    free: Any, caplog: pytest.LogCaptureFixture
) -> None:
    free(0)
    model = qwen2()
    cache = FlatKVCache(model.config, **SMALL)
    model.generate(prompt(1, 30), past_key_values=cache, **GREEDY)
    assert in_full(cache) == [True, True] and not warnings_of(caplog)
    assert "31 tokens or fewer" in cache.stats()["store_reason"]


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"backbone": "higgs"}, True),
        ({"backbone": "minmax"}, True),
        ({"backbone": "kivi", "group": 8}, False),
        ({"backbone": "higgs", "bits": 16}, False),
    ],
)
def test_aqua_warns_where_it_codes_keys_with_their_offset(
    options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen2("slow pair", (1,))
    sizes = {name: SMALL[name] for name in ("sink", "recent", "flush", "dense_below")}
    cache = AquaKVCache(model.config, predictor="none", **sizes, **options)
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    assert len(warnings_of(caplog)) == warns
    if warns:
        assert "layer 1" in warnings_of(caplog)[0] and "kivi" in warnings_of(caplog)[0]


@pytest.mark.parametrize(
    ("plan", "codes"),
    [
        ({"previous": None}, True),
        ({"previous": 0}, False),
        ({"previous": None, "bits": 16}, False),
        ({"previous": None, "artifact": SimpleNamespace(options={"anchor_mean": False})}, True),
        ({"previous": None, "artifact": SimpleNamespace(options={"anchor_mean": True})}, False),
    ],
)
def test_predictions_and_means_take_an_offset_off(plan: dict[str, Any], codes: bool) -> None:
    arguments = {"layer": 1, "bits": 2, "lowest_bits": 2, **plan}
    assert LayerPlan(AquaConfig(predictor="none"), **arguments).codes_offsets == codes
