"""Processes that share a model: how many there are, and what each of them holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from hf_kvret.models.compatibility import layer_shapes


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


WHOLE = Part()


def is_split(model: nn.Module) -> bool:
    """Whether this process holds a part of the weights, as of a tensor parallel model."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def part_of(model: nn.Module) -> Part:
    """The heads of ``model`` that this process holds, by the mesh that its weights lie on."""
    # Older versions of transformers give a mesh without names, and so does FSDP by itself.
    nameless = ("tp",) if (getattr(model, "_tp_size", None) or 1) > 1 else ()
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        names = () if mesh is None else (mesh.mesh_dim_names or nameless)
        # Weights of data parallel processes (FSDP) are in shards too: each has all heads.
        if "tp" in names and mesh.size(names.index("tp")) > 1:
            return Part(mesh.get_local_rank(names.index("tp")), mesh.size(names.index("tp")))
    return WHOLE


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


def check_calibration(model: PreTrainedModel) -> None:
    """ValueError for a model of which this process has a part."""
    if is_split(model):
        raise ValueError(
            "the model is split over processes (tensor parallel or in shards), and what is learned "
            "of the heads of one is not of all: calibrate it in one process, without tp_plan and "
            "torchrun (device_map='auto' spreads it over several GPUs)"
        )
