"""Options that every retrieval cache has, their checks, and what a filled cache may change."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from hf_kvret.options.declare import FLAG, OneOf, check_options, integer, option, real, text


@dataclass(frozen=True)
class PromptRecipe:
    """Which of the earlier tokens a group of 512 queries of a long prompt attends to.

    Attributes:
        top_k: tokens that a group chooses among those before it, per KV head: a share or a count.
            The first 64 tokens and the 512 before the group come on top.
        floor: the least number of tokens that a group chooses.
        above: only longer contexts are read by retrieval.
        exact: last tokens of a prompt that attend to everything, since a question stands there.
        probes: tokens of a group that choose for it, or ``"all"``. ``"all"`` also finds the tokens
            that one query inside the prompt needs, at half the cost of attending to everything.
    """

    top_k: int | float = option(
        0.125, integer(1, "tokens"), real(note="a share; an int is a count", above=0, most=1)
    )
    floor: int = option(2048, integer(0, "tokens"))
    above: int = option(16_384, integer(0, "tokens"))
    exact: int = option(512, integer(0, "tokens"))
    probes: int | Literal["all"] = option(16, integer(1, "queries"), OneOf("all"))

    def __post_init__(self) -> None:
        check_options(self, prefix="prompt: ")

    @classmethod
    def of(cls, option: Any) -> PromptRecipe | None:
        """What the option ``prompt`` asks for; None where prompts attend to everything.

        Raises:
            ValueError: an unknown name, key or value.
        """
        if option in ("exact", "retrieve"):
            return cls() if option == "retrieve" else None
        names = ", ".join(field.name for field in fields(cls))
        if not isinstance(option, Mapping):
            raise ValueError(
                f"prompt={option!r}: choose 'exact' or 'retrieve', or give a dictionary with any "
                f"of {names}"
            )
        for name in option:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"prompt has no {name!r}: choose among {names}")
        return cls(**option)

    def budget(self, before: int) -> int:
        """Tokens that a group attends to among the ``before`` ones before it, at most all."""
        count = self.top_k if isinstance(self.top_k, int) else -(-before * self.top_k // 1)
        return min(before, max(int(count), self.floor))


PromptOption = str | Mapping[str, Any]


@dataclass(frozen=True)
class RetrievalConfig:
    """Options of every retrieval cache: its budget, its window, and where cold rows live.

    Lengths are in tokens.

    Attributes:
        top_k: the budget: cold tokens that a query attends to, per KV head. A count, or a share of
            the cold tokens as ``0.04``, in a batch those of the longest text. ``None``: 256 below
            8K cold tokens, 512 below 16K, 1024 below 32K, 2048 from there on (LRQK, appendix D).
        sink: first valid tokens of each sequence. They are always attended.
        recent: newest tokens. They are always attended, and a flush leaves them in the window.
        flush: tokens that gather beyond ``recent`` before they move to the store together.
        dense_below: a shorter cache retrieves nothing and attends to everything. ``None``:
            ``max(2000, sink + recent + 2 * top_k)``, where a share counts as 0.
        max_draft: up to so many new tokens at once each retrieve, as drafted tokens do. More are a
            prompt, and attend to everything.
        prefill_chunk: tokens of a pass while ``generate`` reads a prompt: a count above
            ``max_draft``, ``None`` for one pass, or ``"auto"``. ``"auto"`` cuts a prompt that
            would take much memory beside its rows.
        prompt: ``"exact"``: each token of a prompt attends to all tokens before it.
            ``"retrieve"``: in long prompts it attends to a part of them. A dictionary sets the
            recipe of ``"retrieve"``.
        store: where cold rows live: ``"auto"``, ``"device"``, ``"host"``, ``"resident"``,
            ``"cpu"``, ``"disk"``, ``"higgs"`` or ``"higgs-host"``. ``"auto"`` chooses by the memory
            that is free.
        slots: with ``store="resident"``, rows that stay on the device, per KV head. A count of at
            least ``top_k``, or a multiple of the budget (a float of at least 1).
        bits: bits of each number in coded rows, ``"higgs"`` and ``"higgs-host"``: 2, 3 or 4. 16 is
            the model's own dtype.
        disk: with ``store="disk"``, the folder for its files.
        rest: the token that represents the cold tokens that are not selected. ``"mean"``: one per
            KV head, of the mean and covariance of all cold tokens. ``None``: no token.
        select_every: one selection for so many layers. Retrieval layers that are alike stand in
            groups of so many: the first layer of a group selects, and the others attend to the
            tokens that it selected. 1: each layer selects for itself.
        track_recall: compare every selection with the exact top-k. This reads all keys, so it is
            for studies.
        graph: ``"auto"``: ``generate`` replays decode steps from a CUDA graph where it can.
            ``False``: it never does.
        compile: whether decode steps run the model's layers compiled by torch, around attention.
            ``"auto"``: on a GPU, where steps are replayed. ``True``: on any device.
        lossless: answers are full attention's own. Every pass attends to all tokens, and
            ``generate`` retrieves only to draft tokens, which one such pass verifies.
        snapshots: at most so many copies of states that can't go back (recurrent ones, sliding
            windows). A conversation whose earlier text changed goes back to one of them.
        snapshot_every: ``generate`` takes one after so many tokens of a long prompt, and near the
            end of every prompt.
        on_divergence: what ``generate`` does with a filled cache whose tokens differ from the
            prompt. ``"error"``: it raises. ``"crop"``: it drops them, and reads the rest of the
            prompt.
    """

    # Whether any length of context leads to retrieval.
    retrieves: ClassVar[bool] = True
    # Whether later selections depend on the queries seen, and on which of them came together.
    learns_from_queries: ClassVar[bool] = False
    # Options by which a filled cache has given up tokens for good; it can't go back to fewer.
    evicts_by: ClassVar[frozenset[str]] = frozenset()
    # Whether the model itself selects, by an indexer of its own.
    follows_model: ClassVar[bool] = False
    # Options that saved caches may name, and the values that all have now.
    gone: ClassVar[Mapping[str, Any]] = {}
    # Options by the name of a preset: "paper", as published.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    top_k: int | float | None = option(
        1024,
        integer(1, "a count"),
        real(note="a share of the cold tokens; an int is a count", above=0, most=1),
        OneOf(None),
    )
    sink: int = option(4, integer(0, "tokens"))
    recent: int = option(256, integer(1, "tokens"))
    flush: int = option(512, integer(1, "tokens"))
    dense_below: int | None = option(None, integer(0, "tokens"), OneOf(None))
    max_draft: int = option(32, integer(1, "tokens"))
    prefill_chunk: int | Literal["auto"] | None = option(
        "auto", integer(note="tokens"), OneOf("auto", None)
    )
    prompt: PromptOption = "exact"
    store: str = option("auto", text(note="a name"))
    slots: int | float = option(
        1.0,
        integer(1, "a count"),
        real(note="a multiple of the budget; an int is a count", least=1, below=math.inf),
    )
    bits: int = option(4, OneOf(2, 3, 4, 16))
    disk: str | None = option(None, text(note="a folder"), OneOf(None))
    rest: Literal["mean"] | None = option("mean", OneOf("mean", None))
    select_every: int = option(1, integer(1, "layers"))
    track_recall: bool = option(False, FLAG)
    graph: Literal["auto", False] = option("auto", OneOf("auto", False))
    compile: Literal["auto", True, False] = option("auto", OneOf("auto", True, False))
    lossless: bool = option(False, FLAG)
    snapshots: int = option(4, OneOf(0), integer(2, "copies"))
    snapshot_every: int = option(4096, integer(64, "tokens"))
    on_divergence: Literal["error", "crop"] = option("error", OneOf("error", "crop"))

    def __post_init__(self) -> None:
        check_options(self)
        if isinstance(self.prompt, Mapping):
            # A copy, since the caller may change its own.
            object.__setattr__(self, "prompt", dict(self.prompt))
        PromptRecipe.of(self.prompt)
        for conflict in self._conflicts():
            raise ValueError(conflict)

    def _conflicts(self) -> Iterator[str]:
        """Options that contradict the method or each other, each time with the way out."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for reason in self.why_not(field.name, value):
                yield f"{field.name}={value!r}: {reason}"
        slots, top_k = self.slots, self.top_k
        if isinstance(slots, int) and isinstance(top_k, int) and slots < top_k:
            yield (
                f"slots={slots} is less than top_k={top_k}: what a query selects must fit into the "
                "slots; raise slots (a filled cache takes others when saved and loaded), or pass a "
                "multiple of the budget, as slots=2.0"
            )
        own_budget = top_k is not None or not self.follows_model
        if isinstance(slots, int) and not isinstance(top_k, int) and own_budget:
            yield (
                f"slots={slots} with top_k={top_k}: the budget grows with the length, so slots "
                "must be a multiple of it, as slots=2.0"
            )
        if (self.store == "disk") != (self.disk is not None):
            yield (
                f"disk={self.disk!r} with store={self.store!r}: rows in files need both, as "
                "store='disk' and disk='/data/rows'; leave both out to keep rows in memory"
            )
        chunk, drafts = self.prefill_chunk, self.max_draft
        if isinstance(chunk, int) and chunk <= drafts:
            yield (
                f"prefill_chunk={chunk} with max_draft={drafts}: up to max_draft tokens at once "
                "retrieve like drafted ones, so a prompt's chunks must be longer; take more than "
                f"{drafts}, as {max(1024, 2 * drafts)}, or 'auto'"
            )
        if self.lossless and self.prompt_recipe is not None:
            yield (
                "lossless=True: a prompt read with prompt='retrieve' is not full attention's; take "
                "'exact'"
            )
        if self.lossless and self.row_bits != 16:
            yield (
                f"lossless=True: store={self.store!r} keeps rows in codes; take another, as "
                "'host', or bits=16"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The configuration ``name``, as ``"paper"`` for the published one, with ``changes``.

        ValueError for a name that the method doesn't have, or an unknown option.
        """
        return cls.from_options(preset=name, **changes)

    @classmethod
    def written_out(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` with those of their ``preset`` in its place; what is named itself wins.

        Raises:
            ValueError: no such preset.
        """
        named = dict(options)
        name = named.pop("preset", None)
        if name is None:
            return named
        if not isinstance(name, str) or name not in cls.presets:
            known = f"choose {', '.join(map(repr, cls.presets))}" if cls.presets else "it has none"
            raise ValueError(f"{cls.__name__} has no preset {name!r}: {known}")
        return {**cls.presets[name], **named}

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """The configuration with ``options`` set, the name of a ``preset`` among them.

        An unknown name raises with the nearest one.
        """
        values = cls.written_out(options)
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, [*names, "preset"], n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{cls.__name__} has no option {name!r}: {hint}The options are "
                    f"{', '.join(names)}{', preset' if cls.presets else ''}"
                )
        return cls(**values)

    @classmethod
    def of(cls, options: object, changes: Mapping[str, Any], owner: str) -> Self:
        """The ``options`` of a cache of class ``owner`` (None: defaults), with ``changes``."""
        if options is None:
            return cls.from_options(**changes)
        if not isinstance(options, cls):
            raise TypeError(f"{owner} takes a {cls.__name__}, got {type(options).__name__}")
        return options.replace(**changes) if changes else options

    def replace(self, **options: Any) -> Self:
        """A copy with ``options`` changed, validated like a new one."""
        changes = self.written_out(options)
        return type(self).from_options(**{**dataclasses.asdict(self), **changes})

    @cached_property
    def prompt_recipe(self) -> PromptRecipe | None:
        """How long prompts are read; None: every token attends to everything."""
        return PromptRecipe.of(self.prompt)

    @classmethod
    def why_not(cls, name: str, value: Any) -> list[str]:
        """Why the method can't have the option ``name`` with this value, each time with the way
        out; empty where it can."""
        return []

    @classmethod
    def takes(cls, name: str, value: Any) -> bool:
        """Whether the option ``name`` with this value may stand among defaults for all methods."""
        return not cls.why_not(name, value)

    @property
    def row_bits(self) -> int:
        """Bits of an element in the store; 16: the model's own dtype."""
        return self.bits if self.store.startswith("higgs") else 16

    @property
    def unread(self) -> dict[str, str]:
        """Options that change nothing as the others are, each with what would read it."""
        readers = {}
        if self.slots != 1 and self.store != "resident":
            readers["slots"] = "store='resident'"
        # A load may code full rows in so many bits; 4 is the default.
        if self.bits in (2, 3) and self.row_bits == 16:
            readers["bits"] = "store='higgs' or 'higgs-host'"
        return readers

    @property
    def lacks_artifact(self) -> bool:
        """Whether the method needs a calibration artifact and the options name none."""
        return False

    def exact(self) -> Self:
        """These options with a budget that covers everything, and rows stored uncoded."""
        return self.replace(top_k=1.0, slots=1.0, bits=16)

    def check_head_dim(self, head_dim: int) -> None:
        """ValueError for options that don't work with this head dim."""
        if self.store.startswith("higgs") and self.bits != 16 and head_dim % 8:
            raise ValueError(
                f"store={self.store!r} with heads of {head_dim} numbers: coded rows need dims that "
                "8 divides; use store='device' or 'host'"
            )

    def check_weights(self, model: Any) -> None:
        """ValueError for a model that what the options name was not made from."""

    def budget(self, cold_len: int) -> int:
        """Tokens to select among ``cold_len``: at least 1, at most all of them."""
        if self.top_k is None:
            count = next(count for below, count in _BUDGETS if cold_len < below)
            return min(count, cold_len)
        if isinstance(self.top_k, float):
            return max(1, math.ceil(self.top_k * cold_len))
        return min(self.top_k, cold_len)

    @property
    def even_len(self) -> int:
        """Tokens from which on every token more takes the same number of bytes, up to rounding."""
        steps = 2 * int(_BUDGETS[-2][0]) if self.top_k is None else 0
        return max(8192, 2 * (self.dense_len + self.recent + self.flush), steps)

    @property
    def dense_len(self) -> int:
        """Length below which the cache stays dense, ``dense_below`` or its default."""
        if self.dense_below is not None:
            return self.dense_below
        top_k = _BUDGETS[0][1] if self.top_k is None else self.top_k
        selected_len = 2 * top_k if isinstance(top_k, int) else 0
        return max(2000, self.sink + self.recent + selected_len)


