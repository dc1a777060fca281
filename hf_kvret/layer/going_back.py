"""Drop the newest tokens of all layers of a cache, also where some of them can't go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_kvret.layer.hybrid import foreign_layers_of, records_past, window_obstacle
from hf_kvret.layer.layer import RetrievalLayer, check_count
from hf_kvret.layer.snapshots import Snapshot, Snapshots


class CantGoBackError(RuntimeError):
    """Layers can't go back as far as they are asked to, and no snapshot lies there."""


def drop_tokens(
    layers: Sequence[Any],
    attending: Sequence[Any],
    tokens_to_remove: int,
    fault: str | None,
    snapshots: Snapshots,
) -> int:
    """Drop a broken pass and the newest tokens of every layer, or of none.

    Layers that can't go back become those of the newest of the ``snapshots`` at or before that
    point. Returns how many tokens more were dropped so.

    Args:
        layers: all of a cache.
        attending: those of them with keys and values.
        tokens_to_remove: their number, negative.
        fault: says that the last pass broke off; None where it did not.
        snapshots: of the cache.

    Raises:
        CantGoBackError: there is no such snapshot.
        RuntimeError: the pass broke off while a layer took its tokens in.
        ValueError: a positive number, or more tokens than are held.
    """
    # From the top: a store may compute rows from those of the layer below.
    ours = [layer for layer in reversed(layers) if isinstance(layer, RetrievalLayer)]
    if any(layer.is_torn for layer in ours):
        raise RuntimeError(
            f"{fault}, and it broke off while a layer took its tokens in: start with a new cache "
            "or cache.reset()"
        )
    # A pass that broke off in its last layer reached all of them.
    lengths = [layer.past_len for layer in ours if layer.pending_attention]
    held = min(lengths + [layer.get_seq_length() for layer in attending])
    check_count(tokens_to_remove, held)
    target, snapshot = held + tokens_to_remove, Snapshot(0, {})
    foreign = foreign_layers_of(layers)
    if (why := _why_stuck(foreign, fault, held, target)) is not None:
        snapshot = _snapshot(snapshots, target, why)
        target = snapshot.length
    others = [layer for number, layer in foreign.items() if number not in snapshot.layers]
    for layer in (*others, *ours):
        length = layer.get_seq_length() if layer in attending else held
        # Layers of transformers that can't go back refuse to drop even no tokens.
        if (count := target - length) or layer in ours:
            layer.crop(count)
    snapshot.restore(foreign)
    for layer in ours if snapshot.layers else ():
        # A captured step has the addresses of what was there.
        layer.edited()
    return held + tokens_to_remove - target


def _why_stuck(foreign: Mapping[int, Any], fault: str | None, held: int, target: int) -> str | None:
    """Why layers ``foreign`` of transformers can't go back from ``held`` to ``target`` tokens.

    None where all can. Of a pass with a ``fault`` some may have seen tokens.
    """
    for layer in foreign.values():
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            if fault is not None:
                return f"{fault}, and a recurrent state of this model may be ahead"
            if target < held and not records_past(layer):
                return "a recurrent state of this model can't go back"
        if (why := window_obstacle(layer, target)) is not None:
            return why
    return None


def _snapshot(snapshots: Snapshots, target: int, why: str) -> Snapshot:
    """The newest one at or before ``target``; CantGoBackError, which says ``why``, without one."""
    snapshot = snapshots.newest(target)
    if snapshot is not None:
        return snapshot
    oldest = "there is no snapshot"
    if snapshots.held:
        oldest = f"the oldest snapshot has {snapshots.lengths[0]} tokens"
    raise CantGoBackError(
        f"{why}, and {oldest}: start with a new cache or cache.reset(); the option snapshots keeps "
        "more of them"
    )
