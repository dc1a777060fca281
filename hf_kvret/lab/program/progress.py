"""A bar that moves while a model reads a prompt, which may take minutes in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

# A prompt that is read sooner shows no bar.
_DELAY_SECONDS = 1.0


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
