"""What a cache was given beside ids is compared: positions, token types, pictures."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import RetrievalCache
from hf_kvret.core.input_record import InputHash, InputRecord
from hf_kvret.core.token_record import PADDING
from hf_kvret.integration.prompt_check import check_origin
from hf_kvret.integration.requests import Request
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def llama() -> Any:
    return MODELS["llama"].build()


@pytest.fixture(scope="module")
def qwen2_vl() -> Any:
    return MODELS["qwen2_vl"].build()


def new_cache(model: PreTrainedModel) -> RetrievalCache:
    return hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)


def held_ids(cache: RetrievalCache) -> list[list[int]]:
    ids = cache.tokens.ids(cache.get_seq_length())
    assert ids is not None
    return ids.tolist()


def saved(cache: RetrievalCache, directory: Path, model: PreTrainedModel) -> RetrievalCache:
    cache.save_pretrained(directory)
    return type(cache).from_pretrained(directory, model.config)


def forked(cache: RetrievalCache, directory: Path, model: PreTrainedModel) -> RetrievalCache:
    return copy.deepcopy(cache)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def own_positions() -> torch.Tensor:
    positions = torch.arange(60)[None].clone()
    positions[:, 35:] += 200
    return positions


def test_other_positions_are_refused(llama: Any) -> None:
    ids = prompt(2, 60)
    positions = torch.arange(60).expand(2, -1).clone()
    positions[:, 35:] += 200
    cache = new_cache(llama)
    answer = llama.generate(ids, position_ids=positions, past_key_values=cache, **RUN)
    more = positions[:, -1:] + torch.arange(1, 5)
    again = torch.cat([positions, more], dim=1)
    llama.generate(answer, position_ids=again, past_key_values=cache.fork(), **RUN)
    again[1, 50] += 1
    with pytest.raises(ValueError, match="position_ids is not what the tokens 48 to 59"):
        llama.generate(answer, position_ids=again, past_key_values=cache, **RUN)


def test_inputs_of_a_call_that_failed_at_once_are_forgotten(llama: Any) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("no room")

    cache, positions = new_cache(llama), torch.arange(60)[None]
    answer = llama.generate(
        prompt(1, 50), position_ids=positions[:, :50], past_key_values=cache, **RUN
    )
    ids = torch.cat([answer, prompt(1, 6)], dim=1)
    wrong = positions.clone()
    wrong[:, 54:] += 100
    handle = llama.model.embed_tokens.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no room"):
        llama.generate(ids, position_ids=wrong, past_key_values=cache, **RUN)
    llama.generate(ids, position_ids=positions, past_key_values=cache, **RUN)


def test_tensors_of_generates_own_options_are_no_inputs(qwen2_vl: Any) -> None:
    cache, ends = new_cache(qwen2_vl), torch.tensor([126])
    answer = qwen2_vl.generate(prompt(1, 50), past_key_values=cache, eos_token_id=ends, **RUN)
    ids = torch.cat([answer, prompt(1, 6)], dim=1)
    qwen2_vl.generate(ids, past_key_values=cache, eos_token_id=ends - 1, **RUN)
    assert not cache.tokens.inputs.entries


def picture(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A picture of four patches, which one token stands for."""
    vision = model.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}


def with_picture(model: Any, length: int) -> dict[str, torch.Tensor]:
    ids = prompt(1, length)
    config = model.config
    ids[0, 5:8] = torch.tensor(
        [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
    )
    return {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int()}


@pytest.mark.parametrize("go_on", [forked, saved])
def test_another_picture_is_refused(
    qwen2_vl: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache]
) -> None:
    inputs = with_picture(qwen2_vl, 50)
    cache = new_cache(qwen2_vl)
    answer = qwen2_vl.generate(**inputs, **picture(qwen2_vl, 0), past_key_values=cache, **RUN)
    ids = torch.cat([answer, prompt(1, 20, salt=1)], dim=1)
    cache = go_on(cache, tmp_path, qwen2_vl)
    with pytest.raises(ValueError, match="pixel_values is not what the tokens 6 to 6"):
        qwen2_vl.generate(ids, **picture(qwen2_vl, 1), past_key_values=cache, **RUN)
    # Text alone goes on after pictures.
    qwen2_vl.generate(ids, past_key_values=cache, **RUN)
    pads = [
        PADDING if token == qwen2_vl.generation_config.pad_token_id else token for token in ids[0]
    ]
    assert held_ids(cache)[0][:74] == pads


