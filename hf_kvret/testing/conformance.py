"""Conformance: a cache must give what transformers' own cache gives, in every mode of use.

With a budget that covers everything, retrieval is full attention in another order of summation.
So the text must be the same token for token and the logits equal up to rounding, and cold rows
must really have been read. The author of an index runs all of it with

    run_conformance(lambda model: MyCache(config=model.config, **COVERING_OPTIONS))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.generate.attach import attach
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.models.compatibility import model_layers
from hf_kvret.stores import Store
from hf_kvret.testing.indexed_models import INDEXED_MODELS
from hf_kvret.testing.models import (
    GEMMA4_MODELS,
    HYBRID_MODELS,
    LATENT_MODELS,
    MODELS,
    SHARED_MODELS,
)
from hf_kvret.testing.modes import MODES, Mode
from hf_kvret.testing.scenario import FAILURES, CacheMaker, Outcome, describe

COVERING_OPTIONS: dict[str, Any] = {
    "top_k": 10**6,
    "sink": 2,
    "recent": 8,
    "flush": 4,
    "max_draft": 6,
    "dense_below": 0,
}
"""Options with which a budget covers all, and the suite's short prompts have cold rows."""

LOGIT_TOLERANCE = 3e-4
"""Largest difference of logits, which spread over about 4. Summing attention in another order
moved them by at most 3e-5 in any mode; a budget of a single token by 0.1 and more."""


ALL_MODELS = MODELS | LATENT_MODELS | GEMMA4_MODELS | SHARED_MODELS | HYBRID_MODELS | INDEXED_MODELS
"""All test models, by name."""

# How configurations call the tokens that a layer works on together.
_SPANS = (
    "sliding_window",
    "attention_chunk_size",
    "index_block_size",
    "block_size",
    "chunk_size",
    "mamba_chunk_size",
)


class Case(NamedTuple):
    """A model and a mode, by name; ``str(case)`` is an identifier for test runners."""

    model: str
    mode: str

    def __str__(self) -> str:
        return f"{self.model}-{self.mode}"


@dataclass(frozen=True)
class Result:
    """How one case went.

    Attributes:
        case: model and mode.
        status: ``"passed"``, ``"failed"`` or ``"skipped"``.
        detail: the first difference, or why transformers' own cache can't do it.
    """

    case: Case
    status: str
    detail: str = ""


def cold_rows_read(cache: Any) -> int:
    """Cold rows that `cache` selected and read, over all layers, by its own ``stats()``."""
    return sum(int(layer["selected"]) for layer in cache.stats()["layers"])


def reads_cold_rows(cache: Cache) -> bool:
    """The default proof that retrieval took part: ``stats()`` counts selected rows."""
    return cold_rows_read(cache) > 0


def no_proof(cache: Cache) -> bool:
    """In place of a proof, for caches without retrieval."""
    del cache
    return True


def check(
    model: PreTrainedModel,
    mode: Mode,
    make_cache: CacheMaker,
    *,
    baseline: Outcome | None = None,
    atol: float = LOGIT_TOLERANCE,
    proof: Callable[[Cache], bool] = reads_cold_rows,
) -> Outcome:
    """Run `mode` on `model` with the caches of `make_cache` and compare with the baseline.

    Args:
        model: a model whose attention serves the caches; for modes with ``mode.direct`` it must
            have been attached to them.
        mode: what to do.
        make_cache: returns a new, empty cache.
        baseline: what must come out; None runs the reference on the same model first.
        atol: largest absolute difference of floating point values.
        proof: tells of a cache that ran whether retrieval took part; true of at least one.

    Returns:
        What came out.

    Raises:
        AssertionError: the first difference, with model and mode, or that no cold row was read.
        ValueError: the mode does not work on the model, or its texts are no longer than a window
            or block of the model, so that they would show nothing.
    """
    where = f"{model.config.model_type}, {mode.name}"
    if baseline is None:
        reference = mode.reference(model)
        if isinstance(reference, str):
            raise ValueError(f"{where} can't be checked: {reference}")
        baseline = reference
    outcome = mode.run(model, make_cache)
    difference = first_difference(outcome, baseline, atol)
    if difference is not None:
        raise AssertionError(f"{where}: {difference}")
    longest = max(cache.get_seq_length() for cache in outcome.caches)
    name, span = widest_span(model)
    if longest <= span:
        raise ValueError(
            f"{where}: its texts have at most {longest} tokens, {name} of the model is {span}: "
            "what lies beyond a window or block was never seen; build the model with a smaller one"
        )
    if not any(proof(cache) for cache in outcome.caches):
        raise AssertionError(
            f"{where}: no cold row was read, so the agreement proves nothing; shrink the window "
            "(COVERING_OPTIONS) or see why the cache retrieves nothing"
        )
    return outcome


def widest_span(model: PreTrainedModel) -> tuple[str, int]:
    """The widest window or block of tokens in the model's configuration: its name and length."""
    text = model.config.get_text_config(decoder=True)
    slides = any(getattr(layer, "is_sliding", False) for layer in model_layers(model.config))
    names = [name for name in _SPANS if slides or name != "sliding_window"]
    spans = [(name, getattr(text, name, None)) for name in names]
    return max(
        ((name, span) for name, span in spans if isinstance(span, int)),
        key=lambda named: named[1],
        default=("no window", 0),
    )


