"""How bench decode takes its steps: as usual, replayed, compiled; and what a row says of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import masking_utils

from hf_kvret.lab.bench import stepping
from hf_kvret.lab.bench.filling import feed, prefill, random_tokens, serving
from hf_kvret.lab.bench.opponents import PreallocatedCache, attend_to_all, choose_bench_caches
from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.bench.stepping import (
    CompiledSteps,
    DenseGraphSteps,
    LosslessRounds,
    ReplayedSteps,
    Steps,
    make_steps,
    unmasked,
)
from hf_kvret.lab.report.results import Results
from hf_kvret.testing.tape import taped
from hf_kvret_kernels._dispatch import interpreted

SMALL = "dense_below=0:recent=16:flush=8:sink=2:top_k=8"
LENGTH = 24


class Graph:
    """Stands for ``DecodeGraph`` on a device with graphs; every fourth call captures anew."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.reason = model, None
        self.captures = self.replays = self.eager = self.calls = 0

    def __call__(self, **inputs: Any) -> Any:
        place = self.calls % 4
        self.calls += 1
        self.eager += place == 0
        self.captures += place == 1
        self.replays += place > 0
        return self.model(**inputs)


def make(text: str, length: int, steps: int, layers: int = 2) -> tuple[Any, Any, Any, torch.Tensor]:
    """Choice, model, filled cache and next token of the tiny shape."""
    model = random_model(load_shape("tiny").with_layers(layers), torch.float32, "cpu", seed=0)
    choice = choose_bench_caches([text], {"store": "device"}, "cpu")[text]
    cache = choice.make(model.config, length + steps + 1)
    tokens = random_tokens(model, 1, length, seed=1)
    with serving(model, cache):
        token = prefill(model, choice, cache, tokens)[:, -1:].argmax(-1)
    return choice, model, cache, token


def test_retrieval_caches_are_replayed_unless_their_option_says_no() -> None:
    for text, cls in (
        (f"paris:{SMALL}", ReplayedSteps),
        (f"paris:{SMALL}:graph=false", Steps),
        ("dense", Steps),
    ):
        choice, model, cache, _ = make(text, 64, 4)
        assert type(make_steps(choice, model, cache, 64)) is cls


@pytest.mark.parametrize(("accepted", "tokens"), [(None, 6), (9, 6), (2, 3), (0, 1)])
@torch.inference_mode()
def test_rounds_of_exact_answers_accept_as_many_drafts_as_asked(
    accepted: int | None, tokens: int
) -> None:
    _, model, cache, token = make(f"flat:{SMALL}:lossless=true:max_draft=5", 64, 0)
    with serving(model, cache):
        steps = LosslessRounds(model, cache, 64, accepted)
        _, seconds, kinds = steps.run(token, 3)
    counts = cache.stats()["lossless"]
    assert (counts["rounds"], counts["drafted"]) == (3, 15)
    assert counts["accepted"] == 3 * (tokens - 1)
    assert cache.get_seq_length() == steps.length == 64 + 3 * tokens
    # Seconds are those of a token.
    total = counts["draft_s"] + counts["exact_s"]
    assert [kind.label for kind in kinds] == ["round"] * 3
    assert total <= tokens * sum(seconds) < 2 * total + 1


def test_a_row_tells_the_kinds_of_its_steps(
    measure: Callable[..., Results],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stepping, "DecodeGraph", Graph)
    caches = f"dense,flat:{SMALL},flat:{SMALL}:graph=false"
    arguments = ["--context", "64", "--steps", "9", "--warmup", "1", "--rounds", "1"]
    results = measure("decode", *arguments, "--caches", caches)
    rows = {cell["cache"]: row for cell, row in results}
    flat = rows[f"flat:{SMALL}"]
    # Calls 1 to 9 of the stand-in. The prompt left 16 tokens in the window, the first step that
    # finds 24 there moves 8: the ninth call, which would have been eager.
    assert flat["steps"] == {"replay": 4, "capture": 3, "flush": 1, "eager": 1}
    assert set(flat["seconds_by_kind"]) == set(flat["steps"]) and flat["flushed_tokens"] == 2 * 8
    assert flat["not_replayed"] is None
    assert rows[f"flat:{SMALL}:graph=false"]["steps"] == {"eager": 8, "flush": 1}
    assert rows["dense"]["steps"] == {"eager": 9}
    text = capsys.readouterr().out
    header, _, first = text[text.index("| cache") :].splitlines()[:3]
    column = [name.strip() for name in header.split("|")].index("mean ms a step")
    mean = float(first.split("|")[column].replace(",", ""))
    assert mean == pytest.approx(1e3 * rows["dense"]["seconds_mean"], rel=0.01)
    assert "| 4 replay, 3 capture, 1 " in text and re.search(r"[,:] capture [\d.]+ ms", text)


