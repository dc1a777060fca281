"""Tokens and other inputs of a cache: recorded as they come, followed through edits, compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hf_kvret
from hf_kvret import RetrievalCache
from hf_kvret.generate import provenance
from hf_kvret.saved.token_record import UNKNOWN
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.modes import MODES
from hf_kvret.testing.scenario import prompt, ragged

from ..model_types.small import small_model
from ..pictures import ask, next_turn, picture_model, picture_prompt, with_types
from .filled_caches import RUN, as_it_is, forked, held_ids, new_cache, saved


@pytest.mark.parametrize(("go_on", "slot"), [(as_it_is, 0), (forked, 31), (saved, 52)])
def test_another_document_is_refused_at_the_first_token_that_differs(
    llama: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache], slot: int
) -> None:
    cache = new_cache(llama)
    answer = llama.generate(prompt(2, 50), past_key_values=cache, **RUN)
    cache = go_on(cache, tmp_path, llama)
    ids = torch.cat([answer, prompt(2, 20, salt=1)], dim=1)
    other = ids.clone()
    other[1, slot] += 1
    other[0, slot + 5 :] = 9
    wrong = f"row 1 at position {slot} it has id {other[1, slot]}, the cache holds {ids[1, slot]}"
    if slot + 5 < 53:
        assert held_ids(cache) == answer[:, :-1].tolist()
    with pytest.raises(ValueError, match=wrong):
        llama.generate(other, past_key_values=cache, **RUN)
    # Nothing was done yet, and the remedy works.
    expected = llama.generate(ids, **RUN)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **RUN), expected)


def test_the_cut_that_the_message_names_makes_the_prompt_fit(llama: Any) -> None:
    cache, other = new_cache(llama), prompt(1, 60)
    llama.generate(other[:, :50], past_key_values=cache, **RUN)
    other[0, 40:] = prompt(1, 20, salt=3)
    with pytest.raises(ValueError, match=r"cache\.crop\(-13\)"):
        llama.generate(other, past_key_values=cache, **RUN)
    cache.crop(-13)
    expected = llama.generate(other, **RUN)
    assert torch.equal(llama.generate(other, past_key_values=cache, **RUN), expected)


def test_a_forgotten_origin_is_not_compared(llama: Any) -> None:
    cache = new_cache(llama)
    llama.generate(prompt(1, 50), past_key_values=cache, **RUN)
    cache.forget_origin()
    llama.generate(prompt(1, 70, salt=1), past_key_values=cache, **RUN)
    assert held_ids(cache)[0][:53] == [UNKNOWN] * 53
    assert held_ids(cache)[0][53:70] == prompt(1, 70, salt=1)[0, 53:].tolist()
    assert cache.identity is None


@pytest.fixture(scope="module")
def without_positions() -> Any:
    """A model in which a token's first key is the same wherever it stands: nothing is rotated."""
    model = MODELS["llama"].build()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()
    hf_kvret.attach(model)
    return model


def keys_of_tokens(model: Any) -> torch.Tensor:
    """``[vocabulary, Hkv * D]`` keys of the first layer."""
    layer = model.model.layers[0]
    with torch.no_grad():
        return layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens.weight))


# Rows that move, come, go and are read again; the others do less of it.
TELLING = {
    *("beams_ragged", "prompt_lookup", "chunked_prefill", "second_turn_ragged", "inputs_embeds"),
    *("reset_other_batch", "crop_deep", "batch_select_indices", "prefix_reuse"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in TELLING else pytest.mark.slow) for x in MODES]
)
def test_the_record_is_what_the_first_layer_holds(without_positions: Any, name: str) -> None:
    """Through beams, drafts, crops, forks, and rows that come and go."""
    model = without_positions
    options = {"sink": 0, "recent": 1024, "dense_below": 4096}
    outcome = MODES[name].run(model, lambda: hf_kvret.FlatKVCache(model.config, **options))
    keys = keys_of_tokens(model)
    for cache in outcome.caches:
        assert isinstance(cache, RetrievalCache)
        window = cache.retrieval_layers[0].kv.window
        held = window.keys[:, :, : cache.get_seq_length()].transpose(1, 2).flatten(2)
        ids = torch.tensor(held_ids(cache))
        assert held.shape[:2] == ids.shape
        expected = torch.cdist(held, keys.expand(len(held), -1, -1)).argmin(dim=-1)
        assert torch.equal(ids[ids >= 0], expected[ids >= 0])
        unknown = int((ids == UNKNOWN).sum())
        assert unknown == (120 if name == "inputs_embeds" else 0)