def test_a_new_picture_for_new_tokens_is_not_refused(qwen2_vl: Any) -> None:
    first = with_picture(qwen2_vl, 50)
    cache = new_cache(qwen2_vl)
    answer = qwen2_vl.generate(**first, **picture(qwen2_vl, 0), past_key_values=cache, **RUN)
    ids = torch.cat([answer, with_picture(qwen2_vl, 20)["input_ids"]], dim=1)
    types = {"mm_token_type_ids": (ids == qwen2_vl.config.image_token_id).int()}
    both = [picture(qwen2_vl, seed) for seed in (0, 1)]
    pictures = {name: torch.cat([one[name] for one in both]) for name in both[0]}
    names: list[str] = []
    note = cache.tokens.inputs.note

    def noted(inputs: Any, *args: Any) -> None:
        names.extend(inputs)
        note(inputs, *args)

    cache.tokens.inputs.note = noted  # type: ignore[method-assign]
    try:
        qwen2_vl.generate(ids, **types, **pictures, past_key_values=cache, **RUN)
    except ValueError as error:
        # Of Qwen2-VL, which looks for places of both pictures among the new tokens.
        assert "past_key_values" not in str(error)
    assert "pixel_values" in names


@pytest.mark.parametrize("go_on", [forked, saved])
def test_a_cut_leaves_the_positions_in_front_of_it(
    llama: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache]
) -> None:
    cache = new_cache(llama)
    answer = llama.generate(
        prompt(1, 60), position_ids=own_positions(), past_key_values=cache, **RUN
    )
    cache.crop(-4)
    cache = go_on(cache, tmp_path, llama)
    ids = torch.cat([answer[:, :59], prompt(1, 10, salt=3)], dim=1)
    with pytest.raises(ValueError, match="position_ids is not what the tokens 32 to 47"):
        llama.generate(ids, position_ids=torch.arange(69)[None], past_key_values=cache, **RUN)
    positions = torch.cat([own_positions()[:, :59], 259 + torch.arange(10)[None]], dim=1)
    llama.generate(ids, position_ids=positions, past_key_values=cache, **RUN)


