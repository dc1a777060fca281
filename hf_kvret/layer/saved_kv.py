"""The tokens of one layer as tensors to save, and made of saved ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_kvret.contracts.block import check_dtypes
from hf_kvret.contracts.schema import Schema
from hf_kvret.contracts.state import State, Tensors
from hf_kvret.contracts.store import FirstRows, check_rows
from hf_kvret.layer.layer_kv import LayerKV, keeps_tensors


def kv_to_save(kv: LayerKV) -> Tensors:
    """Tensors on the CPU, named ``window.*``, ``index.*``, ``store.*``, ``rest.*``, ``built``."""
    # An index may have state from forward passes before any token was cold.
    index = {} if kv.index is None else kv.index.state_dict()
    parts = {"window": kv.window.state_dict(), "index": index}
    positions = kv.positions
    if positions.is_allocated:
        first = torch.tensor(positions.first)
        parts["index"] = {"positions": positions.rows[:, 0].contiguous(), "start": first}
    if kv.store is not None and kv.cold_len:
        parts["store"] = kv.store.state_dict()
        # Sums of short blocks are nearly as large as the rows that they are made of, and a store
        # that codes reads back other rows than those that another one would be given.
        sums = kv.sums
        if sums is not None and sums.mean_len is None and not kv.store.codes_rows:
            parts["rest"] = sums.state_dict() if sums.can_be_saved else {}
    state = {
        f"{name}.{key}": value.cpu() for name, part in parts.items() for key, value in part.items()
    }
    return state | ({"built": torch.tensor(kv.built)} if "store" in parts else {})


def saved_rows(
    state: Tensors, sink: int, value_in_key: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, Hkv, *, Dk]`` and values of a saved layer's window, to make a ``LayerKV`` for.

    Raises:
        KeyError: names a missing tensor.
        ValueError: they do not fit one another, or ``sink``.
    """
    names = ("keys",) if value_in_key else ("keys", "values")
    tensors = [state[f"window.{name}"] for name in names]
    schema = Schema(tensors[0].dtype, {})
    for name, tensor in zip(names, tensors, strict=True):
        schema.check(f"window.{name}", tensor, f"B H c {name}")
    schema.check("window.sink_slots", state["window.sink_slots"], f"B {sink}", torch.int64)
    keys = tensors[0].to(device)
    values = keys[..., :value_in_key] if value_in_key else tensors[1].to(device)
    check_dtypes(keys=keys, values=values)
    return keys, values


@keeps_tensors
def load_kv(kv: LayerKV, state: Tensors, device: torch.device, query_heads: int | None) -> None:
    """Make ``kv``, which holds nothing, the one whose ``kv_to_save`` is ``state``.

    ``query_heads`` of the layer, None where they are not known.

    Raises:
        KeyError: names a missing tensor.
        ValueError: a tensor does not fit the others.
    """
    keys, values = kv.window.keys, kv.window.values
    sizes = {"B": keys.shape[0], "H": keys.shape[1], "D": keys.shape[3], "V": values.shape[3]}
    sizes |= {"S": kv.config.sink, "I": kv.window.value_in_key}
    sizes |= {} if query_heads is None else {"Q": query_heads}
    schema = Schema(keys.dtype, sizes)
    _load("window.", kv.window, state, schema, device)
    schema = schema.extended({"N": kv.window.start, "T": kv.window.end})
    with _named("index."):
        _load_index(kv, _part(state, "index."), schema, device)
    if not kv.window.start:
        return
    rows = _part(state, "store.")
    nbytes = sum(x.nbytes for x in rows.values())
    store = kv.store = kv.make_store(FirstRows(device, nbytes, kv.window.start))
    if not store.codes_rows and "codes" not in rows:
        with _named("store."):
            check_rows(rows, schema)
    _load("store.", store, state, schema, device)
    kv.built = bool(state["built"])
    needs_sums = kv.config.rest is not None and kv.config.rest_blocks is None
    # Sums of coded rows are made from what the store reads back.
    if _part(state, "rest.") and needs_sums and not store.codes_rows:
        kv.sums = kv.new_sums()
        _load("rest.", kv.sums, state, schema, device)


def _load_index(kv: LayerKV, index: Tensors, schema: Schema, device: torch.device) -> None:
    if kv.needs_positions:
        positions, first = index.pop("positions"), index.pop("start")
        schema.check("positions", positions, "B n", torch.int32)
        kv.positions.put(positions.to(device)[:, None], int(first))
    if kv.index is not None and (index or kv.window.start):
        kv.index.check_saved(index, schema)
        kv.index.load_state_dict(index, device)


def _load(prefix: str, part: State, state: Tensors, schema: Schema, device: torch.device) -> None:
    """Load the tensors of ``state`` that begin with ``prefix`` into ``part``."""
    tensors = _part(state, prefix)
    with _named(prefix):
        part.check_saved(tensors, schema)
        part.load_state_dict(tensors, device)


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
