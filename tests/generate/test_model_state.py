"""What a model keeps of a conversation outside the cache: every conversation gets its own."""

import gc
import inspect
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

import hf_kvret
from hf_kvret.commands.models import default_type, type_names
from hf_kvret.models import kept_state
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import LOGIT_TOLERANCE

from ..pictures import (
    COVER,
    NEW_TOKENS,
    Conversation,
    Text,
    ask,
    assert_same,
    flat,
    next_turn,
    padded,
    picture_model,
    picture_prompt,
)

FEW = ("glm_ocr",)
# These need inputs of other forms than a grid of patches.
OTHER_FORMS = {"minicpmv4_7": "its pictures are tiles"}


def shifting_types() -> list[str]:
    """All types whose sources set a shift of positions; found without an import of any model."""
    folder = Path(transformers.__file__).parent / "models"
    return [
        name
        for name in type_names()
        for path in (folder / model_type_to_module_name(name)).glob("modeling_*.py")
        if "self.rope_deltas = rope_deltas" in path.read_text(encoding="utf-8")
        and not name.endswith("_text")
        and name not in OTHER_FORMS
    ]


TYPES = [pytest.param(x, marks=() if x in FEW else pytest.mark.slow) for x in shifting_types()]


@pytest.mark.parametrize("name", TYPES)
def test_a_second_turn_has_the_positions_of_its_own_conversation(name: str, tmp_path: Path) -> None:
    if refusal := default_type(name).refusal:
        pytest.skip(refusal)
    talk = Conversation(picture_model(name))
    model = talk.model
    talk.check(talk.filled())
    for other in talk.others:
        cache = talk.filled()
        ask(model, other)
        talk.check(cache)
        cache = talk.filled()
        fork = cache.fork()
        ask(model, other, cache_implementation="flat", cache_config=COVER)
        talk.check(fork)
        talk.check(cache)
    talk.filled().save_pretrained(tmp_path)
    fresh = picture_model(name)
    loaded = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=fresh.config, model=fresh)
    talk.check(loaded, fresh)


@pytest.fixture(scope="module")
def talk() -> Conversation:
    return Conversation(picture_model("glm_ocr"))


@torch.no_grad()
def test_a_loop_of_ones_own_has_its_own_positions(talk: Conversation) -> None:
    """Two conversations in turn, token by token; positions are left to the model."""
    model = talk.model
    hf_kvret.attach(model)
    prompts = [talk.first, *talk.others]
    references = [ask(model, prompt).logits for prompt in prompts]
    caches = [flat(model) for _ in prompts]
    results: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        for prompt, cache, logits in zip(prompts, caches, results, strict=True):
            inputs = prompt if not step else {"input_ids": logits[-1].argmax(-1, keepdim=True)}
            logits.append(model(**inputs, past_key_values=cache).logits[:, -1])
    for logits, reference in zip(results, references, strict=True):
        assert torch.allclose(torch.stack(logits), reference, atol=LOGIT_TOLERANCE)


def computes_new_pictures(model: PreTrainedModel) -> bool:
    """Whether this version gives pictures of a second turn the positions of pictures at all."""
    source = inspect.getsource(type(model)._prepare_position_ids_for_generation)
    return "has_new_vision_tokens" in source


def test_a_crop_brings_back_the_shift_of_what_is_left(talk: Conversation) -> None:
    """Behind the picture, at both of its borders, and to nothing."""
    model, first = talk.model, talk.first
    marks = (first["input_ids"][0] == model.config.image_token_id).nonzero()
    start, end = int(marks[0]), int(marks[-1]) + 1
    length = first["input_ids"].shape[1]
    for count in (length + 2, length, length - 7, end + 1, end):
        cache = talk.filled()
        cache.crop(count - cache.get_seq_length())
        talk.check(cache)
    whole = next_turn(model, first, talk.answer, pictures=True)
    for count in (start, start - 5):
        cache = talk.filled()
        cache.crop(count - cache.get_seq_length())
        assert int(cache.model_state.shift) == 0
        if computes_new_pictures(model):
            assert_same(ask(model, whole, cache), talk.reference)
    cache = talk.filled()
    cache.crop(-cache.get_seq_length())
    assert_same(ask(model, whole, cache), talk.reference)


