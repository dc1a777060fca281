"""Progress bars, shown where transformers shows its own; one moves while a model reads a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tqdm as tqdm_lib
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_kvret.saved.identity import printable

# A prompt that is read sooner shows no bar.
_DELAY_SECONDS = 1.0

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


@contextmanager
def prompt_bar(model: PreTrainedModel, count: int, name: str) -> Iterator[None]:
    """A bar over ``count`` tokens that ``model`` reads inside, in one pass, for the cache ``name``.

    It moves with every part of a layer that is through (attention, MLP, norms). The prompt is not
    cut for it: chunks would be another measurement, as some methods learn from the whole prompt.
    """
    parts = _layer_parts(model)
    with (
        tqdm(
            total=count,
            desc=f"{name}: reading",
            unit="tok",
            leave=False,
            delay=_DELAY_SECONDS,
            bar_format="{l_bar}{bar}| {n:,.0f}/{total:,} tok [{elapsed}<{remaining}]",
        ) as bar,
        ExitStack() as stack,
    ):

        def tick(*given: Any) -> None:
            bar.update(min(count / len(parts), count - bar.n))

        for part in parts:
            stack.callback(part.register_forward_hook(tick).remove)
        yield


def _layer_parts(model: PreTrainedModel) -> list[nn.Module]:
    """The children of all decoder layers; empty where the layers are not in a list of their own."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [part for layer in module for part in layer.children()]
    return []
