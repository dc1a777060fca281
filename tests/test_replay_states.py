"""Replayed steps after whatever happened to the cache, the model or the call in between."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import DecodeGraph, FlatKVCache, RetrievalCache, registered_methods
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.methods.lrqk import factors
from hf_kvret.replay import graph, why_not
from hf_kvret.testing.tape import TapeRecorder, taped

from .steps import OPTIONS, PROMPT, DecodeLoop, small_cache, small_llama


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was told in this process yet, and all that is told is seen."""
    monkeypatch.setattr(graph, "_logged_reasons", set())
    caplog.set_level(logging.DEBUG, logger="hf_kvret.replay")


class Waiting(torch.nn.Module):
    """A norm that asks the device for a number, as experts without a fixed shape do."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.error: BaseException | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.error is not None and self.calls == 5:
            raise self.error
        if self.error is None and x.sum().item() != x.sum().item():
            raise AssertionError("not a number")
        result: torch.Tensor = self.norm(x)
        return result


def test_a_model_that_waits_for_the_device_runs_as_usual_and_says_so_once(
    untold: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_llama(layers=1)
    usual = DecodeLoop(model, small_cache(model)).run(6)
    model.model.norm = Waiting(model.model.norm)
    with taped(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache = small_cache(model)
            step = DecodeGraph(model, cache)
            given = DecodeLoop(step, cache).run(6)
            assert torch.allclose(given, usual, atol=1e-4)
            assert step.replays == 0
            assert step.reason is not None and "_local_scalar_dense" in step.reason
            assert cache.get_seq_length() == PROMPT + 6
    assert [record.getMessage() for record in caplog.records].count(
        f"decode steps are not replayed from a CUDA graph: {step.reason}"
    ) == 1


def test_an_error_of_another_kind_passes_and_leaves_the_cache_as_it_was() -> None:
    model = small_llama(layers=1)
    waiting = Waiting(model.model.norm)
    waiting.error = KeyboardInterrupt()
    model.model.norm = waiting
    with taped():
        cache = small_cache(model)
        step = DecodeGraph(model, cache)
        loop = DecodeLoop(step, cache)
        waiting.calls = 2
        loop.run(2)
        assert step.captures == 0
        held, mask = cache.get_seq_length(), loop.mask
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        assert cache.get_seq_length() == held
        loop.mask = mask
        loop.step()
    assert cache.get_seq_length() == held + 1


def _both(
    act: Any, method: str = "flat", padded: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, DecodeGraph]:
    """What ``act(loop)`` returns with the model and with a DecodeGraph, and the latter."""
    model, given = small_llama(layers=1), []
    with taped():
        for graphed in (False, True):
            cache = small_cache(model, method, **options)
            step = DecodeGraph(model, cache) if graphed else model
            given.append(act(DecodeLoop(step, cache, padded)))
    return given[0], given[1], step


def test_lrqk_sums_the_same_queries_in_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through several folds, with a new token that counts as padding."""
    monkeypatch.setattr(factors, "_PENDING", 6)

    def act(loop: DecodeLoop) -> torch.Tensor:
        first = loop.run(3)
        loop.mask[0, -1] = 0
        logits = torch.cat([first, loop.run(13)])
        index = loop.cache.retrieval_layers[0].kv.index
        index._queries.fold()
        return torch.cat([logits.flatten(), index._queries.steady.flatten()])

    usual, replayed, step = _both(act, "lrqk", padded=True, flush=6)
    assert torch.equal(usual, replayed)
    assert step.replays >= 8


@pytest.mark.parametrize("prompt", [pytest.param(8, marks=pytest.mark.slow), PROMPT])
def test_a_cache_that_was_reset_is_rehearsed_again(prompt: int) -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(4)
        loop.cache.reset()
        again = DecodeLoop.__new__(DecodeLoop)
        vars(again).update(vars(loop), mask=torch.ones(2, prompt, dtype=torch.long))
        again.logits = again._feed(loop.tokens[:, :prompt])
        loop.cache.fork()
        logits = again.run(5)
        counts = [layer["selected"] for layer in loop.cache.stats()["layers"]]
        return torch.cat([logits.flatten(), torch.tensor(counts)])

    usual, replayed, step = _both(act, "lrqk", flush=7)
    assert torch.equal(usual, replayed)
    assert step.reason is None
    assert step.replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "resident"])
def test_a_question_in_between_is_no_reason_to_give_up(store: str) -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(3)
        loop.mask = torch.cat([loop.mask, loop.mask.new_ones(2, 7)], dim=1)
        loop.logits = loop._feed(loop.tokens[:, :7])
        return loop.run(7)

    usual, replayed, step = _both(act, "lrqk", store=store, flush=6)
    assert torch.equal(usual, replayed)
    assert step.reason is None
    assert step.replays >= 2


@pytest.mark.slow
def test_passes_that_went_past_it_are_noticed() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(4)
        through, loop.call = loop.call, small_llama(layers=1)
        loop.run(1)
        loop.call = through
        return loop.run(4)

    usual, replayed, step = _both(act, flush=7)
    assert torch.equal(usual, replayed)
    assert step.captures >= 2


@pytest.mark.slow
def test_a_keyword_that_changes_between_steps_is_seen() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        call, shapes = loop.call, []
        loop.run(4)
        for scale in (1, 0):
            loop.call = lambda scale=scale, **inputs: call(**inputs, logits_to_keep=scale)
            shapes.append(loop.step())
        return torch.stack(shapes)

    usual, replayed, step = _both(act, flush=7)
    assert torch.equal(usual, replayed)
    assert step.captures >= 2


