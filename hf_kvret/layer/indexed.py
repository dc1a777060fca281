"""A layer whose model has an indexer of its own: that names the tokens, the store attends to them.

The indexer of DeepSeek-V3.2 and its relatives gives each query the slots of its tokens, in a prompt
and in every step. transformers computes such attention densely, with the others masked. Here rows
of others are neither read nor needed on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch

from hf_kvret.contracts.state import FLOATS, PartField, Schema, State, Tensors, tensor
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.layer.exact_attention import merge
from hf_kvret.layer.latent import LatentLayer
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.layer_kv import LayerKV, keeps_tensors
from hf_kvret.layer.queries import AttentionCall, NewTokens
from hf_kvret.layer.step import StepRecord
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.soft_cap import soft_cap_

# Scores of the window, and marks of tokens, that are held at once.
_ELEMENTS = 1 << 24


class IndexerKeys(State):
    """What the model's own indexer keeps of a layer's tokens.

    Attributes:
        keys: of each token, ``[B, 1, T, d]``.
        positions: ``[dims, B, T]`` int64, positions that a model keeps with one of its indexers.
    """

    keys: TokenBuffer = tokens(key="rows", may_be_empty=True, dims="B 1 T d", dtype=FLOATS)
    positions: torch.Tensor | None = tensor(
        optional=True, batched=False, shared=True, dims="a B T", dtype=torch.int64
    )

    def crop(self, length: int) -> None:
        super().crop(length)
        if self.positions is not None:
            self.positions = self.positions[..., :length] if length else None

    def reorder(self, rows: torch.Tensor) -> None:
        super().reorder(rows)
        if self.positions is not None:
            self.positions = self.positions[:, rows]


_SAVED_INDEXER = PartField(IndexerKeys, key="indexer", may_be_empty=True)


class IndexedLayer(RetrievalLayer):
    """Attention to the tokens that the model's own indexer names.

    Attributes:
        indexer: what the indexer keeps; behind the layer's tokens, of a pass that broke off.
    """

    follows_model = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.indexer = IndexerKeys()

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """``IndexerKeys.positions`` of the tokens held."""
        positions, length = self.indexer.positions, self.get_seq_length()
        return None if positions is None or not length else positions[..., :length]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        self.indexer.positions = positions

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """As ``update_indexer``, of keys ``[B, 1, n, d]`` (MiniMax-M3)."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    @keeps_tensors
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Add the indexer's keys ``[B, n, d]`` of new tokens; returns those of all, ``[B, T, d]``.

        They take the place of keys from a pass that broke off.
        """
        self.indexer.keys.put(indexer_key_states[:, None], self.get_seq_length())
        return self.indexer.keys.rows[:, 0]

    def _attend_many(
        self, kv: LayerKV, new: NewTokens, past: int, call: AttentionCall
    ) -> torch.Tensor:
        """Each query attends to the tokens that the indexer names."""
        query, key, value = new
        is_prompt = not past or key.shape[2] > self.config.max_draft
        indices = call.indices
        if indices is None:
            raise ValueError(
                "the model's indexer named no tokens for this layer: this transformers passes its "
                "choice in another way than those that were tested; take "
                "cache_implementation='dynamic', or a transformers of docs/features.md"
            )
        if self.pending_attention:
            take = kv.take_prompt if is_prompt else kv.take_step
            take(key, value, call.scoring.valid)
        self._scoring = call.scoring
        row_query = call.heads.absorb(query) if call.heads.makes_rows else query
        out, ids = attend_to_indices(kv, row_query, indices, call)
        cold = None if is_prompt else kv.cold(call.scoring)
        if cold is not None and ids is not None:
            count_ids(ids, kv.selected)
            record = StepRecord(self.layer_info.number, kv, row_query, call, cold, ids)
            for subscriber in self.subscribers:
                subscriber(record)
        out = out.to(query.dtype)
        return call.heads.project_values(out) if call.heads.makes_rows else out

    _attend_few = _attend_many

    @keeps_tensors
    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Drop the newest tokens; pass their count as a negative number."""
        super().crop(tokens_to_remove)
        self.indexer.crop(self.get_seq_length())

    @keeps_tensors
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``beam_idx[b]``."""
        super().reorder_cache(beam_idx)
        if self.kv is not None:
            self.indexer.reorder(beam_idx.to(self.kv.window.keys.device))

    def reset(self) -> None:
        """Forget all tokens and counts."""
        super().reset()
        self.indexer.reset()

    def fork(self) -> Self:
        """An independent copy that shares the cold part and the indexer's keys."""
        twin = super().fork()
        self.indexer.crop(self.get_seq_length())
        twin.indexer = self.indexer.fork()
        return twin

    def state_dict(self) -> Tensors:
        """Tensors of the layer on the CPU; empty for a layer that holds nothing."""
        self.indexer.crop(self.get_seq_length())
        own = _SAVED_INDEXER.to_save(self.indexer)
        return super().state_dict() | {name: x.cpu() for name, x in own.items()}

    @keeps_tensors
    def load_state_dict(self, state: Tensors, device: torch.device) -> None:
        """As of every layer. One that reads another's choice has no indexer."""
        super().load_state_dict(state, device)
        if self.kv is not None:
            sizes = {"B": self.batch_size, "T": self.get_seq_length()}
            schema = Schema(self.kv.window.keys.dtype, sizes)
            _SAVED_INDEXER.check(self.indexer, state, schema)
            _SAVED_INDEXER.loaded(self.indexer, state, device)


