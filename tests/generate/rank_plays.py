"""What ranks refuse: modes for ``run_on_ranks``.

A single process plays along: what only ranks can show, it records as if it had.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.models.ranks import part_of
from hf_kvret.testing.scenario import Scenario, prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 8}


def is_alone() -> bool:
    return not distributed.is_initialized()


def refused(call: Callable[[], object], words: str) -> Any:
    """Whether ``call`` raises ValueError with ``words``; 1 in a single process."""
    if is_alone():
        return torch.tensor(1)
    try:
        call()
    except ValueError as raised:
        assert words in str(raised), str(raised)
        return torch.tensor(1)
    return torch.tensor(0)


def saved(s: Scenario, folder: Path) -> None:
    """A rank's heads are not saved, and it takes no saved cache."""
    cache = s.cache()
    s.generate(prompt(1, 200), cache, **RUN)
    heads = refused(lambda: cache.save_pretrained(folder / "saved"), "some of the heads")
    s.record("saved", heads)
    load = partial(type(cache).from_pretrained, folder, s.model.config, model=s.model)
    s.record("loaded", refused(load, "the model is split over processes"))


def a_shelf(s: Scenario, folder: Path) -> None:
    """Ranks leave a shelf alone, and say so."""
    call: dict[str, Any] = {"cache_implementation": "paris", "return_dict_in_generate": True}
    options = {**SMALL, "shelf": str(folder / "shelf")}
    result = s.model.generate(prompt(1, 200), cache_config=options, **call, **RUN)
    s.record("tokens", result.sequences)
    note = result.past_key_values.shelf_note
    s.record("note", torch.tensor(is_alone() or "split over processes" in note))
    s.register(result.past_key_values)


def latent_weight(s: Scenario, folder: Path) -> None:
    """A rank's heads of a weight that knows its whole shape."""
    del folder
    s.generate(prompt(1, 120), s.cache(), **RUN)
    module = s.model.model.layers[0].self_attn
    weight = module.kv_b_proj.weight
    with torch.no_grad():
        heads = ModuleHeads(module)._matrices(torch.zeros(1))
    ranks = part_of(s.model).ranks
    s.record("whole shape", torch.tensor(weight.shape))
    s.record("heads", torch.tensor([len(heads) * ranks, *heads.shape[1:]]))
