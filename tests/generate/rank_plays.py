"""What ranks do with saved caches and with each other's errors: modes for ``run_on_ranks``.

A single process plays along: what only ranks can show, it records as if it had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hf_kvret import ParisKVCache
from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.models.ranks import part_of
from hf_kvret.testing.scenario import Scenario, prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 8}


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_alone() -> bool:
    return not distributed.is_initialized()


def refused(call: Callable[[], object], words: str, error: type[Exception] = ValueError) -> Any:
    """Whether ``call`` raises ``error`` with ``words``; 1 in a single process."""
    if is_alone():
        return torch.tensor(1)
    try:
        call()
    except error as raised:
        assert words in str(raised), str(raised)
        return torch.tensor(1)
    return torch.tensor(0)


def load(s: Scenario, cache: Any, folder: Path, **changes: Any) -> Any:
    cls: type[RetrievalCache] = type(cache)
    if cls.needs_artifact:
        changes["artifact"] = cache.options.artifact
    return s.register(cls.from_pretrained(folder, s.model.config, model=s.model, **changes))


def _filled(s: Scenario) -> tuple[Any, torch.Tensor]:
    cache = s.cache()
    ids = s.generate(prompt(1, 200), cache, "first", **RUN)
    return cache, torch.cat([ids, prompt(1, 5, salt=3)], dim=1)


def saved(s: Scenario, folder: Path) -> None:
    """All ranks save into one folder, load it again, and go on; a later save replaces it."""
    cache, question = _filled(s)
    cache.save_pretrained(folder / "saved")
    s.generate(question, load(s, cache, folder / "saved"), "loaded", **RUN)
    s.generate(question, cache, "kept", **RUN)
    cache.save_pretrained(folder / "saved")
    again = load(s, cache, folder / "saved")
    s.record("length", torch.tensor(again.get_seq_length()))
    own = part_of(s.model).folder(folder / "saved")
    s.record("in a folder of its own", torch.tensor((own / "cache.json").is_file()))
    s.record("no other", refused(lambda: load(s, cache, own), "holds no cache of"))


def other_files(s: Scenario, folder: Path) -> None:
    """Files of another rank, of one process, of another length on one rank, and of nobody."""
    cache, question = _filled(s)
    part = part_of(s.model)
    cache.save_pretrained(folder / "saved")
    if not is_alone():
        distributed.barrier()
        swapped = folder / f"swapped {part.rank}"
        other = folder / "saved" / f"rank-{1 - part.rank}-of-{part.ranks}"
        part.folder(swapped).parent.mkdir(parents=True)
        part.folder(swapped).symlink_to(other.absolute())
    s.record(
        "another rank's",
        refused(lambda: load(s, cache, folder / f"swapped {part.rank}"), "was saved by rank"),
    )
    nobody = refused(lambda: load(s, cache, folder / "none"), "holds no cache of 2 ranks")
    s.record("nobody's", nobody)
    s.record(
        "without the model",
        refused(
            lambda: type(cache).from_pretrained(folder / "saved", s.model.config), "pass model="
        ),
    )
    s.generate(question, cache, "second", **RUN)
    if rank() == 1:
        cache.save_pretrained(folder / "saved")
    if not is_alone():
        distributed.barrier()
    s.record(
        "saved at different times",
        refused(lambda: load(s, cache, folder / "saved"), "the ranks of this tensor parallel"),
    )


def errors(s: Scenario, folder: Path) -> None:
    """What one rank refuses, or has otherwise, all refuse at once."""
    del folder
    s.generate(prompt(1, 200), s.cache(), "before", **RUN)
    mine = rank() == 1

    def other_options() -> None:
        cache = ParisKVCache(s.model.config, **{**SMALL, "top_k": 64 if mine else 8})
        s.model.generate(prompt(1, 200), past_key_values=cache, **RUN)

    def unknown_option() -> None:
        options = {"no_such_option": 1} if mine else SMALL
        call = {"cache_implementation": "paris", "cache_config": options}
        s.model.generate(prompt(1, 200), **call, **RUN)

    def two_caches() -> None:
        cache = ParisKVCache(s.model.config, **SMALL)
        call = {"cache_implementation": "lrqk"} if mine else {}
        s.model.generate(prompt(1, 200), past_key_values=cache, **call, **RUN)

    def unknown_keyword() -> None:
        call: dict[str, Any] = {"no_such_keyword": 1} if mine else {}
        s.model.generate(prompt(1, 200), cache_implementation="paris", cache_config=SMALL, **call)

    s.record("options differ", refused(other_options, "the ranks of this tensor parallel model"))
    calls = {"option": unknown_option, "caches": two_caches, "keyword": unknown_keyword}
    for name, call in calls.items():
        how: Any = ("", (TypeError, ValueError)) if mine else ("another rank", RuntimeError)
        s.record(name, refused(call, *how))
    s.generate(prompt(1, 200), s.cache(), "after", **RUN)


def a_shelf(s: Scenario, folder: Path) -> None:
    """Ranks leave a shelf alone, and say so."""
    call: dict[str, Any] = {"cache_implementation": "paris", "return_dict_in_generate": True}
    options = {**SMALL, "shelf": str(folder / "shelf")}
    result = s.model.generate(prompt(1, 200), cache_config=options, **call, **RUN)
    s.record("tokens", result.sequences)
    note = result.past_key_values.shelf_note
    s.record("note", torch.tensor(is_alone() or "split over processes" in note))
    s.register(result.past_key_values)


def by_hand(s: Scenario, folder: Path) -> None:
    """A cache filled without the model's passes is saved with the model alone."""
    filled = s.cache()
    s.generate(prompt(1, 200), filled, "first", **RUN)
    cache: Any = s.cache()
    for number, layer in enumerate(filled.layers):
        kv = layer.kv
        row = torch.zeros(1, kv.window.keys.shape[1], 1, kv.window.keys.shape[3])
        cache.layers[number].update(row, row)
        cache.layers[number].pending_attention = False
    s.record(
        "nobody's heads",
        refused(lambda: cache.save_pretrained(folder / "by hand"), "did not see of which rank"),
    )


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
