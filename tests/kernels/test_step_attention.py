"""The end of a step at once: the window, chunks of other tokens, learned sinks, a count."""

from typing import Any

import pytest
import torch

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels.gather_attention import gather_partials
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials, merge_partials
from hf_kvret_kernels.prompt_attention import prompt_attention
from hf_kvret_kernels.step_attention import NewToken, naive, step_attention

from .draws import Place, attention_inputs
from .paged_rows import paged, random_ids

INF = float("inf")
# Sums of some dozen fp32 products of size 1, added up in another order.
FP32_ERROR = 1e-5


def inputs(place: Place, **sizes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A decode step and its window."""
    return attention_inputs(place, **({"queries": 1, "tokens": 70, "dims": (16, 16)} | sizes))


def some_chunks(query: torch.Tensor, splits: int, dim: int, tickets: bool = True) -> Partials:
    """Attention to anything in ``splits`` chunks, some of them empty; of the first query all."""
    shape, device = query.shape[:3], query.device
    outs, lses = torch.randn(*shape, splits, dim), 3 * torch.randn(*shape, splits)
    lses[torch.rand(lses.shape) < 0.3] = -INF
    lses[:1, :1, :1] = -INF
    outs[lses == -INF] = 0.0
    zeros = torch.zeros(shape, dtype=torch.int32, device=device) if tickets else None
    return Partials(outs.to(device), lses.to(device), zeros)


def check(
    place: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Partials,
    causal_offset: int | None = None,
    *,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In ``place`` with fp32 output: as attention, merge and count after one another, in torch.

    With ``splits`` the Triton kernel shares its work out among so many programs.
    """
    # Without queries there are no ids to count.
    shape = (3, 5, 7 if query.shape[2] else 0)
    ids = torch.randint(-2, 9, shape, device=place[1]).clamp(min=-1)
    selected = torch.tensor(5, device=place[1])
    if splits is None or place[0] != "triton":
        out, lse = step_attention(
            query, key, value, others, scale=0.3, causal_offset=causal_offset, valid=valid,
            softcap=softcap, sink_logits=sinks, ids=ids, selected=selected,
            out_dtype=torch.float32, backend=place[0],
        )  # fmt: skip
    else:
        from hf_kvret_kernels.step_attention import triton

        call = DenseCall(query, key, value, 0.3, causal_offset, valid, softcap)
        more = sinks, ids, selected, torch.float32
        out, lse = triton.step_attention(call, others, *more, splits=splits)
    near = prompt_attention(
        query, key, value, scale=0.3, causal_offset=causal_offset, valid=valid, softcap=softcap,
        out_dtype=torch.float32, backend="naive",
    )  # fmt: skip
    outs, lses = [near[0], others.outs], [near[1], others.lses]
    want_out, want_lse = merge_partials(outs, lses, sink_logits=sinks, backend="naive")
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_ERROR)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=FP32_ERROR)
    assert selected.item() == 5 + (ids >= 0).sum().item()
    assert others.tickets is None or not others.tickets.any()
    return out, lse


