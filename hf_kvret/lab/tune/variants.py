"""The variants to try: methods with budgets and rests, as forks of few filled caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hf_kvret.lab.evaluate.caches import CacheChoice, Stranger, choose_cache, is_stranger
from hf_kvret.lab.evaluate.subject import model_folder
from hf_kvret.options.config import FORK_OPTIONS, RetrievalConfig
from hf_kvret.options.spec import parse_spec
from hf_kvret.registry import registered_methods

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
        """For ``cache_implementation``; of a stranger's cache its factory."""
        return self.base.factory if isinstance(self.base, Stranger) else self.base.method


def ladder(context: int) -> tuple[int, ...]:
    """Budgets for a context, ascending: 1/128 of it, twice that and so on to a half, and 3/4."""
    shares = [context // 2**power for power in range(7, 0, -1)]
    return tuple(budget for budget in (*shares, 3 * context // 4) if budget >= _LEAST_BUDGET)


def check_method(text: str, model: str) -> None:
    """Refuse a method that can't be tried.

    Args:
        text: of ``--methods``, options included.
        model: of ``--model``, whose folder may have an artifact.

    Raises:
        ValueError: no method of ours, one that attends to everything, or one that lacks its
            artifact.
    """
    if is_stranger(text):
        return
    method = text.partition(":")[0].strip()
    names = [name for name, cls in registered_methods().items() if cls.Config.retrieves]
    if method not in names:
        raise ValueError(f"--methods: unknown: {method}; choose among {', '.join(names)}")
    if choose_cache(text).lacks_artifact and not (model_folder(model) / method).is_dir():
        raise ValueError(
            f"--methods {method}: it is tried with what it learned about the model: write "
            f"{method}:artifact=FOLDER (hf-kvret calibrate {method} makes it), or leave it out"
        )


def make_variants(
    methods: Sequence[str], budgets: Sequence[int | float], context: int
) -> dict[str, Variant]:
    """Every method at every budget, without a rest and with the mean, by name.

    A method that attends to all tokens has one variant. Options that a text of ``methods`` names
    stay as they are.

    Args:
        methods: with options, as ``paris`` or ``paris:recent=64``; ``check_method`` looked at them.
        budgets: values of ``top_k``.
        context: tokens that are read before a method selects.

    Raises:
        ValueError: an unknown or impossible option, one variant twice, or options that retrieve
            nothing at this context.
    """
    variants: dict[str, Variant] = {}
    bases: list[CacheChoice] = []
    for text in methods:
        if is_stranger(text):
            choice = choose_cache(text)
            assert isinstance(choice, Stranger)
            variants[choice.name] = Variant(choice.name, choice, {}, choice.given)
            continue
        for name in _names(text, budgets):
            choice = _retrieving(choose_cache(name), context)
            if choice.name in variants:
                raise ValueError(f"{choice.name} is there twice: see --methods and --top-k")
            variants[choice.name] = _fork(choice, bases)
    return variants


def _names(text: str, budgets: Sequence[int | float]) -> list[str]:
    """The names of all variants of one method."""
    options = choose_cache(text).options
    assert options is not None
    # With a default budget of all rows nothing is selected, and budgets and rests mean nothing.
    if type(options).top_k == 1.0:
        return [text]
    fixed = options.written_out(parse_spec(text)[1])
    names = [text] if "top_k" in fixed else [f"{text}:top_k={budget}" for budget in budgets]
    if "rest" not in fixed and options.takes("rest", "mean"):
        return [f"{name}{rest}" for name in names for rest in ("", ":rest=mean")]
    return names


def _retrieving(choice: CacheChoice, context: int) -> CacheChoice:
    """The choice, with a ``dense_below`` of half the context where its own would be beyond it."""
    options = choice.options
    assert options is not None
    if options.dense_len >= context and options.dense_below is None:
        choice = choose_cache(f"{choice.name}:dense_below={context // 2}")
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


def _fork(choice: CacheChoice, bases: list[CacheChoice]) -> Variant:
    """The variant of ``choice``, as a fork of one of ``bases``, to which a new base is added."""
    options = choice.options
    assert options is not None
    own = type(options)()
    free = FORK_OPTIONS.difference(options.evicts_by, ("prompt",))

    def different(other: RetrievalConfig | None) -> dict[str, Any]:
        """The options in which ``other`` is not as those of the choice."""
        values = ((field.name, getattr(options, field.name)) for field in fields(options))
        return {name: value for name, value in values if value != getattr(other, name)}

    base = _filled(choice)
    for one in bases:
        # The length from which on a cache retrieves makes no difference to one that does.
        same_method = one.method == choice.method
        if same_method and different(one.options).keys() <= {*free, "dense_below"}:
            base = one
            break
    else:
        bases.append(base)
    changes = {name: value for name, value in different(base.options).items() if name in free}
    config = different(own)
    if own.top_k != 1.0:
        # The budget is always named, as it is the result of the search.
        config = {"top_k": options.top_k, **config}
    return Variant(choice.name, base, changes, config)


def _filled(choice: CacheChoice) -> CacheChoice:
    """The choice, as it is filled for variants that are forks of it."""
    options = choice.options
    assert options is not None
    filled = options.replace(dense_below=options.dense_len)
    cls = registered_methods()[choice.method]
    return replace(
        choice, make=lambda config, capacity: cls(config=config, options=filled), options=filled
    )
