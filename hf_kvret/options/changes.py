"""Options that a filled cache can change, in a fork or as it is loaded."""

from __future__ import annotations

from typing import Any

# Options that do not affect what is stored, so a load may change them.
_STORE_OPTIONS = {"store", "slots", "device_budget"}
_CALL_OPTIONS = {
    *("max_draft", "flush", "track_recall", "prefill_chunk", "graph", "select_heads"),
    *("warn_lost_mass", "rest", "rest_blocks"),
}
_FREE_OPTIONS = {"top_k", *_CALL_OPTIONS, *_STORE_OPTIONS}
FORK_OPTIONS = frozenset(_FREE_OPTIONS - _STORE_OPTIONS)
"""Options that a fork may change: they don't affect what is held, nor where."""
# A load may change these too: the artifact may be in another place. The index itself refuses an
# artifact other than the one that it was saved with.
_MOVABLE_OPTIONS = {"artifact", "revision", "artifact_sha256"}


def forked(options: Any, changes: dict[str, Any]) -> Any:
    """``options`` with ``changes``; ValueError unless a fork may have them."""
    _check(changes, set(FORK_OPTIONS))
    return options.replace(**changes)


def check_load(changes: dict[str, Any], has_artifact: bool) -> None:
    """ValueError unless all ``changes`` are options that a load may change.

    ``has_artifact``: whether the method's index has one.
    """
    _check(changes, _FREE_OPTIONS | (_MOVABLE_OPTIONS if has_artifact else set()))


def with_companions(changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` with the revision of an artifact that they replace."""
    return {"revision": None, **changes} if "artifact" in changes else changes


def _check(changes: dict[str, Any], free: set[str]) -> None:
    unchangeable = sorted(set(changes) - free)
    if unchangeable:
        raise ValueError(
            f"{', '.join(unchangeable)}: not an option that a filled cache can change; free to "
            f"change are {', '.join(sorted(free))}"
        )
