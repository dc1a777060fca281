"""Processes that share a model: how many there are, and what each of them holds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.models.compatibility import layer_shapes

_RANK_FOLDER = re.compile("rank-([0-9]+)-of-([0-9]+)")


class Part(NamedTuple):
    """The part of each layer's heads that a process holds: number ``rank`` of ``ranks``."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all heads."""
        return self.ranks == 1

    def heads(self, count: int) -> range | None:
        """Numbers of the layer's heads, where the process holds ``count``; None: all heads."""
        first = self.rank * count
        return None if self.is_whole else range(first, first + count)

    def facts(self, config: PreTrainedConfig) -> dict[str, str]:
        """What a saved cache says of it, by name; empty for all heads."""
        if self.is_whole:
            return {}
        held = []
        for shape in layer_shapes(config):
            own = shape.held_by(self.ranks).kv_heads
            first = 0 if shape.rank else self.rank * own
            held.append(f"{first} to {first + own - 1} of {shape.kv_heads}")
        return {
            "rank": f"{self.rank} of {self.ranks}",
            "rank's KV heads": held[0] if len(set(held)) == 1 else ", ".join(held),
        }

    def folder(self, directory: Path) -> Path:
        """Where a cache that lies in ``directory`` has the file of this part."""
        return directory if self.is_whole else directory / f"rank-{self.rank}-of-{self.ranks}"


WHOLE = Part()


def group_size() -> int:
    """Processes in torch's process group; 1 without one."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def is_split(model: nn.Module) -> bool:
    """Whether this process holds a part of the weights, as of a tensor parallel model."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def part_of(model: nn.Module) -> Part:
    """The heads of ``model`` that this process holds, by the mesh that its weights lie on."""
    mesh, dim = _tensor_mesh(model)
    return WHOLE if mesh is None else Part(mesh.get_local_rank(dim), mesh.size(dim))


def _tensor_mesh(model: nn.Module) -> tuple[Any, int]:
    """The mesh of a tensor parallel model, and its dimension that divides heads; None without."""
    # Older versions of transformers give a mesh without names, and so does FSDP by itself.
    nameless = ("tp",) if (getattr(model, "_tp_size", None) or 1) > 1 else ()
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        names = () if mesh is None else (mesh.mesh_dim_names or nameless)
        # Weights of data parallel processes (FSDP) are in shards too: each has all heads.
        if "tp" in names and mesh.size(names.index("tp")) > 1:
            return mesh, names.index("tp")
    return None, 0


@contextmanager
def agreed(model: nn.Module) -> Iterator[list[object]]:
    """Context of what all ranks of a tensor parallel model do alike, before they wait for another.

    An error of one rank is raised on all of them, and so is a difference: yields a list for what
    has to be the same. Each rank must come here. Other models are only looked at.

    Raises:
        RuntimeError: another rank failed.
        ValueError: the lists of two ranks differ.
    """
    facts: list[object] = []
    try:
        yield facts
    except Exception:
        share_error(model)
        raise
    _exchange(model, facts)


def share_error(model: nn.Module) -> None:
    """Have the other ranks, in or before ``agreed``, raise as well."""
    _exchange(model, None)


def _exchange(model: nn.Module, facts: list[object] | None) -> None:
    """Compare ``facts`` of all ranks; None: this one failed, and raises its own error."""
    mesh, dim = _tensor_mesh(model)
    if mesh is None:
        return
    digest = hashlib.sha256(repr(facts).encode()).digest()
    number = int.from_bytes(digest[:6])
    device = next(model.parameters()).device
    answer = torch.tensor([facts is None, number, -number], dtype=torch.int64, device=device)
    distributed.all_reduce(answer, distributed.ReduceOp.MAX, group=mesh.get_group(dim))
    failed, most, least = answer.tolist()
    if facts is None:
        return
    if failed:
        raise RuntimeError(
            "another rank of this tensor parallel model raised an error, so this one does not "
            "begin either: see what that one says"
        )
    if most != -least:
        raise ValueError(
            "the ranks of this tensor parallel model differ in the method, its options, the tokens "
            "that the cache holds or prefill_chunk_size: give each rank the same"
        )


def check_split(model: PreTrainedModel) -> None:
    """ValueError for a model that is split in a way that a retrieval cache can't serve."""
    distribution: Any = getattr(model.config, "distributed_config", None)
    if (getattr(distribution, "pp_size", None) or 1) > 1:
        raise ValueError(
            f"the layers of this model are spread over {distribution.pp_size} processes "
            "(pp_size), and a retrieval cache has all layers in one: take tp_plan='auto', or "
            "device_map='auto' in one process"
        )
    ranks = part_of(model).ranks
    for shape in layer_shapes(model.config):
        if not shape.rank and shape.kv_heads % ranks:
            raise ValueError(
                f"{shape.kv_heads} KV heads can't be divided among {ranks} ranks: take a number of "
                f"processes that divides {shape.kv_heads}"
            )


def place_to_save(directory: Path, part: Part) -> Path:
    """The folder for the file of ``part``; ValueError where other processes' files would stay."""
    for found in _rank_folders(directory):
        if part.is_whole or found.ranks != part.ranks:
            raise ValueError(
                f"{directory} holds a cache of {found.ranks} ranks, and this one is of "
                f"{part.ranks}: give another folder, or remove that one"
            )
    if not part.is_whole and (directory / "cache.json").exists():
        raise ValueError(
            f"{directory} holds a cache of one process, and this one is of {part.ranks} ranks: "
            "give another folder, or remove that one"
        )
    return part.folder(directory)


def place_to_load(directory: Path, part: Part, model: nn.Module | None) -> Path:
    """The folder with the file of ``part``.

    Raises:
        ValueError: there are other ranks' files, or one that has all heads; nobody knows which part
            this process needs.
    """
    size = group_size()
    if size > 1 and model is None:
        raise ValueError(
            f"from_pretrained in a process group of {size} ranks: a rank may have a part of the "
            "heads, and which one the model knows: pass model="
        )
    folder = part.folder(directory)
    if part.is_whole or folder.is_dir():
        found = next(_rank_folders(directory), part)
        if folder is directory and not (directory / "cache.json").exists() and found is not part:
            raise ValueError(
                f"{directory} holds the files of {found.ranks} ranks, and this process has the "
                f"whole model: load it in {found.ranks} processes with tp_plan='auto'"
            )
        return folder
    found = next(_rank_folders(directory), WHOLE)
    of = "one process" if found.is_whole else f"{found.ranks} ranks"
    raise ValueError(
        f"{directory} holds no cache of {part.ranks} ranks (of {of}, if any), and this process is "
        f"rank {part.rank} of {part.ranks}: load it by as many processes as saved it"
    )


def _rank_folders(directory: Path) -> Iterator[Part]:
    """The parts that have a folder in ``directory``."""
    for path in sorted(directory.glob("rank-*")):
        if match := _RANK_FOLDER.fullmatch(path.name):
            yield Part(int(match[1]), int(match[2]))


def check_calibration(model: PreTrainedModel) -> None:
    """ValueError for a model of which this process has a part."""
    if is_split(model):
        raise ValueError(
            "the model is split over processes (tensor parallel or in shards), and what is learned "
            "of the heads of one is not of all: calibrate it in one process, without tp_plan and "
            "torchrun (device_map='auto' spreads it over several GPUs)"
        )
