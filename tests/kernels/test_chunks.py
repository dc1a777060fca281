"""Entries of tensors in several chunks, against the same tensor in one chunk."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels.paged import select


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 0, 5, 1)], ids=str)
@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("shape", [(), (2, 4)], ids=str)
def test_entries_are_counted_across_all_chunks(
    sizes: tuple[int, ...], count: int, shape: tuple[int, ...]
) -> None:
    whole = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0)).half()
    index = torch.randint(0, 7, (count,), generator=torch.Generator().manual_seed(1))
    selected = select(whole.split(sizes), index)
    assert selected.dtype == whole.dtype and torch.equal(selected, whole[index])


def test_the_result_lies_where_it_is_asked_for() -> None:
    chunks = [torch.zeros(2, 3), torch.zeros(4, 3)]
    index = torch.tensor([5, 1])
    assert select(chunks, index).device.type == "cpu"
    assert select(chunks, index, torch.device("meta")).device.type == "meta"
    assert select(chunks[:1], index[1:], torch.device("meta")).shape == (1, 3)


def test_the_result_is_a_tensor_of_its_own() -> None:
    chunk = torch.zeros(2, 3)
    select([chunk], torch.arange(2)).fill_(1.0)
    assert not chunk.any()
