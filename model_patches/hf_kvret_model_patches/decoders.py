"""Where the text model stands in a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text model in ``model``, without its head; ``model`` itself if it has none inside.

    ``get_decoder()`` knows it in composite models. In a few types it gives something else that is
    called decoder, as the last linear layer of ModernBertDecoderForCausalLM.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model
