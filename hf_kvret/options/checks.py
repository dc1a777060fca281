"""Checks of single options of a cache: TypeError or ValueError with what to give instead."""

from __future__ import annotations

import math
import re

from hf_kvret.options.sizes import byte_count

_BITS = (2, 3, 4, 16)


def check_budget(top_k: object) -> None:
    """Errors for a ``top_k`` that is no budget."""
    if top_k is None:
        return
    if isinstance(top_k, bool) or not isinstance(top_k, int | float):
        raise TypeError(
            f"top_k must be an int (a count), a float (a share) or None (by length), got {top_k!r}"
        )
    if isinstance(top_k, int) and top_k < 1:
        raise ValueError(f"top_k={top_k}: a count must be at least 1")
    if isinstance(top_k, float) and not 0.0 < top_k <= 1.0:
        raise ValueError(
            f"top_k={top_k}: a float is a share of the cold tokens, above 0 and at most 1; "
            "pass an int for a count"
        )


def check_slots(slots: object, top_k: int | float | None) -> None:
    """Errors for ``slots`` that can't hold a budget of ``top_k``."""
    if isinstance(slots, bool) or not isinstance(slots, int | float):
        raise TypeError(
            f"slots must be an int (a count) or a float (a multiple of the budget), got {slots!r}"
        )
    if isinstance(slots, float):
        if not 1.0 <= slots < math.inf:
            raise ValueError(
                f"slots={slots}: a float is a multiple of the budget, at least 1.0; pass an int "
                "for a count"
            )
    elif not isinstance(top_k, int):
        raise ValueError(
            f"slots={slots} with top_k={top_k}: the budget grows with the length, so slots must be "
            "a multiple of it, as slots=2.0"
        )
    elif slots < top_k:
        raise ValueError(
            f"slots={slots} is less than top_k={top_k}: what a query selects must fit into the "
            "slots; raise slots (a filled cache takes others when saved and loaded), or pass a "
            "multiple of the budget, as slots=2.0"
        )


def check_bits(bits: object) -> None:
    """ValueError for ``bits`` that no code has."""
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in _BITS:
        raise ValueError(f"bits={bits!r}: choose {', '.join(map(str, _BITS))}")


def check_select_heads(count: object, obstacle: str) -> None:
    """Errors for a ``count`` of heads that can't select together, because of an ``obstacle``."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"select_heads must be an int (query heads) or None (all), got {count!r}")
    if count < 1:
        raise ValueError(f"select_heads={count}: at least one head selects; None means all of them")
    if obstacle:
        raise ValueError(f"select_heads={count}: {obstacle}; leave it out")


def check_rest(rest: object, blocks: object, obstacle: str) -> None:
    """ValueError for a ``rest``, or ``blocks`` of it, that can't be, because of an ``obstacle``."""
    if rest not in (None, "mean"):
        raise ValueError(f"rest={rest!r}: choose 'mean' or None")
    if rest is not None and obstacle:
        raise ValueError(f"rest={rest!r}: {obstacle}; leave it out")
    if blocks is None:
        return
    check_length("rest_blocks", blocks, 1)
    if rest is None:
        raise ValueError(
            f"rest_blocks={blocks} with rest=None: only rest='mean' makes a token for every so "
            "many; give that, or rest_blocks=None"
        )


def check_source(artifact: object, revision: object, sha256: object) -> None:
    """Errors for what can't name an artifact.

    Args:
        artifact: folder or hub id; None: none, and so no ``revision``.
        revision: on the hub.
        sha256: of the artifact that is meant, 64 small hexadecimal digits.
    """
    for name, value in (("artifact", artifact), ("revision", revision)):
        if value is not None and (not isinstance(value, str) or not value):
            raise TypeError(f"{name} must be a name, got {value!r}")
    if revision is not None and artifact is None:
        raise ValueError(
            f"revision={revision!r} without artifact: name the artifact's hub id too, or leave the "
            "revision out"
        )
    if sha256 is None:
        return
    if not isinstance(sha256, str):
        raise TypeError(f"artifact_sha256 must be a text, got {sha256!r}")
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(
            f"artifact_sha256={sha256!r}: give the 64 hexadecimal digits that `hf-kvret "
            "inspect` shows, or leave it out"
        )


def check_lost_mass(share: object) -> None:
    """Errors for what is no ``share`` of the attention."""
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"warn_lost_mass must be a share or None (never), got {share!r}")
    if not 0.0 < share < 1.0:
        raise ValueError(
            f"warn_lost_mass={share}: a share of the attention, above 0 and below 1, as 0.3"
        )


def check_device_budget(size: object, store: str) -> None:
    """Errors for a ``size`` of no bytes, or for another ``store`` than the one that has it."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f"device_budget must be bytes (an int), a text such as '90GB', or None, got {size!r}"
        )
    try:
        byte_count(size)
    except ValueError as error:
        raise ValueError(
            f"device_budget={size!r}: write '90GB', '75GiB', or bytes, at least 1; store='host' "
            "keeps no rows on the device"
        ) from error
    if store not in ("auto", "split"):
        raise ValueError(
            f"device_budget={size!r} with store={store!r}: it is of store='split', which keeps "
            "rows on the device as long as it lasts; ask for that store, or leave device_budget out"
        )


def check_prefill_chunk(chunk: object, max_draft: int) -> None:
    """Errors for a ``chunk`` that is none beside drafts of ``max_draft``."""
    if chunk is None or chunk == "auto":
        return
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(
            f"prefill_chunk must be an int (tokens), 'auto' or None (one pass), got {chunk!r}"
        )
    if chunk <= max_draft:
        raise ValueError(
            f"prefill_chunk={chunk} with max_draft={max_draft}: up to max_draft tokens at once "
            "retrieve like drafted ones, so a prompt's chunks must be longer; take more than "
            f"{max_draft}, as {max(1024, 2 * max_draft)}, or 'auto'"
        )


def check_length(name: str, value: object, least: int) -> None:
    """Errors for a ``value`` of the option ``name`` that is no length, or below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int (tokens), got {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
