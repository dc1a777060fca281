"""Small random vision models that see pictures, and prompts with pictures for them.

For types that take pictures as patches, with a grid for each: those whose positions shift behind a
picture (see ``hf_kvret.models.kept_state``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from hf_kvret.lab.coverage.scan import text_class
from hf_kvret.lab.coverage.small import VOCAB_SIZE, build, small_config
from hf_kvret.testing.tiny import PAD_TOKEN

_LEAD, _END = 20, VOCAB_SIZE - 1
# Numbers of heads of the towers, by the names they have in configurations.
_HEADS = ("num_heads", "num_attention_heads")
_WIDTH = 256


def picture_model(name: str) -> PreTrainedModel:
    """A random model of the type ``name`` with a small vision tower: fp32, CPU, eval mode.

    Raises:
        Exception: of any kind, where a configuration of this type can't be made small like that.
    """
    config = small_config(AutoConfig.for_model(name))
    text, vision = config.get_text_config(decoder=True), config.vision_config
    if getattr(vision, "out_hidden_size", None) is None:
        # Some towers have the width of the text model here, others are projected to it.
        vision.hidden_size = text.hidden_size if hasattr(vision, "embed_dim") else _WIDTH
    else:
        vision.hidden_size, vision.out_hidden_size = _WIDTH, text.hidden_size
    for heads in _HEADS:
        if hasattr(vision, heads):
            setattr(vision, heads, 4)
    return build(config, text_class(name))


def picture_prompt(
    model: PreTrainedModel, seed: int, grids: Sequence[tuple[int, int]], length: int = 60
) -> dict[str, torch.Tensor]:
    """Inputs of ``generate`` for one row: random tokens with pictures among them.

    Args:
        model: of ``picture_model``.
        seed: of tokens and pictures.
        grids: rows and columns of the patches of each picture; multiples of 2.
        length: tokens beside those of pictures.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE // 2, _END, (length,), generator=generator)
    parts = [ids[:_LEAD]]
    for rows, columns in grids:
        marks = torch.full((_marks(config, rows, columns),), config.image_token_id)
        parts += [torch.tensor([_opening(config)]), marks, torch.tensor([_END]), ids[_LEAD:][:5]]
    ids = torch.cat([*parts, ids[_LEAD:]])[None]
    inputs = with_types(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if grids:
        patches = [torch.randn(_patches(config, *grid), generator=generator) for grid in grids]
        inputs["pixel_values"] = torch.cat(patches)
        inputs["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
    return inputs


def padded(prompts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Prompts of one row each as one batch, padded at the left."""
    length = max(prompt["input_ids"].shape[1] for prompt in prompts)
    batch: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for prompt in prompts for name in prompt):
        rows = [prompt[name] for prompt in prompts if name in prompt]
        if name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            fill = PAD_TOKEN if name == "input_ids" else 0
            rows = [
                torch.nn.functional.pad(row, (length - row.shape[1], 0), value=fill) for row in rows
            ]
        batch[name] = torch.cat(rows)
    return batch


def with_types(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``inputs`` with the type of each token, for a model that takes it."""
    if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
        return inputs
    types = (inputs["input_ids"] == model.config.image_token_id).int()
    return {**inputs, "mm_token_type_ids": types}


def _opening(config: Any) -> int:
    """The token in front of a picture."""
    names = ("vision_start_token_id", "image_start_token_id")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), _END - 1)


def _marks(config: Any, rows: int, columns: int) -> int:
    """Tokens that stand for a picture."""
    merged = config.vision_config.spatial_merge_size
    if config.model_type == "hunyuan_vl":
        # Every row ends in a token, and the picture begins and ends in one.
        return rows // merged * (columns // merged + 1) + 2
    return rows * columns // merged**2


def _patches(config: Any, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of a picture's patches."""
    vision = config.vision_config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next(getattr(vision, name) for name in names if getattr(vision, name, None))
    size, frames = vision.patch_size, getattr(vision, "temporal_patch_size", None) or 1
    if config.model_type == "paddleocr_vl":
        return rows * columns, channels, size, size
    return rows * columns, channels * frames * size**2
