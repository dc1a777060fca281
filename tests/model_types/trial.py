"""A trial of a type: a small random model decodes with our caches as with transformers' own.

Caches with a budget that covers everything must give the tokens of full attention, and logits equal
up to the order of summation; with a budget of one row they must not, or nothing was retrieved.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.attach import restore
from hf_kvret.models.compatibility import index_budget, retrieval_shapes
from hf_kvret.registry import registered_methods
from hf_kvret.testing.conformance import (
    COVERING_OPTIONS,
    LOGIT_TOLERANCE,
    cold_rows_read,
    widest_span,
)
from hf_kvret.testing.scenario import FAILURES, describe

from .small import generate, image_inputs, padded_prompt, small_model, small_text_part

PROMPT_LEN, PADDING_LEN, NEW_TOKENS = 200, 57, 8

# Logits of the suite's models spread over about 4; the tolerance grows with them.
_SPREAD = 4.0
# Experts that are chosen by nearly the same scores spread rounding, on some processors more.
_ROUNDING = 4.0
# Without the rows that a budget of one leaves out, logits must differ by this many tolerances.
_BITE = 5.0


@dataclass(frozen=True)
class Trial:
    """The result of a trial of one type.

    Attributes:
        outcome: ``"equal"``, ``"differs"``, ``"raised"``, or ``"not tried"``, by the first method:
            ``flat`` but for models that select.
        detail: what differed, what was raised, or why it was not tried.
        part: ``"text part"`` where only that was tried, which a model with images wraps.
        rows: distinct ``(heads, elements of a key, elements of a value)`` of full layers' rows.
        failures: by method that does not serve it, what happened instead.
    """

    outcome: str
    detail: str = ""
    part: str = "whole"
    rows: list[list[int]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


class _Text(NamedTuple):
    """Results of one ``generate``: tokens ``[B, N]``, logits ``[T, B, V]``, and its cache."""

    tokens: torch.Tensor
    logits: torch.Tensor
    cache: Any


# transformers raises these where a model can't be built, or can't run on text alone.
IMPOSSIBLE = (*FAILURES, LookupError, ImportError, AssertionError, StrictDataclassError)


def trial(name: str) -> Trial:
    """Try one type that the scan finds served; see ``Trial``.

    The prompt has two sequences of 200 tokens, one of them padded at its left. Where transformers
    can't build a small model or run it on text alone, the text part is tried.
    """
    reasons = []
    for part, make in (("whole", small_model), ("text part", small_text_part)):
        try:
            model = make(name)
            reference = _generate(model, DynamicCache(config=model.config))
        except IMPOSSIBLE as error:
            reasons.append(f"{part}: {describe(error)}")
            continue
        return _compare(model, reference, part)
    return Trial("not tried", "; ".join(reasons))


def tried_methods(config: PreTrainedConfig) -> dict[str, type[RetrievalCache]]:
    """The methods that a trial of such a model tries: those that retrieve and need no artifact.

    A model with an indexer of its own takes one method alone.
    """
    return {
        name: cls
        for name, cls in registered_methods().items()
        if not cls.needs_artifact
        and cls.Config.retrieves
        and cls.Config.follows_model == bool(index_budget(config))
    }


def _compare(model: PreTrainedModel, reference: _Text, part: str) -> Trial:
    """The trial of ``model`` whose text with transformers' own cache is ``reference``."""
    heads, rows = set(), set()
    for number, shape in retrieval_shapes(model.config).items():
        layer = reference.cache.layers[number]
        heads.add((layer.keys.shape[1], shape.kv_heads))
        rows.add((layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]))
    facts: dict[str, Any] = {"part": part, "rows": sorted(map(list, rows))}
    if any(held != configured for held, configured in heads):
        detail = f"heads of rows, and by the configuration: {heads}"
        return Trial("differs", detail, **facts)
    span_name, span = widest_span(model)
    if span >= PROMPT_LEN:
        return Trial("not tried", f"{span_name} is {span}, as long as the prompt", **facts)
    if not torch.isfinite(reference.logits).all():
        return Trial("not tried", "transformers' own logits are not finite", **facts)
    tried = tried_methods(model.config)
    results = {name: _outcome(model, reference, cls) for name, cls in tried.items()}
    detail = next(iter(results.values()))
    first = next(iter(tried.values()))
    if detail == "equal" and not first.Config.follows_model:
        detail = _bites(model, reference, first)
    failures = {name: result for name, result in results.items() if result != "equal"}
    if detail == "equal":
        return Trial("equal", failures=failures, **facts)
    outcome = "raised" if detail.startswith("raised") else "differs"
    return Trial(outcome, detail, failures=failures, **facts)


def _tolerance(reference: _Text) -> float:
    return _ROUNDING * LOGIT_TOLERANCE * max(1.0, float(reference.logits.std()) / _SPREAD)


def _difference(text: _Text, reference: _Text) -> float:
    return float((text.logits - reference.logits).abs().max())


def _outcome(model: PreTrainedModel, reference: _Text, cls: Any) -> str:
    """``"equal"``, or words that say what happened instead with a cache of this class."""
    tolerance = _tolerance(reference)
    options = {name: x for name, x in COVERING_OPTIONS.items() if cls.Config.takes(name, x)}
    try:
        text = _generate(model, cls(model.config, **options))
    except IMPOSSIBLE as error:
        return f"raised {describe(error)}"
    finally:
        restore(model)
    difference = _difference(text, reference)
    if not torch.equal(text.tokens, reference.tokens) or not difference <= tolerance:
        return f"logits differ by {difference:.1e}, allowed are {tolerance:.1e}"
    return "equal" if cold_rows_read(text.cache) else "no cold row was read"


def _bites(model: PreTrainedModel, reference: _Text, cls: Any) -> str:
    """``"equal"`` where a budget of one row gives other logits, or words."""
    one_row = _generate(model, cls(model.config, **{**COVERING_OPTIONS, "top_k": 1}))
    restore(model)
    if _difference(one_row, reference) < _BITE * _tolerance(reference):
        return "a budget of one row changes nothing, so the agreement shows nothing"
    return "equal"


def _generate(model: PreTrainedModel, cache: Cache) -> _Text:
    """Greedy text after two prompts, the second padded at its left."""
    extra = image_inputs(model.config.model_type, 2, PROMPT_LEN)
    inputs = {**padded_prompt(PROMPT_LEN, PADDING_LEN), **extra}
    output = generate(model, cache, NEW_TOKENS, **inputs)
    return _Text(output.sequences, torch.stack(output.logits), cache)