def test_ids_are_recorded_inside_inference_mode_and_outside(llama: Any, tmp_path: Path) -> None:
    hf_kvret.attach(llama)
    cache, ids = new_cache(llama), prompt(1, 40)
    with torch.inference_mode():
        llama(ids[:, :30], past_key_values=cache)
    with torch.no_grad():
        llama(ids[:, 30:35], past_key_values=cache)
    twin = cache.fork()
    with torch.inference_mode():
        twin.batch_repeat_interleave(2)
        llama(ids[:, 35:].repeat(2, 1), past_key_values=twin)
    assert held_ids(cache) == ids[:, :35].tolist()
    assert held_ids(twin) == ids.repeat(2, 1).tolist()
    cache.save_pretrained(tmp_path)
    for inside in (True, False):
        with torch.inference_mode():
            loaded = type(cache).from_pretrained(tmp_path, llama.config)
        with torch.inference_mode(inside), torch.no_grad():
            llama(ids[:, 35:36], past_key_values=loaded)
        assert held_ids(loaded) == ids[:, :36].tolist()


def test_ids_of_many_steps_are_written_before_anybody_asks(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_MOST_PENDING", 6)
    hf_kvret.attach(llama)
    cache, ids = new_cache(llama), prompt(1, 50)
    with torch.inference_mode():
        for part in ids.split([30, *[1] * 20], dim=1):
            llama(part, past_key_values=cache)
            assert len(cache.tokens.pending) <= 6
            # The caller's tensor may be another step's next.
            part.zero_()
    assert held_ids(cache) == prompt(1, 50).tolist()


def test_tokens_by_hand_are_unknown_and_never_refused(llama: Any) -> None:
    hf_kvret.attach(llama)
    cache, ids = new_cache(llama), prompt(1, 60)
    with torch.no_grad():
        llama(ids[:, :20], past_key_values=cache)
        llama(inputs_embeds=llama.get_input_embeddings()(ids[:, 20:30]), past_key_values=cache)
        llama(ids[:, 30:40], past_key_values=cache)
    assert held_ids(cache)[0] == [*ids[0, :20], *[UNKNOWN] * 10, *ids[0, 30:40]]
    twin = cache.fork()
    answer = llama.generate(ids, past_key_values=twin, **RUN)
    again = torch.cat([answer, prompt(1, 20, salt=1)], dim=1)
    llama.generate(again, past_key_values=twin, **RUN)
    wrong = ids.clone()
    wrong[0, 25] = wrong[0, 39] = 9
    with pytest.raises(ValueError, match="at position 39"):
        llama.generate(wrong, past_key_values=cache, **RUN)


def test_a_failed_pass_records_nothing(llama: Any) -> None:
    hf_kvret.attach(llama)
    cache, ids = new_cache(llama), prompt(1, 40)
    with torch.no_grad():
        llama(ids[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="embed"):
            llama(ids, inputs_embeds=torch.zeros(1, 3, 64), past_key_values=cache)
        with pytest.raises(IndexError):
            llama(torch.full((1, 5), 10**6), past_key_values=cache)
        llama(ids[:, 20:], past_key_values=cache)
    assert held_ids(cache) == ids.tolist()


def test_rows_that_saw_later_tokens_do_not_outlive_them() -> None:
    model, ids = small_model("paligemma"), prompt(1, 150)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS, on_divergence="crop")
    answer = model.generate(ids, past_key_values=cache, **RUN)
    other = torch.cat([ids[:, :60], prompt(1, 100, salt=1)], dim=1)
    logits = {"output_logits": True, "return_dict_in_generate": True}
    want = model.generate(other, **RUN, **logits).logits[0]
    got = model.generate(other, past_key_values=cache, **RUN, **logits).logits[0]
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert cache.went_back == answer.shape[1] - 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("common", "tokens"), [(40, 50), (40, 1), (0, 50)])
def test_rows_of_a_pass_that_breaks_behind_the_last_layer_are_known(
    llama: Any, monkeypatch: pytest.MonkeyPatch, error: type, common: int, tokens: int
) -> None:
    cache, ids = new_cache(llama), prompt(1, 50 + tokens)
    cache.options = cache.options.replace(on_divergence="crop")
    if tokens == 1:
        llama.generate(ids[:, :50], past_key_values=cache, max_new_tokens=1)
    with monkeypatch.context() as patched, pytest.raises(error):
        patched.setattr(llama.lm_head, "forward", Mock(side_effect=error))
        llama.generate(ids, past_key_values=cache, **RUN)
    assert held_ids(cache) == ids.tolist()
    other = torch.cat([ids[:, :common], prompt(1, 80, salt=2)], dim=1)
    expected = llama.generate(other, **RUN)
    assert torch.equal(llama.generate(other, past_key_values=cache, **RUN), expected)
    assert cache.went_back == ids.shape[1] - common


