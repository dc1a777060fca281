"""The mask carrier: one small tensor that becomes the base's mask or a layer's padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from hf_kvret.attention.base import record_base
from hf_kvret.attention.masks import base_mask, mask_info, retrieval_mask, token_validity
from hf_kvret.generate.attach import ATTENTION_NAME
from hf_kvret.models.versions import as_argument

CPU = torch.device("cpu")
BATCH, TOTAL, WINDOW = 2, 24, 5
FLASH = "flash_attention_2"
BASES = ["sdpa", "eager", FLASH]
FUNCTIONS = {
    "causal": masking_utils.create_causal_mask,
    "sliding": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "sliding to both sides": masking_utils.create_bidirectional_sliding_window_mask,
    "recurrent": masking_utils.create_recurrent_attention_mask,
}
CAUSAL = ["causal", "sliding", "chunked"]


def _arguments(new: int, total: int, padding: torch.Tensor | None, **changes: Any) -> dict:
    return {
        "batch_size": 2, "q_length": new, "kv_length": total, "q_offset": total - new,
        "attention_mask": padding, "dtype": torch.float32, **changes,
    }  # fmt: skip


def _padding(total: int) -> torch.Tensor:
    padding = torch.ones(2, total, dtype=torch.bool)
    padding[1, : total // 3] = False
    return padding


def _padding_of(carrier: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return carrier.as_subclass(torch.Tensor)


def test_a_carrier_takes_no_memory_of_its_own() -> None:
    padding = _padding(12)
    assert retrieval_mask(**_arguments(1, 12, padding)).data_ptr() == padding.data_ptr()
    without = retrieval_mask(**_arguments(1, 12, None))
    assert without.shape == (2, 12) and without.untyped_storage().nbytes() == 1


def test_the_carrier_survives_contiguous_and_a_second_call() -> None:
    """What ``generate`` does to masks for a static cache, longer than the mask given."""
    for padding in (None, _padding(10), _padding(15)):
        carrier = retrieval_mask(**_arguments(4, 12, padding))
        copy = carrier.contiguous()
        assert mask_info(copy) is mask_info(carrier) is not None
        assert copy.shape == (2, 1, 4, 12) and copy.dtype == torch.bool
        assert _padding_of(copy).shape == (2, 12), "it takes no more memory than padding"
        assert retrieval_mask(**_arguments(4, 12, copy)) is copy


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda mask: mask & torch.ones(2, 12, dtype=torch.bool), "__and__"),
        (lambda mask: mask[:, None, None], "__getitem__"),
        (lambda mask: torch.where(mask, 0.0, 1.0), "where"),
        (bool, "__bool__"),
        (lambda mask: mask.expand(2, 12), "expand"),
        (lambda mask: mask.__setitem__((0, 0), False), "__setitem__"),
    ],
)
def test_computing_with_a_carrier_is_refused(
    compute: Callable[[torch.Tensor], object], operation: str
) -> None:
    """A model that makes a mask of its own of it would be wrong in silence (MiniMax-M3)."""
    carrier = retrieval_mask(**_arguments(12, 12, _padding(12)))
    with pytest.raises(ValueError, match=rf"attention mask \({operation}\).*restore\(model\)"):
        compute(carrier)


def test_a_layer_gets_the_padding_and_none_means_all_valid() -> None:
    assert token_validity(None, 1, 12, CPU) is None
    assert token_validity(retrieval_mask(**_arguments(1, 12, None)), 1, 12, CPU) is None
    padding = _padding(12)
    got = token_validity(retrieval_mask(**_arguments(3, 12, padding)), 3, 12, CPU)
    assert got is not None and torch.equal(got, padding)
    longs = token_validity(retrieval_mask(**_arguments(3, 12, padding.long())), 3, 12, CPU)
    assert longs is not None and longs.dtype == torch.bool and torch.equal(longs, padding)


def test_a_foreign_mask_is_refused_by_a_layer_and_passed_to_the_base() -> None:
    foreign = torch.zeros(2, 1, 3, 12)
    assert base_mask(foreign, "sdpa", CPU) is foreign
    with pytest.raises(ValueError, match=r"shape \(2, 1, 3, 12\).* custom 4D masks are not"):
        token_validity(foreign, 3, 12, CPU)


def test_attention_that_is_not_causal_is_refused_behind_cached_tokens() -> None:
    def to_both_sides(batch: int, head: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return causal_mask_function(batch, head, q, kv) | (kv < 11)

    arguments = _arguments(3, 12, None, mask_function=to_both_sides, use_vmap=True)
    with pytest.raises(ValueError, match="give the whole prompt in one forward pass"):
        token_validity(retrieval_mask(**arguments), 3, 12, CPU)
    prompt = _arguments(12, 12, None, mask_function=to_both_sides, use_vmap=True)
    assert token_validity(retrieval_mask(**prompt), 12, 12, CPU) is None


@pytest.mark.parametrize("padded", [False, True])
def test_a_function_that_comes_to_causal_attention_is_served(padded: bool) -> None:
    """Behind an image, whose tokens see each other, there is text: these queries see as others."""

    def past_image(batch: int, head: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return causal_mask_function(batch, head, q, kv) | (kv < 9)

    padding = _padding(12) if padded else None
    arguments = _arguments(3, 12, padding, mask_function=past_image, use_vmap=True)
    valid = token_validity(retrieval_mask(**arguments), 3, 12, CPU)
    assert (valid is None) != padded
    assert valid is None or valid.tolist() == _padding(12).tolist()


def test_one_query_sees_what_any_mask_shows_it() -> None:
    def hide_two(batch: int, head: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return causal_mask_function(batch, head, q, kv) & (kv != 2)

    arguments = _arguments(1, 6, _padding(6), mask_function=hide_two, use_vmap=True)
    seen = token_validity(retrieval_mask(**arguments), 1, 6, CPU)
    assert seen is not None
    expected = [[True, True, False, True, True, True], [False, False, False, True, True, True]]
    assert seen.tolist() == expected
    # A layer that reads another's keys may have the newest of several queries alone.
    arguments = _arguments(3, 6, _padding(6), mask_function=hide_two, use_vmap=True)
    seen = token_validity(retrieval_mask(**arguments), 1, 6, CPU)
    assert seen is not None and seen.tolist() == expected


def test_the_tokens_a_query_sees_are_a_mask_also_where_sdpa_needs_none() -> None:
    for queries in (6, 3):
        arguments = _arguments(queries, 6, None, mask_function=causal_mask_function)
        for seen in (retrieval_mask(**arguments)[:, 0], retrieval_mask(**arguments)[:, 0, :, :]):
            expected = torch.ones(2, queries, 6, dtype=torch.bool).tril(6 - queries)
            assert torch.equal(seen, expected)


def test_a_counter_that_moves_on_does_not_change_the_mask() -> None:
    """A static cache passes its own counter, and counts new tokens before the mask is made."""
    counter = torch.tensor(9)
    arguments = _arguments(3, 16, None) | {"q_offset": counter}
    expected = ALL_MASK_ATTENTION_FUNCTIONS["eager"](**arguments | {"q_offset": 9})
    carrier = retrieval_mask(**arguments)
    counter += 3
    assert torch.equal(base_mask(carrier, "eager", CPU), expected)


def _past(_batch: int, _head: int, _query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < TOTAL - 2


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"block_sequence_ids": torch.arange(TOTAL).expand(BATCH, -1) // 7},
    "function": {"or_mask_function": _past},
}


def _configs(base: str) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """One that has the base's attention, one that was switched from it to ours."""
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
    own, ours = (LlamaConfig(**shape, **sizes) for _ in range(2))
    own._attn_implementation = base
    ours._attn_implementation = ATTENTION_NAME
    record_base(ours, base)
    return own, ours


