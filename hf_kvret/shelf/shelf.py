"""A shelf: caches of prompts in a folder, found again by the tokens that they begin with.

Several processes may use a shelf at once: an entry comes and goes by renaming its folder, so it is
there as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.methods.known import METHODS
from hf_kvret.models.exact_chunks import depends_on_length, why_whole
from hf_kvret.models.ranks import is_split
from hf_kvret.options.config import LOAD_OPTIONS, byte_count
from hf_kvret.saved.description import verify_cache
from hf_kvret.saved.folder import replace_file
from hf_kvret.saved.identity import identity_of, printable
from hf_kvret.saved.token_record import ids_of_pictures
from hf_kvret.shelf.entry import (
    BLOCK,
    DESCRIPTION,
    NAME,
    ShelfEntry,
    chain_of,
    description_of,
    is_own,
    name_of,
    read_entry,
)
from hf_kvret.stores.placement import CODED, UNCODED, size_text

_log = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"
# An unfinished entry that nobody wrote to for so long is of a process that was killed.
_ABANDONED_SECONDS = 24 * 3600


class Shelf:
    """Caches of prompts in a folder, found by the longest common prefix.

        shelf = hf_kvret.Shelf("~/.cache/shelf")
        cache = shelf.find(ids, model, "paris") or hf_kvret.ParisKVCache(model.config)
        answer = model.generate(ids, past_key_values=cache)
        shelf.put(cache, ids, model)

    One sequence a cache, and text alone. An entry answers the model that filled it, its method, and
    options that what is stored depends on; options as ``top_k`` and ``store`` are the request's.

    Args:
        folder: where entries lie; made, for its owner alone, with the first of them.
        max_size: bytes of all entries, as ``"20GB"``; those that were used the longest time ago
            leave. None: half of what the disk has for them, free or taken by them.
    """

    def __init__(self, folder: str | os.PathLike[str], max_size: int | str | None = None) -> None:
        # The folder itself may be a link.
        self.folder = Path(os.path.realpath(Path(folder).expanduser()))
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file: give a folder for the shelf")
        self._max_bytes = None if max_size is None else byte_count(max_size)
        # Names of entries that are damaged: nobody finds them, and they are put again.
        self._damaged: set[str] = set()

    @property
    def max_bytes(self) -> int:
        """What all entries may take together, as far as the disk tells now."""
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        room = shutil.disk_usage(place).free + sum(entry.nbytes for entry in self.entries())
        return room // 2 if self._max_bytes is None else min(self._max_bytes, room)

    def check_writable(self) -> None:
        """Make the folder; ValueError for a place where nothing can be put.

        `put` and ``generate`` do so by themselves.
        """
        why = ""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"it can't be made ({error.strerror})"
        else:
            if not os.access(self.folder, os.W_OK):
                why = "nothing can be written there"
            elif not is_own(self.folder):
                why = "others may write there, take their right away (chmod go-w)"
        if why:
            raise ValueError(f"the shelf {self.folder}: {why}, or give another folder")

    def check_room(self, cache: RetrievalCache, tokens: int) -> None:
        """ValueError where the shelf has no room for ``tokens``; ``cache`` holds some of them.

        Their keys and values alone count. Coded rows are not checked.
        """
        if cache.options.row_bits == UNCODED:
            memory = cache.memory()
            rows = memory.full_attention - memory.other_layers
            _check_size(rows * tokens // cache.get_seq_length(), self.max_bytes)

    def find(
        self, input_ids: torch.Tensor, model: PreTrainedModel, method: str, **options: Any
    ) -> RetrievalCache | None:
        """A cache that holds the most of the first tokens of a prompt; None where no entry has 64.

        At least the last token of the prompt is left to be read. ``cache.from_shelf`` says how many
        tokens it holds. A damaged entry is skipped with a warning.

        Args:
            input_ids: ``[1, T]``, the whole prompt.
            model: that is to use the cache.
            method: name of a registered method.
            options: of the cache, as ``cache_config`` has them.

        Raises:
            ValueError: more than one sequence, an unknown method or option.
        """
        ids = _one_sequence(input_ids)
        _check_model(model)
        cls = _method(method)
        empty = cls(model.config, **options)
        key, chain = _key(empty, model), chain_of(ids)
        named = ("artifact", "revision") if cls.needs_artifact else ()
        changes = {name: getattr(empty.options, name) for name in LOAD_OPTIONS}
        changes |= {name: options[name] for name in named if name in options}
        entries = [one for one in self.entries() if one.key == key]
        candidates = [
            (one.usable(min(one.common(ids, chain), len(ids) - 1)), one)
            for one in entries
            if one.name not in self._damaged
        ]
        for usable, entry in sorted(candidates, key=lambda pair: pair[0], reverse=True):
            if usable < BLOCK:
                break
            path = self.folder / entry.name
            try:
                cache = cls.from_pretrained(
                    path, model.config, model.device, model=model, **changes
                )
            except (OSError, ValueError) as error:
                # Another process may have taken it away meanwhile.
                if path.is_dir():
                    _log.warning("%s is left out (shelf.remove takes it away): %s", path, error)
                    self._damaged.add(entry.name)
                continue
            if usable < entry.tokens:
                cache.crop(usable - entry.tokens)
            cache.from_shelf = usable
            self._use(entry)
            return cache
        return None

    def has(
        self, input_ids: torch.Tensor, model: PreTrainedModel, method: str, **options: Any
    ) -> ShelfEntry | None:
        """The entry of exactly these tokens, which `find` would look at; None where there is none.

        All of its files are read, and a damaged one is none. Arguments and errors as of `find`,
        which leaves a token to be read.
        """
        ids = _one_sequence(input_ids)
        _check_model(model)
        key = _key(_method(method)(model.config, **options), model)
        entry = self._entry_named(name_of(key, len(ids), chain_of(ids)))
        if entry is None:
            return None
        try:
            verify_cache(self.folder / entry.name)
        except (OSError, ValueError) as error:
            _log.warning("%s is damaged, and is left out: %s", self.folder / entry.name, error)
            self._damaged.add(entry.name)
            return None
        self._use(entry)
        return entry

    def load(self, name: str, model: PreTrainedModel, **changes: Any) -> RetrievalCache:
        """The cache of the entry with that name or title.

        ``changes`` are options that don't affect stored tokens, as of ``from_pretrained``.

        Raises:
            ValueError: no such entry, another model, or files that are damaged.
        """
        entry = self.entry(name)
        path, load = self.folder / entry.name, _method(entry.method).from_pretrained
        cache = load(path, model.config, model.device, model=model, **changes)
        self._use(entry)
        cache.from_shelf = entry.tokens
        return cache

    def put(
        self,
        cache: RetrievalCache,
        input_ids: torch.Tensor,
        model: PreTrainedModel,
        title: str = "",
    ) -> ShelfEntry:
        """Put the tokens of a prompt that ``cache`` holds on the shelf; it goes on as it is.

        What the cache holds behind them, as an answer, stays out. Entries that begin the new one
        leave, where a part of this can be taken. Nothing is written where it is there already.

        Args:
            cache: that has read the prompt.
            input_ids: ``[1, T]``, what to put.
            model: that filled the cache.
            title: a name to load it by. Entries without one that begin this one leave.

        Raises:
            RuntimeError: in the middle of a forward pass, or the cache holds more than the prompt
                and can't be cropped: put it before anything is generated.
            ValueError: other tokens than the cache has read, more than one sequence, images,
                padding, less than 64 tokens, a cache of another model, one that is larger than the
                shelf.
            OSError: the disk is full, for instance; nothing is on the shelf then.
        """
        cache.stack.check_pass()
        if not isinstance(title, str):
            raise TypeError(f"title={title!r}: pass a text")
        ids = _one_sequence(input_ids)
        _check_model(model)
        _check_tokens(cache, ids, model)
        # The caller's own keeps no trace of it.
        cache = _without_newest(cache, cache.get_seq_length() - len(ids))
        cache.check_model(model, "the cache")
        key, chain = _key(cache, model), chain_of(ids)
        name = name_of(key, len(ids), chain)
        self.check_writable()
        there = self._entry_named(name)
        if there is not None and title in ("", there.title):
            self._use(there)
            return there
        most, memory = self.max_bytes, cache.memory()
        # Where the model was loaded from, a folder by its whole path.
        place = str(getattr(model.config, "_name_or_path", ""))
        place = str(Path(place).resolve()) if place and Path(place).is_dir() else place
        entry = ShelfEntry(
            *(name, cache.name, len(ids), memory.device + memory.host, time.time(), key, chain),
            *(can_crop(cache), title, place, str(model.dtype).removeprefix("torch.")),
            tuple(cache.snapshots.lengths),
        )
        with self._unfinished() as path:
            cache.save_pretrained(path, model=model)
            replace_file(path / DESCRIPTION, description_of(entry, path))
            files = list(path.iterdir())
            for file in files:
                file.chmod(0o600)
            entry = dataclasses.replace(entry, nbytes=sum(x.stat().st_size for x in files))
            _check_size(entry.nbytes, most)
            # A damaged entry may stand there, or one of another title.
            self._take_away(self.folder / name)
            try:
                path.rename(self.folder / name)
            except OSError:
                # Another process may have put the same right now.
                if not (self.folder / name).exists():
                    raise
            self._damaged.discard(name)
            self._make_room(entry, ids, most)
        return entry

    def entries(self) -> list[ShelfEntry]:
        """All entries, the last used first; those that others could have written are left out."""
        if not self.folder.is_dir():
            return []
        if not is_own(self.folder):
            _log.warning("the shelf %s is left out: others may write into it", self.folder)
            return []
        read = (read_entry(path) for path in self.folder.iterdir() if not path.name.startswith("."))
        return sorted(filter(None, read), key=lambda entry: entry.used, reverse=True)

    def entry(self, name: str) -> ShelfEntry:
        """The entry with that name, else the last used with that title; ValueError for none."""
        entries = self.entries()
        named = [entry for entry in entries if entry.name == name]
        named = named or [entry for entry in entries if name and name == entry.title]
        if not named:
            known = ", ".join(printable(entry.title or entry.name) for entry in entries)
            raise ValueError(f"{self.folder} has no entry {name!r}, it has {known or 'nothing'}")
        return named[0]

    def remove(self, name: str) -> None:
        """Remove the entry with that name, whole or damaged, or with that title.

        ValueError for none, and for several of one title.
        """
        if not (NAME.fullmatch(name) and (self.folder / name).is_dir()):
            twins = [one.name for one in self.entries() if name and name == one.title]
            if len(twins) > 1:
                raise ValueError(
                    f"{len(twins)} entries of {self.folder} have this title: give the name of one, "
                    f"{', '.join(twins)} (the last used first)"
                )
            name = self.entry(name).name
        self._take_away(self.folder / name)

    def _entry_named(self, name: str) -> ShelfEntry | None:
        """The entry of that name; None for none, and for one that is known to be damaged."""
        entries = (one for one in self.entries() if one.name == name)
        return None if name in self._damaged else next(entries, None)

    def _use(self, entry: ShelfEntry) -> None:
        """Make ``entry`` the last used, if it is still there."""
        with suppress(OSError):
            os.utime(self.folder / entry.name / DESCRIPTION)

    def _take_away(self, path: Path) -> None:
        """Remove an entry at once: a kill leaves a whole one, or what the next put cleans up."""
        with suppress(FileNotFoundError):
            path = path.rename(self.folder / f"{_UNFINISHED}{secrets.token_hex(8)}")
            shutil.rmtree(path, ignore_errors=True)

    def _make_room(self, new: ShelfEntry, ids: torch.Tensor, most: int) -> None:
        """Remove what ``new`` makes superfluous, and then the least used.

        ``ids [T]``: its tokens; ``most``: bytes of all.
        """
        size, is_full = new.nbytes, False
        for entry in self.entries():
            if entry.name == new.name:
                continue
            begins_new = entry.tokens < len(ids) and entry.common(ids, new.chain) == entry.tokens
            has_it = begins_new and new.usable(entry.tokens) == entry.tokens
            is_part = has_it and entry.key == new.key and not entry.title
            # Once an entry doesn't fit, it leaves, and so do all that were used before it.
            is_full = is_full or (not is_part and size + entry.nbytes > most)
            if is_part or is_full:
                self._take_away(self.folder / entry.name)
            else:
                size += entry.nbytes

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """A folder to be filled and renamed; what it has then is gone if that fails."""
        for left in self.folder.glob(f"{_UNFINISHED}*"):
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        path = self.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _method(name: str) -> type[RetrievalCache]:
    if name not in METHODS:
        raise ValueError(f"method={name!r}: choose among {', '.join(METHODS)}")
    return METHODS[name]


def _check_size(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise ValueError(
            f"the cache takes {size_text(nbytes)}, and the shelf holds at most {size_text(most)}: "
            "give a larger max_size, or free space on its disk"
        )


def _one_sequence(input_ids: torch.Tensor) -> torch.Tensor:
    """``[T]`` of ``input_ids [1, T]``, on the CPU."""
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(
            f"input_ids are {list(input_ids.shape)}: a shelf holds caches of one sequence, pass "
            "[1, tokens] for each"
        )
    return input_ids[0].cpu().to(torch.int64)


def _check_model(model: PreTrainedModel) -> None:
    """ValueError for a model that a cache can't be compared with, or loaded for."""
    devices = {str(one.device) for one in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on {', '.join(sorted(devices))}: a shelf serves models on one device"
        )
    if is_split(model):
        raise ValueError(
            "the model is split over processes, of which each could find another prompt on a "
            "shelf: take save_pretrained and from_pretrained"
        )
    why = why_whole(model.config) or ""
    if depends_on_length(model.config):
        why = "its rotation depends on the length of a text"
    if why:
        raise ValueError(
            f"{type(model).__name__} reads a prompt as a whole ({why}): a shelf would give what "
            "another text was read to, leave it out"
        )
    if not identity_of(model).weights:
        raise ValueError(
            "the model's weights can't be read here (offloaded, or in shards), so nobody knows "
            "whether a cache is of this model: take save_pretrained and from_pretrained"
        )


