"""One process of `bench_mapped`: it opens or fills a cache, takes steps, and tells what they cost.

    python mapped_process.py '{"way": "mapped", ...}'

Prints a line of JSON, waits for a line, prints the share of its mappings that is its own, and ends.
"""

from __future__ import annotations

import ctypes
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_save import LayerRows, fill_randomly, layer_rows
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import feed, random_tokens, serving
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.program.arguments import DTYPES
from hf_kvret.saved import persistence

# MS_SYNC and MADV_PAGEOUT of Linux, which Python has no names for.
_SYNC, _PAGE_OUT = 4, 21


def memory_of(folder: Path, field: str) -> int:
    """Bytes of ``field`` of /proc/self/smaps, summed over mappings of files in ``folder``."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = len(words) > 5 and words[5].startswith(str(folder))
        elif inside and words[0] == f"{field}:":
            total += 1024 * int(words[1])
    return total


def own_memory() -> int:
    """Bytes of memory that no file has."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def page_out(folder: Path) -> None:
    """Have the system take the pages of files in ``folder`` out of memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        if len(words) > 5 and words[5].startswith(str(folder)):
            first, last = (int(end, 16) for end in words[0].split("-"))
            libc = ctypes.CDLL(None, use_errno=True)
            for call in (libc.msync, libc.madvise):
                call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            # Pages must be written to the disk before the system takes them out.
            libc.msync(first, last - first, _SYNC)
            if libc.madvise(first, last - first, _PAGE_OUT):
                raise OSError(ctypes.get_errno(), "the system keeps pages of mapped files")


class Process:
    """A cache of one way in a model of random weights.

    Args:
        asked: ``way``, ``shape``, ``cache``, ``context``, ``steps``, ``cold_steps``, ``dtype``,
            ``seed``, ``folder`` (of the saved cache, or for the files of ``store="disk"``).
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.folder = Path(asked["folder"]).resolve()
        self.dtype = DTYPES[asked["dtype"]]
        self.config = load_shape(asked["shape"]).config
        self.model: PreTrainedModel = random_model(self.config, self.dtype, "cpu", asked["seed"])

    def cache(self) -> RetrievalCache:
        """The cache, opened or filled."""
        way, context = self.asked["way"], self.asked["context"]
        if way in ("read", "mapped"):
            made = choose_cache(self.asked["cache"], {}).make(self.config, context)
            return type(made).from_pretrained(self.folder, self.config, mapped=way == "mapped")
        options = {"store": way} | ({"disk": str(self.folder)} if way == "disk" else {})
        cache = choose_cache(self.asked["cache"], options).make(self.config, context)
        assert isinstance(cache, RetrievalCache)
        rows: list[LayerRows] = layer_rows(self.config)
        place: dict[str, Any] = {"device": torch.device("cpu"), "dtype": self.dtype}
        fill_randomly(self.config, cache, rows, 1, context, self.asked["seed"], **place)
        return cache

    def measure(self) -> dict[str, Any]:
        """What this way costs; see the columns of `bench_mapped`."""
        self._warm_up()
        before = own_memory()
        start = time.perf_counter()
        cache = self.cache()
        opened = time.perf_counter()
        filled = own_memory() - before
        token = random_tokens(self.model, 1, 1, self.asked["seed"])
        with serving(self.model, cache):
            token = self._step(cache, token)
            first = time.perf_counter()
            result = {
                "open": opened - start,
                "first": first - start,
                "own": max(filled, own_memory() - before),
                "index": cache.memory().index,
                "touched_first": memory_of(self.folder, "Pss"),
                "mapped": memory_of(self.folder, "Size"),
            }
            seconds = []
            for _ in range(self.asked["steps"] - 1):
                at = time.perf_counter()
                token = self._step(cache, token)
                seconds.append(time.perf_counter() - at)
            result |= {"step": statistics.median(seconds)}
            result["touched_last"] = memory_of(self.folder, "Pss")
            result["read_ratio"] = max(layer["read_ratio"] for layer in cache.stats()["layers"])
            if self.asked["cold_steps"] and self.asked["way"] in ("mapped", "disk"):
                result["cold"] = self._cold_steps(cache, token)
            if self.asked["cold_steps"] and self.asked["way"] == "disk":
                with _nothing_asked(cache):
                    result["cold_unasked"] = self._cold_steps(cache, token)
        self._cache = cache
        return result

    def _warm_up(self) -> None:
        """What a process does once: imports, threads, the first products."""
        small = {"recent": 1, "flush": 1, "sink": 1, "dense_below": 0, "top_k": 1}
        cache = choose_cache(self.asked["cache"].partition(":")[0], small).make(self.config, 64)
        with serving(self.model, cache):
            for start in range(6):
                feed(self.model, cache, random_tokens(self.model, 1, 1, 0), start)

    def _step(self, cache: RetrievalCache, token: torch.Tensor) -> torch.Tensor:
        return feed(self.model, cache, token, cache.get_seq_length())[:, -1:].argmax(-1)

    def _cold_steps(self, cache: RetrievalCache, token: torch.Tensor) -> float:
        """Median seconds of a step with no page of the files in memory."""
        seconds = []
        for _ in range(self.asked["cold_steps"]):
            page_out(self.folder)
            at = time.perf_counter()
            token = self._step(cache, token)
            seconds.append(time.perf_counter() - at)
        return statistics.median(seconds)


@contextmanager
def _nothing_asked(cache: RetrievalCache) -> Iterator[None]:
    """Inside, steps read rows as those of memory."""
    rows: list[Any] = [layer.kv.store.host_rows() for layer in cache.retrieval_layers if layer.kv]
    for each in rows:
        # They are made anew when tokens go cold.
        each.in_files = False
    try:
        yield
    finally:
        for each in rows:
            each.in_files = True


def main() -> None:
    """Run the process; see the module."""
    # It says that no model is compared with the cache.
    logging.getLogger(persistence.__name__).disabled = True
    process = Process(json.loads(sys.argv[1]))
    with torch.inference_mode():
        print(json.dumps(process.measure()), flush=True)
    sys.stdin.readline()
    print(json.dumps(memory_of(process.folder, "Pss")), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