def test_why_nothing_was_replayed_stands_in_row_and_table(
    measure: Callable[..., Results], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--context", "64", "--steps", "2", "--warmup", "0", "--rounds", "1"]
    ((_, row),) = measure("decode", *arguments, "--caches", f"flat:{SMALL}")
    assert row["steps"] == {"eager": 2} and "cpu" in row["not_replayed"]
    assert f"not replayed: flat:{SMALL}: {row['not_replayed']}" in capsys.readouterr().out


@pytest.mark.skipif(not interpreted(), reason="the tape needs Triton's interpreter")
@torch.inference_mode()
def test_replayed_steps_give_the_logits_of_usual_ones() -> None:
    all_logits: dict[str, list[torch.Tensor]] = {}
    kinds: dict[str, list[str]] = {}
    for text in (f"flat:{SMALL}", f"flat:{SMALL}:graph=false"):
        with taped():
            # The model has one layer, for the interpreter is slow.
            choice, model, cache, token = make(text, 40, 8, layers=1)
            with serving(model, cache):
                steps = make_steps(choice, model, cache, 40)
                for _ in range(5):
                    logits, taken = steps.take(token)
                    all_logits.setdefault(text, []).append(logits.clone())
                    kinds.setdefault(text, []).append(taken.kind)
                    token = logits.argmax(-1)
        assert steps.reason is None and steps.length == 45
    replayed, usual = all_logits.values()
    # The same kernels on the same numbers, in another buffer: rounding of sums at most.
    torch.testing.assert_close(torch.stack(replayed), torch.stack(usual), rtol=0, atol=1e-5)
    assert kinds[f"flat:{SMALL}"] == ["eager", "eager", "capture", "replay", "replay"]
    assert kinds[f"flat:{SMALL}:graph=false"] == ["eager"] * 5


@torch.inference_mode()
def test_steps_that_take_too_long_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {"dense": 0}
    take = Steps.take

    def counting(self: Steps, tokens: torch.Tensor) -> Any:
        timed["dense"] += 1
        return take(self, tokens)

    monkeypatch.setattr(Steps, "take", counting)
    # No step of this model takes less than a microsecond, so that three are all that is allowed.
    decode = Decode(device="cpu", caches="dense", steps=50, warmup=1, limit=1e-6)
    cell = {"cache": "dense", "context": 64, "batch": 1}
    sample = decode.once(decode.turn(cell, decode.subjects[0]))
    assert len(sample.seconds) == 3 and timed["dense"] == 1 + 3
    assert decode.steps_within(0.0) == 50


def test_dense_steps_in_cpp_give_the_logits_of_usual_ones() -> None:
    choice, model, cache, token = make("dense-cpp", 200, 8)
    _, _, plain, _ = make("full", 200, 8)
    before = model.config._attn_implementation
    with serving(model, cache):
        steps = make_steps(choice, model, cache, 200)
        got = [steps.take(token)[0] for _ in range(4)]
    assert model.config._attn_implementation == before
    for place, logits in enumerate(got, 200):
        # Sums in another order; logits are about 1.
        torch.testing.assert_close(logits, feed(model, plain, token, place), rtol=0, atol=1e-4)


def test_dense_in_cpp_is_for_plain_attention_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"reads with the CPU kernels.*use dense here"):
        choose_bench_caches(["dense-cpp"], {}, "cuda")
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="this model's attention has softcap"):
        attend_to_all(torch.nn.Module(), query, query, query, None, softcap=3.0)


def test_static_compile_wants_a_warm_up_and_has_no_prefill(bench: Callable[..., int]) -> None:
    with pytest.raises(ValueError, match="--warmup 2: static-compile compiles"):
        bench("decode", "--caches", "static-compile", "--warmup", "2")
    with pytest.raises(ValueError, match=r"static-compile is a way to decode.*use static"):
        bench("prefill", "--caches", "static-compile")
    with pytest.raises(ValueError, match="takes no options"):
        bench("decode", "--caches", "static-compile:x=1")


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_steps_give_the_logits_of_usual_ones() -> None:
    choice, model, cache, token = make("static-compile", 40, 8)
    _, _, plain, _ = make("full", 40, 8)
    steps = make_steps(choice, model, cache, 40)
    assert isinstance(steps, CompiledSteps)
    for place in range(40, 44):
        expected = feed(model, plain, token, place)
        logits, taken = steps.take(token)
        assert taken.kind == "compiled"
        # Fused sums are rounded differently; logits are about 1.
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        token = expected.argmax(-1)


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """``is_tracing`` in a capture as in transformers 5.17, which also asks without padding."""

    def is_tracing(tensor: torch.Tensor | None = None) -> bool:
        return True

    skips = masking_utils._ignore_causal_mask_sdpa

    def as_before(padding_mask: torch.Tensor | None, *sizes: Any, **more: Any) -> bool:
        return not masking_utils.is_tracing(padding_mask) and skips(padding_mask, *sizes, **more)

    monkeypatch.setattr(masking_utils, "is_tracing", is_tracing)
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", as_before)
    return is_tracing


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each call of sdpa: whether it has a mask, and whether heads share keys and values."""
    masks: list[tuple[bool, bool]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        masks.append((more.get("attn_mask") is not None, bool(more.get("enable_gqa"))))
        return sdpa(*tensors, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return masks


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing: what is captured runs as usual."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda what: contextlib.nullcontext())


@torch.inference_mode()
def filled() -> tuple[Any, PreallocatedCache, torch.Tensor]:
    """Model of the tiny shape, a cache of ``LENGTH`` tokens with room for one, the next token."""
    model = random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)
    cache = PreallocatedCache(model.config, LENGTH + 1)
    with unmasked():
        logits = feed(model, cache, random_tokens(model, 2, LENGTH, seed=1), 0)
    return model, cache, logits.argmax(-1)


def test_a_dense_step_is_captured_without_a_mask(
    tracing: Callable[..., bool], cuda: None, calls: list[tuple[bool, bool]]
) -> None:
    model, cache, token = filled()
    calls.clear()
    logits, taken = DenseGraphSteps(model, cache, LENGTH).take(token)
    assert set(calls) == {(False, True)} and cache.get_seq_length() == LENGTH
    assert taken.kind == "capture"
    assert masking_utils.is_tracing is tracing
    # Without the context this version gives a mask, and the logits are the same.
    calls.clear()
    expected = feed(model, cache, token, LENGTH)
    assert {masked for masked, _ in calls} == {True}
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