# Tokens, query heads, queries, chunks of others, and programs that share the work.
SIZES = {
    "one token": (1, 2, 1, 2, None),
    "no token, one tile": (0, 40, 1, 9, None),
    "two tiles": (130, 40, 1, 2, None),
    "drafts": (130, 16, 19, 9, None),
    "more drafts than tokens": (1, 16, 19, 1, None),
    "no query": (9, 2, 0, 2, None),
    "more programs than keys": (40, 2, 2, 1, 20),
    "more chunks than programs": (150, 2, 2, 40, 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_it_is_the_union_of_window_and_chunks(place: Place, name: str) -> None:
    """With more queries than tokens the first ones see none of these; tiles share no ticket."""
    tokens, heads, queries, chunks, splits = SIZES[name]
    sizes: dict[str, Any] = {"batch": 1, "heads": heads, "queries": queries, "tokens": tokens}
    tensors = inputs(place, dims=(9, 5), **sizes)
    offset = None if queries == 1 else tokens - queries
    check(place, *tensors, some_chunks(tensors[0], chunks, 5), offset, splits=splits)


@pytest.mark.factor("masked", [False, True])
def test_values_may_lie_in_wide_keys_of_many_heads(place: Place, masked: bool) -> None:
    """Keys in two parts, more query heads than a program takes, the last of them alone."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 17, "kv_heads": 1, "queries": 2}
    query, key, _ = inputs(place, dims=(520, 512), **sizes)
    valid = torch.rand(1, 70, device=place[1]) < 0.8 if masked else None
    check(place, query / 8, key, key[..., :512], some_chunks(query, 3, 512), 68, valid=valid)


@pytest.mark.parametrize(
    ("dims", "heads", "column"), [((9, 5), 40, 3), ((16, 16), 2, 129), ((520, 512), 2, 64)]
)
def test_a_new_token_is_written_before_it_is_attended_to(
    place: Place, dims: tuple[int, int], heads: int, column: int
) -> None:
    """Of one tile of queries or two; values of 512 lie in their keys."""
    query, key, value = inputs(place, heads=heads, tokens=130, dims=dims)
    value = key[..., :512] if dims[1] == 512 else value
    others, at = some_chunks(query, 3, dims[1]), torch.tensor([column], device=place[1])
    rows = [side[:, :, column : column + 1].clone() for side in (key, value)]
    call: dict[str, Any] = {"scale": 0.1, "causal_offset": None, "backend": place[0]}
    want = step_attention(query, key, value, others, **call)
    whole = key.clone(), value.clone()
    key[:, :, column] = float("nan")
    value[:, :, column] = float("nan")
    result = step_attention(query, key, value, others, new=NewToken(*rows, at), **call)
    assert all(map(torch.equal, (key, value, *result), (*whole, *want)))


# A case has query heads, queries, tokens, dims, programs, ids, and whether each head has its own.
MEANS: dict[str, tuple[int, int, int, tuple[int, int], int | None, int, bool]] = {
    "one query": (4, 1, 70, (16, 16), None, 300, False),
    "heads that select for themselves": (4, 1, 70, (9, 5), None, 7, True),
    "groups of three": (6, 5, 70, (24, 40), 3, 600, False),
    "two tiles": (40, 1, 130, (16, 16), None, 20, False),
    "more programs than moments": (2, 2, 40, (4, 3), 20, 5, True),
    "a program": (2, 1, 9, (130, 16), 1, 40, False),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.factor("softcap", [None, 20.0])
@pytest.mark.factor("width", [0.02, 1.0, 30.0], ids=["alike", "some", "far apart"])
def test_what_is_not_selected_counts_by_its_mean(
    place: Place, name: str, softcap: float | None, width: float
) -> None:
    """Of 600 tokens all, some and none are selected; of the last sequence there are none."""
    heads, queries, tokens, dims, splits, count, by_head = MEANS[name]
    sizes: dict[str, Any] = {"batch": 4, "heads": heads, "queries": queries, "tokens": tokens}
    query, key, value = inputs(place, dims=dims, **sizes)
    device, lead = place[1], (4, value.shape[1])
    spread = torch.randn(*lead, 1 + sum(dims), sum(dims), device=device) * width / sum(dims)
    moments = spread @ spread[:, :, 1 : 1 + dims[0]].mT
    counts = torch.tensor([[count], [600], [600], [0]], device=device)
    mean = MeanToken(moments, torch.randn(*lead, 1, dims[1], device=device), counts)
    shape = (4, heads if by_head else value.shape[1], queries, count)
    ids = torch.arange(count, dtype=torch.int32, device=device).expand(shape).contiguous()
    ids[1][torch.rand(ids[1].shape, device=device) < 0.3] = -1
    ids[2:] = -1
    others, selected = some_chunks(query, 3, dims[1]), torch.tensor(5, device=device)
    offset = None if queries == 1 else tokens - queries
    call = DenseCall(query, key, value, 0.3, offset, None, softcap)
    more = others, None, ids, selected, torch.float32, None, mean
    if splits is None or place[0] != "triton":
        options: dict[str, Any] = {"scale": 0.3, "causal_offset": offset, "softcap": softcap}
        options |= {"ids": ids, "selected": selected, "out_dtype": torch.float32, "mean": mean}
        result = step_attention(query, key, value, others, **options, backend=place[0])
    else:
        from hf_kvret_kernels.step_attention import triton

        result = triton.step_attention(call, *more, splits=splits)
    want = naive.step_attention(call, *more)
    # The normal distribution is known to 1e-6, and logits are as large as the spread's square.
    torch.testing.assert_close(result, want, rtol=1e-5, atol=3 * FP32_ERROR)
    assert selected.item() == 5 + 2 * (ids >= 0).sum().item()
    assert others.tickets is not None and not others.tickets.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("queries", [1, 5])
@pytest.mark.factor("softcap", [None, 2.0])
@pytest.mark.factor("with_sinks", [False, True])
@pytest.mark.factor("splits", [None, 9], ids=["long chunks", "a tile each"])
def test_padding_caps_and_learned_sinks(
    place: Place, splits: int | None, with_sinks: bool, softcap: float | None, queries: int
) -> None:
    """Rows with padding, a hole, neither and no token; none of what is masked may show."""
    query, key, value = inputs(place, batch=4, queries=queries, tokens=75)
    valid = torch.ones(4, 75, dtype=torch.bool, device=place[1])
    valid[0, :70] = valid[1, 30:66] = valid[2] = False
    sinks = torch.linspace(-3.0, 5.0, 4, device=place[1]) if with_sinks else None
    dirty = ~valid[:, None, :, None]
    key, value = key.masked_fill(dirty, float("nan")), value.masked_fill(dirty, float("nan"))
    others, offset = some_chunks(query, 4, 16), None if queries == 1 else 70
    others.outs[2], others.lses[2] = 0.0, -INF
    options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "splits": splits}
    out, lse = check(place, query, key, value, others, offset, valid=valid, **options)
    assert (out[2] == 0).all()
    assert lse[2].isfinite().all() if with_sinks else (lse[2] == -INF).all()


@pytest.mark.factor("count", [0, 513, 1600])
@pytest.mark.factor("dtype", [torch.int32, torch.int64])
def test_ids_are_counted_once_each_time(place: Place, count: int, dtype: torch.dtype) -> None:
    """As a replayed step does it again: with the same tickets, and other ids in the same memory.

    Of two programs each has none, a block, or several, the last of which is not whole.
    """
    query, key, value = inputs(place, batch=1, queries=1, tokens=9)
    others = some_chunks(query, 2, 16)
    ids = torch.arange(count, device=place[1]).to(dtype).view(1, 1, 1, count)
    selected = torch.tensor(5, device=place[1])
    options: dict[str, Any] = {"scale": 0.3, "causal_offset": None, "backend": place[0]}
    results = []
    for missing in (0, min(count, 600), count):
        ids[..., count - missing :] = -1
        before = selected.item()
        results += [
            step_attention(query, key, value, others, **options, ids=ids, selected=selected)
        ]
        assert selected.item() == before + count - missing
        assert others.tickets is not None and not others.tickets.any()
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_chunks_without_tickets_strided_masks_and_views(place: Place) -> None:
    query, key, value = inputs(place, queries=2, tokens=40)
    others = some_chunks(query, 3, 16, tickets=False)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.rand(2, 80, device=place[1]) > 0.5
    rows = torch.cat([key, value], -1).transpose(1, 2).contiguous().transpose(1, 2)
    valid = wide[:, ::2]
    result = check(place, turned, rows[..., :16], rows[..., 16:], others, valid=valid)
    plain = check(place, query, key, value, others, valid=valid.contiguous())
    torch.testing.assert_close(result, plain, rtol=0, atol=FP32_ERROR)


def test_the_output_has_the_querys_dtype_unless_asked(place: Place) -> None:
    query, key, value = inputs(place, dtype=torch.float16)
    others = some_chunks(query, 2, 16)
    options: dict[str, Any] = {"scale": 0.3, "causal_offset": None, "backend": place[0]}
    out, lse = step_attention(query, key, value, others, **options)
    exact, _ = step_attention(query, key, value, others, **options, out_dtype=torch.float32)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert torch.equal(out, exact.half())


def test_what_attention_to_selected_rows_left_is_taken(place: Place) -> None:
    """With its tickets."""
    query, key, value = inputs(place, queries=2, tokens=20)
    rows = paged(place[1])
    partials = gather_partials(query, rows, random_ids(rows, 2, 2, 20), scale=0.3, backend=place[0])
    check(place, query, key, value, partials, 18)
