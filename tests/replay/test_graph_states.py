"""Replayed steps after whatever happened to the cache, the model or the call in between."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import DecodeGraph, FlatKVCache
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.methods.lrqk import factors
from hf_kvret.replay import graph, why_not
from hf_kvret.testing.tape import TapeRecorder, taped
from hf_kvret_kernels._dispatch import prefer

from .steps import PROMPT, DecodeLoop, Waiting, compare, graphed, small_cache, small_llama


@pytest.fixture
def silent(caplog: pytest.LogCaptureFixture) -> None:
    """No reason was logged in this process yet, and every level is seen."""
    graph.log_once.cache_clear()
    caplog.set_level(logging.DEBUG, logger="hf_kvret.replay")


def test_a_model_that_waits_runs_as_usual(silent: None, caplog: pytest.LogCaptureFixture) -> None:
    model = small_llama(layers=1)
    usual = DecodeLoop(model, small_cache(model)).run(3)
    model.model.norm = Waiting(model.model.norm)
    with taped(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            loop = graphed(model)
            assert torch.allclose(loop.run(3), usual, atol=1e-4)
            step = loop.call
            assert step.replays == 0
            assert step.reason is not None and "_local_scalar_dense" in step.reason
            assert loop.cache.get_seq_length() == PROMPT + 3
    assert [record.getMessage() for record in caplog.records].count(
        f"decode steps are not replayed from a CUDA graph: {step.reason}"
    ) == 1


def test_an_error_of_another_kind_passes_and_leaves_the_cache_as_it_was() -> None:
    model = small_llama(layers=1)
    waiting = Waiting(model.model.norm)
    waiting.error = KeyboardInterrupt()
    model.model.norm = waiting
    with taped():
        loop = graphed(model)
        cache = loop.cache
        waiting.calls = 2
        loop.run(2)
        assert loop.call.captures == 0
        length, mask = cache.get_seq_length(), loop.mask
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        assert cache.get_seq_length() == length
        loop.mask = mask
        loop.step()
    assert cache.get_seq_length() == length + 1


def test_a_broken_rehearsal_leaves_no_token_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    first, broken, other = (torch.full((2, 1), token) for token in (3, 7, 11))

    def breaks(*_: Any) -> None:
        assert kv.window.capture is not None
        raise KeyboardInterrupt

    # Kernels take the token and write it, an eager step's as well.
    with taped(), prefer("triton"):
        usual, loop = DecodeLoop(model, small_cache(model)), graphed(model)
        usual.feed(first)
        loop.feed(first)
        kv = loop.cache.retrieval_layers[1].kv
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(kv.index, "search", breaks)
            loop.feed(broken)
        assert kv.window.take_new() is None
        loop.cache.crop(0)
        loop.call = model
        assert torch.equal(loop.feed(other), usual.feed(other))


def test_lrqk_sums_the_same_queries_in_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through several folds, with a new token that counts as padding.

    A step is captured at the last place of the buffer, too.
    """
    monkeypatch.setattr(factors, "_PENDING", 3)

    def act(loop: DecodeLoop) -> torch.Tensor:
        first = loop.run(2)
        loop.mask[0, -1] = 0
        logits = torch.cat([first, loop.run(5)])
        queries = loop.cache.retrieval_layers[0].kv.index._queries
        count = torch.tensor([queries.buffer.count])
        queries.fold()
        return torch.cat([logits.flatten(), queries.steady.flatten(), count])

    step = compare(act, "lrqk", padded=True)
    assert step.captures == 2 and step.replays >= 3


def test_a_cache_that_was_reset_is_rehearsed_again() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(3)
        loop.cache.reset()
        again = loop.copy(mask=torch.ones(2, PROMPT, dtype=torch.long))
        again.logits = again.feed(loop.tokens)
        loop.cache.fork()
        logits = again.run(3)
        counts = [layer["selected"] for layer in loop.cache.stats()["layers"]]
        return torch.cat([logits.flatten(), torch.tensor(counts)])

    step = compare(act, flush=7)
    assert step.reason is None
    assert step.replays >= 2


def ask_between(loop: DecodeLoop) -> torch.Tensor:
    loop.run(3)
    loop.mask = torch.cat([loop.mask, loop.mask.new_ones(2, 7)], dim=1)
    loop.logits = loop.feed(loop.tokens[:, :7])
    return loop.run(7)


def pass_by_another_way(loop: DecodeLoop) -> torch.Tensor:
    loop.run(4)
    call, loop.call = loop.call, small_llama(layers=1)
    loop.run(1)
    loop.call = call
    return loop.run(4)


def change_a_keyword(loop: DecodeLoop) -> torch.Tensor:
    call, logits = loop.call, []
    loop.run(4)
    for scale in (1, 0):
        loop.call = lambda scale=scale, **inputs: call(**inputs, logits_to_keep=scale)
        logits.append(loop.step())
    return torch.stack(logits)