class IndexedLatentLayer(IndexedLayer, LatentLayer):
    """Latent attention to the tokens that the model's own indexer names."""


def indexer_nbytes(layer: RetrievalLayer) -> int:
    """Bytes of the keys of a model's own indexer in this layer, 0 where there is none."""
    return layer.indexer.keys.rows_nbytes if isinstance(layer, IndexedLayer) else 0


def attend_to_indices(
    kv: LayerKV, query: torch.Tensor, indices: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the newest Q queries ``[B, Hq, Q, Dk]``, each to its own tokens alone.

    ``indices [B, Hkv or 1, Q, K]`` are integers; those of later tokens, of padding and below 0
    don't count. Returns ``[B, Hq, Q, Dv]`` fp32, and ``[B, Hkv, Q, K]`` int32, the ids of those in
    the store, -1 for others; None without a store.
    """
    total, queries = kv.length, query.shape[2]
    keys = kv.window.tokens()[0]
    indices = indices.expand(-1, keys.shape[1], -1, -1)
    width = max(indices.shape[1] * total, query.shape[1] * keys.shape[2])
    step = max(1, _ELEMENTS // (len(query) * width))
    outs, named = [], []
    for start in range(0, queries, step):
        some = slice(start, start + step)
        last = torch.arange(total - queries, total, device=query.device)[some]
        ids = _seen(indices[:, :, some].long(), last, call.scoring.valid)
        cold = _in_store(kv, ids)
        named += [] if cold is None else [cold]
        parts = list(_attend(kv, query[:, :, some], ids, cold, call))
        outs.append(merge(parts, call.sink_logits)[0])
    return torch.cat(outs, dim=2), torch.cat(named, dim=2) if named else None


def _seen(ids: torch.Tensor, last: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """``ids [B, H, q, K]``, -1 for those behind ``last [q]`` and for those not ``valid [B, T]``."""
    unseen = (ids < 0) | (ids > last[:, None])
    if valid is not None:
        flat = ids.clamp(min=0, max=valid.shape[1] - 1).flatten(1)
        unseen |= ~valid.gather(1, flat).view_as(ids)
    return ids.masked_fill(unseen, -1)


def _in_store(kv: LayerKV, ids: torch.Tensor) -> torch.Tensor | None:
    """``ids [B, Hkv, q, K]`` in int32, -1 for those in the window; None: all are."""
    if kv.store is None or not kv.cold_len:
        return None
    last = torch.full((1,), kv.cold_len - 1, device=ids.device)
    return _seen(ids, last, kv.retrievable(None)).int().contiguous()


def _attend(
    kv: LayerKV,
    query: torch.Tensor,
    ids: torch.Tensor,
    cold_ids: torch.Tensor | None,
    call: AttentionCall,
) -> Iterator[AttentionResult]:
    """The parts of the attention to ``ids [B, Hkv, q, K]``: of the window, and of the store."""
    scoring, finish = call.scoring, None
    if cold_ids is not None:
        assert kv.store is not None, "it holds them"
        # First, so that a store elsewhere works while the device does the rest.
        finish = kv.store.begin(query.contiguous(), cold_ids, scoring.scale, scoring.softcap)
    yield _attend_to_window(kv, query, ids, call)
    if finish is not None:
        yield finish()


def _attend_to_window(
    kv: LayerKV, query: torch.Tensor, ids: torch.Tensor, call: AttentionCall
) -> AttentionResult:
    """Attention to those of the window's tokens that ``ids`` name."""
    window = kv.window
    keys, values = (x.float() for x in window.tokens())
    # By slot, whether a query's ids name it; a column more for those that name nothing.
    marks = torch.zeros(*ids.shape[:3], kv.length + 1, dtype=torch.bool, device=ids.device)
    marks.scatter_(3, ids.masked_fill(ids < 0, kv.length), True)
    marks[..., -1] = False
    near = torch.arange(window.start, window.end, device=ids.device).expand(len(ids), -1)
    slots = torch.cat([window.sink_slots.masked_fill(window.sink_slots < 0, kv.length), near], 1)
    named = marks.gather(3, slots[:, None, None].expand(-1, *ids.shape[1:3], -1))
    grouped = query.float().unflatten(1, (keys.shape[1], -1)) * call.scoring.scale
    scores = soft_cap_(grouped @ keys.unsqueeze(2).mT, call.scoring.softcap)
    scores.masked_fill_(~named[:, :, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    return (weights @ values.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)
