"""Bytes are those that a cache keeps alive, whatever it says of itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.usage import held_bytes

# Keys and values of 100 tokens: two layers, two heads of 64 numbers in fp32.
TOKENS, FULL = 100, 100 * 2 * 2 * 2 * 64 * 4
KNOWN = "full static flat:store=host paris lrqk aqua:predictor=none:bits=4 paris:store=higgs"


class Liar:
    """Keeps its rows behind a function, and says that they are a byte."""

    def __init__(self, config: Any) -> None:
        inner = DynamicCache(config=config)
        self.update = lambda *args, **kwargs: inner.update(*args, **kwargs)
        self.get_seq_length = lambda *args: inner.get_seq_length()
        self.get_mask_sizes = lambda *args: inner.get_mask_sizes(*args)

    __slots__ = ("get_mask_sizes", "get_seq_length", "update")
    is_compileable, is_sliding, nbytes = False, [False, False], 1


def test_what_a_strange_cache_keeps_alive_is_found_out(subject: Subject) -> None:
    cache: Any = Liar(config=subject.model.config)
    with torch.inference_mode():
        keys = torch.randn(2, 1, 2, TOKENS, 64)
        for layer in range(2):
            cache.update(keys[layer].clone(), keys[layer].clone(), layer)
    assert held_bytes(cache, subject.model) == (FULL, 0, 0)
    # A second cache of the same class has its own.
    assert held_bytes(Liar(config=subject.model.config), subject.model).device < FULL / 100


@pytest.mark.parametrize("name", KNOWN.split())
def test_caches_that_are_known_hold_what_they_say(name: str, subject: Subject) -> None:
    small = ":sink=4:recent=16:flush=16:dense_below=0" if name not in ("full", "static") else ""
    reader = Reader(subject.model, choose_cache(name + small), 600)
    reader.answer(reader.prefill(torch.randint(3, 400, (500,))), 4)
    usage = reader.usage()
    held = held_bytes(reader.cache, subject.model)
    assert sum(held) == pytest.approx(usage.device_bytes + usage.host_bytes, rel=0.05)


def test_a_step_without_an_index_reads_all_rows_whatever_the_budget_is(subject: Subject) -> None:
    name = "aqua:predictor=none:bits=4:recent=16:flush=16:dense_below=0:top_k={}"
    readers = [Reader(subject.model, choose_cache(name.format(k)), 600) for k in (8, 400)]
    for reader in readers:
        reader.answer(reader.prefill(torch.arange(3, 400)), 4)
    few, many = (reader.usage() for reader in readers)
    assert few.step_bytes == many.step_bytes > many.device_bytes / 2


def test_shared_memory_is_memory(subject: Subject) -> None:
    assert held_bytes(torch.empty(1 << 20).share_memory_(), subject.model) == (1 << 22, 0, 0)


def test_mapped_files_arrays_and_bytes_count_apart_and_weights_do_not(
    tmp_path: Path, subject: Subject
) -> None:
    file = tmp_path / "rows.bin"
    np.zeros(1 << 14, dtype=np.float32).tofile(file)
    mapped = torch.from_numpy(np.memmap(file, dtype=np.float32, mode="r+"))
    rows = np.ones((4, 1000), dtype=np.float32)
    cache = {
        "rows": [mapped[:10], mapped[10:20], rows[1], rows[2:], torch.from_numpy(rows[:1])],
        "codes": bytes(500),
        "model": subject.model,
        "weights": [*subject.model.parameters()],
    }
    assert held_bytes(cache, subject.model) == (rows.nbytes + 500, 0, 1 << 16)
