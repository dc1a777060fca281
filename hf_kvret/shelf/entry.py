"""An entry of a shelf: the folder of a saved cache, and for what it can be taken.

Its tokens are known by hashes of blocks of 64, each chained to the one before it, so that the
longest common prefix is found without a look at any token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_kvret.saved.description import checksum, digest_of

_log = logging.getLogger(__name__)

BLOCK = 64
"""Tokens of a block: what entries have in common is counted in these."""

DESCRIPTION = "shelf.json"
VERSION = 2
NAME = re.compile("[0-9a-f]{24}")
# Attributes of an entry that its files say.
_OF_FILES = ("name", "nbytes", "used")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class ShelfEntry:
    """A cache on a shelf.

    Attributes:
        name: of its folder.
        method: of the cache.
        tokens: that it holds.
        nbytes: of its files.
        used: when it was last put, found or loaded, in seconds since the epoch.
        key: hash of what a request must have in common with it, besides tokens.
        chain: hashes of its tokens up to the end of each block of 64, and of all of them.
        can_crop: whether any part of its tokens can be taken.
        title: that its owner gave it.
        model: where the model was loaded from.
        dtype: of the model, as ``bfloat16``.
        points: numbers of its first tokens that can be taken, where not any can.
    """

    name: str
    method: str
    tokens: int
    nbytes: int
    used: float
    key: str
    chain: tuple[str, ...]
    can_crop: bool
    title: str
    model: str
    dtype: str
    points: tuple[int, ...] = ()

    def usable(self, common: int) -> int:
        """How many of its first ``common`` tokens can be taken."""
        if self.can_crop or common == self.tokens:
            return common
        return max((point for point in self.points if point <= common), default=0)

    def common(self, ids: torch.Tensor, chain: tuple[str, ...]) -> int:
        """How many of the first tokens of ``ids [T]`` it has: all of its own, or whole blocks.

        ``chain``: ``chain_of(ids)``.
        """
        full = self.tokens // BLOCK
        pairs = list(zip(self.chain[:full], chain[: len(ids) // BLOCK], strict=False))
        # A hash has those before it in it: where one differs, all that follow do.
        blocks = bisect_left(pairs, True, key=lambda pair: pair[0] != pair[1])
        if blocks < full or len(ids) < self.tokens:
            return BLOCK * blocks
        rest = chain_of(ids[BLOCK * full : self.tokens], chain[full - 1] if full else "")
        return self.tokens if not rest or rest[-1] == self.chain[-1] else BLOCK * blocks


def chain_of(ids: torch.Tensor, before: str = "") -> tuple[str, ...]:
    """Hashes of ``ids [T]`` up to the end of each block, and of all of them.

    ``before``: the hash of what lies in front of them.
    """
    content, chain, last = ids.numpy().astype("<i4").tobytes(), [], bytes.fromhex(before)
    for start in range(0, len(content), 4 * BLOCK):
        last = hashlib.sha256(last + content[start : start + 4 * BLOCK]).digest()[:16]
        chain.append(last.hex())
    return tuple(chain)


def name_of(key: str, tokens: int, chain: Sequence[str]) -> str:
    """The name of an entry: what is put again gets the same."""
    return hashlib.sha256(f"{key} {tokens} {chain[-1]}".encode()).hexdigest()[:24]


def description_of(entry: ShelfEntry, path: Path) -> bytes:
    """``shelf.json`` of an ``entry`` whose cache is saved in ``path``."""
    facts = {name: value for name, value in asdict(entry).items() if name not in _OF_FILES}
    files = {one.name: one.stat().st_size for one in path.iterdir() if one.name[0] != "."}
    content = {"version": VERSION, "entry": facts, "files": files, "cache": digest_of(path)}
    return json.dumps(content | {"checksum": checksum(content)}).encode()


def read_entry(path: Path) -> ShelfEntry | None:
    """The entry in a folder; None, and a warning, where it can't be trusted or read.

    Its files have to be there, in full length. What they hold is compared when they are loaded.
    """
    try:
        files = list(path.iterdir())
        if not all(is_own(one) for one in (path, path / DESCRIPTION, *files)):
            _log.warning("%s is left out of the shelf: others could have written it", path)
            return None
        content: Any = json.loads((path / DESCRIPTION).read_bytes())
        if content["version"] != VERSION or content["checksum"] != checksum(content):
            raise ValueError(f"{DESCRIPTION} is damaged, or of another version")
        sizes = {one.name: one.stat().st_size for one in files}
        facts = content["entry"]
        facts |= {name: tuple(facts.get(name, ())) for name in ("chain", "points")}
        used = (path / DESCRIPTION).stat().st_mtime
        entry = ShelfEntry(name=path.name, nbytes=sum(sizes.values()), used=used, **facts)
        is_named = entry.name == name_of(entry.key, entry.tokens, entry.chain)
        is_complete = content["files"].items() <= sizes.items()
        if not (is_named and is_complete and content["cache"] == digest_of(path)):
            raise ValueError("its files are not those that were put, as after a partial restore")
        return entry
    except (OSError, LookupError, RecursionError, TypeError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        # It is no entry, or another process has just removed it.
        if not is_missing or (NAME.fullmatch(path.name) and path.exists()):
            _log.warning("%s is left out of the shelf: %s", path, error)
        return None


def is_own(path: Path) -> bool:
    """Whether nobody else can have written it; FileNotFoundError where there is nothing."""
    facts = path.lstat()
    mine = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
    return mine and not stat.S_ISLNK(facts.st_mode) and not facts.st_mode & _WRITABLE_BY_OTHERS
