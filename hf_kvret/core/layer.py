"""RetrievalLayer: one layer of a RetrievalCache, between transformers and the regions."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_kvret.config import RetrievalConfig
from hf_kvret.core.cached_rows import CachedRows
from hf_kvret.core.call import AttentionCall
from hf_kvret.core.counters import LayerCounters
from hf_kvret.core.exact_attention import attend_exactly
from hf_kvret.core.index import Index
from hf_kvret.core.layer_reference import LayerReference, new_store, store_below
from hf_kvret.core.precision import check_dtypes, without_autocast
from hf_kvret.core.regions import MakeStore, Regions
from hf_kvret.core.saved_regions import saved_rows
from hf_kvret.core.scoring import Scoring
from hf_kvret.core.selected_attention import attend_selected
from hf_kvret.core.stand_ins import LayerOfModel
from hf_kvret.models.compiled import not_compiled

HANDLE = "hf_kvret_layer"


class RetrievalLayer(CacheLayerMixin):
    """Cache of one attention layer: window x index x store.

    Nothing in it refers back to it but weakly, so that a cache's memory is free once it is dropped.

    Arguments are those of ``Regions``, with what makes an index.

    ``update`` only notes the new tokens and returns them with a handle to this layer; the
    registered attention function finds the handle and calls ``attend``, which takes them in.

    Attributes:
        below: the retrieval layer before this one in the model; set by the cache.
        edits: goes up with everything that is done to the layer, but for a replayed step.
        final_len: tokens that were announced, held ones included; 0: none.
        needs_positions: see ``RetrievalCache.needs_positions``.
        of_model: which layer of the model this is; set by the cache.
    """

    is_sliding = False
    is_croppable = True

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
        self.regions: Regions | None = None
        self.config = config
        self.counters = LayerCounters()
        self.waiting = False
        self.below: RetrievalLayer | None = None
        self.edits = self.final_len = 0
        self.of_model = LayerOfModel()
        self._given: tuple[int, torch.Size, torch.Size] | None = None
        self._scoring: Scoring | None = None
        self._make_index = make_index
        self.make_store = make_store
        self.needs_positions = needs_positions
        self._value_in_key = value_in_key

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the regions for tokens shaped like these, ``[B, Hkv, *, D]``."""
        made = self.config, self._make_index(), partial(new_store, LayerReference(self))
        rows = key_states, value_states
        self.regions = Regions(*made, *rows, self.needs_positions, self._value_in_key)
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
        check_dtypes(keys=key_states, values=value_states)
        if self.regions is None:
            self.lazy_initialization(key_states, value_states)
        else:
            self.regions.check_tokens(key_states, value_states)
        self.waiting = True
        self.edits += 1
        self._given = (value_states.data_ptr(), key_states.shape, value_states.shape)
        handle = key_states.detach()
        setattr(handle, HANDLE, self)
        return handle, value_states

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, Hkv, n, D]`` to be held, of what ``update`` was given."""
        return key, value

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.regions is None else self.regions.length

    @property
    def cold_len(self) -> int:
        """Tokens held outside the window."""
        return 0 if self.regions is None else self.regions.cold_len

    @property
    def keys(self) -> torch.Tensor | None:
        """``[B, Hkv, T, Dk]`` of all tokens, made when it is used; None before the first update."""
        return self._rows("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """``[B, Hkv, T, Dv]`` of all tokens, as ``keys``."""
        return self._rows("values")

    def _rows(self, side: str) -> CachedRows | None:
        regions = self.regions
        if regions is None:
            return None
        like = regions.window.keys if side == "keys" else regions.window.values
        # Whoever keeps the rows keeps no memory of a cache that was reset.
        read = partial(self._read_rows, side, regions.length, weakref.ref(regions), len(like))
        return CachedRows(like, regions.length, read)

    def _read_rows(
        self, side: str, length: int, owner: weakref.ref[Regions], batch: int
    ) -> torch.Tensor:
        """The first ``length`` keys or values; RuntimeError where they are no longer held."""
        regions = self.regions
        same = regions is not None and regions is owner() and regions.batch_size == batch
        if regions is None or not same or length > regions.length:
            raise RuntimeError(
                f"the cache has dropped some of these {length} {side} since they were read: "
                f"read layer.{side} again"
            )
        keys, values = regions.rows(length)
        return keys if side == "keys" else values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for ``query_length`` new queries covers."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows of the batch; AttributeError before the first update, as transformers expects."""
        if self.regions is None:
            raise AttributeError("batch_size")
        return self.regions.batch_size

    # Its steps look at lengths and places, which the compiler would trace anew at every flush.
    @not_compiled
    @without_autocast
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attention of ``query [B, Hq, Q, Dk]``, the queries of the Q newest tokens.

        ``key`` and ``value [B, Hkv, Q, D]`` are what ``update`` was given. The first call after an
        update takes the tokens in; more calls (layers that share their cache) only attend. Under
        autocast, too, all is computed in the dtypes of these tensors.
        Returns ``[B, Hq, Q, Dv]`` in the query's dtype.
        """
        if self.regions is None:
            raise RuntimeError("attention came before any update of this layer")
        if (value.data_ptr(), key.shape, value.shape) != self._given:
            raise ValueError(
                "this model changes keys or values between its cache and its attention, so what "
                "was cached is not what it attends to: use cache_implementation='dynamic'"
            )
        place = self.regions.window.place
        if place is not None:
            # The mask that was captured is of this step alone, the place is filled for each.
            call = dataclasses.replace(call, scoring=call.scoring.of(place.slots))
        key, value = self.rows_of(key, value)
        new, first = query.shape[2], self.waiting
        past = self.regions.length - (0 if first else new)
        selects = past > 0 and new <= self.config.max_draft
        as_it_is = past == 0 or (not selects and call.expands(new))
        watched = first and self.regions.index_watches
        to_rows = call.to_rows(query) if watched or not as_it_is else query
        if first:
            if selects and not self.regions.built:
                # Of the prompt alone, as in a fork that was made before.
                self._settle()
            try:
                self.regions.on_forward(to_rows, key, call.scoring.valid, call.positions)
            except ValueError:
                # Nothing was taken in: the cache stays as it was, for a call without the mistake.
                self.waiting = False
                raise
        self._scoring = call.scoring
        if not selects:
            # A device attends to a first prompt while the host makes room for it.
            whole = call.prompt() if past == 0 else None
            if first:
                self.regions.take_prompt(key, value, call.scoring.valid)
            if whole is not None:
                self.waiting = False
                return whole
            regions = self.regions
            self.counters.exact_rows += min(past, regions.cold_len) * len(key) * key.shape[1]
            asking, form = (query, call) if as_it_is else (to_rows, call.of_rows())
            out = attend_exactly(regions, asking, key, value, past, form).to(query.dtype)
        else:
            if first:
                self.regions.take_step(key, value, call.scoring.valid)
            given = self.regions, to_rows, call, self.counters, self.final_len, self.of_model
            out = attend_selected(*given).to(query.dtype)
        self.waiting = False
        return out if as_it_is else call.from_rows(out)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Drop the newest tokens; pass their count as a negative number (0: none).

        Assisted decoding of transformers 5.17 passes a 0-dim tensor.

        Raises:
            ValueError: a positive number, or more tokens than held.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to drop as a negative "
                "number, as in crop(-3)"
            )
        if self.regions is None or tokens_to_remove == 0:
            return
        if -tokens_to_remove > self.regions.length:
            raise ValueError(f"crop({tokens_to_remove}): only {self.regions.length} tokens held")
        self.edits += 1
        self.regions.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``beam_idx[b]``."""
        if self.regions is not None:
            self.edits += 1
            rows = beam_idx.to(self.regions.window.keys.device)
            self.regions.reorder(rows)
            if self._scoring is not None:
                self._scoring = self._scoring.reordered(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        if self.regions is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (integers, or a bool mask)."""
        if self.regions is not None:
            self.reorder_cache(torch.arange(self.batch_size)[indices.cpu()])

    def reset(self) -> None:
        """Forget all tokens and counts."""
        self.edits += 1
        self.regions = self._scoring = None
        self.is_initialized = self.waiting = False
        self.final_len = 0
        self.counters = LayerCounters(observers=self.counters.observers)

    def offload(self) -> None:
        """Nothing: the store decides where rows live."""

    def prefetch(self) -> None:
        """Nothing: the store decides where rows live."""

    def fork(self) -> Self:
        """An independent copy that shares the cold part; counts start anew."""
        if self.waiting:
            raise RuntimeError("fork() between update and attention: finish the forward pass first")
        made = self._make_index, self.make_store, self.needs_positions, self._value_in_key
        twin = type(self)(self.config, *made)
        twin.of_model = self.of_model
        self._settle()
        if self.regions is not None:
            own = LayerReference(twin)
            twin.regions = self.regions.fork(partial(new_store, own))
            twin.is_initialized = True
            if twin.regions.store is not None:
                twin.regions.store.below = partial(store_below, own)
        return twin

    def _settle(self) -> None:
        """Finish index and sums of what was taken in so far, so that no copy has to."""
        if self.regions is None or self._scoring is None:
            return
        cold = self.regions.cold(self._scoring)
        if cold is not None:
            self.regions.build_index(cold)
            if self.config.needs_means and self.regions.index is not None:
                self.regions.rest_sums(cold)

    def set_options(self, config: RetrievalConfig, make_index: Callable[[], Index | None]) -> None:
        """Go on with other options, which must fit the tokens held."""
        self.edits += 1
        self.config, self._make_index = config, make_index
        if self.regions is not None:
            self.regions.config = config
            if self.regions.index is not None:
                self.regions.index.set_options(config)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of the regions on the CPU; empty for a layer that holds nothing."""
        if self.waiting:
            raise RuntimeError("save between update and attention: finish the forward pass first")
        self._settle()
        return {} if self.regions is None else self.regions.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor], device: torch.device) -> None:
        """Become the layer whose ``state_dict`` this is. KeyError names a missing tensor."""
        self.reset()
        if not state:
            return
        rows = saved_rows(state, self.config.sink, self._value_in_key, device)
        self.lazy_initialization(*rows)
        if self.regions is not None:
            self.regions.load_state_dict(state, device, self._query_heads(rows[0]))

    def _query_heads(self, keys: torch.Tensor) -> int | None:
        """Query heads for ``keys [B, Hkv, *, D]`` of a saved layer; None where nobody knows.

        Some models have a KV head for each query head, whatever their configuration says of KV
        heads.

        Raises:
            ValueError: keys that this layer of the model doesn't have.
        """
        shape, heads, dim = self.of_model.shape, keys.shape[1], keys.shape[3]
        if shape is None:
            return None
        if dim != shape.head_dim or heads not in (shape.kv_heads, shape.heads):
            raise ValueError(
                f"window.keys are of {heads} KV heads with {dim} numbers, and this model has "
                f"{shape.kv_heads} with {shape.head_dim}: the file is damaged or crafted, or of "
                "another model; save the cache again"
            )
        return shape.heads if heads == shape.kv_heads else None
