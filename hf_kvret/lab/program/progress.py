"""Progress bars, shown where transformers shows its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tqdm as tqdm_lib
from transformers.utils import logging

from hf_kvret.saved.identity import printable

# It says whether transformers showed bars before `only_our_bars` silenced it, and is None outside.
# This is no ContextVar, since bars of other threads belong to the same program.
_shown_before: bool | None = None


class tqdm(tqdm_lib.tqdm):
    """tqdm's bar, silent after transformers' ``disable_progress_bar()``.

    ``HF_HUB_DISABLE_PROGRESS_BARS=1`` is where transformers begins, and silences it too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # Names of documents and models stand in it.
        options["desc"] = printable(options.get("desc") or "")
        shown = logging.is_progress_bar_enabled() if _shown_before is None else _shown_before
        super().__init__(*args, **options if shown else {**options, "disable": True})


@contextmanager
def only_our_bars() -> Iterator[None]:
    """Context in which transformers shows no bars, and ours are shown if its were before."""
    global _shown_before
    before, enabled = _shown_before, logging.is_progress_bar_enabled()
    _shown_before = enabled if before is None else before
    logging.disable_progress_bar()
    try:
        yield
    finally:
        _shown_before = before
        if enabled:
            logging.enable_progress_bar()