def _token_mask(kind: str) -> torch.Tensor | None:
    return None if kind == "none" else _padding(TOTAL).long()


def _make(name: str, config: PreTrainedConfig, mask: Any, new: int, **changes: Any) -> Any:
    """The mask that a function of transformers makes for ``new`` tokens behind others."""
    cache = DynamicCache()
    if new < TOTAL:
        past = torch.zeros(BATCH, 2, TOTAL - new, 8)
        cache.update(past, past, 0)
    return FUNCTIONS[name](
        config=config,
        inputs_embeds=torch.zeros(BATCH, new, 16),
        attention_mask=mask,
        **as_argument(cache),
        **changes,
    )


def _possible(case: dict[str, Any]) -> bool:
    """transformers has no chunked attention by flash, and its chunks take no blocks of tokens."""
    chunked = "chunked" in (case.get("outer"), case.get("inner"))
    return not (chunked and (case.get("base") == FLASH or case.get("change") == "blocks"))


@pytest.mark.factor("base", BASES)
@pytest.mark.factor("outer", CAUSAL)
@pytest.mark.factor("inner", list(FUNCTIONS))
@pytest.mark.factor("change", list(CHANGES))
@pytest.mark.factor("padding", ["none", "padded"])
@pytest.mark.factor("new", [1, 3, TOTAL])
@pytest.mark.allowed(when=_possible)
def test_a_mask_made_twice_is_that_of_the_base(
    base: str, outer: str, inner: str, change: str, padding: str, new: int
) -> None:
    own, ours = _configs(base)
    first = _make(outer, own, _token_mask(padding), new, **CHANGES[change])
    carrier = _make(outer, ours, _token_mask(padding), new, **CHANGES[change])
    expected = _make(inner, own, first, new)
    finished = first is not None and first.ndim == 4
    if finished:
        assert carrier.shape == first.shape
    if not finished and (inner == "chunked" or (inner == "recurrent" and new > 1)):
        # These compute with padding, so they say that they can't.
        with pytest.raises(ValueError, match=r"restore\(model\)"):
            _make(inner, ours, carrier, new)
        return
    again = _make(inner, ours, carrier, new)
    assert again is carrier or not finished or expected is None
    found = base_mask(again, base, CPU)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert torch.equal(found, expected)


def test_padding_is_read_only_where_the_form_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would wait for the device."""

    def forbidden(arguments: dict[str, Any]) -> None:
        raise AssertionError("the form was asked for")

    monkeypatch.setattr("hf_kvret.attention.masks.base_layout", forbidden)
    carrier = _make("causal", _configs("sdpa")[1], _token_mask("padded"), 1)
    assert base_mask(carrier, "sdpa", CPU) is not None
    with pytest.raises(AssertionError, match="the form was asked for"):
        _ = carrier.shape
