"""Window: sinks per row, recent tokens, and what moves between them."""

import torch

from hf_kvret import TokenBlock
from hf_kvret.layer.window import Capture, Window

NAN = float("nan")


def _tokens(batch: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, 2, n, 3]`` and values ``[B, 2, n, 5]`` that tell their row and slot."""
    slots = torch.arange(start, start + count, dtype=torch.float32)
    tags = torch.arange(batch)[:, None] * 1000 + slots
    keys = tags[:, None, :, None].expand(batch, 2, count, 3)
    return keys.clone(), -keys[..., :1].expand(batch, 2, count, 5).clone()


def _window(sink: int, batch: int, count: int) -> Window:
    window = Window(sink, *_tokens(batch, 0, 0))
    window.append(*_tokens(batch, 0, count))
    return window


def _flush(window: Window, count: int, valid: torch.Tensor | None = None) -> TokenBlock:
    block = window.pop(count, valid)
    window.take_sinks(block)
    return block


def _validity(window: Window, valid: torch.Tensor | None) -> list[list[bool]]:
    found = window.validity(valid)
    assert found is not None
    return found.tolist()


def _sink_tags(window: Window) -> list[list[int]]:
    """Slots by what stands in the sinks themselves; -1 where a sink is free."""
    tags = (window.keys[:, 0, : window.sink, 0] % 1000).long()
    return tags.masked_fill(window.sink_slots < 0, -1).tolist()


def test_popped_tokens_come_oldest_first_and_the_rest_stay() -> None:
    window = _window(2, 2, 10)
    block = window.pop(4, None)
    assert (block.start, block.end, len(block)) == (0, 4, 4)
    assert torch.equal(block.keys, _tokens(2, 0, 4)[0])
    assert torch.equal(block.values, _tokens(2, 0, 4)[1])
    keys, values = window.recent()
    assert torch.equal(keys, _tokens(2, 4, 6)[0]) and torch.equal(values, _tokens(2, 4, 6)[1])
    assert (window.start, window.end) == (4, 10)


def test_sinks_are_the_first_valid_tokens_of_each_row() -> None:
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[0, :3] = False  # padding on the left
    valid[1, 1:5] = False  # a hole in the middle
    window = _window(3, 3, 8)
    _flush(window, 6, valid)
    assert window.sink_slots.tolist() == [[3, 4, 5], [0, 5, -1], [0, 1, 2]]
    assert _sink_tags(window) == [[3, 4, 5], [0, 5, -1], [0, 1, 2]]


def test_a_row_whose_first_token_comes_late_gets_its_sinks_late() -> None:
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :7] = False
    window = _window(2, 2, 12)
    for count, expected in ((3, [-1, -1]), (3, [-1, -1]), (2, [7, -1]), (1, [7, 8])):
        _flush(window, count, valid)
        assert window.sink_slots[0].tolist() == expected
        assert window.sink_slots[1].tolist() == [0, 1]
    assert _sink_tags(window) == [[7, 8], [0, 1]]


def test_a_sink_that_the_mask_hides_later_is_not_attended() -> None:
    window = _window(2, 1, 6)
    _flush(window, 3)
    valid = torch.tensor([[True, False, True, True, True, True]])
    assert _validity(window, valid) == [[True, False, True, True, True]]


def test_spare_capacity_is_never_read() -> None:
    window = _window(2, 1, 3)
    window.keys[:, :, 5:], window.values[:, :, 5:] = NAN, NAN
    keys, values = window.tokens()
    assert keys.isfinite().all() and values.isfinite().all()
    for start in range(3, 90, 3):
        window.append(*_tokens(1, start, 3))
        used = window.sink + window.length
        window.keys[:, :, used:], window.values[:, :, used:] = NAN, NAN
    assert torch.equal(window.recent()[0], _tokens(1, 0, 90)[0])


def test_the_token_of_a_captured_step_that_broke_off_is_forgotten() -> None:
    window = _window(2, 1, 4)
    column, mask = torch.tensor([6]), torch.ones(1, window.capacity, dtype=torch.bool)
    window.capture = Capture(column, mask, None)
    window.append(*_tokens(1, 90, 1))
    window.capture = None
    window.crop(4)
    window.append(*_tokens(1, 4, 1))
    assert window.take_new() is None
    assert torch.equal(window.recent()[0], _tokens(1, 0, 5)[0])
