"""Replayed decode steps must be usual ones, bit for bit, and whatever can't be is told."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvret import DecodeGraph, registry
from hf_kvret.replay import why_not
from hf_kvret.replay.replayable import untested
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import TapeRecorder, taped

from .pictures import Conversation, ask, assert_same, next_turn, picture_model
from .steps import OPTIONS, PROMPT, DecodeLoop, small_cache, small_llama

COVERING = {**OPTIONS, "top_k": 10**6}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    model: PreTrainedModel = small_llama()
    return model


@pytest.fixture(scope="module")
def shallow() -> PreTrainedModel:
    """For what does not depend on the number of layers: the interpreter takes its time for each."""
    model: PreTrainedModel = small_llama(layers=1)
    return model


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraph]:
    """The objects that ``generate`` makes, in order."""
    made: list[DecodeGraph] = []

    class Noted(DecodeGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(registry, "DecodeGraph", Noted)
    return made


CASES = [
    pytest.param("flat", "device", False, marks=pytest.mark.slow),
    ("flat", "split", True),
    pytest.param("lrqk", "resident", True, marks=pytest.mark.slow),
    pytest.param("paris", "host", False, marks=pytest.mark.slow),
    pytest.param("paris", "device", True, marks=pytest.mark.slow),
    pytest.param("paris", "resident", False, marks=pytest.mark.slow),
    pytest.param("paris", "higgs", False, marks=pytest.mark.slow),
    pytest.param("flat", "higgs-host", True, marks=pytest.mark.slow),
    pytest.param("lrqk", "device", False, marks=pytest.mark.slow),
    pytest.param("lrqk", "host", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("method, store, padded", CASES)
def test_replayed_steps_are_usual_ones_bit_for_bit(
    shallow: PreTrainedModel, method: str, store: str, padded: bool
) -> None:
    """With flushes in between, and counts that are the same."""
    options: dict[str, Any] = {"store": store}
    if store == "split":
        # One page.
        options["device_budget"] = 64 * 32 * 4
    with taped():
        usual = DecodeLoop(shallow, small_cache(shallow, method, **options), padded)
        cache = small_cache(shallow, method, **options)
        step = DecodeGraph(shallow, cache)
        replayed = DecodeLoop(step, cache, padded)
        for number in range(11):
            assert torch.equal(replayed.step(), usual.step()), f"step {number}"
    assert step.reason is None
    assert step.captures >= 2
    assert step.replays >= 7
    assert step.captures + step.replays + step.eager == 12 + step.captures
    assert cache.stats() == usual.cache.stats()


def test_the_tokens_of_replayed_steps_are_noted_once(shallow: PreTrainedModel) -> None:
    """Neither the capture, which runs the model, nor a replay, which does not, notes them."""
    with taped():
        usual = DecodeLoop(shallow, small_cache(shallow), padded=True)
        cache = small_cache(shallow)
        step = DecodeGraph(shallow, cache)
        replayed = DecodeLoop(step, cache, padded=True)
        for _ in range(7):
            assert torch.equal(replayed.step(), usual.step())
    assert step.captures and step.replays > step.captures
    length = cache.get_seq_length()
    ids, expected = cache.tokens.ids(length), usual.cache.tokens.ids(length)
    assert ids is not None and expected is not None
    assert torch.equal(ids[:, PROMPT:], expected[:, PROMPT:])
    assert bool((ids[:, PROMPT:] >= 0).all())


def test_a_step_of_paris_is_replayed(shallow: PreTrainedModel) -> None:
    """One step each way; more of them, and other stores, are slow in the interpreter."""
    with taped():
        outs = []
        for graphed in (False, True):
            cache = small_cache(shallow, "paris", top_k=2, flush=7)
            step = DecodeGraph(shallow, cache) if graphed else shallow
            outs.append(DecodeLoop(step, cache).run(3))
    assert torch.equal(*outs)
    assert isinstance(step, DecodeGraph)
    assert step.replays == 1


def test_steps_of_a_cache_that_is_still_dense_are_replayed_too(shallow: PreTrainedModel) -> None:
    """The window grows in big steps, and after each a step is captured anew."""
    with taped():
        usual = DecodeLoop(shallow, small_cache(shallow, dense_below=10**6))
        cache = small_cache(shallow, dense_below=10**6)
        step = DecodeGraph(shallow, cache)
        assert torch.equal(DecodeLoop(step, cache).run(6), usual.run(6))
    assert step.replays == 5
    assert cache.retrieval_layers[0].kv is not None
    assert cache.retrieval_layers[0].kv.cold_len == 0


@pytest.mark.parametrize("padded", [False, True])
def test_generate_replays_by_itself_and_gives_the_same_tokens(
    llama: PreTrainedModel, padded: bool, made: list[DecodeGraph]
) -> None:
    tokens = torch.arange(2 * PROMPT).view(2, PROMPT) % 40 + 10
    mask = torch.ones_like(tokens)
    mask[1, : 5 * padded] = 0
    asked: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False,
    }  # fmt: skip
    expected = llama.generate(tokens, **asked)  # type: ignore[operator]
    with taped():
        given = llama.generate(  # type: ignore[operator]
            tokens, cache_implementation="flat", cache_config=COVERING, **asked
        )
        (step,) = made
        assert step.replays >= 4
        if padded:
            llama.generate(  # type: ignore[operator]
                tokens,
                cache_implementation="flat",
                cache_config={**COVERING, "graph": False},
                **asked,
            )
            assert made[1:] == [] or made[1].reason == "graph=False"
    assert torch.equal(given, expected)


def test_sampled_tokens_are_the_same_for_a_seed(shallow: PreTrainedModel) -> None:
    tokens = torch.arange(PROMPT)[None] + 10
    given = []
    with taped():
        for graph in ("auto", False):
            torch.manual_seed(0)
            given.append(
                shallow.generate(  # type: ignore[operator]
                    tokens,
                    max_new_tokens=8,
                    do_sample=True,
                    cache_implementation="flat",
                    cache_config={**OPTIONS, "graph": graph},
                )
            )
    assert torch.equal(*given)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_drafts_go_the_usual_way(shallow: PreTrainedModel, mode: dict[str, int]) -> None:
    tokens = torch.arange(PROMPT)[None] % 5 + 10
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, **mode}
    expected = shallow.generate(tokens, **asked)  # type: ignore[operator]
    with taped():
        given = shallow.generate(  # type: ignore[operator]
            tokens, cache_implementation="flat", cache_config=COVERING, **asked
        )
    assert torch.equal(given, expected)


def test_nothing_is_left_of_it_after_generate(
    shallow: PreTrainedModel, made: list[DecodeGraph]
) -> None:
    with taped():
        output = shallow.generate(  # type: ignore[operator]
            torch.arange(PROMPT)[None] + 10,
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            cache_implementation="flat",
            cache_config=OPTIONS,
        )
    (step,) = map(weakref.ref, made)
    made.clear()
    gc.collect()
    assert step() is None
    layer = output.past_key_values.retrieval_layers[0]
    assert layer.kv is not None
    assert layer.kv.window.capture is None


def test_a_crop_a_reorder_and_a_fork_in_between_are_noticed(shallow: PreTrainedModel) -> None:
    with taped():
        loops = []
        for graphed in (False, True):
            cache = small_cache(shallow, flush=7)
            step = DecodeGraph(shallow, cache) if graphed else shallow
            loop = DecodeLoop(step, cache)
            loop.run(4)
            assert not graphed or step._frame is not None
            cache.crop(-2)
            loop.mask = loop.mask[:, :-2]
            loop.run(3)
            assert not graphed or step._frame is not None
            rows = torch.tensor([1, 0])
            for layer in cache.layers:
                layer.reorder_cache(rows)
            loop.logits = loop.logits[rows]
            loop.run(3)
            twin = cache.fork()
            after = loop.run(3)
            apart = DecodeLoop.__new__(DecodeLoop)
            vars(apart).update(vars(loop), call=shallow, cache=twin, mask=loop.mask[:, :-3])
            apart.logits = loop.logits
            loops.append((after, apart.step()))
    for usual, replayed in zip(*loops, strict=True):
        assert torch.equal(usual, replayed)


def test_a_cache_of_another_kind_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="DynamicCache: only steps with a retrieval cache"):
        DecodeGraph(llama, DynamicCache())  # type: ignore[arg-type]


def test_what_a_step_returned_is_the_callers(shallow: PreTrainedModel) -> None:
    with taped():
        cache = small_cache(shallow, flush=7)
        step = DecodeGraph(shallow, cache)
        loop = DecodeLoop(step, cache)
        loop.run(3)
        kept = loop.logits
        before = kept.clone()
        loop.step()
        assert step.replays == 2
    assert torch.equal(kept, before)


def test_a_mask_that_changes_between_steps_is_read_each_time(shallow: PreTrainedModel) -> None:
    outs = []
    with taped():
        for graphed in (False, True):
            cache = small_cache(shallow, flush=7)
            step = DecodeGraph(shallow, cache) if graphed else shallow
            loop = DecodeLoop(step, cache, padded=True)
            loop.run(3)
            loop.mask[0, 3] = loop.mask[1, 12] = loop.mask[0, -1] = 0
            outs.append(loop.run(2))
    assert torch.equal(*outs)


def test_reasons_are_told_before_anything_is_captured(llama: PreTrainedModel) -> None:
    assert "only cuda devices have graphs" in str(why_not(llama, small_cache(llama)))
    with taped():
        assert why_not(llama, small_cache(llama)) is None
        assert why_not(llama, small_cache(llama, graph=False)) == "graph=False"
        hook = llama.lm_head.register_forward_hook(lambda *args: None)  # type: ignore[union-attr]
        assert "hooks" in str(why_not(llama, small_cache(llama)))
        hook.remove()
        llama.train()
        assert "training" in str(why_not(llama, small_cache(llama)))
        llama.eval()
        with torch.autocast("cpu"):
            assert "autocast" in str(why_not(llama, small_cache(llama)))
        mixed = MODELS["lfm2"].build().eval()
        assert "LinearAttention" in str(why_not(mixed, small_cache(mixed)))


@pytest.mark.parametrize(
    "method, options, told",
    [
        ("flat", {"store": "cpu"}, "store='cpu'"),
        ("flat", {"track_recall": True}, "track_recall"),
        ("ctkvr", {}, "ctkvr"),
        ("h2o", {}, "h2o"),
    ],
)
def test_methods_and_stores_that_need_the_host_say_so(
    shallow: PreTrainedModel, method: str, options: dict[str, Any], told: str
) -> None:
    with taped():
        cache = small_cache(shallow, method, **options)
        step = DecodeGraph(shallow, cache)
        DecodeLoop(step, cache).run(3)
    assert told in str(step.reason)
    assert step.replays == 0


def test_inputs_that_a_replay_would_not_see_are_not_replayed(shallow: PreTrainedModel) -> None:
    def reason(**more: Any) -> str | None:
        cache = small_cache(shallow)
        step = DecodeGraph(shallow, cache)
        loop = DecodeLoop(lambda **inputs: step(**{**inputs, **more}), cache)
        loop.run(3)
        return step.reason if not step.replays else f"replayed {step.replays}"

    with taped():
        assert reason() == "replayed 1"
        cache = small_cache(shallow, flush=7)
        step = DecodeGraph(shallow, cache)
        loop = DecodeLoop(step, cache)
        loop.run(3)
        loop.call = lambda **inputs: step(**inputs, output_hidden_states=True)
        loop.step()
        assert step.reason == "output_hidden_states=True"
        loop.call = step
        loop.run(3)
        assert step.reason is None
        assert step.replays >= 2
        assert reason(output_hidden_states=True) == "output_hidden_states=True"
        # What transformers hooked into the model for that stays there, and is no obstacle.
        assert reason() == "replayed 1"
        assert "position_ids" in str(reason(position_ids=None))
        assert "token_type_ids" in str(reason(token_type_ids=torch.zeros(2, 1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "method, store", [("flat", "device"), ("paris", "host"), ("lrqk", "resident")]
)
def test_a_gpu_replays_what_it_would_compute(method: str, store: str) -> None:
    model = small_llama().cuda()
    tokens = torch.arange(2 * PROMPT, device="cuda").view(2, PROMPT) % 40 + 10
    given = [
        model.generate(
            tokens,
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            cache_implementation=method,
            cache_config={**COVERING, "store": store, "graph": graph},
        )
        for graph in ("auto", False)
    ]
    assert torch.equal(*given)
    cache = small_cache(model, method, store=store)
    step = DecodeGraph(model, cache)
    assert step.reason is None


def test_the_recorder_of_the_tape_is_one(llama: PreTrainedModel) -> None:
    with taped():
        cache = small_cache(llama)
        step = DecodeGraph(llama, cache)
        assert isinstance(step._recorder, TapeRecorder)


def test_a_second_turn_after_replayed_steps_has_its_own_positions(
    made: list[DecodeGraph],
) -> None:
    """Replays read positions and call no hook, so another request may come between."""
    talk = Conversation(picture_model("qwen2_5_vl"))
    model, cache = talk.model, talk.filled()
    second = next_turn(model, talk.first, talk.answer)
    # Steps that are told types of tokens are not replayed; a question has none.
    second.pop("mm_token_type_ids")
    whole = next_turn(model, talk.first, talk.answer, pictures=True)
    reference = ask(model, whole, max_new_tokens=16)
    ask(model, talk.others[1])
    with taped():
        answer = ask(model, second, cache, max_new_tokens=16)
    assert made[-1].reason is None and made[-1].replays > 4
    assert_same(answer, reference)
    ask(model, talk.others[0])
    third = ask(model, next_turn(model, second, answer), cache)
    assert_same(third, ask(model, next_turn(model, whole, reference, pictures=True)))


def test_steps_whose_frequencies_grow_with_the_text_are_not_replayed() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )  # fmt: skip
    reason = untested(LlamaForCausalLM(config))
    assert reason is not None and "grow with the text" in reason and "graph=False" in reason
