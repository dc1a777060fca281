"""Tensors of a saved cache in shards, which are safetensors files, with a checksum a tensor.

The checksum is CRC-32, which finds damage (every burst of up to 32 bits; others but for one in four
billion), not intent: whoever can write the file can write checksums, too. ISA-L computes it in a
fourth of zlib's time.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_kvret.contracts.host_memory import empty, expect_random_reads
from hf_kvret.contracts.state import Tensors, mark_mapped
from hf_kvret.contracts.store import PAGES
from hf_kvret.saved.folder import VERSION_LEN, Replacement

SHARD_BYTES = 1 << 30
"""A shard holds no more, but for a single tensor that is larger."""

_AGAIN = "save the cache again"
_ROWS = f".store.{PAGES}"
_OF_INDEX = ".index."
# A smaller tensor of an index is read and compared as fast as it is mapped.
_LEAST_MAPPED = 1 << 20
_CPU = torch.device("cpu")


class ShardWriter:
    """Writes tensors as they come, and holds those of one shard at most.

    Attributes:
        files: names of the shards, for the naming file.
        checksums: of the tensors, by name.
    """

    def __init__(self, replacement: Replacement) -> None:
        self.files: list[str] = []
        self.checksums: dict[str, str] = {}
        self._replacement = replacement
        self._shard: Tensors = {}

    def add(self, prefix: str, tensors: Tensors) -> None:
        """Take ``tensors`` (on the CPU), whose names begin with ``prefix`` in the file.

        ``tensors`` is empty afterwards.

        Raises:
            OSError: the disk is full, for instance.
        """
        while tensors:
            name = next(iter(tensors))
            tensor = tensors.pop(name)
            if sum(x.nbytes for x in self._shard.values()) + tensor.nbytes > SHARD_BYTES:
                self.finish()
            tensor = tensor.detach().contiguous()
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            first = all(tensor.data_ptr() != x.data_ptr() for x in self._shard.values())
            # With memory that no other of the shard has.
            self._shard[f"{prefix}{name}"] = tensor if whole and first else tensor.clone()

    def finish(self) -> None:
        """Write the tensors that remain, or a shard without tensors where there are none."""
        if self.files and not self._shard:
            return
        self.checksums |= {name: checksum(name, tensor) for name, tensor in self._shard.items()}
        path = self._replacement.unfinished()
        path.touch()
        usual_rights = path.stat().st_mode
        try:
            save_file(self._shard, path)
        except SafetensorError as error:
            # safetensors has the system's errors in its words only.
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        self._shard.clear()
        # safetensors gives its files to their owner alone.
        path.chmod(usual_rights)
        version = secrets.token_hex(VERSION_LEN // 2)
        self.files.append(self._replacement.keep(path, version))


class SavedTensors:
    """The tensors of saved shards, by name, each compared with its checksum when it is read.

    They are copies, so that it does not matter what happens to the files later. One shard is mapped
    at a time. What is to be ``mapped`` stays in its file, and nothing of it is read, or compared,
    before it is used: rows of tokens, and, with ``maps_index``, what an index holds of them.
    """

    def __init__(
        self,
        paths: list[Path],
        checksums: Mapping[str, Any],
        mapped: bool = False,
        maps_index: bool = False,
    ) -> None:
        """Look into the shards at ``paths``, which hold the tensors that ``checksums`` names.

        Raises:
            FileNotFoundError: one is missing.
            ValueError: one is damaged, or they hold other tensors.
        """
        self._checksums, self._mapped = checksums, mapped
        self._maps_index = mapped and maps_index
        self._paths: dict[str, Path] = {}
        for path in paths:
            with _opened(path) as shard:
                self._paths |= dict.fromkeys(shard.keys(), path)
        unpaired = self._paths.keys() ^ checksums.keys()
        if unpaired:
            raise ValueError(
                f"{', '.join(path.name for path in paths[:8])} does not hold what the cache has: "
                f"of {min(unpaired)[:80]} there is only one of tensor and checksum; {_AGAIN}"
            )

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._paths)

    def with_prefix(self, prefix: str) -> Tensors:
        """The tensors whose names begin with ``prefix``, without it."""
        tensors = self._read([name for name in self._paths if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU.

        ValueError: it is damaged.
        """
        return self._read([name])[name]

    def _read(self, names: list[str]) -> Tensors:
        """Tensors by name; a shard is opened once for those that lie in it side by side."""
        tensors: Tensors = {}
        for path, group in groupby(names, self._paths.__getitem__):
            with _opened(path) as shard:
                tensors |= {name: self._from(shard, path, name) for name in group}
        return tensors

    def _from(self, shard: Any, path: Path, name: str) -> torch.Tensor:
        """One tensor of an opened shard."""
        rows: torch.Tensor = shard.get_tensor(name)
        # The mapping is private: nobody's write to it would reach the file.
        if self._mapped and name.endswith(_ROWS):
            expect_random_reads(rows)
            return mark_mapped(rows)
        if self._maps_index and _OF_INDEX in name and rows.nbytes >= _LEAST_MAPPED:
            return mark_mapped(rows)
        tensor = empty(tuple(rows.shape), rows.dtype, _CPU).copy_(rows)
        if checksum(name, tensor) != self._checksums[name]:
            raise ValueError(
                f"{path} is damaged: {name[:80]} differs from what was saved; {_AGAIN}"
            )
        return tensor


def checksum(name: str, tensor: torch.Tensor) -> str:
    """8 hexadecimal digits of a contiguous CPU tensor: of its name, dtype, shape and elements."""
    head = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return f"{crc32(memoryview(content), head):08x}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The shard at ``path``; errors say what to do."""
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache in {path.parent}: {path.name} is missing")
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        message = f"{path} is corrupt or truncated ({str(error)[:200]}): {_AGAIN}"
        raise ValueError(message) from error