@pytest.mark.parametrize("kind", ["error", "crop"])
@pytest.mark.parametrize("same", [True, False])
def test_a_first_pass_that_breaks_between_layers_is_told_or_dropped(
    llama: Any, kind: str, same: bool
) -> None:
    cache, ids = new_cache(llama), prompt(1, 50)
    cache.options = cache.options.replace(on_divergence=kind)
    hook = llama.model.layers[1].register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llama.generate(ids, past_key_values=cache, **RUN)
    hook.remove()
    head = ids if same else prompt(1, 50, salt=1)
    other = torch.cat([head, prompt(1, 20, salt=2)], dim=1)
    if kind == "error":
        words = "different numbers of tokens" if same else "prompt differs"
        with pytest.raises((RuntimeError, ValueError), match=words):
            llama.generate(other, past_key_values=cache, **RUN)
        cache.crop(0)
    expected = llama.generate(other, **RUN)
    assert torch.equal(llama.generate(other, past_key_values=cache, **RUN), expected)


def test_a_refused_pass_of_other_sequences_forgets_no_ids(llama: Any) -> None:
    cache, ids = new_cache(llama), prompt(1, 50)
    llama.generate(ids, past_key_values=cache, **RUN)
    held = held_ids(cache)
    with torch.no_grad(), pytest.raises(ValueError, match="holds a batch of 1"):
        llama(prompt(2, 5), past_key_values=cache)
    assert held_ids(cache) == held
    with pytest.raises(ValueError, match="differs from the tokens"):
        llama.generate(prompt(1, 60, salt=1), past_key_values=cache, **RUN)


def test_a_pass_behind_one_that_broke_off_at_once_has_its_own_ids(llama: Any) -> None:
    hf_kvret.attach(llama)
    cache, other = new_cache(llama), prompt(1, 50, salt=1)
    embeddings = llama.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            llama(prompt(1, 50), past_key_values=cache)
        hook.remove()
        llama.model(other, past_key_values=cache)
    assert held_ids(cache) == other.tolist()


@pytest.mark.parametrize(("go_on", "masked"), [(as_it_is, True), (forked, False), (saved, True)])
def test_tokens_in_place_of_padding_are_refused(
    llama: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache], masked: bool
) -> None:
    ids, mask = ragged((40, 30))
    cache = new_cache(llama)
    answer = llama.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)
    cache = go_on(cache, tmp_path, llama)
    other = torch.cat([answer, prompt(2, 9, salt=1)], dim=1)
    other[1, :10] = 77
    given = {"attention_mask": torch.ones_like(other)} if masked else {}
    with pytest.raises(ValueError, match="row 1 at position 0 it has id 77, the cache holds "):
        llama.generate(other, past_key_values=cache, **given, **RUN)
    # The remedy: with the mask of the conversation, what stands there does not matter.
    mask = torch.cat([mask, torch.ones(2, 13).long()], dim=1)
    expected = llama.generate(other, attention_mask=mask, **RUN)
    result = llama.generate(other, attention_mask=mask, past_key_values=cache, **RUN)
    assert torch.equal(result, expected)


def test_padding_that_generate_finds_by_itself_is_padding(llama: Any) -> None:
    """Without a mask, ``generate`` masks padding tokens."""
    ids, mask = ragged((40, 30))
    pad = llama.generation_config.pad_token_id
    ids = ids.masked_fill(mask == 0, pad)
    cache = new_cache(llama)
    answer = llama.generate(ids, past_key_values=cache, **RUN)
    again = torch.cat([answer, prompt(2, 9, salt=1)], dim=1)
    twin = cache.fork()
    twin.batch_repeat_interleave(2)
    llama.generate(again, past_key_values=twin, num_beams=2, **RUN)
    again[1, 3] = 77
    with pytest.raises(ValueError, match="row 1 at position 3 it has id 77, the cache holds 0"):
        llama.generate(again, past_key_values=cache, **RUN)


