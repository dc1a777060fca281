"""Options of a saved cache as a load takes them: the artifacts that a file names are not followed.

Whoever writes a file could otherwise have any folder read, or any repository of the hub downloaded.
The caller names an artifact, or it lies beside the model, where a new cache looks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_kvret.options.config import RetrievalConfig, check_load, with_companions

_MOST_NUMBER = 2**63 - 1


def options_to_load(
    directory: Path,
    kind: type[RetrievalConfig],
    needs_artifact: bool,
    saved: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> tuple[RetrievalConfig, str]:
    """The saved options with ``changes``; and what to tell where the model's artifact won't do.

    That is empty where the caller names the artifact, or none was saved.

    Args:
        directory: of the cache, for messages.
        kind: class of the options.
        needs_artifact: whether the method's index or store has an artifact.
        saved: as ``cache.json`` has them.
        changes: of the caller.

    Raises:
        ValueError: options that no save writes, or a change that a filled cache can't take.
    """
    changes = dict(changes)
    check_load(changes, needs_artifact)
    changes = with_companions(changes)
    if changes.get("store", "split") not in ("auto", "split"):
        # The saved budget belongs to the saved store.
        changes = {"device_budget": None, **changes}
    try:
        options = kind.from_options(**saved)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{directory} has options that no save writes: {error}") from error
    most = max((x for x in saved.values() if type(x) is int), key=abs, default=0)
    if abs(most) > _MOST_NUMBER:
        raise ValueError(f"{directory} has options that no save writes: {most:.0e} is too large")
    hint = ""
    name = getattr(options, "artifact", None) if needs_artifact else None
    if name is not None and "artifact" not in changes:
        hint = (
            f"{directory} was saved with artifact={name[:200]!r}, and what a file names is not "
            "followed: pass artifact= to from_pretrained, with this name if you trust it"
        )
        changes = with_companions({"artifact": None, **changes})
    return options.replace(**changes), hint
