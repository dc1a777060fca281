"""RetrievalCache: a transformers Cache whose full-attention layers retrieve."""

from __future__ import annotations

import copy
import logging
import operator
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.contracts.index import Index
from hf_kvret.contracts.state import State
from hf_kvret.contracts.store import FirstRows
from hf_kvret.layer.hybrid import forget_states, new_layer
from hf_kvret.layer.layer import LayerInfo, RetrievalLayer
from hf_kvret.layer.snapshots import Snapshots
from hf_kvret.layer.stack import CantGoBackError, LayerStack
from hf_kvret.models.compatibility import (
    check_config,
    check_options,
    model_layers,
    model_shape,
    retrieval_shapes,
)
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.kept_state import ModelState
from hf_kvret.models.ranks import Part, part_of
from hf_kvret.observe.observers import RoundCounts, log_missing_kernels, subscribe
from hf_kvret.observe.reports import MemoryReport, cache_stats, dense_reason, memory_report
from hf_kvret.options.config import RetrievalConfig, forked
from hf_kvret.saved import persistence
from hf_kvret.saved.identity import CacheIdentity, check_filler, identity_of
from hf_kvret.saved.token_record import TokenRecord
from hf_kvret.stores import DISK, Store, StoreChoice

_log = logging.getLogger(__name__)


