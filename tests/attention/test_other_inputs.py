"""What a cache was given that is no text is compared, by a digest a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret import RetrievalCache
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

from .filled_caches import RUN, forked, held_ids, new_cache, saved


@pytest.fixture(scope="module")
def qwen2_vl() -> Any:
    return MODELS["qwen2_vl"].build()


def picture(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A picture of four patches, which one token stands for."""
    vision = model.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}


def with_picture(model: Any, length: int) -> dict[str, torch.Tensor]:
    ids = prompt(1, length)
    config = model.config
    ids[0, 5:8] = torch.tensor(
        [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
    )
    return {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int()}


@pytest.mark.parametrize("go_on", [forked, saved])
def test_another_picture_is_refused(
    qwen2_vl: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache]
) -> None:
    inputs = with_picture(qwen2_vl, 50)
    cache = new_cache(qwen2_vl)
    answer = qwen2_vl.generate(**inputs, **picture(qwen2_vl, 0), past_key_values=cache, **RUN)
    ids = torch.cat([answer, prompt(1, 20, salt=1)], dim=1)
    cache = go_on(cache, tmp_path, qwen2_vl)
    with pytest.raises(ValueError, match="pixel_values is not what the tokens 0 to 49"):
        qwen2_vl.generate(ids, **picture(qwen2_vl, 1), past_key_values=cache, **RUN)
    # Text alone goes on after pictures.
    qwen2_vl.generate(ids, past_key_values=cache, **RUN)
    assert held_ids(cache)[0][:74] == ids[0].tolist()


def test_a_new_picture_for_new_tokens_is_not_refused(qwen2_vl: Any) -> None:
    first = with_picture(qwen2_vl, 50)
    cache = new_cache(qwen2_vl)
    answer = qwen2_vl.generate(**first, **picture(qwen2_vl, 0), past_key_values=cache, **RUN)
    ids = torch.cat([answer, with_picture(qwen2_vl, 20)["input_ids"]], dim=1)
    types = {"mm_token_type_ids": (ids == qwen2_vl.config.image_token_id).int()}
    both = [picture(qwen2_vl, seed) for seed in (0, 1)]
    pictures = {name: torch.cat([one[name] for one in both]) for name in both[0]}
    try:
        qwen2_vl.generate(ids, **types, **pictures, past_key_values=cache, **RUN)
    except ValueError as error:
        # Of Qwen2-VL, which looks for places of both pictures among the new tokens.
        assert "past_key_values" not in str(error)
    assert [one.start for one in cache.tokens.passes] == [0, 53]


def test_a_picture_is_compared_behind_a_cut_to_its_pass(qwen2_vl: Any) -> None:
    inputs, cache = with_picture(qwen2_vl, 50), new_cache(qwen2_vl)
    hf_kvret.attach(qwen2_vl)
    with torch.no_grad():
        qwen2_vl(**inputs, **picture(qwen2_vl, 0), past_key_values=cache)
        qwen2_vl(prompt(1, 9), past_key_values=cache)
    cache.crop(-9)
    ids = torch.cat([inputs["input_ids"], prompt(1, 20, salt=1)], dim=1)
    with pytest.raises(ValueError, match="pixel_values is not what the tokens 0 to 49"):
        qwen2_vl.generate(ids, **picture(qwen2_vl, 1), past_key_values=cache, **RUN)
    cache.crop(-1)
    assert not cache.tokens.passes


def test_a_call_that_failed_at_once_leaves_no_digest(qwen2_vl: Any) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("no room")

    inputs, cache = with_picture(qwen2_vl, 50), new_cache(qwen2_vl)
    handle = qwen2_vl.get_input_embeddings().register_forward_pre_hook(fail)
    for seed in (0, 1):
        pictures = picture(qwen2_vl, seed)
        if seed == 0:
            with pytest.raises(RuntimeError, match="no room"):
                qwen2_vl.generate(**inputs, **pictures, past_key_values=cache, **RUN)
        else:
            qwen2_vl.generate(**inputs, **pictures, past_key_values=cache, **RUN)
    assert len(cache.tokens.passes) == 1