_BUDGETS: tuple[tuple[float, int], ...] = (
    (8_192, 256),
    (16_384, 512),
    (32_768, 1024),
    (math.inf, 2048),
)


# Options that do not affect what is stored, so a load may change them.
_STORE_OPTIONS = {"store", "slots", "disk"}
_CALL_OPTIONS = {
    *("max_draft", "flush", "track_recall", "prefill_chunk", "graph", "lossless"),
    *("rest", "prompt", "compile", "snapshots", "snapshot_every", "on_divergence"),
}
LOAD_OPTIONS = frozenset({"top_k", *_CALL_OPTIONS, *_STORE_OPTIONS})
"""Options that a load may change: they don't affect what is held."""
FORK_OPTIONS = LOAD_OPTIONS - _STORE_OPTIONS
"""Options that a fork may change: they don't affect what is held, nor where."""
# A load may change these too: the artifact may be in another place. The index itself refuses an
# artifact other than the one that it was saved with.
_MOVABLE_OPTIONS = {"artifact", "revision"}


def forked(options: Any, changes: dict[str, Any]) -> Any:
    """``options`` with ``changes``; ValueError unless a fork may have them."""
    _check(changes, set(FORK_OPTIONS) - ({"top_k"} if options.follows_model else set()))
    return options.replace(**changes)