def test_a_crop_into_a_picture_is_refused_by_the_next_pass(
    talk: Conversation, tmp_path: Path
) -> None:
    """By ``generate``, by a loop, after a fork and a load; a deeper crop repairs it."""
    model, first = talk.model, talk.first
    marks = (first["input_ids"][0] == model.config.image_token_id).nonzero()
    hf_kvret.attach(model)
    cache = talk.filled()
    cache.crop(int(marks[3]) - cache.get_seq_length())
    cache.save_pretrained(tmp_path)
    loaded = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=model.config)
    second = next_turn(model, first, talk.answer)
    for broken in (cache, cache.fork(), loaded):
        with pytest.raises(ValueError, match=r"middle of a picture.*to a new cache"):
            ask(model, second, broken)
        with pytest.raises(ValueError, match="middle of a picture"), torch.no_grad():
            model(input_ids=first["input_ids"][:, :1], past_key_values=broken)
    for broken in (cache, loaded):
        broken.crop(int(marks[0]) - broken.get_seq_length())
        assert int(broken.model_state.shift) == 0
    # Nobody waits for the calls that failed.
    talk.check(talk.filled())


def test_drafts_are_cropped_with_the_right_shift(talk: Conversation) -> None:
    model, cache = talk.model, flat(talk.model)
    tokens = ask(model, talk.first, max_new_tokens=16).ids
    drafted = ask(model, talk.first, cache, max_new_tokens=16, prompt_lookup_num_tokens=4)
    assert torch.equal(drafted.ids, tokens)
    cache.crop(talk.first["input_ids"].shape[1] + 3 - cache.get_seq_length())
    talk.check(cache)


def test_rows_keep_their_own_shift() -> None:
    """A batch with other pictures in each row, through beams, and with rows taken out of it."""
    model = picture_model("glm_ocr")
    prompts = [picture_prompt(model, 1, [(8, 16)]), picture_prompt(model, 2, [(4, 4)])]
    batch = padded([*prompts, picture_prompt(model, 3, [])])
    answer = ask(model, batch)
    reference = ask(model, next_turn(model, batch, answer, pictures=True))
    second = next_turn(model, batch, answer)
    cache = flat(model)
    ask(model, batch, cache)
    assert len(set(cache.model_state.shift.flatten().tolist())) == 3
    fork = cache.fork()
    assert_same(ask(model, second, cache), reference)
    rows = torch.tensor([2, 0])
    fork.batch_select_indices(rows)
    fork.batch_repeat_interleave(2)
    rows = rows.repeat_interleave(2)
    chosen = {name: x[rows] for name, x in second.items()}
    result = ask(model, chosen, fork)
    assert_same(result, Text(result.ids, reference.logits[:, rows]))
    beams = {"num_beams": 2, "output_logits": False}
    tokens = model.generate(**batch, **beams, max_new_tokens=6)
    searched = model.generate(
        **batch, **beams, max_new_tokens=6, cache_implementation="flat", cache_config=COVER
    )
    assert torch.equal(tokens, searched)


def test_several_answers_to_one_prompt_go_on_with_its_shift(talk: Conversation) -> None:
    """``generate`` repeats the rows of the prompt after it prepared their positions."""
    model, cache = talk.model, flat(talk.model)
    seed = {"do_sample": True, "num_return_sequences": 3}
    ids = ask(model, talk.first, cache, **seed).ids
    first = {name: talk.first[name].repeat_interleave(3, 0) for name in ("attention_mask",)}
    answers = Text(ids, torch.empty(0))
    second = next_turn(model, first, answers)
    whole = {**second, "pixel_values": talk.first["pixel_values"].repeat(3, 1)}
    whole["image_grid_thw"] = talk.first["image_grid_thw"].repeat(3, 1)
    assert_same(ask(model, second, cache), ask(model, whole))


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_breaks_off_keeps_nobody_waiting(
    talk: Conversation, error: type[BaseException]
) -> None:
    """torch calls no hooks after a KeyboardInterrupt."""
    model = talk.model
    hf_kvret.attach(model)

    def fail(*_: Any) -> None:
        raise error("broken")

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(error, match="broken"):
        model(**talk.first, past_key_values=flat(model))
    hook.remove()
    results: list[bool] = []

    def other() -> None:
        for _ in range(2):
            try:
                talk.check(talk.filled())
                results.append(True)
            except RuntimeError as refusal:
                assert error is KeyboardInterrupt and "then try again" in str(refusal)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(60)
    assert results == [True] * (1 if error is KeyboardInterrupt else 2)


@torch.no_grad()
def test_a_cache_by_position_brings_its_state(talk: Conversation) -> None:
    model = talk.model
    hf_kvret.attach(model)
    ids = talk.answer.ids[:, -NEW_TOKENS:-1]
    results = []
    for by_position in (False, True):
        cache = flat(model)
        model(**talk.first, past_key_values=cache)
        ask(model, talk.others[0])
        arguments = ([ids, None, None, cache], {}) if by_position else ([ids], as_argument(cache))
        results.append(model.model(*arguments[0], **arguments[1]).last_hidden_state)
    assert torch.equal(*results)


