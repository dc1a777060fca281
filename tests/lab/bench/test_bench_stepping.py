"""How bench decode takes its steps: as usual, replayed, in rounds; and what a row says of it."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from hf_kvret.lab.bench import opponents, stepping
from hf_kvret.lab.bench.filling import random_tokens, serving
from hf_kvret.lab.bench.opponents import PreallocatedCache, attend_to_all, choose_bench_cache
from hf_kvret.lab.bench.stepping import (
    DenseCompiledSteps,
    DenseGraphSteps,
    LosslessRounds,
    ReplayedSteps,
    Steps,
    make_steps,
)
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lab.report.results import Results
from hf_kvret.models import products
from hf_kvret.replay import compiled_layers

SMALL = "dense_below=0:recent=16:flush=8:sink=2:top_k=8"
LENGTH = 64


def make(model: PreTrainedModel, text: str) -> tuple[CacheChoice, Any, torch.Tensor]:
    """Choice, a cache filled with ``LENGTH`` tokens, and the next token."""
    choice = choose_bench_cache(text, {"store": "device"})
    cache = choice.make(model.config, LENGTH + 8)
    with serving(model, cache):
        logits = feed(model, cache, random_tokens(model, 1, LENGTH, seed=1), 0)
    return choice, cache, logits[:, -1:].argmax(-1)


@pytest.mark.parametrize(
    ("text", "cls"),
    [(f"paris:{SMALL}", ReplayedSteps), (f"paris:{SMALL}:graph=false", Steps), ("dense", Steps)],
)
def test_retrieval_caches_are_replayed_unless_their_option_says_no(
    text: str, cls: type[Steps], model: PreTrainedModel
) -> None:
    choice, cache, _ = make(model, text)
    assert type(make_steps(choice, model, cache, LENGTH)) is cls


@torch.inference_mode()
def test_rounds_of_exact_answers_accept_all_their_drafts(model: PreTrainedModel) -> None:
    _, cache, token = make(model, f"flat:{SMALL}:lossless=true:max_draft=5")
    with serving(model, cache):
        steps = LosslessRounds(model, cache, LENGTH)
        _, seconds, kinds = steps.run(token, 3)
    counts = cache.stats()["lossless"]
    assert (counts["rounds"], counts["drafted"], counts["accepted"]) == (3, 15, 15)
    assert cache.get_seq_length() == steps.length == LENGTH + 3 * 6
    # Seconds are those of a token.
    total = counts["draft_s"] + counts["exact_s"]
    assert kinds == ["round"] * 3
    assert total <= 6 * sum(seconds) < 2 * total + 1


class Graph:
    """Stands for ``DecodeGraph`` on a device with graphs; every fourth call captures anew."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.reason = model, None
        self.captures = self.replays = self.calls = 0

    def __call__(self, **inputs: Any) -> Any:
        self.captures += self.calls % 4 == 1
        self.replays += self.calls % 4 > 0
        self.calls += 1
        return self.model(**inputs)


def test_a_row_tells_the_kinds_of_its_steps(
    measure: Callable[..., Results],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stepping, "DecodeGraph", Graph)
    caches = f"dense,flat:{SMALL},flat:{SMALL}:graph=false"
    arguments = ["--context", "64", "--steps", "9", "--warmup", "1", "--rounds", "1"]
    rows = {cell["cache"]: row for cell, row in measure("decode", *arguments, "--caches", caches)}
    # Calls 1 to 9 of the stand-in. The prompt left 16 tokens in the window, the first step that
    # finds 24 there moves 8: the ninth call, which would have been eager.
    assert rows[f"flat:{SMALL}"]["steps"] == {"replay": 4, "capture": 3, "flush": 1, "eager": 1}
    assert rows[f"flat:{SMALL}"]["not_replayed"] is None
    assert rows[f"flat:{SMALL}:graph=false"]["steps"] == {"eager": 8, "flush": 1}
    assert rows["dense"]["steps"] == {"eager": 9}
    text = capsys.readouterr().out
    header, _, first = text[text.index("| cache") :].splitlines()[:3]
    column = [name.strip() for name in header.split("|")].index("mean ms a step")
    mean = float(first.split("|")[column].replace(",", ""))
    assert mean == pytest.approx(1e3 * rows["dense"]["seconds_mean"], rel=0.01)
    assert "| 4 replay, 3 capture, 1 " in text


