"""``hf-kvret bench kernels`` calls operations as caches do: dtypes, dimensions, options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from bench_kernels import OPS
from kernel_inputs import Draw, KernelShape

from hf_kvret import registered_methods
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt, ragged
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.paris import ParisCodes

ArtifactOptions = Callable[[str, str], dict[str, str]]

RANK = 4
KERNELS, CODEC = "hf_kvret_kernels.", "hf_kvret_kernels.higgs.codec.Codec."
BENCH = "kernel_attention."

# A cache that calls the operation, and the names by which it and the command look it up.
CALLERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{
        f"codebook.{name}": ("a2ats", {}, (f"{KERNELS}codebook.{name}",))
        for name in ("encode", "score_table", "lookup_scores")
    },
    "codebook.lookup": ("a2ats", {"budget_of": "union"}, (f"{KERNELS}codebook.lookup",)),
    "proxy.top_indices": ("lrqk", {"rank": RANK}, (f"{KERNELS}proxy.top_indices",)),
    "top_k": ("a2ats", {}, ("hf_kvret.methods.a2ats.index.top_k", "kernel_codebook.top_k")),
    "centroid.top_keys": ("ctkvr", {}, (f"{KERNELS}centroid.key_lists",)),
    "centroid.similarity": ("ctkvr", {}, (f"{KERNELS}centroid.similarity",)),
    **{
        f"paris.{name}": ("paris", {}, (f"{KERNELS}paris.{name}",)) for name in ("encode", "search")
    },
    **{
        f"paris.{name}": (
            "paris",
            {},
            (f"{KERNELS}paris.selection.{name}", f"{KERNELS}paris.{name}"),
        )
        for name in ("candidates", "rerank")
    },
    "relevance.best_ids": (
        "paris",
        {},
        (f"{KERNELS}paris.selection.best_ids", f"{KERNELS}relevance.best_ids"),
    ),
    "higgs.encode": ("flat", {"store": "higgs"}, (f"{CODEC}encode",)),
    "higgs.decode": ("flat", {"store": "higgs"}, (f"{CODEC}decode",)),
    # Caches leave pieces unmerged.
    "higgs.attend": (
        "paris",
        {"store": "higgs"},
        (f"{KERNELS}higgs.attend_partials", f"{KERNELS}higgs.attention.attend_partials"),
    ),
    "gather_attention": (
        "paris",
        {"store": "device"},
        ("hf_kvret.stores.paged.gather_partials", f"{KERNELS}gather_attention.gather_partials"),
    ),
    "gather_scores": (
        "ctkvr",
        {"store": "device"},
        ("hf_kvret.stores.paged.gather_scores", f"{BENCH}gather_scores"),
    ),
    "prompt_attention": (
        "paris",
        {},
        ("hf_kvret.layer.exact_attention.prompt_attention", f"{BENCH}prompt_attention"),
    ),
}


def kind(value: Any) -> Any:
    """What must be alike of an argument, not how long it is or what stands in it."""
    match value:
        case torch.Tensor():
            return value.dtype, value.ndim
        case PagedRows():
            return kind(value.chunks[0]), kind(value.table), value.key_dim
        case ParisCodes():
            return kind(value.sign), kind(value.magnitude), kind(value.weight)
        case HiggsCodec() | torch.dtype() | None:
            return value
        case _ if callable(value):
            return kind(next(iter(value()))[1])
        case _:
            return type(value)


def recording(called: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    signature = inspect.signature(called)

    @wraps(called)
    def record(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = {name: kind(value) for name, value in bound.arguments.items() if name != "backend"}
        calls.append(given)
        return called(*arguments, **named)

    return record


def use_cache(method: str, dtype: torch.dtype, options: dict[str, Any]) -> KernelShape:
    """A padded prompt, some steps, a second prompt and a step; the sizes of the model."""
    model = MODELS["llama"].build().to(dtype)
    few = {"top_k": 8, "sink": 2, "recent": 8, "flush": 4, "max_draft": 6, "dense_below": 0}
    cache = registered_methods()[method](config=model.config, **{**few, **options})
    ids, mask = ragged((90, 71))
    for more in (0, 20):
        ids = torch.cat([ids, prompt(2, more)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        ids = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False
        )
    heads = model.config.num_key_value_heads
    return KernelShape(
        length=64,
        batch=2,
        heads=heads,
        group=model.config.num_attention_heads // heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
        top_k=8,
        codewords=32,
        rank=RANK,
    )


def test_every_operation_has_a_cache_that_calls_it() -> None:
    assert set(CALLERS) == set(OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLERS)
def test_an_operation_is_measured_as_a_cache_calls_it(
    name: str,
    dtype: torch.dtype,
    artifact_options: ArtifactOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, options, places = CALLERS[name]
    options = options | artifact_options(method, "llama")
    calls: list[dict[str, Any]] = []
    for place in places:
        monkeypatch.setattr(place, recording(resolve_name(place), calls))
    # In one call of the CPU library there are no operations to see.
    with prefer("naive"):
        shape = use_cache(method, dtype, options)
    # Of several kinds, as for a prompt and for a step, it may be any.
    called = [call for number, call in enumerate(calls) if call not in calls[:number]]
    calls.clear()
    OPS[name].prepare(shape, Draw(torch.device("cpu"), 0)).run("naive")
    (measured,) = calls
    assert measured in called
