"""Processes that share a model: how many there are, and what each of them holds."""

from __future__ import annotations

import os

from torch import distributed
from transformers import PreTrainedModel


def group_size() -> int:
    """Processes in torch's process group; 1 without one."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def launched_ranks() -> int:
    """Processes of this run, also of a launcher's (torchrun) that have formed no group yet."""
    size = os.environ.get("WORLD_SIZE", "")
    return max(group_size(), int(size) if size.isdecimal() else 1)


def is_split(model: PreTrainedModel) -> bool:
    """Whether this process holds a part of the weights, as of a tensor parallel model."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def check_save() -> None:
    """ValueError in a process group: no file of one rank holds what the others have."""
    size = group_size()
    if size > 1:
        raise ValueError(
            f"save_pretrained in a process group of {size} ranks: each may hold some of the heads, "
            "and a saved cache is of all. Fill and save the cache in one process without a group"
        )


def check_load(model: PreTrainedModel | None) -> None:
    """ValueError in a process group, unless ``model`` is there and this rank has all of it."""
    size = group_size()
    if size > 1 and (model is None or is_split(model)):
        raise ValueError(
            f"from_pretrained in a process group of {size} ranks: a saved cache is of all heads, "
            "and a rank may hold some of them. Load it in one process without a group"
            + ("; where each rank has a whole model, pass model=" if model is None else "")
        )


def check_calibration(model: PreTrainedModel) -> None:
    """ValueError for a model of which this process has a part."""
    if is_split(model):
        raise ValueError(
            "the model is split over processes (tensor parallel or in shards), and what is learned "
            "of the heads of one is not of all: calibrate it in one process, without tp_plan and "
            "torchrun (device_map='auto' spreads it over several GPUs)"
        )


def check_one_process() -> None:
    """ValueError in a run of several ranks: each would measure beside the others."""
    size = launched_ranks()
    if size > 1:
        raise ValueError(
            f"this is one of {size} ranks, and all would do the same work at once, so that times "
            "are wrong and results overwrite each other: run the command in one process, without "
            "torchrun or accelerate launch (or unset WORLD_SIZE)"
        )