def test_positions_that_are_missing_now_are_counted(
    llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache, ids = new_cache(llama), prompt(1, 60)
    answer = llama.generate(ids, position_ids=own_positions(), past_key_values=cache, **RUN)
    again = torch.cat([answer, prompt(1, 9, salt=3)], dim=1)
    with pytest.raises(ValueError, match="position_ids is missing: the tokens 32 to 47"):
        llama.generate(again, past_key_values=cache, **RUN)
    cache = new_cache(llama)
    answer = llama.generate(ids, position_ids=torch.arange(60)[None], past_key_values=cache, **RUN)
    again = torch.cat([answer, prompt(1, 9, salt=3)], dim=1)
    llama.generate(again, past_key_values=cache, **RUN)
    assert not warnings_of(caplog)


def test_positions_that_can_not_be_counted_are_a_warning(
    qwen2_vl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three parts, which the model makes by itself."""
    cache, ids = new_cache(qwen2_vl), prompt(1, 50)
    positions = torch.arange(50)[None, None].expand(3, 1, -1)
    answer = qwen2_vl.generate(ids, position_ids=positions, past_key_values=cache, **RUN)
    again = torch.cat([answer, prompt(1, 9, salt=3)], dim=1)
    for _ in range(2):
        qwen2_vl.generate(again, past_key_values=cache.fork(), **RUN)
        again = again.clone()
    assert {text[:38] for text in warnings_of(caplog)} == {"past_key_values was filled with positi"}


@pytest.mark.parametrize("go_on", [forked, saved])
def test_a_picture_is_compared_as_long_as_its_token_is_there(
    qwen2_vl: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache]
) -> None:
    inputs, cache = with_picture(qwen2_vl, 50), new_cache(qwen2_vl)
    answer = qwen2_vl.generate(**inputs, **picture(qwen2_vl, 0), past_key_values=cache, **RUN)
    cache.crop(-13)
    cache = go_on(cache, tmp_path, qwen2_vl)
    ids = torch.cat([answer[:, :40], prompt(1, 20, salt=1)], dim=1)
    with pytest.raises(ValueError, match="pixel_values is not what the tokens 6 to 6"):
        qwen2_vl.generate(ids, **picture(qwen2_vl, 1), past_key_values=cache, **RUN)
    cache.crop(-(40 - 6))
    assert not [entry for entry in cache.tokens.inputs.entries if entry.name == "pixel_values"]


def test_of_several_pictures_any_row_of_known_ones_is_the_same() -> None:
    record, shape = InputRecord(), (1, 20)
    one, two, other = (torch.randn(4, 3) for _ in range(3))
    record.note({"pixel_values": one}, shape, 0, 20, None, (5, 1))
    record.note({"pixel_values": two}, shape, 20, 20, None, (25, 1))
    for value in (one, two, torch.cat([one, two]), torch.cat([one, two, one])):
        assert record.unknown_picture({"pixel_values": value}, (1, 50)) is None
    for value in (other, torch.cat([one, other]), one[:2], torch.cat([one, two, two[:1]])):
        entry = record.unknown_picture({"pixel_values": value}, (1, 50))
        assert entry is not None and entry.start == 5


def test_pictures_without_a_known_token_are_a_warning(
    llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model whose configuration has no name that we know."""
    cache, pictures = new_cache(llama), torch.randn(2, 3, 8, 8)
    answer = llama.generate(prompt(1, 50), past_key_values=cache, **RUN)
    cache.tokens.inputs.note({"pixel_values": pictures[:1]}, (1, 50), 0, 50, None)
    ids = torch.cat([answer, prompt(1, 20, salt=1)], dim=1)
    for picture, count in ((pictures[:1], 0), (pictures[1:], 1), (pictures, 1)):
        arguments = {"input_ids": ids, "pixel_values": picture}
        check_origin(Request(llama, arguments), cache, outlives=True)
        assert caplog.text.count("does not say which tokens stand for it") == count


def test_entries_of_whole_passes_are_compared_as_they_were_saved() -> None:
    """As of caches that were saved before there were blocks."""
    record = InputRecord()
    positions = torch.arange(40)[None]
    record.note({"position_ids": positions}, (1, 40), 0, 40, None)
    (entry,) = record.entries
    assert (len(entry.sha256), entry.block, entry.parts) == (3, 16, 1)
    # SHA-256 of "torch.int64 (40,)" and of 0 to 39 in eight bytes each.
    digest = "9b76764ce98e4b28d8b1f024499c8329eb018189260b9c5380ea2a7b7037208f"
    old = {"name": "position_ids", "start": 0, "count": 40, "by_token": True, "sha256": [digest]}
    loaded = InputRecord.from_json([old])
    assert loaded.difference({"position_ids": positions}, (1, 40), None) is None
    other = positions.clone()
    other[0, 30] += 1
    difference = loaded.difference({"position_ids": other}, (1, 40), None)
    assert difference is not None and (difference.start, difference.end) == (0, 40)
    loaded.crop(39)
    assert not loaded.entries
    good = record.to_json()[0]
    assert InputRecord.from_json([good]).entries == record.entries
    for name, value in (("block", 7), ("block", -1), ("sha256", ["00"] * 3), ("count", 0)):
        with pytest.raises(ValueError, match="input 'position_ids'"):
            InputHash.from_json({**good, name: value})
