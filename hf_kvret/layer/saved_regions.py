"""Regions as named tensors, and back: every tensor is compared with the others before its use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hf_kvret.contracts.first_rows import FirstRows
from hf_kvret.contracts.precision import check_dtypes
from hf_kvret.contracts.schema import Form, check_squares, damaged
from hf_kvret.contracts.state import Tensors

if TYPE_CHECKING:
    from hf_kvret.layer.regions import Regions

# No machine has the second.
_LARGE_WINDOW, _MOST_BYTES = 1 << 30, 1 << 60
_PARTS = ("window", "index", "store", "rest")


def regions_to_save(regions: Regions) -> Tensors:
    """Tensors on the CPU, named ``window.*``, ``index.*``, ``store.*``, ``rest.*``, ``built``."""
    # An index may have state from forward passes before any token was cold.
    index = {} if regions.index is None else regions.index.state_dict()
    parts = {"window": regions.window.state_dict(), "index": index}
    positions = regions.positions
    if positions.is_allocated:
        # Under index.*, where format version 1 has them.
        first = torch.tensor(positions.first)
        parts["index"] = {"positions": positions.rows[:, 0].contiguous(), "start": first}
    if regions.store is not None and regions.cold_len:
        parts["store"] = regions.store.state_dict()
        # Sums of short blocks are nearly as large as the rows that they are made of, and a store
        # that codes reads back other rows than those that another one would be given.
        rest = regions.rest
        if rest is not None and rest.mean_len is None and not regions.store.codes_rows:
            parts["rest"] = rest.state_dict() if rest.can_be_saved else {}
    state = {
        f"{name}.{key}": value.cpu() for name, part in parts.items() for key, value in part.items()
    }
    return state | ({"built": torch.tensor(regions.built)} if "store" in parts else {})


def saved_rows(
    state: Tensors, sink: int, value_in_key: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, Hkv, *, Dk]`` and values of a saved layer's window, for which regions are made.

    Raises:
        KeyError: names a missing tensor.
        ValueError: they do not fit one another, or ``sink``.
    """
    sides = [state["window.keys"]] + ([] if value_in_key else [state["window.values"]])
    form = Form(sides[0].dtype, {})
    for name, side in zip(("keys", "values"), sides, strict=False):
        form.check(f"window.{name}", side, f"B H c {name}", form.dtype)
        if 0 in (*side.shape[:2], side.shape[3]):
            raise damaged(f"window.{name} is {list(side.shape)}")
    form.check("window.sink_slots", state["window.sink_slots"], f"B {sink}", torch.int64)
    keys = sides[0].to(device)
    values = keys[..., :value_in_key] if value_in_key else sides[1].to(device)
    check_dtypes(keys=keys, values=values)
    return keys, values


def load_regions(
    regions: Regions, state: Tensors, device: torch.device, query_heads: int | None
) -> None:
    """Make new ``regions`` those whose ``regions_to_save`` is ``state``.

    ``query_heads`` where they are known.

    Raises:
        KeyError: names a missing tensor.
        ValueError: a tensor does not fit the others.
    """
    window, rows = _part(state, "window."), _part(state, "store.")
    strange = state.keys() - {f"{a}.{b}" for a in _PARTS for b in _part(state, f"{a}.")}
    if strange - {"built"}:
        raise damaged(f"there is an unknown {min(strange - {'built'})[:80]}")
    keys, values = regions.window.keys, regions.window.values
    sizes = {"B": keys.shape[0], "H": keys.shape[1], "D": keys.shape[3], "V": values.shape[3]}
    sizes |= {"S": regions.config.sink, "I": regions.window.value_in_key}
    sizes |= {} if query_heads is None else {"Q": query_heads}
    form = Form(keys.dtype, sizes)
    if regions.index is not None and regions.index.needs_finite:
        for name, tensor in state.items():
            if name.startswith(("window.", "store.")) and tensor.is_floating_point():
                check_squares(name, tensor)
    with _named("window."):
        regions.window.check_saved(window, form)
        regions.window.load_state_dict(window, device)
        regions.window.check_loaded(form)
    _check_room(regions)
    form = form.extended({"N": regions.window.start, "T": regions.window.end})
    with _named("index."):
        _load_index(regions, _part(state, "index."), form, device)
    if not regions.window.start:
        if rows or "built" in state:
            raise damaged("there is a store of a layer without cold tokens")
        return
    nbytes = sum(x.nbytes for x in rows.values())
    store = regions.store = regions.make_store(FirstRows(device, nbytes, rows.get("keys")))
    with _named("store."):
        store.check_saved(rows, form)
        store.load_state_dict(rows, device)
        store.check_loaded(form)
    if len(store) != regions.window.start:
        raise damaged(f"the store has {len(store)} tokens, not {regions.window.start}")
    form.check("built", state["built"].reshape(-1), "1", torch.bool)
    if not bool(state["built"]):
        # A save builds the index.
        raise damaged("built is False")
    regions.built = True
    sums = _part(state, "rest.")
    wanted = regions.config.needs_means and regions.config.rest_blocks is None
    # Of coded rows they are made anew.
    if sums and wanted and not store.codes_rows:
        with _named("rest."):
            regions.rest = regions.new_sums()
            regions.rest.check_saved(sums, form)
            regions.rest.load_state_dict(sums, device)
            regions.rest.check_loaded(form)


def _check_room(regions: Regions) -> None:
    """ValueError where there is no memory for the window that the saved options ask for."""
    window, length = regions.window, regions.config.sink + regions.most_recent
    heads = window.keys.shape[:2]
    nbytes = heads.numel() * length * window.row_dim * window.keys.element_size()
    if nbytes < _LARGE_WINDOW:
        return
    try:
        torch.empty(min(nbytes, _MOST_BYTES), dtype=torch.uint8, device=window.keys.device)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"recent, flush and max_draft make a window of {length} tokens, for which there "
            "is no memory: the file is damaged or crafted, or of a larger machine"
        ) from error


def _load_index(regions: Regions, index: Tensors, form: Form, device: torch.device) -> None:
    if regions.needs_positions:
        form.check("positions", index["positions"], "B n", torch.int32)
        form.check("start", index["start"].reshape(-1), "1", torch.int64)
        first, count = int(index["start"]), index["positions"].shape[1]
        # A crop leaves positions of tokens that are gone.
        if first < 0 or (count and first + count < form["T"]):
            raise damaged(f"positions start at {first}, {count} of {form['T']} tokens")
        regions.positions.put(index["positions"].to(device)[:, None], first)
        index = {name: x for name, x in index.items() if name not in ("positions", "start")}
    if regions.index is None:
        if index:
            raise damaged(f"there is an unknown {min(index)[:80]}")
    elif index or regions.window.start:
        regions.index.check_saved(index, form)
        regions.index.load_state_dict(index, device)
        regions.index.check_loaded(form)


@contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Errors of a saved part name it."""
    try:
        yield
    except KeyError as missing:
        raise KeyError(f"{prefix}{missing.args[0]}") from missing
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _part(state: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
