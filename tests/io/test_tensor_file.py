"""Entries of tensors that claim too much: refused with the reason and the way out."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from isal.isal_zlib import crc32

from hf_kvret import FlatKVCache, attach
from hf_kvret.io.tensor_file import BLOCK_BYTES, TensorEntry, file_header
from hf_kvret.io.verification import verify_cache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.saved import read_saved, saved_file, write_saved
from hf_kvret.testing.scenario import prompt

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}


@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [2**32, 2**32], [0, 2**47, 2**47], [2**30] * 8], ids=str
)
def test_a_huge_shape_is_refused(shape: list[int]) -> None:
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"shape \[.*\] is of more bytes than any machine has"):
        TensorEntry.from_json({"dtype": "F64", "shape": shape, "crc32": "00000000"})
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    "checksums", ["0000000", "0" * 16, "0000000x", "0000000\n", "0000000A", "", 0, None, []]
)
def test_what_is_no_checksum_of_one_block_is_refused(checksums: Any) -> None:
    with pytest.raises(ValueError, match="crc32 is not 8 hexadecimal digits"):
        TensorEntry.from_json({"dtype": "I8", "shape": [5], "crc32": checksums})


def test_more_checksums_than_a_regular_expression_counts_are_a_matter_of_length() -> None:
    entry = {"dtype": "F64", "shape": [1 << 47], "crc32": "0123abcd" * (1 << 20)}
    with pytest.raises(ValueError, match=f"crc32 is not {1 << 33} hexadecimal digits"):
        TensorEntry.from_json(entry)


def test_a_file_that_claims_more_than_memory_holds_says_so(tmp_path: Path) -> None:
    """4 TiB of zeros that take no place on the disk, with their checksums."""
    model = MODELS["llama"].build()
    attach(model)
    cache = FlatKVCache(model.config, **OPTIONS)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    cache.save_pretrained(tmp_path)
    content, _ = read_saved(tmp_path)
    name, shape = "layers.0.window.keys", (1, 2, 1 << 30, 1 << 9)
    blocks = 4 * math.prod(shape) // BLOCK_BYTES
    entry = TensorEntry("F32", shape, f"{crc32(bytes(BLOCK_BYTES)):08x}" * blocks)
    header = file_header({name: entry})
    with saved_file(tmp_path).open("wb") as file:
        file.write(header)
        try:
            file.truncate(len(header) + entry.nbytes)
        except OSError:
            pytest.skip("the file system has no such large files")
    write_saved(tmp_path, content | {"tensors": {name: entry.to_json()}})
    words = "no 4096.00 GiB of memory for layers.0.window.keys.*: free memory; if no save wrote so"
    with pytest.raises(MemoryError, match=words):
        FlatKVCache.from_pretrained(tmp_path, model.config)
    with pytest.raises(MemoryError, match=words):
        verify_cache(tmp_path)
