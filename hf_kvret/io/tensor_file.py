"""A file of tensors in the safetensors format, written and read with a checksum of every block.

The checksum is CRC-32, which tells damage (every burst of up to 32 bits; others but for one in four
billion), not intent: whoever can write the file can write checksums, too. It is computed in
threads, beside the reading and writing, by ISA-L, which takes a small part of zlib's time for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch
from isal.isal_zlib import crc32

from hf_kvret.core.host_memory import empty

BLOCK_BYTES = 1 << 20
"""Bytes of a tensor that one checksum covers."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What a cache may hold, by the names of the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_THREADS = min(4, os.cpu_count() or 1)
# Blocks that a thread takes at a time.
_RUN = 8
_AGAIN = "save the cache again"
# Of a tensor; no machine has as many bytes.
_MOST_BYTES = 1 << 50
_HEXADECIMAL = re.compile("[0-9a-f]*")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorEntry:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: a key of ``DTYPES``.
        shape: of the tensor.
        checksums: of its blocks, 8 hexadecimal digits each; ``""`` for an empty tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    checksums: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``from_json``."""
        return {"dtype": self.dtype, "shape": list(self.shape), "crc32": self.checksums}

    @classmethod
    def from_json(cls, entry: Any) -> Self:
        """The entry that ``to_json`` wrote; ValueError for anything else."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "crc32"}:
            raise ValueError("an entry is not dtype, shape and crc32")
        dtype, shape, checksums = entry["dtype"], entry["shape"], entry["crc32"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > 8:
            raise ValueError(f"shape {str(shape)[:80]} is no list of at most 8 sizes")
        if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
            raise ValueError(f"shape {str(shape)[:80]} is not of sizes of at least 0")
        # An empty tensor has strides, which count as if there were no zero.
        if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _MOST_BYTES:
            raise ValueError(f"shape {shape} is of more bytes than any machine has")
        made = cls(dtype, tuple(shape), checksums)
        digits = 8 * -(-made.nbytes // BLOCK_BYTES)
        if (
            not isinstance(checksums, str)
            or len(checksums) != digits
            or not _HEXADECIMAL.fullmatch(checksums)
        ):
            raise ValueError(f"crc32 is not {digits} hexadecimal digits")
        return made


def write_tensors(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Write ``tensors`` (on the CPU) to ``file``; returns their entries.

    Raises:
        TypeError: a dtype that is not in ``DTYPES``.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"cannot save {name} of dtype {tensor.dtype}")
    # Wide numbers first, so that each tensor begins where its numbers may.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    forms = {
        name: TensorEntry(_NAMES[tensors[name].dtype], tuple(tensors[name].shape), "")
        for name in order
    }
    file.write(file_header(forms))
    entries = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        checks = []
        for name in order:
            content = _bytes(tensors[name].contiguous())
            checks.append([pool.submit(_checksums, run) for run in _runs(content)])
            file.write(content)
        for (name, form), runs in zip(forms.items(), checks, strict=True):
            digits = "".join(run.result() for run in runs)
            entries[name] = TensorEntry(form.dtype, form.shape, digits)
    return entries


def file_header(entries: Mapping[str, TensorEntry]) -> bytes:
    """The first bytes of a file of tensors with these entries, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def version_of(entries: Mapping[str, TensorEntry]) -> str:
    """12 hexadecimal digits that stand for the content of the file with these entries."""
    content = json.dumps([[name, entry.to_json()] for name, entry in entries.items()])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


class TensorFile:
    """Reads what ``write_tensors`` wrote; a context manager.

    It is read, not mapped: the tensors are memory of their own, so that whatever happens to the
    file later does not matter.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        """Open ``path``, which must be just as long as ``entries`` say, and begin like it.

        Args:
            path: of the file.
            entries: in the order of the file.

        Raises:
            OSError: as the system says.
            ValueError: the file has another length or header.
        """
        self._path, self._entries = path, entries
        self._places: dict[str, int] = {}
        header = file_header(entries)
        place = len(header)
        for name, entry in entries.items():
            self._places[name] = place
            place += entry.nbytes
        self._lock = threading.Lock()
        self._file = path.open("rb", buffering=0)
        try:
            length = os.fstat(self._file.fileno()).st_size
            if length != place:
                raise ValueError(
                    f"{path} is corrupt or truncated: it has {length} bytes, not {place}; {_AGAIN}"
                )
            begin = bytearray(len(header))
            self._read(memoryview(begin), 0)
            if begin != header:
                raise ValueError(f"{path} is damaged: its header is another one; {_AGAIN}")
        except BaseException:
            self._file.close()
            raise
        self._pool = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def groups(self, groups: Iterable[list[str]]) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each list of names, read and checked while the ones before are in use.

        Raises:
            MemoryError: there is too little for a tensor.
            ValueError: damaged content.
        """
        ahead: list[tuple[dict[str, torch.Tensor], list[Future[None]]]] = []
        for names in groups:
            ahead.append(self._start(names))
            if len(ahead) > 1:
                yield self._finished(*ahead.pop(0))
        for one in ahead:
            yield self._finished(*one)

    def _start(self, names: list[str]) -> tuple[dict[str, torch.Tensor], list[Future[None]]]:
        tensors, runs = {}, []
        for name in names:
            entry = self._entries[name]
            memory = self._memory(name, entry.nbytes)
            tensors[name] = memory.view(DTYPES[entry.dtype]).view(entry.shape)
            content, first = _bytes(memory), 0
            for run in _runs(content):
                runs.append(self._pool.submit(self._take, name, first, run))
                first += len(run)
        return tensors, runs

    def _memory(self, name: str, nbytes: int) -> torch.Tensor:
        try:
            return empty((nbytes,), torch.uint8, _CPU)
        except MemoryError as error:
            raise MemoryError(
                f"no {nbytes / 2**30:.2f} GiB of memory for {name} of {self._path}: free memory; "
                f"if no save wrote so much, the file is damaged or crafted, {_AGAIN}"
            ) from error

    @staticmethod
    def _finished(
        tensors: dict[str, torch.Tensor], runs: list[Future[None]]
    ) -> dict[str, torch.Tensor]:
        for run in runs:
            run.result()
        return tensors

    def _take(self, name: str, first: int, content: memoryview) -> None:
        """Fill ``content``, bytes of a tensor from ``first`` on, block by block."""
        place, checksums = self._places[name], self._entries[name].checksums
        for start in range(0, len(content), BLOCK_BYTES):
            block = content[start : start + BLOCK_BYTES]
            self._read(block, place + first + start)
            number = (first + start) // BLOCK_BYTES
            digits = checksums[8 * number : 8 * number + 8]
            if f"{crc32(block):08x}" != digits:
                raise ValueError(
                    f"{self._path} is damaged: {name} differs from what was saved, in its bytes "
                    f"from {first + start} on; {_AGAIN}"
                )

    def _read(self, content: memoryview, place: int) -> None:
        done = 0
        while done < len(content):
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [content[done:]], place + done)
            else:
                with self._lock:
                    self._file.seek(place + done)
                    count = self._file.readinto(content[done:]) or 0
            if not count:
                raise ValueError(f"{self._path} is corrupt or truncated; {_AGAIN}")
            done += count


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _runs(content: memoryview) -> Iterator[memoryview]:
    step = _RUN * BLOCK_BYTES
    for start in range(0, len(content), step):
        yield content[start : start + step]


def _checksums(content: memoryview) -> str:
    starts = range(0, len(content), BLOCK_BYTES)
    return "".join(f"{crc32(content[start : start + BLOCK_BYTES]):08x}" for start in starts)
