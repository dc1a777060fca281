"""The conformance suite must pass what is right and fail what is wrong, each in its own mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_kvret import FlatKVCache
from hf_kvret.testing import (
    COVERING_OPTIONS,
    MODELS,
    MODES,
    Case,
    Result,
    check,
    conformance_cases,
    failures,
    no_proof,
    run_case,
    run_conformance,
)
from hf_kvret.testing.conformance import first_difference, widest_span
from hf_kvret.testing.scenario import Outcome, dynamic_cache

NEWEST = Version(transformers.__version__) >= Version("5.23")


def leave_alone(model: PreTrainedModel) -> None:
    """Preparation for transformers' own caches: none."""


PLAIN: dict[str, Any] = {"prepare": leave_alone, "proof": no_proof}


class Faulty(DynamicCache):
    """transformers' own cache, made for a model, to put a fault into."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))

    def full_layers(self) -> list[DynamicLayer]:
        return [layer for layer in self.layers if type(layer) is DynamicLayer]

    def update(self, key: Any, value: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(*self.spoiled(key, value, layer), layer, *args, **kwargs)

    def spoiled(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        return key, value


class LosesOneToken(Faulty):
    """The 21st token of every row is gone once decoding begins."""

    def spoiled(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        kept = self.layers[layer]
        if key.shape[2] == 1 and type(kept) is DynamicLayer and kept.is_initialized:
            kept.keys[:, :, 20] = 0
            kept.values[:, :, 20] = 0
        return key, value


class IgnoresReorder(Faulty):
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass


class CropsTheFront(Faulty):
    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.full_layers():
            layer.keys = layer.keys[:, :, -tokens_to_remove:]
            layer.values = layer.values[:, :, -tokens_to_remove:]


class RepeatsInTheWrongOrder(Faulty):
    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.full_layers():
            layer.keys = layer.keys.repeat(repeats, 1, 1, 1)
            layer.values = layer.values.repeat(repeats, 1, 1, 1)


class SelectsTheFirstRows(Faulty):
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(torch.arange(len(indices)))


class CopiesNothing(Faulty):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesNothing:
        return self


class ResetsTheFirstLayerOnly(Faulty):
    def reset(self) -> None:
        self.layers[0].reset()


class ForgetsSecondPrompts(Faulty):
    """The first of several tokens that arrive later is lost."""

    def spoiled(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        if key.shape[2] > 1 and self.get_seq_length(layer) > 0:
            key, value = key.clone(), value.clone()
            key[:, :, 0] = 0
            value[:, :, 0] = 0
        return key, value


class RoundsToHalf(Faulty):
    """Right in every mode, but for precision."""

    def spoiled(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        return key.half().float(), value.half().float()


FAULTS: list[tuple[type[Faulty], list[str], list[str]]] = [
    # fault, modes that must find it, modes that it must not disturb
    (LosesOneToken, ["greedy_ragged", "sampling", "inputs_embeds"], []),
    (IgnoresReorder, ["beams_ragged"], ["greedy", "crop_deep"]),
    (CropsTheFront, ["crop_small", "assisted"], ["beams"]),
    (RepeatsInTheWrongOrder, ["batch_repeat_interleave"], ["return_sequences"]),
    (SelectsTheFirstRows, ["batch_select_indices"], ["beams"]),
    (CopiesNothing, ["prefix_reuse"], ["second_turn"]),
    (ResetsTheFirstLayerOnly, ["reset", "reset_other_batch"], ["second_turn"]),
    (ForgetsSecondPrompts, ["second_turn_ragged", "chunked_prefill"], ["prefill_by_token"]),
    (RoundsToHalf, ["loop", "guidance"], []),
]


@pytest.mark.parametrize(("turn", "model"), enumerate(["llama", "lfm2", "gemma2"]))
def test_transformers_own_cache_conforms(turn: int, model: str) -> None:
    """Modes and models take turns."""
    results = run_conformance(dynamic_cache, [model], list(MODES)[turn::9], **PLAIN)
    failed = [result for result in results if result.status == "failed"]
    # The DynamicCache of older releases keeps zeroed rows after a reset.
    assert not [one for one in failed if NEWEST or not one.case.mode.startswith("reset")]


@pytest.mark.parametrize(("fault", "finding", "spared"), FAULTS)
def test_a_broken_cache_fails_where_its_fault_shows_only(
    fault: type[Faulty], finding: list[str], spared: list[str]
) -> None:
    results = run_conformance(fault, ["llama"], [*finding, *spared], **PLAIN)
    status = {result.case.mode: result.status for result in results}
    assert status == dict.fromkeys(finding, "failed") | dict.fromkeys(spared, "passed")


def test_a_lost_token_shows_in_the_logits_of_every_model() -> None:
    results = run_conformance(LosesOneToken, list(MODELS), ["greedy_ragged"], **PLAIN)
    assert {result.status for result in results} == {"failed"}


@pytest.mark.parametrize(
    ("options", "mode", "detail"),
    [
        ({"top_k": 1}, "greedy", "differs first"),
        ({"top_k": 1}, "crop_deep", "differs first"),
        ({"dense_below": 10_000}, "greedy", "no cold row was read"),
    ],
)
def test_no_retrieval_and_few_rows_fail(options: dict[str, Any], mode: str, detail: str) -> None:
    given = {**COVERING_OPTIONS, **options}
    result = run_case(Case("llama", mode), lambda m: FlatKVCache(config=m.config, **given))
    assert result.status == "failed" and detail in result.detail


def test_a_cache_that_raises_is_reported_as_failed() -> None:
    class Raises(Faulty):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of paper")

    (result,) = run_conformance(Raises, ["qwen2"], ["greedy"], proof=no_proof)
    assert (result.status, result.detail) == ("failed", "raised RuntimeError: out of paper")


def test_failures_are_what_failed_and_all_where_nothing_passed() -> None:
    passed, failed, skipped = (
        Result(Case("llama", "greedy"), status) for status in ("passed", "failed", "skipped")
    )
    assert failures([passed, skipped]) == []
    assert failures([passed, skipped, failed]) == [failed]
    assert failures([skipped]) == [skipped]
    assert failures([skipped, failed]) == [skipped, failed]
    with pytest.raises(ValueError, match="no results: run_conformance was given no models"):
        failures(run_conformance(dynamic_cache, [], ["greedy"]))


def test_what_transformers_own_cache_cannot_do_is_no_failure_of_another() -> None:
    """A recurrent state can't go back; a mode that it can do is shown beside."""
    modes = ["greedy", "crop_small"]
    results = run_conformance(dynamic_cache, ["qwen3_next"], modes, **PLAIN)
    assert [result.status for result in results] == ["passed", "skipped"]
    assert not failures(results) and failures(results[1:]) == results[1:]


