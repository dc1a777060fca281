"""The variants to try, forks of few filled caches, and their walk through windows of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from hf_kvret.lab.evaluate.caches import CacheChoice, Stranger, choose_cache, is_stranger
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.needles import needle_documents
from hf_kvret.lab.evaluate.reader import Reader, divergence
from hf_kvret.lab.evaluate.subject import Subject, model_folder
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.tune.selection import FULL
from hf_kvret.options.config import FORK_OPTIONS, RetrievalConfig, parse_spec
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
    """Every method at every budget, with the mean of the rest and without, by name.

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
    if "rest" not in fixed and options.rest is not None:
        return [f"{name}{rest}" for name in names for rest in ("", ":rest=none")]
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


def cut_windows(
    ids: torch.Tensor, context: int, new: int, count: int, *, bos: int | None, seed: int
) -> list[torch.Tensor]:
    """``count`` windows ``[context + new]`` int64; no two share one of their last ``new`` tokens.

    Each is drawn from its own span of the text. Their order is random, so that the first ones are
    not those of the beginning. Contexts of a short text overlap.

    Args:
        ids: ``[n]`` int64 of the text, without BOS.
        context: tokens of a context, with BOS.
        new: tokens that follow it.
        bos: put in front of every window; None for none.
        seed: of starts and order.

    Raises:
        ValueError: fewer than ``context + count * new`` tokens.
    """
    front = torch.tensor([] if bos is None else [bos], dtype=ids.dtype)
    size = context + new - len(front)
    # A span ends with the last start whose new tokens are not those of the next span.
    span = (len(ids) - size + new) / count
    if span < new:
        raise ValueError(
            f"--text has {len(ids):,} tokens, fewer than the {context:,} of --context and the "
            f"{count * new:,} of --tokens: give a longer text, a shorter context or fewer tokens"
        )
    rng = np.random.default_rng(seed)
    starts = [int(span * number + rng.random() * (span - new)) for number in range(count)]
    return [torch.cat([front, ids[start : start + size]]) for start in rng.permutation(starts)]


def needle_windows(context: int, new: int, count: int, seed: int) -> list[torch.Tensor]:
    """``count`` documents ``[context + new]`` int64 of the bundled model's language.

    They end with questions and answers.

    Raises:
        ValueError: documents too short for a needle.
    """
    size = context + new
    return list(needle_documents(count * size, size, seed))


class Walker:
    """Takes variants through windows of a text, one token a step.

    One filled cache, and the logits of full attention on one window, are kept for the next variant.

    Args:
        subject: the model.
        windows: ``[context + new]`` int64 each.
        new: tokens of a window that are fed one a step, behind its context; what each of them
            foretells is compared.
    """

    def __init__(self, subject: Subject, windows: Sequence[torch.Tensor], new: int) -> None:
        self._model, self._windows, self._new = subject.model, windows, new
        # Full attention on a window: its number, its row, and logits ``[n, vocab]`` on the CPU.
        self._reference: tuple[int, Row, torch.Tensor] | None = None
        self._filled: tuple[str, int, Reader] | None = None

    def full(self, window: int) -> Row:
        """The row of full attention, which agrees with itself."""
        return self._full(window)[0]

    def row(self, variant: Variant, window: int) -> Row:
        """The row of a variant on one window.

        ``tokens`` foretold; ``equal``, how many of them are full attention's first choice too;
        ``kl``, the sum over tokens of KL(full || variant) in nats; ``step_bytes``,
        ``device_bytes``, ``host_bytes`` and ``full_bytes`` as in ``Usage``,
        after the last step; ``ms``, the median step.
        """
        _, reference = self._full(window)
        reader = self._base(variant, window).fork(**variant.changes)
        return self._walk(reader, window, reference)[0]

    def _full(self, window: int) -> tuple[Row, torch.Tensor]:
        if self._reference is None or self._reference[0] != window:
            # The memory of the last window is freed first.
            self._reference = self._filled = None
            self._reference = window, *self._walk(self._fill(choose_cache(FULL), window), window)
        return self._reference[1:]

    def _base(self, variant: Variant, window: int) -> Reader:
        name = variant.base.name
        if self._filled is None or self._filled[:2] != (name, window):
            # The memory of the last one is freed first.
            self._filled = None
            self._filled = (name, window, self._fill(variant.base, window))
        return self._filled[2]

    def _fill(self, choice: CacheChoice, window: int) -> Reader:
        """A reader of the window's context."""
        tokens = self._windows[window]
        reader = Reader(self._model, choice, len(tokens))
        reader.prefill(tokens[: -self._new])
        reader.need_logits()
        return reader

    def _walk(
        self, reader: Reader, window: int, reference: torch.Tensor | None = None
    ) -> tuple[Row, torch.Tensor]:
        """The row, and the logits ``[n, vocab]``, which are their own reference without another."""
        logits, times = [], []
        tokens = self._windows[window][-self._new :]
        for token in tqdm(tokens.split(1), leave=False, desc=reader.choice.name, mininterval=1):
            before = reader.seconds
            logits.append(reader.feed(token).float().cpu())
            times.append(1e3 * (reader.seconds - before))
        own = torch.cat(logits)
        reference = own if reference is None else reference
        kl, usage = divergence(reference, own), reader.usage()
        row = {
            "tokens": len(own),
            "equal": int((own.argmax(-1) == reference.argmax(-1)).sum()),
            "kl": float(kl.sum()),
            **usage.sizes,
            "ms": median(times),
        }
        return row, own
