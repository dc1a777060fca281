"""The shift at every length is the one that a model gives to the text cut there."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.models.position_shift import UNKNOWN, shifts

from ..pictures import padded, picture_model, picture_prompt

GRIDS = ((8, 12), (4, 4))


def positions_of(model, inputs):
    """Positions and shift as the model itself computes them for a whole prompt."""
    names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
    given = {name: inputs[name] for name in names if name in inputs}
    if "image_grid_thw" not in given:
        mask = given["attention_mask"]
        return (mask.cumsum(1) - 1).clamp(0)[None].expand(3, -1, -1), torch.zeros(len(mask), 1)
    return model.model.get_rope_index(inputs["input_ids"], **given)


def cut(model, inputs, length):
    """``inputs`` with the first ``length`` tokens; None where that cuts through a picture."""
    ids, mark = inputs["input_ids"][:, :length], model.config.image_token_id
    part = {name: x[:, :length] for name, x in inputs.items() if x.shape[1] >= 60 and x.ndim == 2}
    part = {name: part[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    inside = ids[0, -1:] == mark and inputs["input_ids"][0, length] == mark
    pictures = int(((ids[0] == mark).int().diff() == 1).sum())
    if pictures:
        part["image_grid_thw"] = inputs["image_grid_thw"][:pictures]
    return None if bool(inside) else part


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", "glm_ocr"]
    + [pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2_vl", "qwen3_vl", "glm4v_moe")],
)
def test_the_shift_at_each_length_is_that_of_the_text_cut_there(name: str) -> None:
    model = picture_model(name)
    inputs = picture_prompt(model, 1, GRIDS)
    positions, shift = positions_of(model, inputs)
    result = shifts(positions, inputs["attention_mask"], 0, None, 1)
    length = inputs["input_ids"].shape[1]
    assert result.shape == (1, length + 1) and result.dtype == torch.int32
    assert result[0, -1] == shift.item()
    known = 0
    for count in range(1, length):
        part = cut(model, inputs, count)
        if part is None:
            assert result[0, count] == UNKNOWN, count
        elif result[0, count] != UNKNOWN:
            assert result[0, count] == positions_of(model, part)[1].item(), count
            known += 1
    pictures = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert known == length - 1 - pictures + len(GRIDS)


def test_text_behind_pictures_that_shift_nothing_has_no_shift() -> None:
    """The pictures of this type have rows and columns from 0, and their borders are text."""
    model = picture_model("hunyuan_vl")
    inputs = picture_prompt(model, 1, GRIDS)
    result = shifts(positions_of(model, inputs)[0], None, 0, None, 1)
    marks = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert set(result[0].tolist()) == {0, UNKNOWN}
    assert int((result == UNKNOWN).sum()) == marks - 2 * len(GRIDS)


def test_padding_and_other_rows_change_nothing() -> None:
    model = picture_model("qwen2_5_vl")
    prompts = [
        picture_prompt(model, seed, grids) for seed, grids in enumerate((GRIDS, (), [(4, 8)]))
    ]
    batch = padded(prompts)
    positions, shift = positions_of(model, batch)
    result = shifts(positions, batch["attention_mask"], 0, None, 3)
    assert torch.equal(result[:, -1:].long(), shift)
    for row, prompt in zip(result, prompts, strict=True):
        alone = shifts(positions_of(model, prompt)[0], None, 0, None, 1)[0]
        padding = len(row) - len(alone)
        assert torch.equal(row[padding:], alone)
        assert not row[:padding].any()


def test_a_later_pass_goes_on_from_the_shift_before_it() -> None:
    """Positions with a row for all rows, and a mask with a hole, as padded second turns have."""
    before = torch.tensor([[-24], [0]])
    mask = torch.ones(2, 50)
    mask[1, 42:45] = 0
    tokens = mask.cumsum(1)[:, 40:] - 1
    result = shifts((tokens + before)[None].long(), mask, 40, before, 2)
    assert result.tolist() == [[-24] * 11, [0] * 11]
    same = shifts(torch.arange(16, 26)[None], None, 40, torch.tensor([[-24]] * 3), 3)
    assert same.tolist() == [[-24] * 11] * 3