def test_a_prompt_of_other_embeddings_is_refused(llama: Any, tmp_path: Path) -> None:
    cache, embed = new_cache(llama), llama.get_input_embeddings()
    first = llama.generate(inputs_embeds=embed(prompt(1, 50)), past_key_values=cache, **RUN)
    cache = saved(cache, tmp_path, llama)
    other = embed(prompt(1, 70, salt=1))
    with pytest.raises(ValueError, match="inputs_embeds is not what the tokens 0 to 49 in"):
        llama.generate(inputs_embeds=other, past_key_values=cache, **RUN)
    same = torch.cat([embed(prompt(1, 50)), embed(first), other[:, 54:]], dim=1)
    answer = llama.generate(inputs_embeds=same, past_key_values=cache, **RUN)
    assert torch.equal(answer, llama.generate(inputs_embeds=same, **RUN))


@pytest.fixture(scope="module")
def vision() -> Any:
    return picture_model("glm_ocr")


@pytest.fixture(scope="module")
def shown(vision: Any) -> dict[str, torch.Tensor]:
    """A prompt with a picture."""
    return picture_prompt(vision, 1, [(4, 4)])


def ask_of_another_picture(model: Any, inputs: Any, shown: Any, cache: Any) -> None:
    """Ask with the ids of ``inputs``, and another picture than ``shown`` has."""
    other = {"pixel_values": shown["pixel_values"] + 1, "image_grid_thw": shown["image_grid_thw"]}
    ask(model, {**inputs, **other}, cache)


ANOTHER = "pixel_values is not what the tokens 0 to 70 in past_key_values were filled with"


@pytest.mark.parametrize("go_on", [forked, saved])
def test_another_picture_is_refused(
    vision: Any, shown: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache]
) -> None:
    cache = new_cache(vision)
    second = next_turn(vision, shown, ask(vision, shown, cache))
    cache = go_on(cache, tmp_path, vision)
    with pytest.raises(ValueError, match=ANOTHER):
        ask_of_another_picture(vision, second, shown, cache)
    # Text alone goes on after pictures.
    ask(vision, second, cache)
    length = second["input_ids"].shape[1]
    assert held_ids(cache)[0][:length] == second["input_ids"][0].tolist()


def test_a_new_picture_for_new_tokens_is_not_refused(vision: Any, shown: Any) -> None:
    cache, more = new_cache(vision), picture_prompt(vision, 2, [(4, 4)])
    ids = torch.cat([ask(vision, shown, cache).ids, more["input_ids"]], dim=1)
    both = with_types(vision, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for name in ("pixel_values", "image_grid_thw"):
        both[name] = torch.cat([shown[name], more[name]])
    length = cache.get_seq_length()
    try:
        ask(vision, both, cache)
    except ValueError as error:
        # The model raises this: it looks for places of both pictures among the new tokens.
        assert "past_key_values" not in str(error)
    assert [one.start for one in cache.tokens.passes] == [0, length]


def test_a_picture_is_compared_behind_a_cut_to_its_pass(vision: Any, shown: Any) -> None:
    cache = new_cache(vision)
    hf_kvret.attach(vision)
    with torch.no_grad():
        vision(**shown, past_key_values=cache)
        vision(prompt(1, 9), past_key_values=cache)
    cache.crop(-9)
    again = {"input_ids": torch.cat([shown["input_ids"], prompt(1, 20, salt=1)], dim=1)}
    with pytest.raises(ValueError, match=ANOTHER):
        ask_of_another_picture(vision, again, shown, cache)
    cache.crop(-1)
    assert not cache.tokens.passes


def test_a_call_that_failed_at_once_leaves_no_digest(vision: Any, shown: Any) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("no room")

    cache = new_cache(vision)
    handle = vision.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no room"):
        ask(vision, shown, cache)
    ask_of_another_picture(vision, shown, shown, cache)
    assert len(cache.tokens.passes) == 1
