"""Rows are not taken where modules compute otherwise, which no configuration shows."""

import copy
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
IDS = prompt(1, 80)


def hooked_last_values(model: Any) -> None:
    layer = model.model.layers[-1].self_attn.v_proj
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,))


def routed_to_one(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1


def rotated_slower(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


def function_replaced(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * 1.1


def class_replaced(model: Any) -> None:
    mlp = model.model.layers[0].mlp

    class Louder(type(mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 1.1

    mlp.__class__ = Louder


CHANGES = hooked_last_values, routed_to_one, rotated_slower, function_replaced, class_replaced


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return MODELS["mixtral"].build()


@pytest.fixture(scope="module")
def places(mixtral: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved cache of a prompt, and a shelf with the same prompt."""
    folder = tmp_path_factory.mktemp("places")
    cache = hf_kvret.FlatKVCache(mixtral.config, **COVERING_OPTIONS)
    mixtral.generate(IDS, past_key_values=cache, **RUN)
    cache.save_pretrained(folder / "cache")
    hf_kvret.Shelf(folder / "shelf").put(cache, IDS, mixtral)
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_another_computation_are_not_taken(
    mixtral: Any, places: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    model, words = copy.deepcopy(mixtral), "filled by another computation"
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    answer = model.generate(IDS, past_key_values=cache, **RUN)
    change(model)
    loaded = type(cache).from_pretrained(places / "cache", model.config)
    for filled in (cache, cache.fork(), loaded):
        with pytest.raises(ValueError, match=words):
            model.generate(answer, past_key_values=filled, **RUN)
    with pytest.raises(ValueError, match=words):
        type(cache).from_pretrained(places / "cache", model.config, model=model)
    shutil.copytree(places / "shelf", tmp_path / "shelf")
    options = {"cache_config": {**COVERING_OPTIONS, "shelf": tmp_path / "shelf", "shelf_step": 64}}
    call = {"cache_implementation": "flat", **options, "return_dict_in_generate": True, **RUN}
    # Each takes its own rows alone, and none of those that the other one has put.
    output = model.generate(IDS, **call)
    assert output.past_key_values.from_shelf == 0
    assert torch.equal(output.sequences, model.generate(IDS, **RUN))
    assert model.generate(IDS, **call).past_key_values.from_shelf == IDS.shape[1] - 1
    assert torch.equal(mixtral.generate(IDS, **call).sequences, answer)


@pytest.mark.parametrize("dense_below", [2000, 0])
def test_a_row_says_whether_it_begins_with_padding(
    mixtral: Any, tmp_path: Path, dense_below: int
) -> None:
    """Also where all cold tokens are padding, and no configuration names its id."""
    ids, mask = prompt(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, :97] = 0
    options = {**COVERING_OPTIONS, "dense_below": dense_below}
    cache = hf_kvret.FlatKVCache(mixtral.config, **options)
    answer = mixtral.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)
    changed = copy.deepcopy(mixtral)
    rotated_slower(changed)
    for row in (1, 0):
        one = cache.fork()
        one.batch_select_indices(torch.tensor([row]))
        one.save_pretrained(tmp_path)
        loaded = type(cache).from_pretrained(tmp_path, mixtral.config, model=mixtral)
        more = torch.cat([mask[[row]], torch.ones(1, answer.shape[1] - 100, dtype=torch.long)], 1)
        call = {"attention_mask": more, **RUN}
        plain = mixtral.generate(answer[[row]], **call)
        assert torch.equal(mixtral.generate(answer[[row]], past_key_values=loaded, **call), plain)
        with pytest.raises(ValueError, match="filled by another") if not row else nullcontext():
            type(cache).from_pretrained(tmp_path, mixtral.config, model=changed)


def test_rows_go_on_where_modules_compute_the_same(mixtral: Any, tmp_path: Path) -> None:
    """A hook that only looks, one of the head, other sizes of passes."""
    model, ids = copy.deepcopy(mixtral), prompt(2, 100)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    answer = model.generate(ids, past_key_values=cache, prefill_chunk_size=7, **RUN)
    cache.save_pretrained(tmp_path)
    seen: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, inputs, output: seen.append(module))
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    plain = model.generate(answer, **RUN)
    assert seen
    loaded = type(cache).from_pretrained(tmp_path, model.config, model=model)
    for filled in (cache, loaded):
        assert torch.equal(model.generate(answer, past_key_values=filled, **RUN), plain)