class RetrievalCache(Cache):
    """One layer per model layer: ours where attention is full, the model's own elsewhere.

    Subclasses choose the index; everything else is here.

        cache = ParisKVCache(config=model.config, top_k=256, store="host")
        model.generate(**inputs, past_key_values=cache)

    Args:
        config: the model's configuration.
        options: a configuration object of the method, for instance ``ParisConfig.preset("paper")``.
        **changes: single options, by name, on top of ``options`` or of the defaults.

    Attributes:
        stack: the layers, and the running forward pass.
        identity: the model that filled it; None while it is empty, and where nobody saw which.
        last_identity: that of the model that was last compared with it.
        tokens: ids of the tokens in it, as far as it saw them.
        model_state: what the model must keep of the conversation in its next pass.
        snapshots: of layers that can't go back, at some lengths.
        from_shelf: tokens that were found on a shelf; see ``Shelf``.
        shelf_note: what became of the prompt there.
        went_back: tokens that were dropped where a prompt differed from them.
        rounds: counts of drafts, with ``lossless``.

    Raises:
        ValueError: a model that retrieval can't serve, an unknown option or a bad value.
    """

    name: ClassVar[str]
    Config: ClassVar[type[RetrievalConfig]]
    # Makes a layer's empty index of the options; None for a method without selection.
    IndexClass: ClassVar[type[Any] | None]
    # Whether the options must name an artifact made by `hf-kvret calibrate`.
    needs_artifact: ClassVar[bool] = False
    options: RetrievalConfig

    def __init__(
        self, config: PreTrainedConfig, options: RetrievalConfig | None = None, **changes: Any
    ) -> None:
        if not hasattr(self, "Config"):
            raise TypeError(f"{type(self).__name__} has no Config: take a method, as ParisKVCache")
        check_config(config)
        options = self.Config.of(options, changes, type(self).__name__)
        layers: list[Any] = model_layers(config)
        options = self.options = self.options_for(options, config)
        for option, reader in options.unread.items():
            value = f"{option}={getattr(options, option)!r}"
            warnings.warn(f"{value} changes nothing: take {reader}, or leave it out", stacklevel=2)
        self.model_shape = model_shape(config)
        shapes = retrieval_shapes(config)
        widths = [shape.width for shape in shapes.values()]
        self._stores = StoreChoice(options, sum(widths) / widths[0])
        for number, shape in shapes.items():
            make_index = partial(self.make_index, options, number)
            make_store = partial(self.make_store, options, number, self._stores)
            arguments = options, make_index, make_store, self.needs_positions(options, number)
            layers[number] = new_layer(layers[number], *arguments, shape.rank)
            layers[number].layer_info = LayerInfo(number, shape)
        self.identity: CacheIdentity | None = None
        self.last_identity: CacheIdentity | None = None
        self.tokens = TokenRecord()
        self.model_state = ModelState()
        self.snapshots = Snapshots()
        self.from_shelf, self.went_back, self.shelf_note = 0, 0, ""
        self.rounds = RoundCounts()
        super().__init__(layers=layers)
        self.stack = LayerStack(layers)
        subscribe(self.retrieval_layers, options)
        log_missing_kernels()

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> Any:
        """``options``, with values that depend on the model filled in.

        Raises:
            ValueError: options that don't fit this model.
        """
        check_options(options, config, cls.__name__)
        return options

    @classmethod
    def make_index(cls, options: Any, layer: int) -> Index | None:
        """A new, empty index for the model layer number ``layer``.

        None for a method without selection: all cold tokens are attended to.
        """
        return None if cls.IndexClass is None else cls.IndexClass(options)

    @classmethod
    def needs_positions(cls, options: Any, layer: int) -> str:
        """Whether the store of a layer needs positions in its blocks; ``""`` if not.

        Otherwise the error message for models that don't pass positions to their attention.
        """
        return ""

    @classmethod
    def make_store(cls, options: Any, layer: int, stores: StoreChoice, first: FirstRows) -> Store:
        """A new, empty store for the model layer number ``layer``; see ``StoreChoice.make``."""
        return stores.make(first)

    @property
    def states(self) -> dict[str, State]:
        """What the cache holds of a conversation beside its layers, by the attribute's name."""
        return {"tokens": self.tokens, "model_state": self.model_state, "snapshots": self.snapshots}

    @property
    def retrieval_layers(self) -> list[RetrievalLayer]:
        """The layers that retrieve, in the order of the model's."""
        return [layer for layer in self.layers if isinstance(layer, RetrievalLayer)]

    @not_compiled
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens ``[B, Hkv, n, D]`` of one layer; see ``RetrievalLayer.update``.

        Raises:
            RuntimeError: a layer was updated but its attention was never called, so the model does
                not use the registered attention function.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} of the model, but this cache was made for {len(self.layers)} "
                "layers: make it with config=model.config"
            )
        layer = self.layers[layer_idx]
        self.stack.enter(layer, self.name)
        if layer is self.stack.lowest:
            self.stack.begin_pass()
            # A step matters to a prompt that was announced alone: it ends it.
            if key_states.shape[2] > 1 or self._stores.announced_len:
                if not self._stores.announced_len:
                    for each in self.retrieval_layers:
                        each.prompt_end = 0
                self._stores.note_pass(key_states.shape[2])
        return layer.update(key_states, value_states, *args, **kwargs)

    def expect(self, tokens: int, chunk: int, new_tokens: int = 0) -> None:
        """Announce a prompt of ``tokens`` tokens, ``chunk`` of them in a pass.

        With this the store is sized for the whole prompt, which a pass of a single token ends. It
        is chosen, and kernels are compiled at the first step, for ``new_tokens`` more as well. More
        than these may come.
        """
        self._stores.expect(tokens, chunk, new_tokens)
        for layer in self.retrieval_layers:
            layer.prompt_end = layer.get_seq_length() + tokens
            layer.final_len = layer.prompt_end + new_tokens

    def reset(self) -> None:
        """Forget all tokens and counts of every layer, and an announced prompt."""
        super().reset()
        forget_states(self.layers)
        self.stack.forget_pass()
        self.stack.has_read_ahead = False
        self._stores.expect(0, 0)
        for state in self.states.values():
            state.reset()
        self.identity = None
        self.from_shelf, self.went_back, self.shelf_note = 0, 0, ""
        self.rounds = RoundCounts()

    def forget_origin(self) -> None:
        """Forget which model filled the cache, and with which tokens: any may go on that fit."""
        self.identity = None
        self.tokens.reset()

    def check_model(self, model: PreTrainedModel, owner: str = "past_key_values") -> None:
        """Record ``model`` as the one that fills the cache; ValueError if another one did.

        ``generate`` does it by itself; after ``attach`` so do passes of several tokens, and the
        first with a model. A filled cache of which nobody saw the model stays without.

        Args:
            model: that is to use the cache.
            owner: the cache, in messages.

        Raises:
            ValueError: another model filled the cache, or the artifact is of another one.
        """
        self.options.check_weights(model)
        current, part = identity_of(model), part_of(model)
        if not self.get_seq_length():
            self.forget_origin()
            self.identity = current
        elif part != self.part:
            rank = f"which is rank {part.rank} of {part.ranks}"
            raise ValueError(f"{owner} has other heads than this process, {rank}: fill a new cache")
        elif self.identity is not None and current is not self.last_identity:
            check_filler(self, model, current, owner)
        self.last_identity = current
        for layer in self.retrieval_layers:
            layer.layer_info = layer.layer_info._replace(part=part)

    @property
    def part(self) -> Part:
        """The part of the model's heads that this process holds."""
        return self.retrieval_layers[0].layer_info.part

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b of the batch becomes the old sequence ``beam_idx[b]``."""
        super().reorder_cache(beam_idx)
        for state in self.states.values():
            state.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch ``repeats`` times."""
        if self.get_seq_length():
            batch = self.retrieval_layers[0].batch_size
            self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences ``indices`` (integers, or a bool mask) of the batch."""
        if self.get_seq_length():
            batch = self.retrieval_layers[0].batch_size
            self.reorder_cache(torch.arange(batch)[indices.cpu()])

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As transformers' own; RuntimeError where the last pass broke off."""
        self.stack.note_state(layer_idx, f"conv {args}{kwargs.get('state_idx', '')}")
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As transformers' own; RuntimeError where the last pass broke off."""
        self.stack.note_state(layer_idx, f"recurrent {args}{kwargs.get('state_idx', '')}")
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> int:
        """Drop the newest tokens of every layer; pass their count as a negative number.

        Where layers can't go back (a recurrent state, a full sliding window), the cache goes back
        to its newest snapshot at or before that point. Returns how many tokens more were dropped
        so, which have to be read again; ``generate`` reads what a whole conversation lacks.

        After a pass that broke off in the middle, what it left is dropped first: ``crop(0)`` drops
        that alone. Assisted decoding passes a tensor, which it changes later.

        Raises:
            RuntimeError: no snapshot lies that far back, or another thread is in the middle of a
                pass. Nothing was dropped.
        """
        surplus = self.drop_newest(operator.index(tokens_to_remove))
        if surplus:
            message = "crop(%d) went back to a snapshot at %d tokens: read %d tokens more again"
            _log.warning(message, tokens_to_remove, self.get_seq_length(), surplus)
        return surplus

    def drop_newest(self, tokens_to_remove: int) -> int:
        """As ``crop``, for a caller who reads again what it returns: without a warning."""
        surplus = self.stack.crop(tokens_to_remove, self.snapshots)
        length = self.get_seq_length()
        for state in self.states.values():
            state.crop(length)
        self.from_shelf = min(self.from_shelf, length)
        return surplus

    def go_back(self, length: int) -> None:
        """Drop tokens until at most ``length`` are held: as few as possible, or all."""
        before, went_back = self.get_seq_length(), self.went_back
        try:
            # What a pass left that broke off goes first: some layers lack it.
            self.drop_newest(0)
            self.drop_newest(min(0, length - self.get_seq_length()))
        except CantGoBackError:
            self.reset()
        self.went_back = went_back + before - self.get_seq_length()

    @property
    def input_ids(self) -> torch.Tensor | None:
        """``[B, T]`` int64, the tokens in the cache; None where it saw none.

        A token that came as an embedding, or by hand, is -1.
        """
        length = self.get_seq_length()
        ids = self.tokens.ids(length) if length else None
        return None if ids is None else ids.long()

    def memory(self) -> MemoryReport:
        """Bytes on device and host by part, and those of full attention."""
        return memory_report(self.layers, self.retrieval_layers, self.snapshots.nbytes())

    def why_dense(self) -> str | None:
        """Why nothing was ever retrieved, if the cache is too short for that; else None."""
        return dense_reason(self.retrieval_layers, self.options, type(self).__name__)

    def stats(self) -> dict[str, Any]:
        """Counts since the cache was made, forked or reset; see ``cache_stats``.

        And ``from_shelf``, ``shelf_note`` and ``went_back``, as the attributes; ``snapshots`` with
        ``lengths`` and ``nbytes``; with ``lossless`` a dict of that name, see ``RoundCounts``.
        """
        stats = cache_stats(self.retrieval_layers, self.name, self._stores, self.why_dense())
        stats |= {name: getattr(self, name) for name in ("from_shelf", "shelf_note", "went_back")}
        stats["snapshots"] = {"lengths": self.snapshots.lengths, "nbytes": self.snapshots.nbytes()}
        return stats | ({"lossless": asdict(self.rounds)} if self.options.lossless else {})

    def fork(self, **changes: Any) -> Self:
        """An independent copy whose cold part is shared: cheap at any length. Counts start at 0.

        ``changes`` are options that don't affect stored tokens, for instance
        ``fork(top_k=64, track_recall=True)``.

        Raises:
            ValueError: other options.
            RuntimeError: in the middle of a forward pass.
        """
        self.stack.check_pass()
        options = forked(self.options, changes)
        twin = object.__new__(type(self))
        twin.__dict__ = dict(vars(self))
        twin.layers = [copy.deepcopy(layer) for layer in self.layers]
        for name, state in self.states.items():
            setattr(twin, name, state.fork())
        twin.rounds, twin.went_back = RoundCounts(), 0
        twin.stack = LayerStack(twin.layers)
        if changes:
            twin.options = options
            twin.snapshots.trim(options.snapshots)
            for number, layer in enumerate(twin.layers):
                if isinstance(layer, RetrievalLayer):
                    layer.set_options(twin.options, partial(self.make_index, twin.options, number))
        subscribe(twin.retrieval_layers, twin.options)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __getstate__(self) -> NoReturn:
        raise TypeError("a cache is not pickled: save_pretrained(folder) writes, fork() copies it")

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, Any]]:
        """As ``DynamicCache``: keys, values and the sliding window of each layer."""
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)

    def options_to_load(self) -> RetrievalConfig:
        """The options to save: a file must not say where others are written."""
        options = self.options
        return options.replace(store="host", disk=None) if options.store == DISK else options

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, model: PreTrainedModel | None = None
    ) -> None:
        """Write the filled cache to ``directory``: ``cache.json``, and shards that it names.

        A cache there is replaced. A crash, a kill or a full disk leaves what was there before, or
        the new cache as a whole. Other files of the folder stay, but for leftovers of broken saves.

        Args:
            directory: where to; made if needed.
            model: the one that filled the cache, where it could not see that (filled by hand).

        Raises:
            RuntimeError: in the middle of a forward pass.
            OSError: the disk is full, for instance; says which cache is in place.
            ValueError: ``cache.json`` there is not of a cache; another model filled the cache; the
                model is split over processes.
        """
        self.stack.check_pass()
        if model is not None:
            self.identity = self.identity or identity_of(model)
            self.check_model(model, "the cache")
        if not self.part.is_whole:
            why = "the cache has some of the heads, as the model is split over processes"
            raise ValueError(f"{why}: fill one in one process (device_map='auto') to save it")
        persistence.save(self, Path(directory))

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        *,
        model: PreTrainedModel | None = None,
        mapped: bool | str = "auto",
        **changes: Any,
    ) -> Self:
        """The cache that ``save_pretrained`` wrote, for the model with ``config``.

        Args:
            directory: where it was written.
            config: the model's configuration; another shape than the saved one is refused.
            device: where the model's queries are.
            model: that is to use the cache; compared with the one that filled it.
            mapped: rows of tokens stay in their files, of which a query reads what it selects, and
                so does what an index holds of them. The files have to stay as they are (one that is
                cut kills the process), and are compared with no checksum: ``hf-kvret inspect
                --verify`` does that. ``"auto"``: above 256 MB, on a CPU or with ``store="disk"``.
            **changes: options to change, for instance ``store="host"``; and ``artifact``, which is
                not taken from the file. Without it the model's own is used.

        Raises:
            FileNotFoundError: no cache there.
            ValueError: a damaged file, another method or model, an artifact that has to be named, a
                changed option that the saved index depends on, a model that is split over
                processes.
        """
        arguments = Path(directory), config, torch.device(device), model
        return persistence.load(cls, *arguments, changes, mapped)
