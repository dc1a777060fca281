"""Replayed decode steps are usual ones, bit for bit, and whatever can't be replayed says why."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

import hf_kvret
from hf_kvret import DecodeGraph, FlatKVCache
from hf_kvret.replay import why_not
from hf_kvret.replay.replayable import untested
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import taped

from ..pictures import Conversation, ask, assert_same, next_turn, picture_model
from .steps import OPTIONS, PROMPT, DecodeLoop, Waiting, compare, graphed, small_cache, small_llama

COVERING = {**OPTIONS, "top_k": 10**6}
TOKENS = torch.arange(2 * PROMPT).view(2, PROMPT) % 40 + 10


@pytest.fixture(scope="module")
def shallow() -> PreTrainedModel:
    """For what does not depend on the number of layers: the interpreter takes its time for each."""
    return small_llama(layers=1)


CASES = [
    ("flat", "host", True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *(("flat", "device", False), ("flat", "higgs-host", True)),
            *(("lrqk", "device", False), ("lrqk", "host", True), ("lrqk", "resident", True)),
            *(("paris", "device", True), ("paris", "higgs", False)),
            *(("paris", "host", False), ("paris", "resident", False)),
        )
    ),
]


@pytest.mark.parametrize("method, store, padded", CASES)
def test_replayed_steps_are_usual_ones_bit_for_bit(method: str, store: str, padded: bool) -> None:
    """With a flush in between; counts are the same, and tokens are logged once."""
    stats, tokens = [], []

    def act(loop: DecodeLoop) -> torch.Tensor:
        logits = loop.run(6)
        stats.append(loop.cache.stats())
        tokens.append(loop.cache.tokens.ids(PROMPT + 6)[:, PROMPT:])
        return logits

    step = compare(act, method, padded, store=store, flush=3)
    assert stats[0] == stats[1]
    assert torch.equal(*tokens) and bool((tokens[0] >= 0).all())
    assert step.reason is None
    assert step.captures >= 2
    assert step.replays >= 3
    assert step.replays + step.eager == 7


def test_a_step_of_paris_is_replayed() -> None:
    """One step each way; more of them, and other stores, are slow in the interpreter."""
    assert compare(lambda loop: loop.run(3), "paris", top_k=2, flush=7).replays == 1


def test_steps_of_a_cache_that_is_still_dense_are_replayed() -> None:
    """The window grows in big steps, and after each a step is captured anew."""
    step = compare(lambda loop: loop.run(4), dense_below=10**6)
    assert step.replays == 3
    assert step._cache.retrieval_layers[0].kv.cold_len == 0


def generate(
    model: Any, tokens: torch.Tensor, options: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Greedy tokens, with a cache of ``options`` where there are some."""
    cached = {"cache_implementation": "flat", "cache_config": options} if options else {}
    return model.generate(tokens, **{"max_new_tokens": 6, "do_sample": False} | cached | more)


