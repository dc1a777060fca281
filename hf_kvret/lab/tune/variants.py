"""The variants to try: methods with stores, budgets and rests, as forks of few filled caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_kvret.artifacts.files import read_description
from hf_kvret.artifacts.hub import find_folder
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.subject import model_folder
from hf_kvret.options.config import FORK_OPTIONS, RetrievalConfig
from hf_kvret.options.spec import parse_spec
from hf_kvret.registry import registered_methods

OFF = "off"
"""The name of ``rest=None`` on the command line."""

_LEAST_BUDGET = 16


@dataclass(frozen=True)
class Variant:
    """One configuration, and the filled cache that it is a fork of.

    Attributes:
        name: as ``--caches`` of other commands takes it, for instance ``paris:top_k=64``.
        base: the cache that reads the prompt; equal for variants that share it.
        changes: options of the fork.
        cache_config: the options that differ from the method's own, for ``generate``.
    """

    name: str
    base: CacheChoice
    changes: Mapping[str, Any]
    cache_config: Mapping[str, Any]

    @property
    def method(self) -> str:
        """For ``cache_implementation``."""
        return self.base.method


def ladder(context: int) -> tuple[int, ...]:
    """Budgets for a context, ascending: 1/128 of it, twice that and so on to a half, and 3/4."""
    shares = [context // 2**power for power in range(7, 0, -1)]
    return tuple(budget for budget in (*shares, 3 * context // 4) if budget >= _LEAST_BUDGET)


def find_artifacts(sources: Sequence[str]) -> dict[str, str]:
    """By method, the folder or hub id of its artifact.

    Raises:
        FileNotFoundError, ValueError: no artifact there; two of one method.
    """
    artifacts: dict[str, str] = {}
    for source in sources:
        method = read_description(find_folder(source))["method"]
        if method in artifacts:
            raise ValueError(
                f"--artifact {artifacts[method]} and {source} are both of {method}: give one"
            )
        artifacts[method] = source
    return artifacts


def check_method(text: str, artifacts: Mapping[str, str], model: str) -> None:
    """Refuse a method that can't be tried.

    Args:
        text: of ``--methods``, options included.
        artifacts: as ``find_artifacts`` returns them.
        model: of ``--model``, whose folder may have an artifact.

    Raises:
        ValueError: no method of ours, one that attends to everything, or one that lacks its
            artifact.
    """
    method = text.partition(":")[0].strip()
    names = [name for name, cls in registered_methods().items() if cls.Config.retrieves]
    if method not in names:
        raise ValueError(f"--methods: unknown: {method}; choose among {', '.join(names)}")
    choice = choose_cache(text, _defaults(method, "auto", artifacts))
    if choice.lacks_artifact and not (model_folder(model) / method).is_dir():
        raise ValueError(
            f"--methods {method}: it is tried with what it learned about the model: name that with "
            f"--artifact FOLDER (hf-kvret calibrate {method} makes it), or leave the method out"
        )


def make_variants(
    methods: Sequence[str],
    stores: Sequence[str],
    budgets: Sequence[int | float],
    rests: Sequence[str],
    artifacts: Mapping[str, str],
    context: int,
) -> dict[str, Variant]:
    """Every combination by its name; those that share a filled cache stand together.

    A method that attends to all tokens has one variant for each store. Options that a text of
    ``methods`` names stay as they are.

    Args:
        methods: with options, as ``paris`` or ``paris:recent=64``; ``check_method`` looked at them.
        stores: names.
        budgets: values of ``top_k``.
        rests: values of ``rest``, ``"off"`` for None.
        artifacts: by method.
        context: tokens that are read before a method selects.

    Raises:
        ValueError: an unknown or impossible option, one variant twice, or options that retrieve
            nothing at this context.
    """
    variants: dict[str, Variant] = {}
    seen: list[tuple[str, RetrievalConfig]] = []
    bases: dict[str, CacheChoice] = {}
    for text in methods:
        method = text.partition(":")[0].strip()
        for store in stores:
            defaults = _defaults(method, store, artifacts)
            for name in _names(text, store, budgets, rests, defaults):
                choice = _retrieving(choose_cache(name, defaults), defaults, context)
                assert choice.options is not None
                if (method, choice.options) in seen:
                    # The method has no use for this store.
                    continue
                if choice.name in variants:
                    raise ValueError(f"--methods: {choice.name} twice: name each once")
                seen.append((method, choice.options))
                variants[choice.name] = _fork(choice, bases)
    order = list(bases)
    ranked = sorted(variants.values(), key=lambda one: order.index(one.base.name))
    return {one.name: one for one in ranked}


def _defaults(method: str, store: str, artifacts: Mapping[str, str]) -> dict[str, Any]:
    artifact = {"artifact": artifacts[method]} if method in artifacts else {}
    return {"store": store, **artifact}


def _names(
    text: str,
    store: str,
    budgets: Sequence[int | float],
    rests: Sequence[str],
    defaults: Mapping[str, Any],
) -> list[str]:
    """The names of all variants of one method and store."""
    options = choose_cache(text, dict(defaults)).options
    assert options is not None
    _, words = parse_spec(text)
    fixed = options.written_out(words)
    start = text
    if store != "auto" and "store" not in fixed and type(options).takes("store", store):
        start += f":store={store}"
    # With a default budget of all rows nothing is selected, and budgets and rests mean nothing.
    if type(options).top_k == 1.0:
        return [start]
    ends = [""] if "top_k" in fixed else [f":top_k={budget}" for budget in budgets]
    if "rest" not in fixed:
        ends = [
            end + ("" if rest == OFF else f":rest={rest}")
            for rest in rests
            if rest == OFF or options.takes("rest", rest)
            for end in ends
        ]
    return [start + end for end in ends]


def _retrieving(choice: CacheChoice, defaults: dict[str, Any], context: int) -> CacheChoice:
    """The choice, with a ``dense_below`` of half the context where its own would be beyond it."""
    options = choice.options
    assert options is not None
    if options.dense_len >= context and options.dense_below is None:
        choice = choose_cache(f"{choice.name}:dense_below={context // 2}", defaults)
        options = choice.options
        assert options is not None
    window = options.sink + options.recent + options.flush
    least = max(options.dense_len, window) + 1
    if least > context - 1:
        why = "dense_below" if options.dense_len >= window else "sink, recent and flush"
        raise ValueError(
            f"--context {context}: {choice.name} attends to everything up to {least} tokens "
            f"({why}): give a longer context, or smaller ones as "
            f"{choice.method}:recent=64:flush=64:dense_below=0"
        )
    return choice


def _fork(choice: CacheChoice, bases: dict[str, CacheChoice]) -> Variant:
    """The variant of ``choice``, as a fork of one of ``bases``, to which a new base is added."""
    options = choice.options
    assert options is not None
    free = FORK_OPTIONS.difference(options.evicts_by, ("prompt",))
    # The length from which on a cache retrieves makes no difference to one that does.
    fixed = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in free and field.name != "dense_below"
    }
    own = type(options)()
    words = [
        f"{name}.{entry}={each}" if entry else f"{name}={each}"
        for name, value in fixed.items()
        if value != getattr(own, name)
        for entry, each in (value.items() if isinstance(value, dict) else [("", value)])
    ]
    text = ":".join([choice.method, *words])
    if text not in bases:
        filled = options.replace(dense_below=options.dense_len)
        cls = registered_methods()[choice.method]
        bases[text] = replace(
            choice,
            name=text,
            make=lambda config, capacity: cls(config=config, options=filled),
            options=filled,
        )
    base = bases[text]
    changes = {
        name: getattr(options, name)
        for name in sorted(free)
        if hasattr(options, name) and getattr(options, name) != getattr(base.options, name)
    }
    config = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(own, field.name)
    }
    if own.top_k != 1.0:
        # The budget is always named, as it is the result of the search.
        config = {"top_k": options.top_k, **config}
    return Variant(choice.name, base, changes, config)
