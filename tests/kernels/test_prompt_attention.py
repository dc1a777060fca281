"""prompt_attention against softmax attention in float64, in every place it runs."""

import os
import sys
from typing import Any

import pytest
import torch

from hf_kvret_kernels import _dispatch, host_library
from hf_kvret_kernels.prompt_attention import naive, prompt_attention, torch_flash

from .draws import HALF_ULP, TRITON, Place, attention64, attention_inputs, needs_triton

# Sums of a few hundred fp32 products of size 1: some hundred roundings of 6e-8 each.
FP32_ERROR = 1e-5
# For 16-bit inputs torch's flash attention takes exponentials of some 14 bits.
FAST_EXP_ERROR = 2e-4
# These round softmax weights to the inputs' dtype, and torch's flash attention results, too.
ROUNDS_WEIGHTS = {"triton": 1.0, "auto": 4.0}


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` in float64."""
    group, (queries, tokens) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    seen = torch.ones(len(query), 1, queries, tokens, dtype=torch.bool, device=query.device)
    if causal_offset is not None:
        seen = seen.tril(causal_offset)
    if valid is not None:
        seen = seen & valid[:, None, None, :]
    rows = (x.repeat_interleave(group, 1) for x in (key, value))
    return attention64(query, *rows, seen, scale, softcap)[:2]


def check(
    place: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal_offset: int | None,
    *,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in ``place`` with fp32 output, compare with the reference, return the result."""
    out, lse = prompt_attention(
        query, key, value, scale=0.3, causal_offset=causal_offset, valid=valid, softcap=softcap,
        out_dtype=torch.float32, backend=place[0],
    )  # fmt: skip
    want_out, want_lse = reference(query, key, value, 0.3, causal_offset, valid, softcap)
    assert out.dtype == lse.dtype == torch.float32
    assert (out[want_lse == float("-inf")] == 0).all()
    largest = value.abs().nan_to_num(0).max().item() if value.numel() else 0.0
    roundings = ROUNDS_WEIGHTS.get(place[0], 0.0)
    if place[0] == "cpp" and query.dtype == torch.bfloat16:
        path = os.environ.get(host_library.ISA_VARIABLE) or host_library.paths()[0]
        roundings = float(path == "avx512_bf16")
    rounding = roundings * HALF_ULP[query.dtype] * largest
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=FP32_ERROR + rounding)
    fast_exp = place[0] == "auto" and query.dtype != torch.float32
    lse_error = FAST_EXP_ERROR if fast_exp else FP32_ERROR
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=lse_error)
    return out, lse


@pytest.mark.factor("queries", [0, 16, 70])
@pytest.mark.factor("tokens", [0, 1, 130])
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("offset", ["none", "end", "early", "late"])
def test_it_is_attention(
    where: Place, offset: str, dtype: torch.dtype, tokens: int, queries: int
) -> None:
    """With more queries than keys the offset is negative, and the first queries see nothing."""
    offsets = {"none": None, "end": tokens - queries, "early": -2, "late": tokens}
    sizes: dict[str, Any] = {"batch": 1, "queries": queries, "tokens": tokens, "dims": (40, 24)}
    check(where, *attention_inputs(where, dtype=dtype, **sizes), offsets[offset])


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("causal_offset", [None, 114])
@pytest.mark.factor("softcap", [None, 0.5, 30.0])
@pytest.mark.factor("poison", [float("nan"), float("inf")])
def test_padding_and_holes_differ_by_row_and_may_hold_anything(
    where: Place, poison: float, softcap: float | None, causal_offset: int | None
) -> None:
    sizes: dict[str, Any] = {"batch": 4, "heads": 2, "kv_heads": 1, "queries": 16, "tokens": 130}
    query, key, value = attention_inputs(where, **sizes)
    valid = torch.ones(4, 130, dtype=torch.bool, device=where[1])
    valid[0, :70] = valid[1, 40:110] = valid[2] = False
    key, value = (x.masked_fill(~valid[:, None, :, None], poison) for x in (key, value))
    query *= 1.0 if softcap is None else 8.0
    check(where, query, key, value, causal_offset, valid=valid, softcap=softcap)


def test_scores_far_from_zero_do_not_overflow(where: Place) -> None:
    query, key, value = attention_inputs(where, batch=1)
    out, lse = prompt_attention(
        300.0 * query, key, value, scale=1.0, causal_offset=None, backend=where[0]
    )
    want_out, want_lse = reference(300.0 * query, key, value, 1.0, None)
    # Scores near 5,000 carry errors of 5e-4 and more, and the softmax passes them on.
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


def test_strided_views_are_read_in_place(where: Place) -> None:
    query, key, value = attention_inputs(where, queries=5, tokens=40)
    expected = check(where, query, key, value, 35)
    rows = torch.cat([key, value], -1).transpose(1, 2).contiguous().transpose(1, 2)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2), rows[..., :40], rows[..., 40:]
    mask = torch.ones(1, 1, dtype=torch.bool, device=where[1]).expand(2, 40)
    result = check(where, *turned, 35, valid=mask)
    torch.testing.assert_close(result, expected, rtol=0, atol=FP32_ERROR)
    wide = torch.rand(2, 80, device=where[1]) > 0.5
    check(where, *turned, None, valid=wide[:, ::2])


def test_output_dtype_is_the_querys_unless_asked(where: Place) -> None:
    query, key, value = attention_inputs(where, dtype=torch.float16)
    arguments: dict[str, Any] = {"scale": 0.3, "causal_offset": 60, "backend": where[0]}
    out, lse = prompt_attention(query, key, value, **arguments)
    wide, _ = prompt_attention(query, key, value, out_dtype=torch.float32, **arguments)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert torch.equal(out, wide.half())


@needs_triton
@pytest.mark.parametrize("causal_offset", [None, 5])
def test_splitting_the_keys_changes_nothing(causal_offset: int | None) -> None:
    """With offset 5 the later splits see no key at all."""
    from hf_kvret_kernels.prompt_attention import triton

    tensors = attention_inputs(TRITON, queries=2, tokens=300)
    valid = torch.rand(2, 300, device=TRITON[1]) > 0.3
    valid[1, :128] = False
    call = _dispatch.DenseCall(*tensors, 0.3, causal_offset, valid, None)
    whole, parts = (triton.prompt_attention(call, torch.float32, splits) for splits in (1, 4))
    torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_ERROR)


@pytest.mark.parametrize("queries", [1, 37])
def test_many_small_torch_blocks_agree(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    place = ("naive", "cpu")
    monkeypatch.setattr(naive, "_ROWS", 8)
    monkeypatch.setattr(naive, "_SCORES", 8)
    monkeypatch.setattr(naive, "_KEYS", (16, 16))
    valid = torch.rand(2, 70) > 0.5
    valid[0, 16:50] = False
    valid[1, 20:64] = False
    tensors = attention_inputs(place, heads=4, queries=queries, tokens=70)
    check(place, *tensors, 70 - queries, valid=valid, softcap=2.0)
    check(place, *tensors, 70 - queries)


def test_torch_never_forms_the_whole_matrix(watch: Any) -> None:
    sizes = watch(torch, "bmm", lambda left, right: left.shape[1] * right.shape[2])
    query, key, value = attention_inputs(
        ("naive", "cpu"), batch=1, queries=1100, tokens=1100, dims=(8, 40)
    )
    prompt_attention(query, key, value, scale=1.0, causal_offset=0, backend="naive")
    assert max(sizes) <= naive._SCORES
    # Blocks above the diagonal are left out: not much more than half the matrix is computed.
    assert sum(sizes) < 0.7 * 2 * 1100 * 1100


LONG = ("auto", "cpu")


@pytest.fixture
def flash_calls(watch: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call of torch's operator, which goes first: whether it is causal."""
    monkeypatch.setattr("hf_kvret_kernels.prompt_attention.compiled", lambda query: False)
    return watch(torch_flash, "_flash", lambda *arguments: arguments[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal_offset", [None, -5, 0, 40, 90])
def test_long_passes_on_a_cpu_run_through_flash_attention(
    flash_calls: list[bool], causal_offset: int | None, dtype: torch.dtype
) -> None:
    tensors = attention_inputs(LONG, queries=50, tokens=90, dtype=dtype)
    check(LONG, *tensors, causal_offset)
    seen_by_all = causal_offset is None or causal_offset > 0
    triangle = causal_offset is not None and causal_offset < 90
    assert flash_calls == [False] * seen_by_all + [True] * triangle


@pytest.mark.parametrize("causal_offset", [None, -7, 0, 60])
def test_flash_leaves_padding_out(flash_calls: list[bool], causal_offset: int | None) -> None:
    query, key, value = attention_inputs(LONG, batch=5, queries=40, tokens=100)
    valid = torch.zeros(5, 100, dtype=torch.bool)
    for row, (start, stop) in enumerate([(0, 100), (30, 100), (0, 70), (80, 95), (0, 0)]):
        valid[row, start:stop] = True
    dirty = ~valid[:, None, :, None]
    clean = check(LONG, query, key, value, causal_offset, valid=valid)
    poisoned = (tensor.masked_fill(dirty, float("nan")) for tensor in (key, value))
    again = check(LONG, query, *poisoned, causal_offset, valid=valid)
    assert flash_calls
    torch.testing.assert_close(again, clean, rtol=0, atol=0)


def test_what_flash_attention_cannot_do_runs_elsewhere(
    flash_calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = attention_inputs(LONG, queries=40, tokens=100)
    holes = torch.ones(2, 100, dtype=torch.bool)
    holes[1, 50] = False
    check(LONG, query, key, value, 60, valid=holes)
    check(LONG, query, key, value, 60, softcap=2.0)
    check(LONG, query[:, :, :15], key, value, 85)
    check(LONG, *attention_inputs(LONG, queries=40, dims=(40, 24)), 23)
    monkeypatch.setattr(torch_flash, "_NAME", "an_operator_that_torch_has_not")
    check(LONG, query, key, value, 60)
    assert not flash_calls


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ImportError, match="pip install triton"):
        prompt_attention(query, query, query, scale=1.0, causal_offset=0, backend="triton")
