"""Small random vision models that see pictures, and conversations about pictures with them.

They are of types that take pictures as patches, with a grid for each: types whose positions shift
behind a picture (see ``hf_kvret.models.kept_state``).
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.commands.models import text_class
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import LOGIT_TOLERANCE
from hf_kvret.testing.models import PAD_TOKEN

from .model_types.small import VOCAB_SIZE, build, small_config

COVER: dict[str, Any] = {"top_k": 4096, "recent": 16, "flush": 16, "dense_below": 0}
"""A budget that covers everything: full attention, up to the order of sums."""

NEW_TOKENS = 4
"""Tokens of an answer."""

_LEAD, _END = 20, VOCAB_SIZE - 1
# Names that configurations of towers have for their heads.
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
    """Inputs of ``generate`` for one sequence: random tokens with pictures among them.

    Args:
        model: of ``picture_model``.
        seed: of tokens and pictures.
        grids: rows and columns of the patches of each picture; multiples of 2.
        length: tokens beside those of pictures.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE // 2, _END, (length,), generator=generator)
    chunks = [ids[:_LEAD]]
    for rows, columns in grids:
        marks = torch.full((_marks(config, rows, columns),), config.image_token_id)
        chunks += [torch.tensor([_opening(config)]), marks, torch.tensor([_END]), ids[_LEAD:][:5]]
    ids = torch.cat([*chunks, ids[_LEAD:]])[None]
    inputs = with_types(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if grids:
        patches = [torch.randn(_patches(config, *grid), generator=generator) for grid in grids]
        inputs["pixel_values"] = torch.cat(patches)
        inputs["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
    return inputs


def padded(prompts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Prompts of one sequence each as one batch, padded at the left."""
    length = max(prompt["input_ids"].shape[1] for prompt in prompts)
    batch: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for prompt in prompts for name in prompt):
        tensors = [prompt[name] for prompt in prompts if name in prompt]
        if name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            fill = PAD_TOKEN if name == "input_ids" else 0
            tensors = [
                torch.nn.functional.pad(tensor, (length - tensor.shape[1], 0), value=fill)
                for tensor in tensors
            ]
        batch[name] = torch.cat(tensors)
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


class Text(NamedTuple):
    """What one ``generate`` gave: ids ``[B, T]`` and logits ``[N, B, V]``."""

    ids: torch.Tensor
    logits: torch.Tensor


def ask(model: PreTrainedModel, inputs: dict[str, Any], cache: Any = None, **more: Any) -> Text:
    """The greedy answer to ``inputs`` with ``cache``; ``more`` are arguments of ``generate``."""
    given = {} if cache is None else as_argument(cache)
    call: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    call |= {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(**{**call, **inputs, **given, **more})
    return Text(output.sequences, torch.stack(output.logits))


def next_turn(model: PreTrainedModel, inputs: Any, answer: Text, *, pictures: bool = False) -> Any:
    """The conversation so far with a question behind it; with its pictures or without."""
    question = torch.randint(128, 255, (len(answer.ids), 9), generator=torch.Generator())
    ids = torch.cat([answer.ids, question], 1)
    ones = torch.ones(len(ids), ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], ones], 1)
    kept = {name: x for name, x in inputs.items() if pictures and name.startswith(("pix", "image"))}
    return with_types(model, {**kept, "input_ids": ids, "attention_mask": mask})


def flat(model: PreTrainedModel) -> FlatKVCache:
    """An empty cache for ``model`` that retrieves everything."""
    return FlatKVCache(config=model.config, **COVER)


def assert_same(result: Text, reference: Text) -> None:
    """AssertionError unless logits agree.

    Those of a second turn come from other groups of sums than those of one pass.
    """
    tolerance = 3 * LOGIT_TOLERANCE * max(1.0, float(reference.logits.std()) / 4)
    assert torch.allclose(result.logits, reference.logits, atol=tolerance, rtol=0)


class Conversation:
    """A first turn with a picture, and the second turn by full attention from scratch.

    Attributes:
        model: of ``picture_model``.
        first: inputs of the first turn.
        others: inputs of other requests: text alone, and two pictures.
        answer: to the first turn.
        reference: the answer to the second turn, without any cache of the first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.first = model, picture_prompt(model, 1, [(8, 16)])
        self.others = [picture_prompt(model, 2, []), picture_prompt(model, 3, [(4, 4), (8, 8)])]
        self.answer = ask(model, self.first)
        whole = next_turn(model, self.first, self.answer, pictures=True)
        self.reference = ask(model, whole)

    def filled(self) -> FlatKVCache:
        """A cache that holds the first turn."""
        cache = flat(self.model)
        ask(self.model, self.first, cache)
        return cache

    def check(self, cache: RetrievalCache, model: PreTrainedModel | None = None) -> None:
        """The second turn with ``cache`` is that of full attention."""
        model = model or self.model
        second = next_turn(model, self.first, self.answer)
        assert_same(ask(model, second, cache), self.reference)