def check_load(changes: dict[str, Any], has_artifact: bool) -> None:
    """ValueError unless all ``changes`` are options that a load may change.

    ``has_artifact``: whether the method's index has one.
    """
    _check(changes, LOAD_OPTIONS | (_MOVABLE_OPTIONS if has_artifact else set()))


def _check(changes: dict[str, Any], free: Set[str]) -> None:
    unchangeable = sorted(set(changes) - free)
    if unchangeable:
        raise ValueError(
            f"{', '.join(unchangeable)}: not an option that a filled cache can change; free to "
            f"change are {', '.join(sorted(free))}"
        )


_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(size: int | str) -> int:
    """Bytes of a size: a count, or a text such as ``90GB``, ``0.5 GiB`` or ``123``.

    Units are KB, MB, GB (powers of 1000) and KiB, MiB, GiB (of 1024), in any case.

    Raises:
        TypeError: neither an int nor a str.
        ValueError: a text that can't be parsed, or less than one byte.
    """
    way_out = "is not a memory size: write '80GB', '75GiB', or bytes, at least 1"
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{size!r} {way_out}")
    digits, unit = str(size).strip(), 1.0
    for suffix, factor in _UNITS.items():
        if digits.upper().endswith(suffix):
            digits, unit = digits[: -len(suffix)], factor
            break
    try:
        count = int(float(digits) * unit) if isinstance(size, str) else size
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"{size!r} {way_out}")
    return count


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a cache and the options in ``text``, as ``paris:top_k=512:store=host``.

    A colon stands before each option, and a dot names an entry of an option that is a dictionary:
    ``paris:prompt.above=0:prompt.top_k=0.25``. Numbers, ``true``, ``false`` and ``none`` are values
    of their types, and everything else is text.

    Raises:
        ValueError: a word that is no option, or one with both a value and entries.
    """
    name, *words = (word.strip() for word in text.split(":"))
    options = [parse_option(text, word) for word in words]
    result = {key: value for key, value in options if "." not in key}
    for key, value in options:
        outer, dot, inner = key.partition(".")
        if not dot:
            continue
        if not isinstance(result.setdefault(outer, {}), dict):
            raise ValueError(f"{text!r}: {outer} has a value and entries, write one or the other")
        result[outer][inner] = value
    return name, result


def parse_option(text: str, word: str) -> tuple[str, Any]:
    """Name and value of the option ``word`` in ``text``; ValueError where it is none."""
    name, separator, value = word.partition("=")
    if not separator or not name or not value:
        raise ValueError(f"{text!r}: {word!r} is no option, write NAME=VALUE")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    # An artifact may have a name that looks like a number.
    for parse in () if name in _MOVABLE_OPTIONS else (int, float):
        with contextlib.suppress(ValueError):
            return name, parse(value)
    return name, value