def first_difference(outcome: Outcome, baseline: Outcome, atol: float) -> str | None:
    """The first value that differs, in words; None when all agree.

    Token ids come first: where they differ, the logits after them say nothing.
    """
    if outcome.values.keys() != baseline.values.keys():
        return f"recorded {list(outcome.values)}, expected {list(baseline.values)}"
    for label in sorted(
        baseline.values, key=lambda name: baseline.values[name].is_floating_point()
    ):
        actual, expected = outcome.values[label], baseline.values[label]
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return (
                f"{label} is {actual.dtype} {list(actual.shape)}, expected {expected.dtype} "
                f"{list(expected.shape)}"
            )
        if expected.is_floating_point():
            # Equal infinities (forbidden tokens) agree; a NaN never does.
            close = torch.isclose(actual, expected, rtol=0.0, atol=atol)
            tolerance = f" (tolerance {atol})"
        else:
            close, tolerance = actual == expected, ""
        if not bool(close.all()):
            index = tuple((~close).nonzero()[0].tolist())
            return (
                f"{label} differs first at {list(index)}: got {actual[index].item()}, expected "
                f"{expected[index].item()}{tolerance}; {int((~close).sum())} of {close.numel()} "
                "differ"
            )
    return None


def conformance_cases(
    models: Iterable[str] | None = None, modes: Iterable[str] | None = None
) -> Iterator[Case]:
    """Pairs of model and mode, all by default, those that are refused included.

    For ``pytest.mark.parametrize("case", conformance_cases(), ids=str)``.

    Raises:
        ValueError: an unknown name.
    """
    mode_names = _checked(modes, MODES, "mode")
    for model in list(MODELS) if models is None else _checked(models, ALL_MODELS, "model"):
        for mode in mode_names:
            yield Case(model, mode)


@cache
def baseline_of(case: Case, device: str = "cpu") -> Outcome | str:
    """The reference of `case` on a model of its own, or why there is none; kept for the process."""
    return MODES[case.mode].reference(ALL_MODELS[case.model].build(device))


def run_case(
    case: Case,
    make_cache_for: Callable[[PreTrainedModel], Cache],
    *,
    device: str = "cpu",
    prepare: Callable[[PreTrainedModel], None] = attach,
    atol: float = LOGIT_TOLERANCE,
    proof: Callable[[Cache], bool] = reads_cold_rows,
) -> Result:
    """Run one case on a newly built model.

    Args:
        case: model and mode.
        make_cache_for: returns a new, empty cache for a model.
        device: of the model, and of the reference's.
        prepare: called with the model before modes that call it directly (``mode.direct``);
            in the others ``generate`` must do by itself what is needed.
        atol: largest absolute difference of floating point values.
        proof: see ``check``.

    Raises:
        Exception: whatever the cache raises, to be seen where it arose.
    """
    baseline = baseline_of(case, device)
    if isinstance(baseline, str):
        return Result(case, "skipped", baseline)
    model, mode = ALL_MODELS[case.model].build(device), MODES[case.mode]
    if mode.direct:
        prepare(model)
    try:
        check(
            model, mode, partial(make_cache_for, model), baseline=baseline, atol=atol, proof=proof
        )
    except AssertionError as error:
        return Result(case, "failed", str(error))
    return Result(case, "passed")


def run_conformance(
    make_cache_for: Callable[[PreTrainedModel], Cache],
    models: Iterable[str] | None = None,
    modes: Iterable[str] | None = None,
    **options: Any,
) -> list[Result]:
    """Run every case; one result each, in order. A cache that raises has failed the case.

    Args:
        make_cache_for: returns a new, empty cache for a model.
        models: names in ``MODELS``, all by default, or in ``ALL_MODELS``.
        modes: names in ``MODES``, all by default.
        **options: as for ``run_case``.

    Raises:
        ValueError: an unknown name.
    """
    results = []
    for case in conformance_cases(models, modes):
        try:
            results.append(run_case(case, make_cache_for, **options))
        except FAILURES as error:
            results.append(Result(case, "failed", f"raised {describe(error)}"))
    return results


def failures(results: Iterable[Result]) -> list[Result]:
    """The results that speak against a cache: none if it conforms.

    Those are the failed cases. A skipped one says nothing: transformers' own cache can't do it
    either, and which ones these are differs between releases of transformers. Where no case passed
    at all, nothing was shown, and the skipped ones are returned too.

    Raises:
        ValueError: no results.
    """
    results = list(results)
    if not results:
        raise ValueError("there are no results: run_conformance was given no models or no modes")
    proven = any(result.status == "passed" for result in results)
    return [result for result in results if result.status == "failed" or not proven]


def _checked(names: Iterable[str] | None, allowed: dict[str, Any], thing: str) -> list[str]:
    choices = list(allowed) if names is None else list(names)
    for name in choices:
        if name not in allowed:
            raise ValueError(f"unknown {thing} {name!r}: choose from {', '.join(allowed)}")
    return choices


def all_valid(
    store: Store, batch: int, *, budget: int = 1, scale: float = 1.0, softcap: float | None = None
) -> ColdTokens:
    """All tokens of a store on the CPU, for ``Index.build`` and ``search``; none is padding."""
    valid = torch.ones(batch, len(store), dtype=torch.bool)
    return ColdTokens(store, Scoring(valid, scale, softcap), budget)


def held_tokens(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys ``[B, Hkv, n, Dk]`` and values that a layer holds, in the order of their slots."""
    chunks = [] if kv.store is None else list(kv.store.chunks())
    end = 0
    for start, keys, _ in chunks:
        assert start == end, f"a chunk starts at slot {start}, the one before ends at {end}"
        end += keys.shape[2]
    assert end == kv.window.start, "the window goes on where the store ends"
    keys, values = kv.window.recent()
    return (
        torch.cat([*(cold_keys for _, cold_keys, _ in chunks), keys], dim=2),
        torch.cat([*(cold_values for _, _, cold_values in chunks), values], dim=2),
    )
