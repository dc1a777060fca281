"""Arguments that do not fit are refused: for each the words of the error, and the call."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hf_kvret_kernels import centroid, codebook, paris, proxy, relevance
from hf_kvret_kernels.block_lse import block_lse
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec
from hf_kvret_kernels.merge import Partials, merge_partials
from hf_kvret_kernels.paged import PagedRows, copy_pages
from hf_kvret_kernels.prompt_attention import prompt_attention
from hf_kvret_kernels.resident import SlotMap, assign, fetch
from hf_kvret_kernels.step_attention import step_attention
from hf_kvret_kernels.top_k import top_k

from .paged_rows import TWO_ROWS, Kind, paged

Refusal = tuple[str, Callable[[], object]]
"""What the error says, as a regular expression, and the call."""


def of_proxies_and_relevance() -> Iterator[Refusal]:
    query, rows = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 6, 8)
    scores_of = partial(proxy.relevance, query)
    yield "rows is ", partial(scores_of, rows[..., :7], 2)
    yield r"rows is torch\.float64", partial(scores_of, rows.double(), 2)
    wide = torch.zeros(1, 4, 1, 257), torch.zeros(1, 2, 6, 257)
    yield "rank r is 257", partial(proxy.relevance, *wide, 2)
    yield "tokens must be contiguous", partial(scores_of, rows[:, :, ::2], 2)
    yield "heads are 3", partial(scores_of, rows, 3)
    mask = torch.ones(1, 7, dtype=torch.bool)
    yield r"valid is .* pass bool \[1, 6\]", partial(scores_of, rows, 2, valid=mask)
    maps = torch.zeros(1, 2, 8, 8)
    projection = proxy.Projection(maps, mean=torch.zeros(1, 4))
    yield "mean is .* pass fp32", partial(scores_of, rows, 2, projection=projection)
    kept = proxy.KeptQueries(torch.zeros(1, 4, 8, 8).mT, torch.zeros(2).long())
    yield "kept: pass contiguous", partial(proxy.top_indices, query, rows, 2, 3, kept=kept)

    scores = torch.zeros(1, 4, 1, 9)
    yield r"scores is torch\.float64", partial(top_k, scores.double(), 3)
    yield "count=10: 1 to 9", partial(top_k, scores, 10)
    yield r"scores is torch\.float64", partial(relevance.group_relevance, scores.double(), 2)
    yield "heads=3: must divide the 4", partial(relevance.group_relevance, scores, 3)
    yield "count=10: 1 to 9", partial(relevance.top_indices, scores, 2, 10)
    grouped, ids = scores.view(1, 2, 1, 2, 9), torch.zeros(1, 2, 1, 9, dtype=torch.int32)
    yield "G above 0", partial(relevance.best_ids, grouped[:, :, :, :0], ids, 3)
    too_few = ids[..., :8]
    yield r"ids is torch\.int32 \(1, 2, 1, 8\)", partial(relevance.best_ids, grouped, too_few, 3)
    yield "count=0: 1 to 9", partial(relevance.best_ids, grouped, ids, 0)
    learned = grouped.clone().requires_grad_()
    yield "requires gradients", partial(relevance.best_ids, learned, ids, 3)
    yield "pass one int64", partial(relevance.count_ids, ids, torch.zeros(1))
    ranked, ids = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4).int()
    three_heads = torch.zeros(1, 3, 1, 4)
    yield "a multiple of 2", partial(relevance.host_rank, three_heads, ids, 1)
    yield "pass int32", partial(relevance.host_rank, ranked, ranked, 1)
    yield "count=-1", partial(relevance.host_rank, ranked, ids, -1)


def of_codebooks_and_centroids() -> Iterator[Refusal]:
    table, codes = torch.zeros(1, 4, 1, 6), torch.zeros(1, 2, 5, dtype=torch.int16)
    for scores in (codebook.lookup, codebook.lookup_scores):
        yield r"table is .*: pass fp32 \[any, ", partial(scores, table.double(), codes)
        yield r"codes is .*: pass int16 \[1, any, any\]", partial(scores, table, codes.int())
    x, words = torch.zeros(1, 2, 5, 8), torch.zeros(2, 6, 8)
    query, three = torch.zeros(1, 4, 1, 8), words[[0, 1, 0]]
    yield "codebook has 3 heads", partial(codebook.score_table, query, three)
    many = torch.zeros(2, 32769, 8)
    yield "C=32769 codewords: pass 1 to 32768", partial(codebook.encode, x, many)
    yield r"pass fp32 or bf16 \[2, any, 8\]", partial(codebook.encode, x, words.half())

    query, norms = torch.zeros(2, 2, 7, 2, 16), torch.zeros(2, 2, 7, 2)
    cosines = partial(centroid.similarity, query)
    yield r"metric is .*: pass fp32 \[2, 2, 16, 16\]", partial(centroid.units, query, norms)
    yield r"centroids is .* \[2, 2, any, 2, 16\]", partial(cosines, query[:, :1], norms[:, :1])
    yield r"pass fp32 \[2, 2, 7, 2\]", partial(cosines, query, norms.double())
    low, index = torch.zeros(2, 2, 5, 3, dtype=torch.int16), torch.zeros(2, 2, 1, 4).long()
    yield r"pass uint8 \[2, 2, 5, 3\]", partial(centroid.take_lists, low, low, index)
    valid, keys = torch.ones(2, 50, dtype=torch.bool), torch.zeros(2, 2, 50, 16)
    yield "no token", partial(centroid.unite, torch.zeros(2, 1, 1, 3).int(), valid[:, :0])
    for words_of_error, count, chunk in (
        ("count=0", 0, (0, keys)),
        ("the chunk of slot 0", 3, (0, keys[..., :8])),
        ("the slots 1 to 50: valid covers 0 to 49", 3, (1, keys)),
        ("slot 0 is .* on meta", 3, (0, keys.to("meta"))),
    ):
        chunks: Callable[[], list[Any]] = partial(list, [chunk])
        yield (
            words_of_error,
            partial(centroid.top_keys, query, chunks, count, valid=valid, scale=1.0),
        )


def of_paris() -> Iterator[Refusal]:
    signs, levels = paris.random_signs(16, seed=7), paris.magnitude_levels()
    keys = torch.randn(1, 2, 3, 16)
    encode = partial(paris.encode, keys, signs, levels)
    yield "head dim 1025", partial(paris.encode, torch.zeros(1, 1, 1, 1025), signs, levels)
    yield "signs is ", partial(paris.encode, torch.zeros(1, 1, 1, 20), signs, levels)
    yield "levels is ", partial(paris.encode, keys, signs, levels[:4])
    yield "out has room", partial(encode, out=paris.ParisCodes.empty(1, 2, 4, 16))
    wide = vars(paris.ParisCodes.empty(1, 2, 6, 16)).values()
    gaps = paris.ParisCodes(*(plane[:, :, ::2] for plane in wide))
    yield "tokens must be contiguous", partial(encode, out=gaps)
    for dim in (48, 140, 1032):
        yield "no power of two", partial(paris.random_signs, dim, seed=0)

    stage: dict[str, Any] = {"rho": 0.5, "tiers": (0.5, 1.0)}
    codes, rotated = encode(), paris.rotate(torch.randn(1, 2, 1, 3, 16), signs)
    counts = paris.count_centroids(codes.sign)
    narrow = paris.ParisCodes(codes.sign, codes.record[..., 1:])
    search = partial(paris.search, rotated, None, survivors=2, **stage)
    yield "count=3, survivors=2", partial(search, codes, counts, levels, 3)
    yield r"codes\.record is ", partial(search, narrow, counts, levels, 1)
    yield "counts is ", partial(search, codes, counts[..., 1:], levels, 1)
    search = partial(paris.search, rotated, None, codes, counts, levels, 1, survivors=2)
    yield "rho=2", partial(search, **stage | {"rho": 2})
    yield "at most 127 tiers", partial(search, rho=0.5, tiers=(0.5,) * 128)
    yield "valid is torch.uint8", partial(search, valid=torch.ones(1, 3).byte(), **stage)
    means = torch.zeros(1, 2, 2, 16)
    yield "means is ", partial(search, means=means[:, :, :1], block_len=2, **stage)
    for length in (0, 3):
        yield f"block_len={length}", partial(search, means=means, block_len=length, **stage)
    yield "samples: pass some", partial(search, means=means, block_len=2, samples=means, **stage)
    one_head = rotated[:, :1], None, codes, counts[:, :1], levels, 1
    yield r"codes\.sign is .*\[1, 1, 3, 2\]", partial(paris.search, *one_head, survivors=2, **stage)
    narrow = rotated[..., :12], None, codes, counts, levels, 1
    yield "no power of two", partial(paris.search, *narrow, survivors=2, **stage)


def of_coded_rows() -> Iterator[Refusal]:
    yield "bits=8: pass one of 2, 3, 4", partial(HiggsCodec, 8, 64)
    for group in (4, 96, 2048):
        said = f"group={group}: pass a power of two from 8 to 1024"
        yield said, partial(HiggsCodec, 2, group)
    codec, x = HiggsCodec(2, 64), torch.zeros(2, 64)
    yield "rows have 96 numbers, group is 64: pass", partial(codec.encode, torch.zeros(2, 96))
    yield r"x is .*: pass fp32, bf16 or fp16 \[", partial(codec.encode, torch.tensor(1.0))
    yield "x requires gradients", partial(codec.encode, x.clone().requires_grad_())
    yield "leave backend out", partial(codec.encode, x.to("meta"), backend="cpp")
    codes, scales = codec.encode(x)
    decode = partial(codec.decode, codes)
    yield r"dtype=torch\.float64: choose", partial(decode, scales, torch.float64)
    yield r"scales is torch\.float16", partial(decode, scales.view(torch.float16))
    yield "rows have 60 numbers, group is 64", partial(codec.decode, codes[:, :15], scales)
    yield r"scales has shape \(1, 2\): pass \[2, 2\]", partial(decode, scales[:1])
    yield "scales is on meta, codes on cpu", partial(decode, scales.to("meta"))
    yield "as many as divide 2 rows", partial(decode, scales, added=torch.zeros(3, 64))

    coded, _ = Kind((64, 64), 2, 64).rows()
    pages = PagedRows([torch.zeros(9, 2, 8, 36)], coded.table, 32)
    said = "rows have 32 bytes of codes and 4 of scales; .* has 48 and 6"
    yield said, partial(replace, coded, key_dim=128)
    yield "has 48 and 4 for key_dim=64", partial(replace, coded, codec=HiggsCodec(3, 64))
    mean = torch.zeros(2, 2, 32)
    yield r"key_mean is .*: pass fp32 \[2, 2, 64\]", partial(replace, coded, key_mean=mean)
    yield "pass coded rows", partial(replace, coded, pages=pages)
    within = partial(replace, coded, value_dim=12, value_in_key=True)
    yield "value_dim=12 with value_in_key", within


def of_pages_and_slots() -> Iterator[Refusal]:
    chunk, table = torch.zeros(9, 2, 8, 32), torch.tensor(TWO_ROWS, dtype=torch.int32)
    yield "chunks is empty", partial(PagedRows, [], table, 16)
    yield r"chunks\[1\] is torch.float16", partial(PagedRows, [chunk, chunk.half()], table, 16)
    yield "contiguous", partial(PagedRows, [chunk.transpose(1, 2)], table, 16)
    said = r"chunks\[1\] is .* on meta: .* host memory"
    yield said, partial(PagedRows, [chunk, chunk.to("meta")], table, 16)
    yield "pass int32", partial(PagedRows, [chunk], table.long(), 16)
    yield "at least one column", partial(PagedRows, [chunk], table[:, :0], 16)
    yield "1 .. 31", partial(PagedRows, [chunk], table, 32)
    yield "value_in_key", partial(PagedRows, [chunk], table, 32, value_in_key=33)
    yield "value_in_key", partial(PagedRows, [chunk], table, 20, value_in_key=8)
    yield "value_in_key", partial(PagedRows, [chunk], table, 32, value_in_key=8, apart=True)
    for tokens in (33, -1):
        said = f"tokens={tokens}: the table has room for 0 to 32"
        yield said, partial(PagedRows, [chunk], table, 16, tokens=tokens)
    rows, far = PagedRows([chunk], table, 16), torch.zeros(2, 2, 1, 3, device="meta").int()
    yield "programs=0: at least 1", partial(copy_pages, rows, 0, 1, programs=0)
    for first, last in ((0, 5), (-1, 2), (3, 3)):
        said = rf"columns {first} \.\. {last}: the table has 4"
        yield said, partial(copy_pages, rows, first, last)
    mixed = PagedRows([chunk.to("meta"), chunk], table.to("meta"), 16)
    yield "the rows lie on cpu, ids on meta", partial(mixed.gather, far, backend="naive")
    yield "the page table is on meta, the rows on cpu: keep", mixed.addresses

    ints = torch.full((1, 2, 6), -1, dtype=torch.int32)
    new_map = partial(SlotMap, ints, ints, ints, torch.zeros(1, dtype=torch.int32))
    yield r"pass \[B, H, n\] and \[B, H, S\]", partial(replace, new_map(), table=ints[0])
    said = r"token is torch.int32 \(1, 1, 6\) .* pass int32 \[1, 2, 6\]"
    yield said, partial(replace, new_map(), token=ints[:, :1])
    yield r"clock is .* pass int32 \[1\]", partial(replace, new_map(), clock=ints[0, 0])
    twice = torch.cat([ints, ints], 2)
    yield "table has strides", partial(replace, new_map(), table=twice[..., ::2])
    yield "must be contiguous", partial(replace, new_map(), token=ints.mT.contiguous().mT)
    said = r"ids is torch.int64 .* pass int32 \[1, 2, any\]"
    yield said, partial(assign, new_map(), ints.long())
    yield "12 requests for 6 slots: ask for fewer", partial(assign, new_map(), twice)
    yield "tokens=7: the table is of 0 to 6", partial(assign, new_map(), ints, tokens=7)

    rows = paged("cpu", [[0, 1]], (2,), dims=(16, 8))
    fetch_into = partial(fetch, rows, ints, ints)
    buffer = torch.zeros(1, 2, 6, 24)
    said = "fetched is .* on meta: .* on cpu"
    yield said, partial(fetch, rows, ints, ints.to("meta"), buffer)
    yield r"\[1, 2, any, 24\]", partial(fetch_into, buffer[..., 1:])
    gaps = torch.cat([buffer, buffer], 2)[:, :, ::2]
    yield "pass a contiguous", partial(fetch_into, gaps)
    said = "rows have apart=True: a slot has"
    yield said, partial(fetch, replace(rows, apart=True), ints, ints, buffer)


def of_attention_to_chosen_rows() -> Iterator[Refusal]:
    rows, ids = paged("cpu", TWO_ROWS), torch.zeros(2, 2, 1, 3).int()
    coded, _ = Kind((64, 64), 2, 64).rows()
    far = PagedRows([rows.chunks[0].to("meta")], rows.table.to("meta"), 16)
    query = torch.zeros(2, 4, 1, 16)
    on_meta = query.to("meta"), far, ids.to("meta")
    assert isinstance(coded, CodedRows)
    joined = replace(coded, pages=replace(coded.pages, apart=False))
    apart, two = replace(rows, apart=True), query.expand(2, 4, 2, 16)
    for operation in (gather_attention, gather_scores):
        call = partial(operation, scale=1.0)
        yield "pass int32", partial(call, query, rows, ids.long())
        yield r"pass \[2, 2 or 4, 2, K\]", partial(call, two, rows, ids)
        yield "no multiple", partial(call, torch.zeros(2, 5, 1, 16), rows, ids)
        yield "must agree", partial(call, query[..., :12], rows, ids)
        yield "softcap", partial(call, query, rows, ids, softcap=-1.0)
        yield "choose one", partial(call, query, rows, ids, backend="x")
        yield "rows have apart=True: .* side by side", partial(call, query, apart, ids)
        yield "on meta: .* leave backend out", partial(call, *on_meta, backend="cpp")
        yield "Dk=16, .* Dk=64: they must agree", partial(call, query, coded, ids)
        yield "rows have apart=False: .* lie apart, as", partial(call, query, joined, ids)


def of_attention_to_windows() -> Iterator[Refusal]:
    query, key = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
    tensors: dict[str, Any] = {"query": query, "key": key, "value": key.clone()}
    for said, change in (
        ("cast", {"query": query.double()}),
        ("same", {"key": key.half()}),
        ("contiguous", {"key": torch.zeros(2, 2, 8, 5).transpose(2, 3)}),
        ("multiple of Hkv", {"query": torch.zeros(2, 3, 3, 8)}),
        ("do not fit", {"value": torch.zeros(2, 2, 6, 8)}),
        ("valid is", {"valid": torch.ones(2, 6, dtype=torch.bool)}),
        ("softcap", {"softcap": 0.0}),
        ("choose one of auto, naive, triton", {"backend": "cuda"}),
        ("no_grad", {"query": query.clone().requires_grad_()}),
    ):
        yield said, partial(prompt_attention, **tensors | change, scale=1.0, causal_offset=0)

    outs, lses = torch.zeros(2, 4, 3, 3, 8), torch.zeros(2, 4, 3, 3)
    good = Partials(outs, lses, torch.zeros(2, 4, 3, dtype=torch.int32))
    turned = torch.zeros(3, 4, 2, dtype=torch.int32).transpose(0, 2)
    ids, two = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for said, others, options in (
        ("do not fit", good, {"key": key[:, :1]}),
        ("S 1 or more", Partials(outs[:, :, :, :0], lses[..., :0]), {}),
        (r"others.outs is .* \[2, 4, 3, 3, 8\]", replace(good, outs=query), {}),
        ("pass contiguous zeros", replace(good, tickets=turned), {}),
        ("sink_logits is", good, {"sink_logits": torch.zeros(3)}),
        ("ids without selected", good, {"ids": ids}),
        ("pass one number", good, {"ids": ids, "selected": two}),
        ("out_dtype=torch.float64", good, {"out_dtype": torch.float64}),
    ):
        arguments = {**tensors, **options}
        yield (
            said,
            partial(step_attention, **arguments, others=others, scale=1.0, causal_offset=None),
        )

    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    yield "2 outs and 1 lses", partial(merge_partials, [out, out], [lse])
    yield r"outs\[0\] has shape \(2, 3, 4\)", partial(merge_partials, [out[0]], [lse])
    pair = [out, out[..., :3]]
    yield r"outs\[1\] is .* \[1, 2, 3, 4\]", partial(merge_partials, pair, [lse, lse])
    yield r"lses\[0\] is torch\.float64", partial(merge_partials, [out], [lse.double()])
    merged = partial(merge_partials, [out], [lse])
    yield "sink_logits is", partial(merged, sink_logits=torch.zeros(3))
    yield r"out_dtype=torch\.float64", partial(merged, out_dtype=torch.float64)

    positions = torch.zeros(2, 3).long()
    for at, block in ((positions, 48), (positions[:, :2], 64), (positions.to("meta"), 64)):
        said = r"pass int64 \[2, 3\] on cpu, and one of 16, 32"
        yield said, partial(block_lse, query, key, at, block=block, scale=1.0)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        pytest.param(words, call, id=words)
        for refusals in (
            *(of_proxies_and_relevance, of_codebooks_and_centroids, of_paris, of_coded_rows),
            *(of_pages_and_slots, of_attention_to_chosen_rows, of_attention_to_windows),
        )
        for words, call in refusals()
    ],
)
def test_what_does_not_fit_is_named(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=words):
        call()
