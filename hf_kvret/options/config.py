"""Options that every retrieval cache has, and their validation."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from hf_kvret.options.checks import (
    check_bits,
    check_budget,
    check_device_budget,
    check_length,
    check_lost_mass,
    check_prefill_chunk,
    check_rest,
    check_select_heads,
    check_slots,
)


@dataclass(frozen=True)
class RetrievalConfig:
    """Sizes of the regions, the budget, and where cold rows live. Lengths are in tokens.

    Attributes:
        top_k: budget of cold tokens per query and KV head: a count (``int >= 1``), a share
            of the cold tokens (``0 < float <= 1``), or None: 256 below 8K cold tokens, 512 below
            16K, 1024 below 32K, 2048 from there on (LRQK, appendix D).
        select_heads: how many query heads of a KV head select together: their budget is one, of the
            tokens that matter most to any of them. None: all of them.
        sink: first valid tokens of each row, always attended, kept on the device.
        recent: newest tokens, always attended; what a flush leaves in the window.
        flush: tokens that accumulate beyond ``recent`` before a flush moves them to the store.
        dense_below: caches shorter than this retrieve nothing and attend to everything. None
            means ``max(2000, sink + recent + 2 * top_k)``.
        max_draft: up to this many queries at once (drafted tokens) each retrieve; more of them
            (a second prompt) are attended exactly.
        prefill_chunk: tokens of a pass while ``generate`` reads a prompt, so that a long one needs
            no memory for all its hidden states at once: a count above ``max_draft`` (it may be
            changed a little, so that the last chunk is above it, too), None for one pass, or
            ``"auto"``: one pass if it takes at most a quarter of the free device memory (on a CPU
            8 GiB), else chunks that take up to 2 GiB beside their rows. A prompt whose chunks would
            not be exact goes in one pass, and the log says why.
        store: ``"device"``, ``"host"``, ``"resident"`` (the host, with slots on the device for rows
            in use), ``"cpu"`` (the host, where the CPU attends to them), ``"higgs"`` and
            ``"higgs-host"`` (in ``bits`` a number, on the device and on the host), ``"split"`` (on
            the device as long as ``device_budget`` lasts, then on the host), or ``"auto"``: with a
            ``device_budget`` split; else by the memory that is free when the first rows go cold:
            on the device, on the host where they need more than a quarter of a GPU's free memory,
            and in ``bits`` a number where host memory is short (see ``stores.places``).
        device_budget: of ``store="split"``, device memory for the cold rows of all layers
            together, each of which gets an equal share: bytes (int), or a text as ``"90GB"`` or
            ``"75GiB"``. None: half of what is free when the first rows go cold; a GPU only.
        slots: of ``store="resident"``, rows on the device per head that selects: a count
            (``int >= top_k``), or a multiple of the budget (``float >= 1``). More than the budget
            keep rows that were used recently, for a later query to find.
        bits: of ``store="higgs"`` and ``"higgs-host"``, for each number of a key or value: 2, 3, 4,
            or 16, which is the model's own dtype. With 16, ``"auto"`` codes nothing.
        rest: what stands for the cold tokens that a query does not select. None: nothing.
            ``"mean"``: one token of each KV head, with the mean key and the mean value of all cold
            tokens and the weight of those that are left out.
        rest_blocks: of ``rest="mean"``, a token for every so many cold slots; None: one for all.
        warn_lost_mass: warn once where the share of the attention that a layer does not compute
            exactly, as its index estimates it, is larger in the mean: above 0 and below 1. None:
            never.
        track_recall: compare every selection with the exact top-k. Reads all keys: for study.
        graph: ``"auto"``: ``generate`` replays decode steps from a CUDA graph where it can (see
            ``DecodeGraph``); False: it never does.
    """

    # Whether any length of context leads to retrieval.
    retrieves: ClassVar[bool] = True

    top_k: int | float | None = 1024
    select_heads: int | None = None
    sink: int = 4
    recent: int = 256
    flush: int = 512
    dense_below: int | None = None
    max_draft: int = 32
    prefill_chunk: int | Literal["auto"] | None = "auto"
    store: str = "auto"
    slots: int | float = 1.0
    bits: int = 4
    device_budget: int | str | None = None
    rest: Literal["mean"] | None = None
    rest_blocks: int | None = None
    warn_lost_mass: float | None = None
    track_recall: bool = False
    graph: Literal["auto", False] = "auto"

    def __post_init__(self) -> None:
        check_budget(self.top_k)
        check_slots(self.slots, self.top_k)
        # A method that reads the bits from its artifact has the default None.
        if self.bits is not type(self).bits:
            check_bits(self.bits)
        if not isinstance(self.store, str):
            raise TypeError(f"store must be a name, got {self.store!r}")
        check_device_budget(self.device_budget, self.store)
        for name, least in (("sink", 0), ("recent", 1), ("flush", 1), ("max_draft", 1)):
            check_length(name, getattr(self, name), least)
        if self.select_heads is not None:
            check_select_heads(self.select_heads, self.group_obstacle)
        if self.dense_below is not None:
            check_length("dense_below", self.dense_below, 0)
        check_prefill_chunk(self.prefill_chunk, self.max_draft)
        check_rest(self.rest, self.rest_blocks, self.rest_obstacle)
        check_lost_mass(self.warn_lost_mass)
        if self.warn_lost_mass is not None and self.estimate_obstacle:
            raise ValueError(_without_estimates(self, self.estimate_obstacle))
        if not isinstance(self.track_recall, bool):
            raise TypeError(f"track_recall must be True or False, got {self.track_recall!r}")
        if self.graph is not False and self.graph != "auto":
            raise ValueError(f"graph={self.graph!r}: choose 'auto' or False")

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """The configuration with ``options`` set; an unknown name raises with the nearest one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{cls.__name__} has no option {name!r}: {hint}The options are "
                    f"{', '.join(names)}"
                )
        return cls(**options)

    @classmethod
    def of(cls, options: object, changes: Mapping[str, Any], owner: str) -> Self:
        """What a cache of class ``owner`` was given; ``options`` of this class, None: defaults."""
        if options is None:
            return cls.from_options(**changes)
        if not isinstance(options, cls):
            raise TypeError(f"{owner} takes a {cls.__name__}, got {type(options).__name__}")
        return options.replace(**changes) if changes else options

    def replace(self, **options: Any) -> Self:
        """A copy with ``options`` changed, validated like a new one."""
        return type(self).from_options(**{**dataclasses.asdict(self), **options})

    @classmethod
    def takes_store(cls, store: str) -> bool:
        """Whether the method works with this kind of store."""
        return True

    @classmethod
    def takes(cls, name: str, value: Any) -> bool:
        """Whether the option ``name`` has a meaning for the method, with this value."""
        return name != "store" or cls.takes_store(value)

    @property
    def splits_rows(self) -> bool:
        """Whether cold rows lie on the device and, beyond ``device_budget``, on the host."""
        return self.store == "split" or self.device_budget is not None

    @property
    def row_bits(self) -> int:
        """Bits of a number in the store; 16: the model's own dtype."""
        return self.bits if self.store.startswith("higgs") else 16

    @property
    def group_obstacle(self) -> str:
        """Why the query heads of a KV head must select together; empty where they need not."""
        return ""

    @property
    def rest_obstacle(self) -> str:
        """Why nothing can stand for tokens that are not selected; empty where it can."""
        return ""

    @property
    def estimate_obstacle(self) -> str:
        """Why the index can't estimate attention logits; empty where it can, or may."""
        return ""

    @property
    def needs_means(self) -> bool:
        """Whether means of what is not selected are asked for."""
        return self.rest is not None or self.warn_lost_mass is not None

    def check_estimates(self, makes_them: bool) -> None:
        """ValueError where estimates are needed and the index does not make any."""
        if self.warn_lost_mass is not None and not makes_them:
            raise ValueError(_without_estimates(self, "its index has no method estimate"))

    @property
    def lacks_artifact(self) -> bool:
        """Whether the method needs a calibration artifact and the options name none."""
        return False

    def exact(self) -> Self:
        """These options with a budget that covers everything, and rows stored uncoded."""
        return self.replace(top_k=1.0, slots=1.0, bits=16)

    def check_model(self, head_dim: int) -> None:
        """ValueError for options that don't work with this head dim."""
        if self.store.startswith("higgs") and self.bits != 16 and head_dim % 8:
            raise ValueError(
                f"store={self.store!r} with heads of {head_dim} numbers: coded rows need dims that "
                "8 divides; use store='device' or 'host'"
            )

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


def _without_estimates(config: RetrievalConfig, why: str) -> str:
    """The message where estimates are needed and there are none."""
    asking = f"warn_lost_mass={config.warn_lost_mass}"
    return f"{asking}: {why}; leave it out, or use flat, paris, lrqk or a2ats"