def change_modes(loop: DecodeLoop) -> torch.Tensor:
    logits = []
    for inference in (True, True, True, True, False, False, False, True, True):
        with torch.inference_mode(inference):
            logits.append(loop.step().clone())
    return torch.stack([x.clone() for x in logits])


def change_sequences(loop: DecodeLoop) -> torch.Tensor:
    loop.run(2)
    loop.cache.batch_repeat_interleave(2)
    order = torch.arange(2).repeat_interleave(2)
    loop.logits, loop.mask = loop.logits[order], loop.mask[order]
    loop.run(2)
    loop.cache.batch_select_indices(torch.tensor([3, 0]))
    loop.logits, loop.mask = loop.logits[[3, 0]], loop.mask[[3, 0]]
    return loop.run(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "method", "options", "captures", "replays"),
    [
        (ask_between, "lrqk", {"store": "device", "flush": 6}, 1, 2),
        (ask_between, "lrqk", {"store": "resident", "flush": 6}, 1, 2),
        (pass_by_another_way, "flat", {"flush": 7}, 2, 2),
        (change_a_keyword, "flat", {"flush": 7}, 2, 2),
        (change_modes, "flat", {"flush": 7}, 1, 2),
        (change_sequences, "lrqk", {"flush": 7}, 0, 0),
    ],
)
def test_what_happens_between_steps_is_noticed(
    act: Any, method: str, options: dict[str, Any], captures: int, replays: int
) -> None:
    step = compare(act, method, **options)
    assert step.reason is None
    assert step.captures >= captures and step.replays >= replays


def test_a_failed_capture_leaves_what_an_index_notes_as_it_was() -> None:
    model = small_llama(layers=1)
    norm = model.model.norm

    def act(loop: DecodeLoop) -> torch.Tensor:
        model.model.norm = norm
        loop.run(1)
        model.model.norm = Waiting(norm)
        logits = loop.run(2)
        buffer = loop.cache.retrieval_layers[0].kv.index._queries.buffer
        assert buffer.count == int(buffer._next[0])
        return logits

    step = compare(act, "lrqk", model=model, flush=7)
    assert "_local_scalar_dense" in str(step.reason)


def test_with_gradients_on_a_step_runs_as_usual() -> None:
    model = small_llama(layers=1).requires_grad_(False)
    with taped():
        loop = graphed(model, flush=7)
        step = loop.call
        loop.run(3)
        replays = step.replays
        with torch.enable_grad():
            step(
                input_ids=loop.logits.argmax(-1, keepdim=True),
                position_ids=torch.full((2, 1), PROMPT + 3),
                past_key_values=loop.cache,
            )
    assert replays > 0
    assert step.replays == replays


def test_memory_that_ran_out_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record, failures = TapeRecorder.record, [1, 1, 1]

    def full(recorder: TapeRecorder, step: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("out of memory")
        return record(recorder, step)

    monkeypatch.setattr(TapeRecorder, "record", full)
    model = small_llama(layers=1)
    with taped():
        usual = DecodeLoop(model, small_cache(model, flush=7)).run(3)
        for count, gives_up in ((2, True), (1, False)):
            failures[:] = [1] * count
            loop = graphed(model, flush=7)
            step = loop.call
            assert step.reason is None
            assert torch.equal(loop.run(3), usual)
            assert ("out of memory" in str(step.reason)) == gives_up
            assert (step.replays == 0) == gives_up


@pytest.mark.parametrize("method", ["h2o", "aqua"])
def test_what_sees_each_pass_is_not_replayed_while_dense(method: str, tmp_path: Path) -> None:
    """It would not see the passes that are replayed, and lack them when tokens turn cold."""
    model = small_llama(layers=1)
    learned = {"artifact": tiny_artifact(model, method, tmp_path)} if method == "aqua" else {}
    step = compare(lambda loop: loop.run(4), method, model=model, dense_below=PROMPT + 2, **learned)
    assert step.replays == 0 and step.reason is not None
    assert step._cache.retrieval_layers[0].cold_len > 0


@pytest.mark.parametrize(
    ("device", "cuda", "level"),
    [("meta", False, logging.DEBUG), ("meta", True, logging.WARNING), ("cpu", True, logging.DEBUG)],
)
def test_a_missing_graph_is_a_warning_only_where_one_is_expected(
    device: str, cuda: bool, level: int, silent: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """An offloaded model has its weights on the meta device; hooks of accelerate bring them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    model = small_llama().to(device)
    step = DecodeGraph(model, FlatKVCache(model.config))
    assert (step.reason == "the model's weights are offloaded") == (device == "meta")
    assert [record.levelno for record in caplog.records] == [level]


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_not_captured(whole: bool) -> None:
    model: Any = small_llama()
    with taped():
        assert why_not(model, FlatKVCache(model.config)) is None
        if whole:
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")
        assert why_not(model, FlatKVCache(model.config)) == "the model is compiled"