def test_generate_replays_by_itself(shallow: PreTrainedModel, graphs: list[DecodeGraph]) -> None:
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    request = {"attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9}
    expected = generate(shallow, TOKENS, **request)
    with taped():
        assert torch.equal(generate(shallow, TOKENS, COVERING, **request), expected)
        (step,) = graphs
        assert step.replays >= 4
        generate(shallow, TOKENS, {**COVERING, "graph": False}, max_new_tokens=2)
        assert all(graph.reason == "graph=False" for graph in graphs[1:])


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_drafts_go_the_usual_way(shallow: PreTrainedModel, mode: dict[str, int]) -> None:
    tokens = TOKENS[:1] % 5 + 10
    expected = generate(shallow, tokens, **mode)
    with taped():
        assert torch.equal(generate(shallow, tokens, COVERING, **mode), expected)


def test_no_graph_outlives_generate(shallow: PreTrainedModel, graphs: list[DecodeGraph]) -> None:
    with taped():
        output = generate(shallow, TOKENS[:1], OPTIONS, return_dict_in_generate=True)
    (step,) = map(weakref.ref, graphs)
    graphs.clear()
    gc.collect()
    assert step() is None
    assert output.past_key_values.retrieval_layers[0].kv.window.capture is None


def test_a_crop_a_reorder_and_a_fork_in_between_are_noticed(shallow: PreTrainedModel) -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(2)
        assert getattr(loop.call, "_frame", True) is not None
        loop.cache.crop(-2)
        loop.mask = loop.mask[:, :-2]
        loop.run(2)
        assert getattr(loop.call, "_frame", True) is not None
        order = torch.tensor([1, 0])
        for layer in loop.cache.layers:
            layer.reorder_cache(order)
        loop.logits = loop.logits[order]
        loop.run(2)
        twin = loop.copy(call=shallow, cache=loop.cache.fork())
        logits = loop.step()
        twin.logits = logits
        return torch.stack([logits, twin.step()])

    compare(act, model=shallow, flush=7)


def test_a_cache_of_another_class_is_refused(shallow: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="DynamicCache: only steps with a retrieval cache"):
        DecodeGraph(shallow, DynamicCache())  # type: ignore[arg-type]


def test_later_steps_leave_the_output_of_a_step_alone(shallow: PreTrainedModel) -> None:
    with taped():
        loop = graphed(shallow, flush=7)
        loop.run(3)
        logits, before = loop.logits, loop.logits.clone()
        loop.step()
        assert loop.call.replays == 2
    assert torch.equal(logits, before)


def test_a_mask_that_changes_between_steps_is_read_each_time() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(3)
        loop.mask[0, 3] = loop.mask[1, 12] = loop.mask[0, -1] = 0
        return loop.run(2)

    compare(act, padded=True, flush=7)


def test_reasons_are_told_before_anything_is_captured(shallow: PreTrainedModel) -> None:
    assert "only cuda devices have graphs" in str(why_not(shallow, small_cache(shallow)))
    with taped():
        assert why_not(shallow, small_cache(shallow)) is None
        assert why_not(shallow, small_cache(shallow, graph=False)) == "graph=False"
        hook = shallow.lm_head.register_forward_hook(lambda *args: None)
        assert "hooks" in str(why_not(shallow, small_cache(shallow)))
        hook.remove()
        shallow.train()
        assert "training" in str(why_not(shallow, small_cache(shallow)))
        shallow.eval()
        with torch.autocast("cpu"):
            assert "autocast" in str(why_not(shallow, small_cache(shallow)))
        growing = small_cache(shallow)
        growing.layers.append(DynamicLayer())
        assert "keep a DynamicLayer, which grows" in str(why_not(shallow, growing))


@pytest.mark.parametrize(
    "method, options, reason",
    [
        ("flat", {"store": "cpu"}, "store='cpu'"),
        ("flat", {"track_recall": True}, "track_recall"),
        ("ctkvr", {}, "ctkvr"),
        ("h2o", {}, "h2o"),
    ],
)
def test_methods_and_stores_that_need_the_host_say_so(
    shallow: PreTrainedModel, method: str, options: dict[str, Any], reason: str
) -> None:
    with taped():
        loop = graphed(shallow, method, **options)
        loop.run(3)
    assert reason in str(loop.call.reason)
    assert loop.call.replays == 0


def test_inputs_that_a_replay_would_not_see_are_not_replayed(shallow: PreTrainedModel) -> None:
    with taped():
        loop = graphed(shallow, flush=12)
        step = loop.call
        for more, reason in (
            ({"output_hidden_states": True}, "output_hidden_states=True"),
            ({"position_ids": None}, "position_ids"),
            ({"token_type_ids": torch.zeros(2, 1)}, "token_type_ids"),
        ):
            # The hooks of transformers for hidden states stay in the model, and are no obstacle.
            loop.call = step
            loop.run(2)
            assert step.reason is None and step.replays
            replays = step.replays
            loop.call = lambda more=more, **inputs: step(**{**inputs, **more})
            loop.step()
            assert reason in str(step.reason) and step.replays == replays


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "method, store", [("flat", "device"), ("paris", "host"), ("lrqk", "resident")]
)
def test_a_gpu_replays_what_it_would_compute(method: str, store: str) -> None:
    model = small_llama().cuda()
    request = {"cache_implementation": method, "max_new_tokens": 24, "min_new_tokens": 24}
    texts = [
        generate(model, TOKENS.cuda(), {**COVERING, "store": store, "graph": graph}, **request)
        for graph in ("auto", False)
    ]
    assert torch.equal(*texts)
    assert DecodeGraph(model, small_cache(model, method, store=store)).reason is None


@pytest.mark.slow
def test_a_second_turn_after_replays_has_its_own_positions(graphs: list[DecodeGraph]) -> None:
    """Replays read positions and call no hook, so another request may come between."""
    talk = Conversation(picture_model("qwen2_5_vl"))
    model, cache = talk.model, talk.filled()
    second = next_turn(model, talk.first, talk.answer)
    # Steps with types of tokens are not replayed; a question has none.
    second.pop("mm_token_type_ids")
    whole = next_turn(model, talk.first, talk.answer, pictures=True)
    reference = ask(model, whole, max_new_tokens=7)
    ask(model, talk.others[1])
    with taped():
        answer = ask(model, second, cache, max_new_tokens=7)
    assert graphs[-1].reason is None and graphs[-1].replays > 1
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


# Models with layers that slide, which keep a window of their own beside retrieval layers.

SLIDING = {"prompt": 12}
NAMES = ["small", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma2", "gpt_oss"))]


def sliding_model(name: str = "small") -> Any:
    """One of the tests' models, or one with one layer of each kind and a window of 8 tokens."""
    if name == "small":
        config = Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config).eval()
    else:
        model = MODELS[name].build().eval()
    hf_kvret.attach(model)
    assert any(layer.is_sliding for layer in FlatKVCache(model.config).layers)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_full_windows_are_replayed_bit_for_bit(name: str) -> None:
    step = compare(
        lambda loop: loop.run(5), model=sliding_model(name), prompt=26 if name in MODELS else 12
    )
    assert step.reason is None
    assert step.captures >= 1
    assert step.replays >= 2


def test_padded_steps_with_sliding_windows_run_as_usual() -> None:
    step = compare(lambda loop: loop.run(3), model=sliding_model(), padded=True, **SLIDING)
    assert step.replays == 0
    assert "padded" in str(step.reason)


@pytest.mark.slow
def test_a_capture_that_fails_leaves_sliding_windows_as_they_were() -> None:
    model = sliding_model()

    def act(loop: DecodeLoop) -> torch.Tensor:
        if isinstance(loop.call, DecodeGraph):
            model.model.norm = Waiting(model.model.norm)
        return loop.run(4)

    step = compare(act, model=model, **SLIDING)
    assert step.replays == 0
    assert "could not be captured" in str(step.reason)