def _check_tokens(cache: RetrievalCache, ids: torch.Tensor, model: PreTrainedModel) -> None:
    """ValueError unless ``cache`` has read ``ids [T]``, as text, in one sequence."""
    known = cache.input_ids
    if known is None or len(known) != 1:
        raise ValueError(
            "the cache holds no sequence whose tokens it saw, or several: put a cache of one "
            "sequence after model.generate or a pass with input_ids"
        )
    marks = torch.tensor(ids_of_pictures(model.config))
    if cache.tokens.passes or bool(torch.isin(ids, marks).any()):
        raise ValueError("the cache was filled with more than text (images, embeddings)")
    if any(layer.has_padding for layer in cache.retrieval_layers):
        raise ValueError("the cache holds padding: give the prompt without it, and without a mask")
    if len(ids) < BLOCK:
        raise ValueError(f"input_ids has {len(ids)} tokens: a shelf holds {BLOCK} and more")
    if known.shape[1] < len(ids) or not torch.equal(known[0, : len(ids)].cpu(), ids):
        raise ValueError(
            f"the cache has not read these {len(ids)} tokens (it holds {known.shape[1]}): pass the "
            "prompt that it was filled with, or the beginning of it"
        )


def _key(cache: RetrievalCache, model: PreTrainedModel) -> str:
    """Hash of the model, of the method, and of options that what is stored depends on."""
    identity, options = identity_of(model), cache.options_to_load()
    recipe = options.prompt_recipe
    # A method that evicts tokens holds others for another budget, so the budget is in the key.
    free = LOAD_OPTIONS - options.evicts_by
    content = {
        "model": [identity.facts, identity.weights],
        "method": cache.name,
        "options": {
            name: value for name, value in dataclasses.asdict(options).items() if name not in free
        },
        "coded": options.store in CODED and options.bits != UNCODED,
        "prompt": None if recipe is None else dataclasses.asdict(recipe),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _without_newest(cache: RetrievalCache, surplus: int) -> RetrievalCache:
    """A fork without the newest ``surplus`` tokens; RuntimeError where layers can't go back."""
    twin, why = cache.fork(), ""
    if not surplus:
        return twin
    try:
        if twin.crop(-surplus):
            why = "no snapshot was taken at the end of the prompt"
    except RuntimeError as error:
        why = str(error)
    if cache.options.evicts_by:
        why = f"{cache.name} has weighed earlier tokens by them"
    if why:
        raise RuntimeError(
            f"the cache holds {surplus} tokens behind the prompt and can't go back ({why}): put it "
            "before anything is generated, after a pass of the prompt"
        )
    return twin


def can_crop(cache: RetrievalCache, length: int | None = None) -> bool:
    """Whether a part of a cache's tokens can be taken, once it holds ``length``; None: now."""
    others = foreign_layers_of(cache.layers).values()
    slides = any(
        layer.is_sliding and (length or layer.get_seq_length()) >= layer.sliding_window
        for layer in others
        if isinstance(layer, DynamicSlidingWindowLayer)
    )
    recurs = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in others)
    return not (slides or recurs or cache.options.evicts_by)