@pytest.mark.slow
def test_inference_mode_and_no_grad_may_take_turns() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        logits = []
        for inference in (True, True, True, True, False, False, False, True, True):
            with torch.inference_mode(inference):
                logits.append(loop.step().clone())
        return torch.stack([x.clone() for x in logits])

    usual, replayed, step = _both(act, flush=7)
    assert torch.equal(usual, replayed)
    assert step.replays >= 2


def test_a_failed_capture_leaves_what_an_index_notes_as_it_was() -> None:
    given = []
    with taped():
        for graphed in (False, True):
            model = small_llama(layers=1)
            cache = small_cache(model, "lrqk", flush=7)
            step = DecodeGraph(model, cache) if graphed else model
            loop = DecodeLoop(step, cache)
            loop.run(2)
            model.model.norm = Waiting(model.model.norm)
            given.append(loop.run(4))
            index = cache.retrieval_layers[0].kv.index
            waiting = index._queries._buffer
            assert waiting.count == int(waiting._next)
    assert torch.equal(*given)
    assert "_local_scalar_dense" in str(step.reason)
    # The next one for this model does not try again.
    with taped():
        assert DecodeGraph(model, small_cache(model, "lrqk", flush=7)).reason == step.reason


@pytest.mark.slow
def test_rows_that_come_and_go_in_between() -> None:
    def act(loop: DecodeLoop) -> torch.Tensor:
        loop.run(2)
        loop.cache.batch_repeat_interleave(2)
        rows = torch.arange(2).repeat_interleave(2)
        loop.logits, loop.mask = loop.logits[rows], loop.mask[rows]
        loop.run(2)
        loop.cache.batch_select_indices(torch.tensor([3, 0]))
        loop.logits, loop.mask = loop.logits[[3, 0]], loop.mask[[3, 0]]
        return loop.run(3)

    usual, replayed, _ = _both(act, "lrqk", flush=7)
    assert torch.equal(usual, replayed)


def test_with_gradients_on_a_step_runs_as_usual() -> None:
    model = small_llama(layers=1).requires_grad_(False)
    with taped():
        cache = small_cache(model, flush=7)
        step = DecodeGraph(model, cache)
        loop = DecodeLoop(step, cache)
        loop.run(4)
        replays = step.replays
        with torch.enable_grad():
            step(
                input_ids=loop.logits.argmax(-1, keepdim=True),
                position_ids=torch.full((2, 1), PROMPT + 4),
                past_key_values=cache,
            )
    assert replays > 0
    assert step.replays == replays


def test_memory_that_ran_out_is_tried_again_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, failures = TapeRecorder.record, [1, 1, 1]

    def full(recorder: TapeRecorder, step: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("out of memory")
        return record(recorder, step)

    monkeypatch.setattr(TapeRecorder, "record", full)
    model = small_llama(layers=1)
    with taped():
        usual = DecodeLoop(model, small_cache(model, "lrqk", flush=7)).run(6)
        for left, told in ((2, True), (1, False)):
            failures[:] = [1] * left
            cache = small_cache(model, "lrqk", flush=7)
            step = DecodeGraph(model, cache)
            assert step.reason is None
            assert torch.equal(DecodeLoop(step, cache).run(6), usual)
            assert ("out of memory" in str(step.reason)) == told
            assert (step.replays == 0) == told


@pytest.mark.parametrize("method", ["h2o", "aqua"])
def test_what_sees_each_pass_is_not_replayed_before_anything_is_cold(
    method: str, tmp_path: Path
) -> None:
    """It would not see the passes that are replayed, and lack them when tokens turn cold."""
    model = small_llama(layers=1)
    made = {**OPTIONS, "dense_below": PROMPT + 8}
    if method == "aqua":
        made["artifact"] = tiny_artifact(model, method, tmp_path)

    def cache() -> RetrievalCache:
        return registered_methods()[method](model.config, **made)

    with taped():
        usual, mine = DecodeLoop(model, cache()).run(14), cache()
        step = DecodeGraph(model, mine)
        assert torch.equal(DecodeLoop(step, mine).run(14), usual)
    assert step.replays == 0 and step.reason is not None
    assert mine.retrieval_layers[0].cold_len > 0


@pytest.mark.parametrize(("cuda", "level"), [(False, logging.DEBUG), (True, logging.WARNING)])
def test_an_offloaded_model_is_a_warning_only_where_there_is_a_gpu(
    cuda: bool,
    level: int,
    untold: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    # As accelerate's `cpu_offload` leaves a model: hooks bring weights when they are needed.
    model = small_llama().to("meta")
    step = DecodeGraph(model, FlatKVCache(model.config))
    assert step.reason == "the model's weights are offloaded"
    assert [record.levelno for record in caplog.records] == [level]


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_no_warning(
    untold: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = small_llama()
    DecodeGraph(model, FlatKVCache(model.config))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


@pytest.mark.parametrize("whole", [True, False], ids=["compile", "forward"])
def test_a_compiled_model_is_not_captured(whole: bool) -> None:
    model: Any = small_llama()
    with taped():
        assert why_not(model, FlatKVCache(model.config)) is None
        if whole:
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")
        assert why_not(model, FlatKVCache(model.config)) == "the model is compiled"