def test_zoo_models_are_what_they_say() -> None:
    for name, tiny in MODELS.items():
        model, again = tiny.build(), tiny.build()
        full = [i for i, x in enumerate(dynamic_cache(model).layers) if type(x) is DynamicLayer]
        assert tuple(full) == tiny.full_attention, name
        assert not model.training, name
        for (key, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert weight.dtype is torch.float32 and torch.equal(weight, other), f"{name} {key}"


def test_check_refuses_a_mode_that_the_model_can_not_do() -> None:
    model = MODELS["qwen3_next"].build()
    with pytest.raises(ValueError, match=r"qwen3_next, crop_deep can't be checked: a recurrent"):
        check(model, MODES["crop_deep"], partial(dynamic_cache, model), proof=no_proof)


def test_check_refuses_texts_that_a_window_of_the_model_covers() -> None:
    """At 40 tokens a model whose sparse layers lose causality passed; at 200 it failed."""
    model = MODELS["gemma2"].build()
    assert widest_span(model) == ("sliding_window", 16)
    model.config.sliding_window = 71
    options = {"proof": no_proof, "baseline": MODES["greedy"].reference(model)}
    with pytest.raises(ValueError, match=r"at most 71 tokens, sliding_window of the model is 71"):
        check(model, MODES["greedy"], partial(dynamic_cache, model), **options)
    model.config.sliding_window = 70
    options["baseline"] = MODES["greedy"].reference(model)
    check(model, MODES["greedy"], partial(dynamic_cache, model), **options)


def test_check_compares_with_the_same_model_when_no_baseline_is_given() -> None:
    model = MODELS["qwen2"].build()
    check(model, MODES["greedy"], partial(dynamic_cache, model), proof=no_proof)
    with pytest.raises(AssertionError, match=r"qwen2, loop: step 0: logits differs first at"):
        check(model, MODES["loop"], partial(LosesOneToken, model), proof=no_proof)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'lama': choose from llama,"):
        list(conformance_cases(models=["lama"]))
    with pytest.raises(ValueError, match="unknown mode 'gredy': choose from greedy,"):
        list(conformance_cases(modes=["gredy"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(logits=v["logits"] + 1.0), r"logits differs first at \[0, 0\]"),
        (lambda v: v.update(logits=v["logits"] * float("nan")), "logits differs first"),
        (lambda v: v.update(logits=v["logits"][:1]), r"is torch.float32 \[1, 3\], expected"),
        (lambda v: v.update(logits=v["logits"].double()), "torch.float64"),
        (lambda v: v.update(ids=v["ids"].flip(0), logits=v["logits"] + 1), "ids differs first"),
        (lambda v: v.pop("ids"), "recorded"),
    ],
)
def test_every_difference_is_seen(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    values = {"logits": torch.zeros(2, 3), "ids": torch.arange(4)}
    want = Outcome({**values})
    assert first_difference(Outcome(values), want, 0.1) is None
    change(values)
    assert re.search(message, first_difference(Outcome(values), want, 0.1) or "none")