def growing(rope_type: str = "dynamic") -> LlamaForCausalLM:
    """A text model whose frequencies depend on the length of the text."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"original_max_position_embeddings": 64}
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, rope_parameters=rope,
        bos_token_id=None, eos_token_id=None, initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def text(seed: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def converse(model: PreTrainedModel, cache: Any, length: int, between: list[Any]) -> Text:
    """Two turns; before each of them the requests ``between``."""
    ask_others(model, between)
    first = text(1, length)
    answer = ask(model, first, cache)
    ask_others(model, between)
    return ask(model, next_turn(model, first, answer), cache)


def ask_others(model: PreTrainedModel, requests: list[Any]) -> None:
    for request in requests:
        ask(model, request)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_are_those_of_the_conversation_alone(rope_type: str, tmp_path: Path) -> None:
    """Whether requests between are longer or shorter; in a fork and after a load, too."""
    length = 120
    alone = growing(rope_type)
    reference = converse(alone, DynamicCache(config=alone.config), length, [])
    model = growing(rope_type)
    for between in ([text(2, 300)], [text(2, 20)], [text(2, 300), text(3, 20)]):
        assert_same(converse(model, flat(model), length, between), reference)
    ask_others(model, between)
    named = {"cache_implementation": "flat", "cache_config": COVER}
    first = text(1, length)
    answer = ask(model, first, **named)
    assert_same(answer, ask(growing(rope_type), first))
    cache = flat(model)
    ask(model, first, cache)
    cache.save_pretrained(tmp_path)
    fresh = growing(rope_type)
    loaded = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=fresh.config, model=fresh)
    ask_others(model, [text(2, 300)])
    assert_same(ask(model, next_turn(model, first, answer), cache.fork()), reference)
    assert_same(ask(fresh, next_turn(fresh, first, answer), loaded), reference)


@pytest.mark.parametrize("name", ["vision", "growing"])
def test_passes_of_two_threads_with_one_model_are_right_or_refused(name: str) -> None:
    """Whoever comes into another one's pass is refused; passes in turn have their own state."""
    model = picture_model("glm_ocr") if name == "vision" else growing()
    hf_kvret.attach(model)
    prompts = (
        [picture_prompt(model, 1, [(8, 16)]), picture_prompt(model, 2, [(4, 4), (8, 8)])]
        if name == "vision"
        else [text(1, 120), text(2, 300)]
    )
    with torch.no_grad():
        references = [model(**one, past_key_values=flat(model)).logits for one in prompts]
    inside, go_on = threading.Event(), threading.Event()
    results: dict[int, Any] = {}

    def stop(*_: Any) -> None:
        """The pass has its own positions and frequencies by now, and reads them next."""
        if threading.current_thread().name == "0" and not inside.is_set():
            inside.set()
            go_on.wait(60)

    hook = model.get_decoder().register_forward_pre_hook(stop)

    def run(row: int) -> None:
        try:
            with torch.no_grad():
                results[row] = model(**prompts[row], past_key_values=flat(model)).logits
        except RuntimeError as error:
            results[row] = error

    threads = [threading.Thread(target=run, args=(row,), name=str(row)) for row in (0, 1)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(60)
    go_on.set()
    threads[0].join(60)
    hook.remove()
    assert torch.allclose(results[0], references[0], atol=LOGIT_TOLERANCE)
    assert "two threads ran one" in str(results[1])
    # Neither waits for the other afterwards.
    for row in (0, 1):
        run(row)
        assert torch.allclose(results[row], references[row], atol=LOGIT_TOLERANCE)


def test_a_model_that_ran_is_freed() -> None:
    model = growing()
    ask(model, text(1, 40), flat(model))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_restore_takes_the_hooks_away_and_plain_models_get_none() -> None:
    model, plain = growing(), growing("default")
    for one in (model, plain):
        hooks = [len(module._forward_hooks) for module in one.modules()]
        hf_kvret.attach(one)
        hf_kvret.attach(one)
        added = sum(len(module._forward_hooks) for module in one.modules()) - sum(hooks)
        # Two modules of each note tokens.
        assert added == (4 if kept_state.stateful_attributes(one) else 2)
        hf_kvret.restore(one)
        assert [len(module._forward_hooks) for module in one.modules()] == hooks
        assert not any(module._forward_hooks_always_called for module in one.modules())