def test_why_nothing_was_replayed_stands_in_row_and_table(
    measure: Callable[..., Results], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--context", "64", "--steps", "2", "--warmup", "0", "--rounds", "1"]
    ((_, row),) = measure("decode", *arguments, "--caches", f"flat:{SMALL}")
    assert row["steps"] == {"eager": 2} and "cpu" in row["not_replayed"]
    assert f"not replayed: flat:{SMALL}: {row['not_replayed']}" in capsys.readouterr().out


def test_dense_steps_in_cpp_give_the_logits_of_usual_ones(model: PreTrainedModel) -> None:
    choice, cache, token = make(model, "dense-cpp")
    _, plain, _ = make(model, "full")
    before = model.config._attn_implementation
    with serving(model, cache):
        steps = make_steps(choice, model, cache, LENGTH)
        results = [steps.take(token)[0] for _ in range(4)]
    assert model.config._attn_implementation == before
    for place, logits in enumerate(results, LENGTH):
        # Sums in another order; logits are about 1.
        torch.testing.assert_close(logits, feed(model, plain, token, place), rtol=0, atol=1e-4)


def test_dense_in_cpp_multiplies_in_cpp(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "most_tokens", lambda dtype: 4)
    linear, head, shapes = torch.nn.functional.linear, vars(model.lm_head), []
    monkeypatch.setattr(opponents, "linear", lambda x, *_: shapes.append(x.shape) or linear(x, *_))
    choice, cache, token = make(model, "dense-cpp")
    with serving(model, cache):
        make_steps(choice, model, cache, LENGTH).take(token)
    # The head has read the prompt's last token before.
    assert len(shapes) == 1 + sum(isinstance(one, torch.nn.Linear) for one in model.modules())
    assert "forward" not in head


def test_dense_in_cpp_is_for_plain_attention_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"reads with the CPU kernels.*use dense here"):
        choose_bench_cache("dense-cpp", device="cuda")
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="this model's attention has softcap"):
        attend_to_all(torch.nn.Module(), query, query, query, None, softcap=3.0)


@pytest.fixture
def calls(watch: Any) -> list[tuple[bool, bool]]:
    """For each call of sdpa: whether it has a mask, and whether heads share keys and values."""

    def note(*_: torch.Tensor, **more: Any) -> tuple[bool, bool]:
        return more.get("attn_mask") is not None, bool(more.get("enable_gqa"))

    return watch(torch.nn.functional, "scaled_dot_product_attention", note)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing: what is captured runs as usual."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda what: contextlib.nullcontext())


@pytest.mark.slow
@torch.inference_mode()
def test_a_dense_step_of_a_compiled_model_is_captured(
    model: PreTrainedModel, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    counters.clear()
    cache = PreallocatedCache(model.config, LENGTH + 1)
    token = feed(model, cache, random_tokens(model, 2, LENGTH, seed=1), 0).argmax(-1)
    steps = DenseCompiledSteps(model, cache, LENGTH)
    logits, kind = steps.take(token)
    assert kind == "capture" and cache.get_seq_length() == LENGTH
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(logits, feed(model, cache, token, LENGTH), rtol=0, atol=1e-5)
    steps.finish()
    assert cache.get_seq_length() == LENGTH + 1


@torch.inference_mode()
def test_a_dense_step_is_captured_without_a_mask(
    model: PreTrainedModel, cuda: None, calls: list[tuple[bool, bool]]
) -> None:
    cache = PreallocatedCache(model.config, LENGTH + 1)
    token = feed(model, cache, random_tokens(model, 2, LENGTH, seed=1), 0).argmax(-1)
    calls.clear()
    logits, kind = DenseGraphSteps(model, cache, LENGTH).take(token)
    assert set(calls) == {(False, True)} and cache.get_seq_length() == LENGTH
    assert kind == "capture"
    expected = feed(model, cache, token, LENGTH)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
