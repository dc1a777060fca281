"""Tensors in shards: few at a time, each with a checksum, and nothing of a file is trusted."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_kvret.saved import shards
from hf_kvret.saved.folder import replacing
from hf_kvret.saved.shards import SavedTensors, ShardWriter, checksum

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8),
)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)


def _write(folder: Path, *groups: Tensors) -> tuple[list[Path], dict[str, str]]:
    with replacing(folder, "it.json", "it") as replacement:
        writer = ShardWriter(replacement)
        for number, group in enumerate(groups):
            writer.add(f"{number}.", dict(group))
        writer.finish()
        replacement.commit(json.dumps(writer.files).encode())
    return [folder / name for name in writer.files], writer.checksums


def _floats(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def test_tensors_of_every_dtype_and_shape_come_back(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(-3, 3).abs().to(dtype).view(2, 3) for dtype in DTYPES}
    rows = _floats(60).view(3, 20)
    tensors |= {"one": torch.tensor(3.5), "none": torch.zeros(2, 0, 3), "view": rows[:, 2:5]}
    tensors |= {"part": rows[1:], "same": rows, "again": rows, "bits": rows.bfloat16()}
    paths, checksums = _write(tmp_path, tensors)
    read = SavedTensors(paths, checksums).with_prefix("0.")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    (tmp_path / "usual").touch()
    assert paths[0].stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.usefixtures("small")
def test_a_shard_holds_so_many_bytes_or_one_tensor(tmp_path: Path) -> None:
    paths, checksums = _write(
        tmp_path,
        {"a": _floats(100), "b": _floats(150), "c": _floats(1)},
        {"huge": _floats(700), "d": _floats(2)},
    )
    groups = [sorted(load_file(path)) for path in paths]
    assert groups == [["0.a", "0.b"], ["0.c"], ["1.huge"], ["1.d"]]
    assert sorted(SavedTensors(paths, checksums).with_prefix("0.")) == ["a", "b", "c"]
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"it.json", *(x.name for x in paths)}


@pytest.mark.usefixtures("small")
def test_no_more_than_one_shard_is_held(tmp_path: Path) -> None:
    """Of tensors that are made as they are saved, as copies from a GPU are."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> Iterator[Tensors]:
        for _ in range(20):
            assert sum(reference() is not None for reference in alive) <= 2
            tensor = torch.ones(120)
            alive.append(weakref.ref(tensor))
            yield {"x": tensor}
            del tensor

    with replacing(tmp_path, "it.json", "it") as replacement:
        writer = ShardWriter(replacement)
        for number, tensors in enumerate(made()):
            writer.add(f"{number}.", tensors)
        writer.finish()
        replacement.commit(b"")
    assert len(writer.files) == 10 and len(writer.checksums) == 20


def test_a_checksum_is_of_all_that_a_tensor_is() -> None:
    tensor = torch.arange(6).view(2, 3)
    others = [tensor.view(3, 2), tensor.view(torch.float64), tensor + 1, tensor.view(1, 2, 3)]
    sums = {checksum("x", tensor), checksum("y", tensor), *(checksum("x", x) for x in others)}
    assert len(sums) == 6 and all(len(each) == 8 for each in sums)


def test_every_bit_of_a_shard_is_watched(tmp_path: Path) -> None:
    tensors = {"ids": torch.arange(3), "rows": _floats(4).half(), "flag": torch.tensor(True)}
    (path,), checksums = _write(tmp_path, tensors)
    content = path.read_bytes()
    # Every seventh: nearly each byte, and each bit of some byte.
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            read = SavedTensors([path], checksums).with_prefix("0.")
        except ValueError as error:
            assert "save the cache again" in str(error)
        else:
            # Words of the header that say nothing.
            assert all(torch.equal(read[name], tensors[name]) for name in tensors), bit


def test_a_tensor_without_a_checksum_is_refused(tmp_path: Path) -> None:
    paths, checksums = _write(tmp_path, {"x": _floats(3), "y": _floats(4)})
    for wrong in ({}, {**checksums, "z": "00000000"}, {"0.x": checksums["0.x"]}):
        with pytest.raises(ValueError, match="there is only one of tensor and checksum"):
            SavedTensors(paths, wrong)
    read = SavedTensors(paths, {**checksums, "0.y": checksums["0.x"]})
    with pytest.raises(ValueError, match=r"0\.y differs from what was saved"):
        read.read("0.y")
