"""LayerKV: the tokens of one layer, as they move from the window into index and store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from hf_kvret.contracts.block import UNKNOWN_POSITION, TokenBlock, check_dtypes, other_batch
from hf_kvret.contracts.index import ColdTokens, Index, Scoring, SearchCost, blamed_on
from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.contracts.state import Schema, State, Tensors, listed, number, part, transient
from hf_kvret.contracts.store import PAGES, FirstRows, Store, all_of
from hf_kvret.contracts.token_buffer import TokenBuffer
from hf_kvret.layer.cold_sums import ColdSums
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.layer.window import Window
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels.host_step import HostCold, PackedStep
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.mean_tokens import MeanToken

MakeStore = Callable[[FirstRows], Store]

_Owner = TypeVar("_Owner", bound=Any)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def keeps_tensors(
    method: Callable[Concatenate[_Owner, _Params], _Result],
) -> Callable[Concatenate[_Owner, _Params], _Result]:
    """``method`` as one change of its owner, for which a signal waits.

    An exception leaves ``torn`` set: nobody knows what is held. Inference mode is left for it, as
    its tensors could not be written to outside of that.
    """

    @functools.wraps(method)
    def change(self: _Owner, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        SIGNALS_WAIT.depth += 1
        try:
            # One change may be a part of another.
            before, self.torn = getattr(self, "torn", False), True
            if not torch.is_inference_mode_enabled():
                result = method(self, *args, **kwargs)
            else:
                with torch._C._InferenceMode(False):
                    result = method(self, *args, **kwargs)
            self.torn = before
            return result
        finally:
            SIGNALS_WAIT.depth -= 1
            if SIGNALS_WAIT.waiting:
                SIGNALS_WAIT.end()

    return change


class RetrievedTokens(State):
    """Tokens read with ``prompt="retrieve"``: they attended to a part of what came before them.

    Attributes:
        spans: first token and the one behind the last of each run of them, in order.
    """

    spans: list[tuple[int, int]] = listed(lambda span: span[1])

    def __len__(self) -> int:
        return sum(end - first for first, end in self.spans)

    def add(self, groups: Iterable[tuple[int, int]]) -> None:
        """Add later tokens, ``first`` to ``end``; a span grows where these begin at its end."""
        for first, end in groups:
            if self.spans and self.spans[-1][1] == first:
                first = self.spans.pop()[0]
            self.spans.append((first, end))

    def crop(self, length: int) -> None:
        self.spans = [(first, min(end, length)) for first, end in self.spans if first < length]

    def stats(self) -> dict[str, Any]:
        """For ``stats()``; nothing where there are no such tokens."""
        return {"prompt_retrieved": len(self)} if self.spans else {}

    def state_dict(self) -> Tensors:
        """The ``spans [n, 2]`` int64; nothing where there are no such tokens."""
        return {"spans": torch.tensor(self.spans, dtype=torch.int64)} if self.spans else {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.spans = [(first, end) for first, end in state["spans"].tolist()]

    def check(self, config: RetrievalConfig) -> None:
        """ValueError where options want exact rows, and some were read by retrieval."""
        if self.spans and config.prompt_recipe is None:
            raise ValueError(
                f"{len(self):,} tokens of this cache were read with prompt='retrieve', and "
                "prompt='exact' is asked for: leave the option as it was, or read the text again"
            )


class LayerKV(State):
    """Window, index and store of one layer, kept in step.

    Slots ``0 .. cold_len`` are cold: in the store and the index, whether valid or not. The rest is
    recent. The first valid cold tokens of each row are also in the window, as sinks.

    Args:
        config: sizes of window and sinks, the budget.
        index: an empty index, or None: all cold tokens are attended to.
        make_store: makes an empty store for the first block; called at the first flush.
        keys: any ``[B, Hkv, *, Dk]`` with the dtype and device of the tokens.
        values: the same for values, ``[B, Hkv, *, Dv]``.
        needs_positions: see ``RetrievalCache.needs_positions``.
        value_in_key: Dv where values are the first numbers of keys, and not held; else 0.

    Attributes:
        built: whether the index was built, see ``Index.build``.
        positions: ``[B, 1, n]`` int32 of recent tokens, where the store needs them.
        retrieved: tokens that were read with ``prompt="retrieve"``.
        selected: rows read by selection so far, one int64; steps count in place.
        watches: whether ``on_forward`` has anything to do.
        changes: goes up whenever other tokens are cold, or other sequences are held.
        sums: of cold tokens, where the options ask for their mean, which may lag behind;
            None: there are none yet.
        torn: whether a change of it broke off in the middle; False again with the next pass.
        drafts: whether new tokens are drafts, which will be dropped: nothing leaves the window.
        compiled_len: by shape of queries, how long the layer may grow with kernels that are there.
    """

    window: Window = part()
    index: Index | None = part(may_be_empty=True)
    positions: TokenBuffer = part(saved=False)
    store: Store | None = part(may_be_empty=True)
    sums: ColdSums | None = part(key="moments", may_be_empty=True)
    retrieved: RetrievedTokens = part(RetrievedTokens, key="prompt", may_be_empty=True)
    built: bool = number(False)
    _retrievable: torch.Tensor | None = transient()
    _cold: ColdTokens | None = transient()
    # The newest step passed the first to the compiled library, and the next may pass the second.
    host_cold: HostCold | None = transient()
    next_step: PackedStep | None = transient()
    # Scale and soft cap that it was made for.
    _cold_key: tuple[float, float | None] | None = transient()

    @keeps_tensors
    def __init__(
        self,
        config: RetrievalConfig,
        index: Index | None,
        make_store: MakeStore,
        keys: torch.Tensor,
        values: torch.Tensor,
        needs_positions: str = "",
        value_in_key: int = 0,
    ) -> None:
        self.config = config
        self.index = index
        self.window = Window(config.sink, keys, values, value_in_key)
        self.positions = TokenBuffer(64)
        self.needs_positions = needs_positions
        self.make_store = make_store
        self.changes = 0
        self.compiled_len: dict[torch.Size, int] = {}
        self.torn = self.drafts = False
        self.selected = torch.zeros((), dtype=torch.long, device=keys.device)
        self.watches = (index is not None and "on_forward" in index.hooks) or bool(needs_positions)
        self._value_dim = values.shape[3]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.window.start + self.window.length

    @property
    def cold_len(self) -> int:
        """Tokens that have left the window."""
        return 0 if self.store is None else len(self.store)

    @property
    def batch_size(self) -> int:
        """Sequences of the batch."""
        return self.window.sink_slots.shape[0]

    def check_tokens(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """ValueError for new tokens of another batch, shape, dtype or device than those held."""
        keys = self.window.keys
        if not key.dtype == value.dtype == keys.dtype:
            check_dtypes(keys=key, values=value)
        if keys.shape[0] != key.shape[0]:
            raise ValueError(other_batch(len(keys), len(key)))
        old_form = (keys.shape[1], keys.shape[3], self._value_dim, keys.dtype, keys.device)
        new_form = (key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        if old_form != new_form:
            names = "KV heads {}, key dim {}, value dim {}, {}, {}"
            raise ValueError(
                f"this cache was filled by another model ({names.format(*old_form)}); the new "
                f"tokens have {names.format(*new_form)}: use a new cache or reset()"
            )

    @keeps_tensors
    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        start: int | None = None,
    ) -> None:
        """Pass ``queries [B, Hq, n, Dk]`` and keys of tokens to the index.

        ``start``: slot of the first one; None: they are about to be added.

        Raises:
            ValueError: no ``positions [B, n]``, and the store needs them.
        """
        start = self.length if start is None else start
        new_valid = None if valid is None else valid[:, start : start + keys.shape[2]]
        capture = self.window.capture
        if capture is not None and new_valid is not None:
            # Replays are for other slots than the captured step, so read the validity by column.
            new_valid = capture.mask.index_select(1, capture.column)
        if self.needs_positions:
            if positions is None:
                raise ValueError(self.needs_positions)
            self.positions.put(positions.to(torch.int32)[:, None], start)
        if self.index is not None:
            self.index.on_forward(queries, keys, start, new_valid, positions)

    @keeps_tensors
    def on_prompt(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Show the newest ``queries [B, Hq, n, Dk]`` of a long pass to the index."""
        if self.index is not None:
            self.index.on_prompt(queries, valid)

    @property
    def most_recent(self) -> int:
        """Recent tokens between two flushes, at most."""
        return self.config.recent + self.config.flush + self.config.max_draft

    def step_flushes(self) -> bool:
        """Whether the next ``take_step`` moves tokens to the store."""
        window, config = self.window, self.config
        full = window.length >= config.recent + config.flush
        return full and window.end >= config.dense_len and not self.drafts

    def take_step(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        learn: Callable[[], None] | None = None,
    ) -> None:
        """Flush if one is due, then append ``[B, Hkv, n, D]``.

        Dropping tokens of this step never has to undo a flush. ``valid [B, T]`` covers all slots,
        those of the new tokens included; None: all valid. ``learn`` is called first, and has the
        index learn from the queries of these tokens.
        """
        # Each is a change of its own: a crop drops what a pass that breaks off between them left.
        if learn is not None:
            learn()
        if self.step_flushes():
            self.flush(valid)
        self.window.append(keys, values)

    @keeps_tensors
    def flush(self, valid: torch.Tensor | None) -> None:
        """Move all but ``recent`` tokens of the window to store and index; as in ``take_step``."""
        self._cool(self.window.pop(self.window.length - self.config.recent, valid))
        self.window.fit(self.most_recent)

    @keeps_tensors
    def take_prompt(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        learn: Callable[[], None] | None = None,
    ) -> None:
        """Add many tokens at once; if they overflow the window, all but ``recent`` become cold.

        A cache that stays shorter than ``dense_below`` keeps everything in the window, and a
        question that fits beside the recent tokens flushes nothing. Arguments as in ``take_step``.
        """
        if learn is not None:
            learn()
        window, config, new = self.window, self.config, keys.shape[2]
        if not window.end:
            window.padded = None if valid is None else ~valid[:, 0]
        end, recent = window.end + new, window.length + new
        if end < config.dense_len or recent <= config.recent + config.flush:
            window.append(keys, values)
            return
        surplus = recent - config.recent
        pop_len = min(window.length, surplus)
        if pop_len:
            self._cool(window.pop(pop_len, valid))
        if skip_len := surplus - pop_len:
            start = window.start
            skip_valid = None if valid is None else valid[:, start : start + skip_len]
            skip_rows = keys[:, :, :skip_len], values[:, :, :skip_len]
            self._cool(TokenBlock(*skip_rows, start, skip_valid, value_in_key=window.value_in_key))
            window.skip(skip_len)
        window.fit(self.most_recent)
        window.append(keys[:, :, skip_len:], values[:, :, skip_len:])

    def cold(self, scoring: Scoring) -> ColdTokens | None:
        """The cold tokens; None if there are none. ``scoring.valid`` as in ``take_step``.

        Between two flushes it is the same object for every step without padding.
        """
        key = scoring.scale, scoring.softcap
        if scoring.valid is None and self._cold_key == key:
            return self._cold
        if self.store is None or not self.cold_len:
            return None
        scoring_cold = scoring.of(self.retrievable(scoring.valid))
        cold = ColdTokens(self.store, scoring_cold, self.config.budget(self.cold_len))
        if self.config.rest is not None:
            cold = replace(cold, mean=self._mean_token(cold))
        if scoring.valid is None:
            self._cold, self._cold_key = cold, key
        return cold

    def _forget_cold(self) -> None:
        """Other tokens are cold, or other options hold."""
        self._retrievable = self._cold = self._cold_key = self.host_cold = self.next_step = None

    def set_options(self, config: RetrievalConfig) -> None:
        """Go on with other options; ValueError where they don't fit the tokens held."""
        self.retrieved.check(config)
        self.config = config
        if config.rest is None:
            self.sums = None
        self._forget_cold()
        if self.index is not None:
            self.index.set_options(config)

    def ready_index(self, cold: ColdTokens) -> Index | None:
        """The index, built and ready to search ``cold``; None: all cold tokens are attended to."""
        index = self.index
        if index is None or not self.built or index.is_stale(cold):
            self.build_index(cold)
        elif "before_search" in index.hooks:
            self._prepare(index, "before_search", cold)
        return index

    @keeps_tensors
    def _prepare(self, index: Index, method: str, cold: ColdTokens) -> None:
        """Call ``Index.build`` or ``Index.before_search``, as ``method`` says."""
        try:
            getattr(index, method)(cold)
        except WrongIdError as error:
            raise blamed_on(index, method, error) from error

    @keeps_tensors
    def after_search(self, ids: torch.Tensor) -> None:
        """Call ``Index.after_search``."""
        assert self.index is not None, "it has searched"
        self.index.after_search(ids)

    def build_index(self, cold: ColdTokens) -> None:
        """Call ``Index.build``, unless it was called before and the index is not stale."""
        if self.index is not None and (not self.built or self.index.is_stale(cold)):
            self._prepare(self.index, "build", cold)
        self.built = True

    @keeps_tensors
    def _mean_token(self, cold: ColdTokens) -> MeanToken:
        """The mean of all of ``cold``."""
        if self.sums is None:
            self.sums = ColdSums.of(self.window)
        window = self.window
        self.sums.catch_up(cold, window.keys.shape[1], window.value_in_key)
        return self.sums.mean()

    def recount(self, valid: torch.Tensor) -> None:
        """Make sums anew where they count more or fewer tokens than ``valid``; synchronizes."""
        if self.sums is not None and not self.sums.counts_as_many_as(self.retrievable(valid)):
            self.sums = None
            self._forget_cold()

    def search_cost(self) -> SearchCost:
        """Cost of one search; without an index, of reading the store, its rows not counted."""
        if self.index is None:
            return SearchCost(0, 0 if self.store is None else self.store.shared_nbytes())
        return self.index.cost(self.cold_len, self.config.budget(self.cold_len))

    def retrievable(self, valid: torch.Tensor | None) -> torch.Tensor:
        """``[B, cold]`` bool, False for padding, holes and sinks. ``valid`` as in ``take_step``."""
        cold = self.cold_len
        if self._retrievable is None:
            slots = self.window.sink_slots
            # A column more for slots that are not cold; rows of whole words, for wide loads.
            width = (cold // 16 + 1) * 16
            marks = torch.ones(len(slots), width, dtype=torch.bool, device=slots.device)
            marks.scatter_(1, slots.masked_fill(slots < 0, cold), False)
            self._retrievable = marks[:, :cold]
        return self._retrievable if valid is None else self._retrievable & valid[:, :cold]

    def rows(self, count: int, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first ``count`` keys ``[B, Hkv, count, Dk]`` and values, by slot.

        Sinks are as they came, also where the store keeps codes. ``new`` keys and values, if there
        are some, stand behind them.
        """
        window, device = self.window, self.window.keys.device
        cold = min(count, self.cold_len)
        parts = [tuple(side[:, :, : count - cold] for side in window.recent())]
        if self.store is not None and cold:
            chunks = all_of(self.store, self.store.chunks(stop=cold), cold)
            read = [(keys, values) for _, keys, values in chunks]
            keys, values = (torch.cat(side, dim=2)[:, :, :cold] for side in zip(*read, strict=True))
            parts.insert(0, (keys.to(device), values.to(device)))
        parts += [new] if new else []
        keys, values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
        if self.store is not None and self.store.codes_rows:
            window.put_sinks(keys, values)
        return keys, values

    @keeps_tensors
    def crop(self, length: int, scoring: Scoring | None = None) -> None:
        """Forget tokens from slot ``length`` on; a deep crop pulls rows back into the window.

        ``scoring`` is that of the last pass; None: not known.
        """
        cold = length - min(length, self.config.recent)
        if self.sums is not None and self.store is not None and length < self.cold_len:
            tokens = None if scoring is None else self.cold(scoring)
            self.sums.drop(tokens, cold, self.window.keys.shape[1], self.window.value_in_key)
        self.window.crop(length)
        self.retrieved.crop(length)
        if self.store is None or length >= self.cold_len:
            return
        device, heads = self.window.keys.device, self.window.keys.shape[1]
        ids = torch.arange(cold, length, dtype=torch.int32, device=device)
        ids = ids.expand(self.batch_size, heads, 1, -1).contiguous()
        keys, values = self.store.gather(ids)
        self.window.unpop(keys[:, :, 0].to(device), values[:, :, 0].to(device), length)
        for state in (self.store, self.index):
            if state is not None:
                state.crop(cold)
        # An index without tokens is like a new one: the next prompt builds it.
        self.built = self.built and cold > 0
        self._forget_cold()
        self.changes += 1

    @keeps_tensors
    def reorder(self, rows: torch.Tensor) -> None:
        super().reorder(rows)
        self.changes += 1

    @keeps_tensors
    def fork(self) -> Self:
        """An independent copy that shares the cold part; counts start at 0."""
        twin = super().fork()
        twin.selected, twin.compiled_len = torch.zeros_like(self.selected), {}
        twin.torn = False
        return twin

    def state_dict(self) -> Tensors:
        """Tensors on the CPU: ``window.*``, ``index.*``, ``store.*``, ``moments.*`` and ``built``.

        Positions lie beside the index.
        """
        state = super().state_dict()
        if self.positions.is_allocated:
            state["index.positions"] = self.positions.rows[:, 0].contiguous()
            state["index.start"] = torch.tensor(self.positions.first)
        return {name: x.cpu() for name, x in state.items()}

    @keeps_tensors
    def load_state_dict(
        self, state: Tensors, device: torch.device | None = None, query_heads: int | None = None
    ) -> None:
        """Become the layer whose ``state_dict`` this is, made for the rows of its window.

        Args:
            state: the tensors.
            device: of the queries.
            query_heads: of the layer; None where they are not known.

        Raises:
            KeyError: names a missing tensor.
            ValueError: a tensor does not fit the others.
        """
        device = device or self.window.keys.device
        rows_bytes = sum(x.nbytes for name, x in state.items() if name.startswith("store."))
        if rows_bytes:
            tokens = int(state["window.start"])
            self.store = self.make_store(FirstRows(device, rows_bytes, tokens))
        # Sums of coded rows are made from what the store reads back.
        plain = self.store is not None and not self.store.codes_rows
        if plain and self.config.rest is not None:
            self.sums = ColdSums.of(self.window)
        absent = (("index.", self.index), ("moments.", self.sums))
        unread = tuple(prefix for prefix, own in absent if own is None)
        parts = {name: x for name, x in state.items() if not name.startswith(unread)}
        if not rows_bytes:
            parts["built"] = torch.tensor(False)
        schema = self._schema(state, query_heads)
        self.check_saved(parts, schema)
        if self.store is not None and not self.store.codes_rows and "store.codes" not in state:
            _check_rows(state, schema)
        super().load_state_dict(parts, device)
        if self.needs_positions:
            positions, start = state["index.positions"], int(state["index.start"])
            self.positions.put(positions.to(device)[:, None], start)

    def _schema(self, state: Tensors, query_heads: int | None) -> Schema:
        """The sizes of a layer with these rows, whose state is ``state``."""
        keys, start = self.window.keys, int(state["window.start"])
        sizes = {"B": self.batch_size, "H": keys.shape[1], "D": keys.shape[3]}
        sizes |= {"V": self._value_dim, "S": self.config.sink, "I": self.window.value_in_key}
        recent = state["window.keys"].shape[2] - self.config.sink
        sizes |= {"N": start, "T": start + recent}
        return Schema(keys.dtype, sizes if query_heads is None else {**sizes, "Q": query_heads})

    def _cool(self, block: TokenBlock) -> None:
        """Move a block into store and index, its first valid tokens also into free sinks."""
        if self.store is None:
            self.store = self.make_store(FirstRows.of(block))
        takes_sinks = not self.window.sinks_full
        self.window.take_sinks(block)
        if self.positions.is_allocated:
            # The store has the positions of tokens that a crop moved back to the window.
            first, last = (max(0, slot - self.positions.first) for slot in (block.start, block.end))
            positions = self.positions.rows[:, 0, first:last]
            pad_len = len(block) - positions.shape[1]
            positions = torch.nn.functional.pad(positions, (pad_len, 0), value=UNKNOWN_POSITION)
            block = replace(block, positions=positions)
        self.store.append(block)
        if self.config.rest is not None and not self.store.codes_rows:
            if self.sums is None:
                self.sums = ColdSums.of(self.window)
            # Else the store's rows are read again.
            if self.sums.end == block.start:
                self.sums.add(block, self.window.sink_slots if takes_sinks else None)
        self.positions.drop(block.end)
        if self.index is not None:
            self.index.add(block)
        self._forget_cold()
        self.changes += 1


def _check_rows(state: Tensors, schema: Schema) -> None:
    """ValueError for saved rows in full of other heads or dims than the layer's."""
    in_key, pages = schema.sizes["I"], f"store.{PAGES}"
    if pages in state:
        width = schema.sizes["D"] + (0 if in_key else schema.sizes["V"])
        schema.check(pages, state[pages], f"B c H p {width}")
        return
    schema.check("store.keys", state["store.keys"], "B H N D")
    if not in_key:
        schema.check("store.values", state["store.values"], "B H N V")


class DraftRound:
    """One round in one layer, whose tokens are ``kv``; passes draft from here on.

    Drafts retrieve, with a copy of the index where it learns from queries. The pass that verifies
    them attends to all tokens and leaves its own rows. The index learns of those that are accepted,
    as if they had come together.
    """

    # A copy made in inference mode could not be written to outside of it.
    @torch.inference_mode(False)
    def __init__(self, kv: LayerKV) -> None:
        self._kv = kv
        self._start, self._index = kv.length, kv.index
        # Of the verifying pass, what the index would learn: queries, keys [B, H, n, Dk], call.
        self.seen: tuple[torch.Tensor, torch.Tensor, AttentionCall] | None = None
        kv.drafts = True
        if kv.index is not None and kv.index.hooks & {"on_forward", "after_search"}:
            kv.index = kv.index.fork()

    def end_drafts(self) -> None:
        """From here on passes verify, once the caller has dropped the drafts."""
        if self._kv.drafts:
            self._kv.index, self._kv.drafts = self._index, False

    def learn(self, count: int) -> None:
        """Have the index learn of the first ``count`` tokens of the verifying pass.

        They are the newest ones now.
        """
        if self.seen is None or not count:
            return
        (query, key, call), self.seen = self.seen, None
        query, key = query[:, :, :count], key[:, :, :count]
        positions = None if call.positions is None else call.positions[:, :count]
        self._kv.on_forward(query, key, call.scoring.valid, positions, self._start)
        index, cold = self._kv.index, self._kv.cold(call.scoring)
        if index is not None and "after_search" in index.hooks and cold is not None:
            self._kv.ready_index(cold)
            self._kv.after_search(index.search(query, cold))
