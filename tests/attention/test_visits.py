"""A shelf in a call of ``generate``: prompts are found and put, and answers never suffer."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret import Shelf
from hf_kvret.models.versions import cache_of
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged

RUN: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
}
DOCUMENT = prompt(1, 200)


@pytest.fixture
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


def _asked(question: int) -> torch.Tensor:
    return torch.cat([DOCUMENT, prompt(1, 20, salt=question)], dim=1)


def _ask(
    model: Any, ids: torch.Tensor, folder: Any, method: str = "paris"
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The text, which is that of a call without a cache of ours, and what the cache says."""
    expected = model.generate(ids, **RUN).sequences
    options = {**COVERING_OPTIONS, "shelf": folder, "shelf_step": 100}
    result = model.generate(ids, cache_implementation=method, cache_config=options, **RUN)
    assert torch.equal(result.sequences, expected)
    stats = cache_of(result).stats()
    return result.sequences, stats


def test_a_document_is_read_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    for question, expected in ((1, 0), (2, 192), (3, 192)):
        _, stats = _ask(llama, _asked(question), tmp_path / "shelf")
        assert stats["from_shelf"] == expected
        assert stats["shelf_note"].startswith("not put: 28 new" if expected else "put as ")
    [entry] = Shelf(tmp_path / "shelf").entries()
    assert entry.tokens == 220, "the prompt, without the answer"


def test_a_talk_goes_on_with_another_object(llama: PreTrainedModel, tmp_path: Path) -> None:
    ids, stats = _ask(llama, _asked(1), tmp_path)
    for turn in (2, 3):
        length = ids.shape[1]
        ids = torch.cat([ids, prompt(1, 110, salt=turn)], dim=1)
        ids, stats = _ask(llama, ids, Shelf(tmp_path))
        assert 0.7 * length < stats["from_shelf"] < length
        assert stats["shelf_note"].startswith("put as ")
    [entry] = Shelf(tmp_path).entries()
    assert entry.tokens > 400, "the turns before it have left"


@pytest.mark.parametrize(
    ("name", "method"), [("gemma3", "paris"), ("qwen3_next", "flat"), ("llama", "h2o")]
)
def test_what_can_not_go_back_is_put_behind_its_prompt(
    name: str, method: str, tmp_path: Path
) -> None:
    model: Any = MODELS[name].build()
    _, stats = _ask(model, _asked(1), tmp_path, method)
    assert stats["shelf_note"].startswith("put as ")
    _, stats = _ask(model, torch.cat([_asked(1), prompt(1, 9)], dim=1), tmp_path, method)
    assert stats["from_shelf"] == 220
    _, stats = _ask(model, _asked(2), tmp_path, method)
    assert stats["from_shelf"] == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize(
    "more",
    [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 3}],
)
def test_several_answers_begin_with_one_prompt(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = MODELS[name].build()
    options = {**COVERING_OPTIONS, "shelf": tmp_path, "shelf_step": 100}
    # The prompt as a whole is on the shelf then, with one token behind it.
    for ids, expected in ((_asked(1), 0), (torch.cat([_asked(1), prompt(1, 9)], dim=1), 220)):
        run = {"inputs": ids, **RUN, **more}
        torch.manual_seed(0)
        wanted = model.generate(**run).sequences
        torch.manual_seed(0)
        result = model.generate(**run, cache_implementation="flat", cache_config=options)
        assert torch.equal(result.sequences, wanted)
        assert cache_of(result).stats()["from_shelf"] in (expected, expected and 192)
    [entry] = Shelf(tmp_path).entries()
    assert entry.tokens == 220


PADDED, MASK = ragged((70, 90))
ELSEWHERE = {
    "batch": ({"input_ids": prompt(2, 80)}, "2 prompts"),
    "drafts": ({"input_ids": prompt(1, 80), "prompt_lookup_num_tokens": 3}, "assisted"),
    "padding": ({"input_ids": PADDED[:1], "attention_mask": MASK[:1]}, "padding"),
    "positions": (
        {"input_ids": prompt(1, 80), "position_ids": torch.arange(5, 85)[None]},
        "position_ids",
    ),
    "zeros": ({"input_ids": prompt(1, 80), "position_ids": torch.zeros(1, 80).long()}, "position"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_prompt_that_it_can_not_hold_is_answered_without_it(
    case: str, llama: Any, tmp_path: Path
) -> None:
    inputs, why = ELSEWHERE[case]
    options = {**COVERING_OPTIONS, "shelf": tmp_path, "shelf_step": 64}
    run = {**inputs, **RUN}
    result = llama.generate(**run, cache_implementation="paris", cache_config=options)
    assert torch.equal(result.sequences, llama.generate(**run).sequences)
    assert why in cache_of(result).stats()["shelf_note"]
    assert not Shelf(tmp_path).entries()


def test_embeddings_are_answered_without_it(llama: Any, tmp_path: Path) -> None:
    embeds = llama.get_input_embeddings()(prompt(1, 80)).detach()
    options = {**COVERING_OPTIONS, "shelf": tmp_path}
    result = llama.generate(
        inputs_embeds=embeds, cache_implementation="paris", cache_config=options, **RUN
    )
    assert "no token ids" in cache_of(result).stats()["shelf_note"]


def test_padding_that_generate_sees_is_seen(llama: Any, tmp_path: Path) -> None:
    """Without a mask of the caller's, tokens that are the padding token are masked."""
    ids = DOCUMENT.clone()
    ids[0, 0] = llama.generation_config.pad_token_id
    _, stats = _ask(llama, ids, tmp_path)
    assert "padding" in stats["shelf_note"]


@pytest.mark.parametrize("rotation", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_answered_without_it(
    rotation: str, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    if rotation == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope = {"rope_type": rotation, "rope_theta": 1e4, **factors}
        rope["original_max_position_embeddings"] = 100
    config = MODELS["llama"].config()
    config.update({"rope_parameters": rope, "max_position_embeddings": 2048})
    model: Any = LlamaForCausalLM(config).eval()
    for question in (1, 2):
        _, stats = _ask(model, _asked(question), tmp_path)
        assert "reads a prompt as a whole" in stats["shelf_note"]


def test_a_shelf_that_can_not_be_read_costs_no_answer(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Shelf, "find", broken)
    _, stats = _ask(llama, _asked(1), tmp_path)
    assert stats["from_shelf"] == 0 and "Input/output" in stats["shelf_note"]


def test_a_window_that_the_answer_fills_is_put_before_it(tmp_path: Path) -> None:
    model: Any = MODELS["gemma3"].build()
    model.config.sliding_window = 128
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 128 if layer.self_attn.is_sliding else None
    _, stats = _ask(model, prompt(1, 126), tmp_path)
    assert stats["shelf_note"].startswith("put as ")


def test_a_full_disk_costs_no_answer(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_kvret.ParisKVCache, "save_pretrained", full)
    _, stats = _ask(llama, _asked(1), tmp_path)
    assert "not put: " in stats["shelf_note"] and "No space left" in stats["shelf_note"]
    assert not Shelf(tmp_path).entries()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shelf_step": 100}, ValueError, "without shelf"),
        ({"shelf": 3}, TypeError, "pass a folder"),
        ({"shelf": "s", "shelf_step": 0}, ValueError, "at least 1"),
        ({"shelf": "s", "shelf_step": True}, ValueError, "at least 1"),
        ({"shelf": "s", "top": 3}, ValueError, "top"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, llama: Any
) -> None:
    with pytest.raises(error, match=message):
        llama.generate(
            DOCUMENT, cache_implementation="paris", cache_config=options, max_new_tokens=2
        )
