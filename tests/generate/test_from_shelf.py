"""A shelf in a call of ``generate``: prompts are found and put, and answers never suffer."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_kvret
from hf_kvret import Shelf
from hf_kvret.models.versions import cache_of
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
DOCUMENT = prompt(1, 200)


def _asked(question: int) -> torch.Tensor:
    return torch.cat([DOCUMENT, prompt(1, 20, salt=question)], dim=1)


def _call(folder: Any, method: str = "paris", step: int = 100, **options: Any) -> dict[str, Any]:
    """Arguments of ``generate`` for a cache whose prompts go onto a shelf."""
    options = {**COVERING_OPTIONS, "shelf": folder, "shelf_step": step, **options}
    return {"cache_implementation": method, "cache_config": options}


def _ask(
    model: Any, ids: torch.Tensor, folder: Any, method: str = "paris"
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The text, which is that of a call without a cache of ours, and what the cache says."""
    result = model.generate(ids, **_call(folder, method), **RUN)
    assert torch.equal(result.sequences, model.generate(ids, **RUN).sequences)
    return result.sequences, cache_of(result).stats()


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
    ("name", "method", "length", "chunk"), [("llama", "paris", 65, None), ("lfm2", "lrqk", 128, 16)]
)
def test_the_same_prompt_is_found_whatever_its_length(
    name: str, method: str, length: int, chunk: int | None, tmp_path: Path
) -> None:
    model: Any = MODELS[name].build()
    ids, call = prompt(1, length), _call(tmp_path, method, 1, prefill_chunk=chunk)
    expected = model.generate(ids, **RUN).sequences
    for turn in range(3):
        result = model.generate(ids, **call, **RUN)
        assert torch.equal(result.sequences, expected)
        assert (cache_of(result).from_shelf >= 64) == (turn > 0)
    assert len(Shelf(tmp_path).entries()) == 1


class _Stops(BaseStreamer, LogitsProcessor):
    """Breaks an answer off at its first token, or at a later one."""

    def __init__(self, error: BaseException, tokens: int) -> None:
        self.error, self.left = error, tokens

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(ids)
        return scores

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error

    def end(self) -> None:
        """Nothing waits for it."""


@pytest.mark.parametrize(
    ("name", "method", "how", "error", "tokens"),
    [
        # The first that a streamer gets is the prompt.
        ("llama", "paris", "streamer", KeyboardInterrupt(), 2),
        ("qwen3_next", "flat", "logits_processor", ValueError(), 3),
    ],
)
def test_a_prompt_is_kept_where_its_answer_breaks_off(
    name: str, method: str, how: str, error: BaseException, tokens: int, tmp_path: Path
) -> None:
    model: Any = MODELS[name].build()
    call = {**_call(tmp_path, method), "do_sample": False}
    stops: Any = _Stops(error, tokens)
    given = {how: stops if how == "streamer" else [stops]}
    with pytest.raises(type(error)):
        # The prompt goes onto the shelf before an answer that may take hours.
        model.generate(_asked(1), **call, **given, max_new_tokens=10**6)
    result = model.generate(_asked(1), **call, max_new_tokens=1, return_dict_in_generate=True)
    assert cache_of(result).from_shelf >= 213


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"num_beams": 3, "num_return_sequences": 2}),
        ("gemma3", {"do_sample": True, "num_return_sequences": 3}),
    ],
)
def test_several_answers_begin_with_one_prompt(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = MODELS[name].build()
    for ids, expected in ((_asked(1), 0), (torch.cat([_asked(1), prompt(1, 9)], dim=1), 220)):
        run = {"inputs": ids, **RUN, **more}
        torch.manual_seed(0)
        wanted = model.generate(**run).sequences
        torch.manual_seed(0)
        result = model.generate(**run, **_call(tmp_path, "flat"))
        assert torch.equal(result.sequences, wanted)
        assert cache_of(result).stats()["from_shelf"] == expected
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
    "embeddings": ({"inputs_embeds": torch.randn(1, 80, 64)}, "no token ids"),
}


@pytest.mark.parametrize(("inputs", "why"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_prompt_that_it_can_not_hold_is_answered_without_it(
    inputs: dict[str, Any], why: str, llama: Any, tmp_path: Path
) -> None:
    run = {**inputs, **RUN}
    result = llama.generate(**run, **_call(tmp_path, step=64))
    assert torch.equal(result.sequences, llama.generate(**run).sequences)
    assert why in cache_of(result).stats()["shelf_note"]
    assert not Shelf(tmp_path).entries()


def test_hidden_states_are_those_of_the_whole_prompt(llama: Any, tmp_path: Path) -> None:
    _ask(llama, DOCUMENT, tmp_path)
    llama.generation_config.update(output_hidden_states=True)
    call = {**_call(tmp_path), "max_new_tokens": 2, "do_sample": False}
    result = llama.generate(DOCUMENT, **call, return_dict_in_generate=True)
    assert result.hidden_states[0][0].shape[1] == DOCUMENT.shape[1]
    assert "output_hidden_states asks" in cache_of(result).shelf_note
    # Nobody gets them here, so the shelf is used.
    lengths: list[int] = []
    embed = llama.get_input_embeddings()
    embed.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    llama.generate(DOCUMENT, **call)
    assert lengths == [16, 1, 1]  # 16 tokens are read again, as rows from a file are compared


def test_rotations_that_depend_on_the_length_are_answered_without_it(tmp_path: Path) -> None:
    config = MODELS["llama"].config()
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config.update({"rope_parameters": rope, "max_position_embeddings": 2048})
    _, stats = _ask(LlamaForCausalLM(config).eval(), _asked(1), tmp_path)
    assert "reads a prompt as a whole" in stats["shelf_note"]


@pytest.mark.parametrize("fault", ["others", "a file", "no right"])
def test_a_place_where_nothing_can_be_put_is_refused_before_the_first_pass(
    fault: str, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    if fault == "others":
        place.mkdir()
        place.chmod(0o775)
    elif fault == "a file":
        place.write_text("")
        place /= "shelf"
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    passes: list[int] = []
    llama.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"others may write|nothing can be written|can.t be made"):
        llama.generate(_asked(1), **_call(place), **RUN)
    assert not passes
    # Who only reads from a shelf needs no right to write.
    assert "not put" in _ask(llama, prompt(1, 20), place)[1]["shelf_note"]


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(Shelf, "find", errno.EIO), (hf_kvret.ParisKVCache, "save_pretrained", errno.ENOSPC)],
)
def test_a_disk_that_fails_costs_no_answer(
    owner: Any, name: str, number: int, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, failing)
    _, stats = _ask(llama, _asked(1), tmp_path)
    assert stats["from_shelf"] == 0 and os.strerror(number) in stats["shelf_note"]
    assert not Shelf(tmp_path).entries()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shelf_step": 100}, ValueError, "without shelf"),
        ({"shelf": 3}, TypeError, "pass a folder"),
        ({"shelf": "s", "shelf_step": 0}, ValueError, "at least 1"),
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
