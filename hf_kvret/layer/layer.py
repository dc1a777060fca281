"""RetrievalLayer: one layer of a RetrievalCache, between transformers and ``LayerKV``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_kvret.contracts.block import check_dtypes
from hf_kvret.contracts.index import Index, Scoring
from hf_kvret.contracts.state import Tensors
from hf_kvret.contracts.store import FirstRows, Store
from hf_kvret.layer.cached_rows import CachedRows
from hf_kvret.layer.exact_attention import attend_exactly
from hf_kvret.layer.layer_kv import DraftRound, LayerKV, MakeStore
from hf_kvret.layer.prompt_groups import PromptPass
from hf_kvret.layer.queries import AttentionCall, Heads, NewTokens
from hf_kvret.layer.step import BorrowedIndex, Lender, Subscriber, attend_again, attend_step
from hf_kvret.models.compatibility import AttentionShape
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.ranks import WHOLE, Part
from hf_kvret.options.config import RetrievalConfig

HANDLE = "hf_kvret_layer"

# Queries of a long pass that an index may ask for.
_NEWEST = 64


class LayerInfo(NamedTuple):
    """Which layer of the model a retrieval layer is.

    Attributes:
        number: in the model.
        shape: of the layer's heads; None: not known.
        part: of these heads, that this process holds.
    """

    number: int = 0
    shape: AttentionShape | None = None
    part: Part = WHOLE


class RetrievalLayer(CacheLayerMixin):
    """Cache of one attention layer: window x index x store.

    Nothing in it refers back to it but weakly, so that a cache's memory is free once it is dropped.

    Arguments are those of ``LayerKV``, with what makes an index.

    ``update`` only notes the new tokens and returns them with a handle to this layer; the
    registered attention function finds the handle and calls ``attend``, which takes them in.

    Attributes:
        below: the retrieval layer before this one in the model; see ``stand_on``.
        lender: keeps what the layer that selects for this one selected; None: it selects itself.
        edits: goes up with everything that is done to the layer, but for a replayed step.
        moves: as edits, but for what ``lossless`` does in a round, which only fills the window.
        final_len: tokens that were announced, held ones included; 0: none.
        past_len: tokens before those of the pass at hand, from its attention on.
        prompt_end: length at which the announced prompt ends; 0: none was announced.
        needs_positions: see ``RetrievalCache.needs_positions``.
        layer_info: which layer of the model this is; set by the cache.
        subscribers: called after each step; set by the cache.
        exact_rows: rows read by exact attention of long second prompts.
        round: the round of drafts under way, with ``lossless``; None between rounds.
    """

    is_sliding = False
    is_croppable = True
    is_latent = False
    # Whether it attends to what the model's own indexer chooses.
    follows_model = False

    def __init__(
        self,
        config: RetrievalConfig,
        make_index: Callable[[], Index | None],
        make_store: MakeStore,
        needs_positions: str = "",
        value_in_key: int = 0,
    ) -> None:
        # transformers' own constructor assigns to keys and values, which are only read here.
        self.is_initialized = False
        self.kv: LayerKV | None = None
        self.config = config
        self.subscribers: tuple[Subscriber, ...] = ()
        self.exact_rows = 0
        self.round: DraftRound | None = None
        self.pending_attention = False
        self.below: RetrievalLayer | None = None
        self.lender: Lender | None = None
        self.edits = self.moves = 0
        self.past_len = self.final_len = self.prompt_end = 0
        self.layer_info = LayerInfo()
        self._update_key: tuple[int, torch.Size, torch.Size] | None = None
        self._scoring: Scoring | None = None
        self._make_index = make_index
        self.make_store = make_store
        self.needs_positions = needs_positions
        self._value_in_key = value_in_key

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the ``LayerKV`` for tokens shaped like these, ``[B, Hkv, *, D]``."""
        index = self._make_index() if self.lender is None else BorrowedIndex(self.lender)
        store = partial(_new_store, self.make_store, self.below)
        _, shape, part = self.layer_info
        if index is not None and not (shape and shape.rank):
            index.kv_heads = part.heads(key_states.shape[1])
        rows, options = (key_states, value_states), (self.needs_positions, self._value_in_key)
        self.kv = LayerKV(self.config, index, store, *rows, *options)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note new tokens ``[B, Hkv, n, D]``; returns them, the keys with a handle to this layer.

        Raises:
            RuntimeError: gradients are on.
            ValueError: another batch size, head count, head dim, dtype or device than before, a
                dtype that is not served, or two of them.
        """
        if key_states.requires_grad or value_states.requires_grad:
            raise RuntimeError(
                "a retrieval cache has no gradients: run the model under torch.no_grad() or "
                "torch.inference_mode(), or train with use_cache=False"
            )
        if self.kv is None:
            check_dtypes(keys=key_states, values=value_states)
            self.lazy_initialization(key_states, value_states)
        else:
            self.kv.check_tokens(key_states, value_states)
            self.kv.torn = False
        self.pending_attention, self.past_len = True, sys.maxsize
        # As `edited`, of which each step would notice the call.
        self.edits += 1
        self.moves += self.round is None
        self._update_key = (value_states.data_ptr(), key_states.shape, value_states.shape)
        handle = key_states.detach()
        setattr(handle, HANDLE, self)
        return handle, value_states

    def edited(self) -> None:
        """Count that something is done to the layer."""
        self.edits += 1
        self.moves += self.round is None

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, Hkv, n, D]`` to be held, of what ``update`` was given."""
        return key, value

    def get_seq_length(self) -> int:
        """Tokens held."""
        if self.kv is None:
            return 0
        window = self.kv.window
        return window.start + window.length

    @property
    def has_padding(self) -> bool:
        """Whether tokens were padding in the last pass, or before the first ones that count.

        It may wait for the device.
        """
        if self.kv is None:
            return False
        valid = None if self._scoring is None else self._scoring.valid
        slots = self.kv.window.sink_slots
        starts = (slots >= 0) & (slots != torch.arange(slots.shape[1], device=slots.device))
        padded = self.kv.window.padded
        begins = bool(starts.any()) or (padded is not None and bool(padded.any()))
        return begins or (valid is not None and not bool(valid.all()))

    @property
    def is_torn(self) -> bool:
        """Whether a pass broke off while the layer changed: nobody knows what is held."""
        return self.pending_attention and self.kv is not None and self.kv.torn

    @property
    def selected(self) -> int:
        """Rows read by selection; may wait for the device."""
        return 0 if self.kv is None else int(self.kv.selected)

    @property
    def cold_len(self) -> int:
        """Tokens held outside the window."""
        return 0 if self.kv is None else self.kv.cold_len

    @property
    def keys(self) -> torch.Tensor | None:
        """``[B, Hkv, T, Dk]`` of all tokens, made when it is used; None before the first update."""
        return self._rows("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """``[B, Hkv, T, Dv]`` of all tokens, as ``keys``."""
        return self._rows("values")

    def _rows(self, name: str) -> CachedRows | None:
        kv = self.kv
        if kv is None:
            return None
        like = kv.window.keys if name == "keys" else kv.window.values
        # Whoever keeps the rows keeps no memory of a cache that was reset.
        read = partial(self._read_rows, name, kv.length, weakref.ref(kv), len(like))
        return CachedRows(like, kv.length, read)

    def _read_rows(
        self, name: str, length: int, owner: weakref.ref[LayerKV], batch: int
    ) -> torch.Tensor:
        """The first ``length`` keys or values; RuntimeError where they are no longer held."""
        kv = self.kv
        same = kv is not None and kv is owner() and kv.batch_size == batch
        if kv is None or not same or length > kv.length:
            raise RuntimeError(
                f"the cache has dropped some of these {length} {name} since they were read: "
                f"read layer.{name} again"
            )
        keys, values = kv.rows(length)
        return keys if name == "keys" else values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for ``query_length`` new queries covers."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences held; AttributeError before the first update, as transformers expects."""
        if self.kv is None:
            raise AttributeError("batch_size")
        return self.kv.batch_size

    # Its steps look at lengths, which the compiler would trace again at every flush.
    @not_compiled
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, Q, Dk]``, the queries of the Q newest tokens.

        ``key`` and ``value [B, Hkv, n, D]`` are what ``update`` was given. The first call after an
        update takes the tokens in, and Q is n; more calls, of layers that read this one's keys,
        only attend, and may have fewer queries. Under autocast, too, all is computed in the dtypes
        of these tensors. Returns ``[B, Hq, Q, Dv]`` in the query's dtype.
        """
        # The meta device has no autocast.
        if not torch._C._is_any_autocast_enabled() or query.is_meta:
            return self._attend(query, key, value, call)
        # A sum that is kept in fp32 would get parts in bf16.
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(query, key, value, call)

    def attend_again(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor | None:
        """``attend`` where a step does as the one before, ``[B, 1, Hq, Dv]``; else None.

        Nothing is padded; there are no sink logits. None: nothing was done. If the pass breaks off
        later, a crop goes by ``past_len``.
        """
        kv, given = self.kv, (value.data_ptr(), key.shape, value.shape)
        if kv is None or kv.next_step is None or given != self._update_key:
            return None
        if not self.pending_attention or torch._C._is_any_autocast_enabled():
            return None
        self.past_len, self._scoring = kv.length, scoring
        out = attend_again(kv, query, key, value, scoring, self.subscribers)
        self.pending_attention = out is None
        return out

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        kv = self.kv
        assert kv is not None, "the handle is of an update"
        if (value.data_ptr(), key.shape, value.shape) != self._update_key:
            raise ValueError(
                "this model changes keys or values between its cache and its attention, so what "
                "was cached is not what it attends to: use cache_implementation='dynamic'"
            )
        window = kv.window
        if window.capture is not None:
            # The call's mask is of this step alone; that of ``capture`` is filled for each.
            call = call._replace(scoring=call.scoring.of(window.capture.slots))
        tokens = NewTokens(query, *self.rows_of(key, value))
        new = key.shape[2]
        past = window.start + window.length - (0 if self.pending_attention else new)
        if self.pending_attention:
            self.past_len = past
        if past and new > 1 and call.scoring.valid is not None and self.round is None:
            # What stood behind an answer that ended early is padding from now on.
            kv.recount(call.scoring.valid)
        exact = self.config.lossless and not kv.drafts
        # A step may be what makes the first tokens cold.
        exact = exact and (kv.cold_len > 0 or kv.step_flushes())
        if past and new <= self.config.max_draft and not exact:
            out = self._attend_few(kv, tokens, past, call)
        else:
            out = self._attend_many(kv, tokens, past, call)
        self.pending_attention = False
        return out

    def _attend_few(
        self, kv: LayerKV, new: NewTokens, past: int, call: AttentionCall
    ) -> torch.Tensor:
        """Each query retrieves."""
        query, key, value = new
        row_query = call.heads.absorb(query) if call.heads.makes_rows else query
        if self.pending_attention:
            if not kv.built:
                # The index is built of the prompt alone, as in a fork that was made before.
                self._settle()
            learn = partial(self._on_forward, row_query, key, call) if kv.watches else None
            kv.take_step(key, value, call.scoring.valid, learn)
        elif kv.index is not None:
            kv.index.on_reader(call.positions)
        self._scoring = call.scoring
        out = attend_step(kv, row_query, call, self.subscribers, self.layer_info.number)
        out = out if out.dtype == query.dtype else out.to(query.dtype)
        return call.heads.project_values(out) if call.heads.makes_rows else out

    def _attend_many(
        self, kv: LayerKV, new: NewTokens, past: int, call: AttentionCall
    ) -> torch.Tensor:
        """Every query attends to all ``past`` tokens and, causally, to the new ones."""
        query, key, value = new
        recipe, end = self.config.prompt_recipe, max(self.prompt_end, past + key.shape[2])
        if recipe is not None and end > recipe.above:
            return self._attend_in_groups(kv, new, past, call, end)
        as_it_is = not past or call.heads.expands(query.shape[2])
        watched = self.pending_attention and kv.watches
        row_query = call.heads.absorb(query) if watched or not as_it_is else query
        learn = partial(self._on_forward, row_query, key, call) if watched else None
        if learn is not None and self.round is not None:
            # Only what is accepted will be learned.
            self.round.seen = row_query, key, call
            learn = None
        self._scoring = call.scoring
        # A device attends to a first prompt while the host makes room for it.
        whole = call.prompt() if not past else None
        if self.pending_attention:
            is_few = past and key.shape[2] <= self.config.max_draft + 1
            take = kv.take_step if is_few else kv.take_prompt
            if not is_few:
                self._show_prompt(kv, query, call)
            take(key, value, call.scoring.valid, learn)
        if whole is not None:
            return whole
        self.exact_rows += min(past, kv.cold_len) * len(key) * key.shape[1]
        if as_it_is:
            return attend_exactly(kv, query, key, value, past, call).to(query.dtype)
        call_of_rows = call._replace(heads=Heads())
        out = attend_exactly(kv, row_query, key, value, past, call_of_rows)
        return call.heads.project_values(out.to(query.dtype))

    def _attend_in_groups(
        self, kv: LayerKV, new: NewTokens, past: int, call: AttentionCall, end: int
    ) -> torch.Tensor:
        """Groups of queries attend to what their probes choose of the tokens before them."""
        (query, key, value), recipe = new, self.config.prompt_recipe
        assert recipe is not None, "it says that there are groups"
        if not call.is_causal():
            # Nothing was stored yet.
            self.pending_attention = False
            raise ValueError(
                "prompt='retrieve' is for plain causal attention, and this prompt has tokens that "
                "see later ones (those of an image, or of a prefix): take prompt='exact', and a "
                "new cache where some layers slide"
            )
        self._scoring = call.scoring
        rows = kv.rows(past, key, value) if past else (key, value)
        groups = PromptPass(query, *rows, call, recipe, end)
        out = groups.attend()
        if self.pending_attention:
            learn = partial(self._on_forward, call.heads.absorb(query), key, call)
            self.exact_rows += min(past, kv.cold_len) * len(key) * key.shape[1]
            self._show_prompt(kv, query, call)
            kv.take_prompt(key, value, call.scoring.valid, learn if kv.watches else None)
            kv.retrieved.add(groups.retrieved)
        return out

    def _show_prompt(self, kv: LayerKV, query: torch.Tensor, call: AttentionCall) -> None:
        """Show the newest queries of a long pass to an index that asks for them."""
        if kv.index is None or "on_prompt" not in kv.index.hooks:
            return
        newest, end, valid = query[:, :, -_NEWEST:], kv.length + query.shape[2], call.scoring.valid
        if valid is not None:
            valid = valid[:, end - newest.shape[2] : end]
        kv.on_prompt(call.heads.absorb(newest), valid)

    def _on_forward(self, query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> None:
        """Pass tokens to an index that watches, and to a store that needs their positions."""
        assert self.kv is not None, "an update has made it"
        try:
            self.kv.on_forward(query, key, call.scoring.valid, call.positions)
        except ValueError:
            # Nothing was taken in: the cache stays as it was, for a call without the mistake.
            self.pending_attention = False
            raise

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Drop the newest tokens; pass their count as a negative number (0: none).

        Assisted decoding of transformers passes a 0-dim tensor.

        Raises:
            ValueError: a positive number, or more tokens than held.
        """
        tokens_to_remove = int(tokens_to_remove)
        # Tokens of a pass that broke off before attention were never taken in.
        self.pending_attention = False
        check_count(tokens_to_remove, 0 if self.kv is None else self.kv.length)
        if self.kv is None or tokens_to_remove == 0:
            return
        self.edited()
        self.kv.crop(self.kv.length + tokens_to_remove, self._scoring)
        self.prompt_end = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``beam_idx[b]``."""
        if self.kv is not None:
            self.edited()
            rows = beam_idx.to(self.kv.window.keys.device)
            self.kv.reorder(rows)
            if self._scoring is not None:
                self._scoring = self._scoring.reordered(rows)

    def reset(self) -> None:
        """Forget all tokens and counts."""
        self.edited()
        self.kv = self._scoring = self.round = None
        self.is_initialized = self.pending_attention = False
        self.final_len = self.prompt_end = self.exact_rows = 0
        for subscriber in self.subscribers:
            subscriber.reset()

    def offload(self) -> None:
        """Nothing: the store decides where rows live."""

    prefetch = offload

    def fork(self) -> Self:
        """An independent copy that shares the cold part; counts start at 0."""
        options = self._make_index, self.make_store, self.needs_positions, self._value_in_key
        twin = type(self)(self.config, *options)
        twin.layer_info = self.layer_info
        self._settle()
        if self.kv is not None:
            twin.kv, twin.is_initialized = self.kv.fork(), True
        return twin

    def stand_on(self, below: RetrievalLayer) -> None:
        """Have ``below`` as the retrieval layer before this one, also for the store."""
        self.below = below
        if self.kv is not None:
            self.kv.make_store = partial(_new_store, self.make_store, below)
            if self.kv.store is not None:
                self.kv.store.below = partial(_store_of, below)

    def borrow(self, lender: Lender) -> None:
        """Attend to what ``lender`` keeps, in place of a selection of its own."""
        self.lender = lender
        if self.kv is not None:
            self.kv.index = BorrowedIndex(lender)

    @property
    def is_ready(self) -> bool:
        """Whether a round can begin: a pass has come, so padding is known."""
        return self._scoring is not None

    def begin_drafts(self) -> None:
        """From here on passes draft. What is due leaves the window, and the index is up to date."""
        kv, scoring = self.kv, self._scoring
        assert kv is not None and scoring is not None, "drafts follow a prompt"
        if kv.step_flushes():
            self.edited()
            kv.flush(scoring.valid)
        cold = kv.cold(scoring)
        if cold is not None:
            kv.ready_index(cold)
        self.round = DraftRound(kv)

    def end_round(self, accepted: int) -> None:
        """The newest ``accepted`` tokens are the first ones of the verifying pass, and stay."""
        ended, self.round = self.round, None
        if ended is not None and self.kv is not None:
            ended.end_drafts()
            ended.learn(accepted)

    def _settle(self) -> None:
        """Finish index and sums of what was taken in so far, so that no copy has to."""
        if self.kv is None or self._scoring is None:
            return
        cold = self.kv.cold(self._scoring)
        if cold is not None:
            self.kv.build_index(cold)

    def set_options(self, config: RetrievalConfig, make_index: Callable[[], Index | None]) -> None:
        """Go on with other options, which must fit the tokens held."""
        if self.kv is not None:
            self.kv.set_options(config)
        self.edited()
        self.config, self._make_index = config, make_index

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def state_dict(self) -> Tensors:
        """Tensors of the layer on the CPU; empty for a layer that holds nothing."""
        self._settle()
        return {} if self.kv is None else self.kv.state_dict()

    def load_state_dict(self, state: Tensors, device: torch.device) -> None:
        """Become the layer whose ``state_dict`` this is.

        Raises:
            KeyError: names a missing tensor.
            ValueError: tensors of another model, or that don't fit one another.
        """
        self.reset()
        if not state:
            return
        keys, in_key = state["window.keys"].to(device), self._value_in_key
        values = keys[..., :in_key] if in_key else state["window.values"].to(device)
        check_dtypes(keys=keys, values=values)
        self.lazy_initialization(keys, values)
        assert self.kv is not None, "made just now"
        self.kv.load_state_dict(state, device, self._query_heads(keys))
        self.kv.retrieved.check(self.config)

    def _query_heads(self, keys: torch.Tensor) -> int | None:
        """Query heads for ``keys [B, Hkv, *, D]`` of a saved layer; None where nobody knows.

        Some models have a KV head for each query head, whatever their configuration says of KV
        heads.

        Raises:
            ValueError: keys that this layer of the model doesn't have.
        """
        heads, dim = keys.shape[1], keys.shape[3]
        if self.layer_info.shape is None:
            return None
        shape = self.layer_info.shape.held_by(self.layer_info.part.ranks)
        if dim != shape.head_dim or heads not in (shape.kv_heads, shape.heads):
            raise ValueError(
                f"window.keys are of {heads} KV heads with {dim} numbers, and this model has "
                f"{shape.kv_heads} with {shape.head_dim}: the cache is of "
                "another model, or damaged; save it again"
            )
        return shape.heads if heads == shape.kv_heads else None


def _new_store(make_store: MakeStore, below: RetrievalLayer | None, first: FirstRows) -> Store:
    """The store of a layer, which knows the one of the layer below."""
    store = make_store(first)
    store.below = partial(_store_of, below)
    return store


def _store_of(layer: RetrievalLayer | None) -> Store | None:
    """The store of a layer; None where there is no layer, or where it is empty."""
    return None if layer is None or layer.kv is None else layer.kv.store


def check_count(tokens_to_remove: int, held: int) -> None:
    """ValueError for a count of tokens to drop that is positive, or larger than what is held."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): pass the number of tokens to drop as a negative "
            "number, as in crop(-3)"
        )
    if -tokens_to_remove > held:
        raise ValueError(f"crop({tokens_to_remove}): only {held} tokens held")
