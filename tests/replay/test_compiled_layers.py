"""Compiled layers give the logits of layers as they are, by one graph, and leave no trace."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret import DecodeGraph
from hf_kvret.generate.attach import restore
from hf_kvret.models import products
from hf_kvret.models.compatibility import is_latent
from hf_kvret.replay import compiled_layers
from hf_kvret.replay.compiled_layers import CompiledLayer, CompiledLayers, attend, why_not_compiled
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import taped
from hf_kvret_kernels import host_library

from .steps import OPTIONS, PROMPT, DecodeLoop, Waiting, graphed, small_cache, small_llama
from .test_replayable import CASES, build

QUICK = ("gpt_oss", "qwen3_next")
# Types whose layers are of several kinds: a graph for each.
SEVERAL_KINDS = {"exaone4": 2, "gemma4": 3, "smollm3": 2}
# Replayed types whose layers stay as they are, beside those of latent attention, and why.
PLAIN_TYPES = {
    "llama4_text": "no attribute 'get_seq_length'",
    "gemma4_text with shared keys": "read the keys of others",
}


@pytest.fixture(autouse=True)
def _traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced and run as they are, which shows all but what Inductor writes."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    compiled_layers.log_once.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled(model: Any, padded: bool = False, prompt: int = PROMPT, **options: Any) -> DecodeLoop:
    """A loop behind its prompt, whose steps run compiled layers."""
    return graphed(model, padded=padded, prompt=prompt, compile=True, **options)


def plain(model: Any, padded: bool = False, prompt: int = PROMPT, **options: Any) -> DecodeLoop:
    return DecodeLoop(model, small_cache(model, **options), padded, prompt)


def why(loop: DecodeLoop) -> str | None:
    """Why the layers are not compiled, as torch found."""
    assert loop.call.compiled is not None
    reason: str | None = loop.call.compiled.layers.why
    return reason


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in MODELS]
)
def test_compiled_layers_give_the_logits_of_layers_as_they_are(name: str) -> None:
    model = MODELS[name].build().eval()
    hf_kvret.attach(model)
    # A window of 16 tokens that slides is full.
    loop = compiled(model, padded=True, prompt=26)
    assert torch.equal(loop.run(6), plain(model, padded=True, prompt=26).run(6))
    assert why(loop) is None
    assert graphs() == SEVERAL_KINDS.get(name, 1)


@pytest.mark.parametrize(
    ("steps", "flush"), [(16, 4), pytest.param(2_000, 600, marks=pytest.mark.slow)]
)
def test_one_graph_serves_all_layers_steps_flushes_and_caches(steps: int, flush: int) -> None:
    model = small_llama()
    loop, usual = compiled(model, flush=flush), plain(model, flush=flush)
    assert torch.equal(loop.run(steps), usual.run(steps))
    assert loop.cache.retrieval_layers[0].cold_len >= 3 * flush
    for one in (loop, usual):
        one.cache.crop(-3)
        one.mask = one.mask[:, :-3]
    assert torch.equal(loop.run(2), usual.run(2))
    question = torch.arange(10).view(2, 5) + 20
    for one in (loop, usual):
        one.mask = torch.cat([one.mask, torch.ones_like(question)], dim=1)
        one.logits = one.feed(question)
    assert torch.equal(loop.run(3), usual.run(3))
    forks = loop.cache.fork(), usual.cache.fork()
    twins = loop.copy(call=DecodeGraph(model, forks[0]), cache=forks[0]), usual.copy(cache=forks[1])
    assert torch.equal(*(twin.run(3) for twin in twins))
    assert graphs() == 1
    # Another batch size has a graph of its own.
    for one in (loop, usual):
        one.cache.batch_select_indices(torch.tensor([1]))
        one.mask, one.logits = one.mask[1:], one.logits[1:]
    assert torch.equal(loop.run(4), usual.run(4))
    assert graphs() == 2


@pytest.mark.slow
def test_inductor_gives_the_tokens_and_reports_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    monkeypatch.setattr(compiled_layers, "_PATIENCE", 0)
    model = small_llama()
    with caplog.at_level(logging.INFO, "hf_kvret.replay"):
        logits = compiled(model).run(6)
    # Sums are taken in another order.
    torch.testing.assert_close(logits, plain(model).run(6), rtol=0, atol=2e-5)
    assert graphs() == 1
    assert "'compile': False does without" in caplog.text
    assert caplog.text.count("were compiled for decode steps of 2 sequences in ") == 1


def test_generate_compiles_where_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = small_llama(), torch.arange(PROMPT)[None] + 10

    def generate(compile: Any, **more: Any) -> torch.Tensor:
        options = {**OPTIONS, "compile": compile}
        more |= {"cache_implementation": "flat", "cache_config": options}
        text: torch.Tensor = model.generate(tokens, max_new_tokens=9, do_sample=False, **more)
        return text

    expected = generate(False)
    assert torch.equal(generate("auto"), expected)
    assert torch.equal(generate(True, disable_compile=True), expected)
    assert graphs() == 0
    assert torch.equal(generate(True), expected)
    assert graphs() == 1
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert torch.equal(generate(True), expected)
    assert "LlamaForCausalLM are not compiled: modules of its layers have hooks" in caplog.text
    hook.remove()


@pytest.mark.skipif(bool(host_library.why_not()), reason="no compiled library")
def test_weights_of_16_bits_multiply_in_the_library(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama().bfloat16()
    expected = compiled(model).run(3)
    torch.compiler.reset()
    monkeypatch.setattr(products, "most_tokens", lambda dtype: 64 * (dtype != torch.float32))
    shapes = watch(host_library, "product", lambda x, *_: tuple(x.shape))
    hf_kvret.restore(model)
    hf_kvret.attach(model)
    loop = compiled(model)
    loop.run(2)
    shapes.clear()
    got = loop.run(1)
    # Each of two layers has seven products; the head is no part of a layer.
    assert [shape[:2] for shape in shapes].count((2, 1)) == 15
    torch.testing.assert_close(got[-1], expected[-1], rtol=0.05, atol=0.05)
    hf_kvret.restore(model)


def test_hooks_of_layers_run_at_every_step() -> None:
    model, calls = small_llama(), 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1

    compiled(model).run(3)
    model.model.layers[1].register_forward_hook(count)
    loop = compiled(model)
    assert loop.call.compiled is None
    loop.run(4)
    assert calls == 5


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "llama4_text" else pytest.mark.slow) for x in CASES]
)
def test_layers_of_a_replayed_type_compile_or_say_why(name: str) -> None:
    model_type, changes = CASES[name]
    model = build(model_type, **changes)
    hf_kvret.attach(model)
    loop = compiled(model)
    assert torch.equal(loop.run(5), plain(model).run(5))
    unlike = loop.call.compiled is None
    reason = why_not_compiled(model, loop.cache) if unlike else why(loop)
    words = "its attention is latent" if is_latent(model.config) else PLAIN_TYPES.get(name)
    assert reason is None if words is None else words in str(reason)


def test_what_torch_refuses_stays_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small_llama()
    layer = model.model.layers[1]
    layer.input_layernorm = Waiting(layer.input_layernorm)
    loop, usual = compiled(model), plain(model)
    assert torch.equal(loop.run(5), usual.run(5))
    assert "torch.compile" in str(why(loop))
    assert torch.equal(compiled(model).run(3), plain(model).run(3))
    assert caplog.text.count("LlamaForCausalLM are not compiled: torch.compile: ") == 1


def test_drafts_prompts_and_other_caches_run_the_layers_as_they_are() -> None:
    model = small_llama()
    loop, usual = compiled(model), plain(model)
    assert torch.equal(loop.run(3), usual.run(3))
    assert loop.call.compiled is not None
    draft, mask = torch.arange(6).view(2, 3) + 20, loop.mask
    loop.mask = usual.mask = torch.cat([mask, torch.ones_like(draft)], dim=1)
    assert torch.equal(loop.feed(draft), usual.feed(draft))
    assert torch.equal(plain(model).run(3), plain(model, compile=True).run(3))
    assert graphs() == 1
    with pytest.raises(RuntimeError, match="outside of a decode step"):
        attend(*torch.zeros(3, 1, 1, 1, 4))


def test_copies_pickles_and_saved_models_have_layers_as_they_are(tmp_path: Path) -> None:
    model = small_llama()
    expected = compiled(model).run(3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded
    for twin in twins:
        hf_kvret.attach(twin)
        assert _compiled_layers(twin) == 0
        assert torch.equal(plain(twin).run(3), expected)
    assert torch.equal(compiled(twins[0]).run(3), expected)
    assert _compiled_layers(model) == 2
    restore(model)
    assert _compiled_layers(model) == 0


def _compiled_layers(model: PreTrainedModel) -> int:
    return sum(isinstance(one._compiled_call_impl, CompiledLayer) for one in model.modules())


# Each of these changes an MLP between two steps of one loop.
CHANGES: dict[str, Any] = {
    "parameter": lambda mlp: setattr(mlp.up_proj, "weight", torch.nn.Parameter(torch.eye(32))),
    "module": lambda mlp: setattr(mlp, "act_fn", torch.nn.Tanh()),
    "method": lambda mlp: setattr(mlp, "forward", lambda x: 2 * x),
    "hook": lambda mlp: mlp.register_forward_hook(lambda *given: 2 * given[-1]),
    "dict": lambda mlp: mlp.scales.update(one=2.0),
    "list": lambda mlp: mlp.offsets.append(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_layer_between_two_steps_takes_effect(change: str) -> None:
    mlp = (model := small_llama()).model.layers[1].mlp
    mlp.scales, mlp.offsets, real = {"one": 1.0}, [0.0], mlp.forward
    mlp.forward = lambda x: real(x) * mlp.scales["one"] + sum(mlp.offsets)
    loop, usual = compiled(model), plain(model)
    assert torch.equal(loop.run(4), usual.run(4))
    unchanged = usual.copy(cache=usual.cache.fork()).run(2)
    CHANGES[change](mlp)
    expected = usual.run(2)
    assert torch.equal(loop.run(2), expected) and not torch.equal(expected, unchanged)


def test_guards_are_asked_again_for_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, asked, run = compiled(small_llama()), iter(range(99)), CompiledLayers.run
    loop.run(3)
    monkeypatch.setattr(CompiledLayers, "run", lambda *given: (next(asked), run(*given))[1])
    no_functions = torch._C.DisableTorchFunctionSubclass()
    for context in (torch.device("cpu"), torch.inference_mode(), no_functions):
        with context:
            loop.run(1)
        loop.run(2)
    loop.padded = True
    loop.run(2)
    # Both layers, within the contexts and behind them, and with a mask.
    assert next(asked) == 2 * (3 + 3 + 1)


def test_two_models_in_two_threads_do_not_disturb_each_other() -> None:
    models = small_llama(), small_llama(layers=3)
    expected = [plain(model).run(5) for model in models]
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(lambda model=model: compiled(model).run(5)) for model in models * 2]
    for run, one in zip(runs, expected * 2, strict=True):
        assert torch.equal(run.result(), one)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("small", True),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("small", "gemma3", "lfm2", "llama", "qwen3_next")
        ),
    ],
)
def test_a_graph_captures_compiled_layers(name: str, padded: bool) -> None:
    """Also beside states and windows that slide."""
    model = small_llama(layers=1) if name == "small" else MODELS[name].build().eval()
    hf_kvret.attach(model)
    prompt = PROMPT if name == "small" else 26
    with taped():
        expected = plain(model, padded, prompt, flush=12).run(5)
        loop = compiled(model, padded, prompt, flush=12)
        assert torch.equal(loop.run(5), expected)
    assert loop.call.reason is None and why(loop) is None
    assert loop.call.captures and loop.call.replays
    assert name != "small" or graphs() == 1


@pytest.mark.slow
def test_a_layer_of_an_8b_model_is_thirteen_launches_beside_attention() -> None:
    without = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.replay.launches"]
    run = subprocess.run(command, capture_output=True, text=True, env=without, check=True)
    assert json.loads(run.stdout) == {"llama": 13, "qwen3": 13}


def test_a_layer_number_of_another_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    loop = compiled(model)
    loop.run(3)
    monkeypatch.setattr(model.model.layers[1]._compiled_call_impl, "_number", 0)
    with pytest.raises((RuntimeError, ValueError)):
        loop.run(2)


def test_a_mask_of_the_step_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, masks = CompiledLayer._run, dict[int, Any]()

    def stale(layer: Any, *arguments: Any) -> Any:
        *others, kwargs = arguments
        mask = masks.get(layer._number, kwargs["attention_mask"])
        masks[layer._number] = kwargs["attention_mask"]
        return run(layer, *others, {**kwargs, "attention_mask": mask})

    loop = compiled(small_llama(), padded=True)
    loop.run(3)
    monkeypatch.setattr(CompiledLayer, "_run", stale)
    with pytest.raises(ValueError, match="attention_mask has 18 columns"):
        loop.run(2)
