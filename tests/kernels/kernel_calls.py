"""Calls of every launcher of an operation, of the shapes that make different code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch


def calls(operation: str) -> Iterator[partial]:
    """Calls of every launcher of ``operation``, in bf16 where it takes that."""
    from hf_kvret_kernels.block_lse import triton as blocks
    from hf_kvret_kernels.gather_attention import triton as gather
    from hf_kvret_kernels.gather_scores import triton as scores_of
    from hf_kvret_kernels.paged import PagedRows
    from hf_kvret_kernels.prompt_attention import triton as prompt

    half = torch.bfloat16
    rows = PagedRows([torch.zeros(8, 2, 64, 256, dtype=half)], torch.zeros(1, 8).int(), 128)
    ids = torch.zeros(1, 2, 1, 256, dtype=torch.int32)
    if operation == "gather_attention":
        for softcap in (None, 50.0):
            query = torch.zeros(1, 8, 1, 128, dtype=half)
            yield partial(gather.gather_partials, query, rows, ids, 0.1, softcap)
    elif operation == "gather_scores":
        for softcap in (None, 50.0):
            query = torch.zeros(1, 8, 1, 128, dtype=half)
            yield partial(scores_of.gather_scores, query, rows, ids, 0.1, softcap)
    elif operation == "centroid":
        yield from _calls_of_centroids()
    elif operation == "codebook":
        yield from _calls_of_codebooks()
    elif operation == "higgs":
        yield from _calls_of_higgs()
    elif operation == "paged":
        from hf_kvret_kernels.paged_triton import copy_pages, gather_rows

        yield partial(gather_rows, rows, ids)
        coded = torch.zeros(8, 2, 64, 132, dtype=torch.uint8)
        yield partial(gather_rows, PagedRows([coded], rows.table, 128, apart=True), ids)
        odd = PagedRows([torch.zeros(8, 2, 1, 7, dtype=half)], torch.zeros(1, 8).int(), 5)
        lone = PagedRows([torch.zeros(1, 1, 64, 256, dtype=half)], torch.zeros(1, 1).int(), 128)
        for source, programs in ((rows, None), (odd, 3), (lone, 1)):
            yield partial(copy_pages, source, 0, source.table.shape[1], programs)
    elif operation == "proxy":
        from hf_kvret_kernels.proxy import ROW_DTYPES, triton_scores

        valid = torch.ones(1, 501, dtype=torch.bool)
        for dtype in ROW_DTYPES:
            for rank, queries, heads, softcap in ((32, 1, 8, None), (200, 9, 2, 50.0)):
                query = torch.zeros(1, 8, queries, rank)
                proxies = torch.zeros(1, 2, 501, rank, dtype=dtype)
                offset = None if softcap is None else torch.zeros(1, 8, queries)
                arguments = (query, proxies, heads, valid, offset, softcap)
                yield partial(triton_scores.relevance, *arguments)
    elif operation == "top_k":
        from hf_kvret_kernels.top_k import triton

        for length, count in ((501, 100), (5001, 1000), (5001, 5000)):
            yield partial(triton.top_k, torch.zeros(1, 2, 1, length), count)
    elif operation in ("merge", "relevance"):
        yield from _calls_of_merging() if operation == "merge" else _calls_of_relevance()
    elif operation == "latents":
        yield from _calls_of_latents()
    elif operation == "resident":
        from hf_kvret_kernels.resident import SlotMap
        from hf_kvret_kernels.resident import triton as resident

        clock = torch.zeros(1, dtype=torch.int32)
        for count, size in ((256, 512), (3000, 5000)):
            expected = torch.zeros(1, 2, count, dtype=torch.int32)
            tokens = torch.zeros(1, 2, size, dtype=torch.int32)
            slots = SlotMap(torch.zeros(1, 2, 8192).int(), tokens, tokens.clone(), clock)
            yield partial(resident.assign, slots, expected, 8192)
        odd = PagedRows([torch.zeros(8, 2, 64, 13)], torch.zeros(1, 8).int(), 5)
        for source in (rows, odd):
            buffer = torch.zeros(1, 2, 512, source.width, dtype=source.dtype)
            yield partial(resident.fetch, source, ids[:, :, 0], ids[:, :, 0], buffer)
    elif operation == "prompt_attention":
        for queries, dim, valid in ((1, 128, None), (256, 64, torch.ones(1, 512).bool())):
            query = torch.zeros(1, 8, queries, dim, dtype=half)
            key = torch.zeros(1, 2, 512, dim, dtype=half)
            arguments = (query, key, key, 0.1, 512 - queries, valid, None, torch.float32)
            yield partial(prompt.prompt_attention, *arguments)
    elif operation == "block_lse":
        for dim, valid in ((128, None), (64, torch.ones(1, 512).bool()), (576, None)):
            query = torch.zeros(1, 8, 16, dim, dtype=half)
            key = torch.zeros(1, 2, 512, dim, dtype=half)
            slots = torch.zeros(1, 16, dtype=torch.int64)
            yield partial(blocks.block_lse, query, key, slots, 0.1, 64, valid, None)
    elif operation == "step_attention":
        yield from _calls_of_steps()
    else:
        yield from _calls_of_paris()


def _calls_of_paris() -> Iterator[partial]:
    """Of whole codes and small groups, and of what is taken in chunks."""
    from hf_kvret_kernels import paris
    from hf_kvret_kernels.paris import triton, triton_encode

    valid, half = torch.ones(1, 512, dtype=torch.bool), torch.bfloat16
    for heads, group, dim, m in ((2, 4, 128, 8), (1, 20, 576, 8), (1, 3, 136, 4)):
        keys = torch.zeros(1, heads, 512, dim, dtype=half)
        signs, levels = paris.random_signs(dim, 0), paris.magnitude_levels(m)
        codes = paris.ParisCodes.empty(1, heads, 512, dim, m=m)
        counts = torch.zeros(1, heads, dim // m, 1 << m, dtype=torch.int32)
        yield partial(triton_encode.rotate, keys, signs)
        yield partial(triton_encode.encode, keys, signs, levels, m, None, codes)
        yield partial(triton_encode.count_centroids, codes.sign, m, valid)
        shape = 1, heads, 1, group
        query, rotated = torch.zeros(*shape, dim, dtype=half), torch.zeros(*shape, dim)
        for q, turn, mask, softcap, offset in (
            (query, signs, valid, None, None),
            (rotated, None, None, 50.0, torch.zeros(shape)),
        ):
            arguments = (q, turn, codes, counts, levels, 100, 200, (100_000, 200_000), m)
            more = (mask, 0.1, softcap, offset)
            yield partial(triton.search, *arguments, *more)


def _calls_of_merging() -> Iterator[partial]:
    """One set with learned sinks, and several in two dtypes without."""
    from hf_kvret_kernels.merge import triton as merging

    full, half = torch.zeros(1, 8, 1, 128), torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    lse, sinks = torch.zeros(1, 8, 1), torch.zeros(8, dtype=torch.bfloat16)
    yield partial(merging.merge_partials, [full], [lse], sinks, torch.float32)
    yield partial(merging.merge_partials, [full, full, half], [lse, lse, lse], None, torch.bfloat16)


def _calls_of_steps() -> Iterator[partial]:
    """A chunk that is a tile and a longer one, with and without all that a model may lack."""
    from hf_kvret_kernels.merge import Partials
    from hf_kvret_kernels.step_attention import triton as step

    total, ids = torch.zeros((), dtype=torch.int64), torch.zeros(1, 2, 1, 100, dtype=torch.int32)
    sinks = torch.zeros(8, dtype=torch.bfloat16)
    for dtype, dims, queries, splits in (
        (torch.bfloat16, (128, 128), 1, None),
        (torch.bfloat16, (192, 128), 3, 2),
        (torch.float32, (128, 128), 1, 1),
    ):
        query = torch.zeros(1, 8, queries, dims[0], dtype=dtype)
        key, value = (torch.zeros(1, 2, 512, dim, dtype=dtype) for dim in dims)
        others = Partials(torch.zeros(1, 8, queries, 9, dims[1]), torch.zeros(1, 8, queries, 9))
        arguments = partial(step.step_attention, query, key, value, others, 0.1, None)
        yield partial(arguments, None, None, None, None, None, dtype, splits)
        valid, counted = torch.ones(1, 512).bool(), (ids, total)
        yield partial(arguments, valid, 50.0, sinks, *counted, torch.float32, splits)


def _calls_of_relevance() -> Iterator[partial]:
    """Of one head and of a group, in one launch and in several."""
    from hf_kvret_kernels.relevance import triton

    for group in (1, 4):
        # Blocks of both sizes, and more than one launch takes.
        for length, count in ((501, 100), (5001, 1000), (5001, 5000)):
            scores, ids = torch.zeros(1, 2, 1, group, length), torch.zeros(1, 2, 1, length).int()
            yield partial(triton.best_ids, scores, ids, count)
    for group in (1, 4):
        yield partial(triton.group_relevance, torch.zeros(1, 8, 1, 501), 8 // group)
    for dtype in (torch.int32, torch.int64):
        total, ids = torch.zeros((), dtype=torch.int64), torch.zeros(1, 2, 1, 100, dtype=dtype)
        yield partial(triton.count_ids, ids, total)


def _calls_of_centroids() -> Iterator[partial]:
    """With one query for each head and with several, and the widest keys in fp32."""
    from hf_kvret_kernels.centroid import triton

    valid = torch.ones(1, 501, dtype=torch.bool)
    for group, dim, dtype, softcap, positions in (
        (1, 128, torch.bfloat16, None, None),
        (4, 128, torch.bfloat16, 50.0, torch.zeros(1, 65, dtype=torch.int64)),
        (4, 256, torch.float32, None, None),
    ):
        queries = torch.zeros(1, 2, 65, group, dim, dtype=dtype)
        keys = torch.zeros(1, 2, 501, 2 * dim, dtype=dtype)[..., :dim]
        chunks = partial(iter, [(0, keys)])
        yield partial(triton.top_keys, queries, chunks, 100, valid, positions, 0.1, softcap, None)
        for count in (1, 40):
            arguments = (queries[:, :, :count], queries, torch.ones(1, 2, 65, group))
            yield partial(triton.similarity, *arguments)
    low = torch.zeros(1, 2, 65, 2560, dtype=torch.int16)
    index = torch.zeros(1, 2, 1, 4, dtype=torch.int64)
    for high in (None, low.byte()):
        yield partial(triton.take_lists, low, high, index)
    for dtype in (torch.int32, torch.int64):
        yield partial(triton.unite, index.to(dtype), valid)


def _calls_of_codebooks() -> Iterator[partial]:
    """Few tokens and many, short and long rows of every mixture of dtypes."""
    from hf_kvret_kernels.codebook import triton
    from hf_kvret_kernels.proxy import triton_scores

    half, full = torch.bfloat16, torch.float32
    short = ((half, half, 128), (full, full, 256))
    for x_dtype, dtype, dim in (*short, (half, half, 576), (full, half, 576)):
        words = torch.zeros(2, 4000, dim, dtype=dtype)
        for count, splits in ((1, 8), (501, 1)):
            x = torch.zeros(1, 2, count, dim, dtype=x_dtype)
            yield partial(triton.encode, x, words, torch.zeros(2, 4000), splits)
        if dim > 256:
            softcap = None if x_dtype == half else 30.0
            yield partial(triton.score_table, torch.zeros(1, 256, 1, dim), words, softcap)
            continue
        arguments = (torch.zeros(1, 8, 1, dim), words[None], 8, None, None, None)
        yield partial(triton_scores.relevance, *arguments)
    codes = torch.zeros(1, 2, 501, dtype=torch.int16)
    for valid in (None, torch.ones(1, 501, dtype=torch.bool)):
        for codewords in (100, 1 << 15):
            table = torch.zeros(1, 8, 1, codewords)
            counts = torch.zeros(1, 2, codewords, dtype=torch.int32)
            yield partial(triton.code_counts, codes, codewords, valid)
            yield partial(triton.best_shares, table, counts)
            yield partial(triton.lookup, table, codes, valid)
    many = torch.zeros(1, 128, 1, 1 << 15)
    yield partial(triton.best_shares, many, counts[:, :1])


def _calls_of_latents() -> Iterator[partial]:
    """Rows whose value is the start of their key, one KV head, up to 128 query heads; and 512."""
    from hf_kvret_kernels.gather_attention import triton as gather
    from hf_kvret_kernels.gather_scores import triton as scores_of
    from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, triton_attend
    from hf_kvret_kernels.merge import Partials
    from hf_kvret_kernels.paged import PagedRows
    from hf_kvret_kernels.paged_triton import copy_pages, gather_rows
    from hf_kvret_kernels.prompt_attention import triton as prompt
    from hf_kvret_kernels.resident import triton as resident
    from hf_kvret_kernels.step_attention import triton as step

    half, table = torch.bfloat16, torch.zeros(1, 8, dtype=torch.int32)
    ids, selected = torch.zeros(1, 1, 1, 1024, dtype=torch.int32), torch.zeros((), dtype=torch.long)
    for dim, value_dim in ((576, 512), (320, 256), (160, 128), (512, 512)):
        within = value_dim if dim != 512 else 0
        chunk = torch.zeros(8, 1, 64, dim + (0 if within else value_dim), dtype=half)
        rows = PagedRows([chunk], table, dim, value_in_key=within)
        keys = torch.zeros(1, 1, 840, dim, dtype=half)
        values = keys[..., :value_dim] if within else keys.clone()
        yield partial(gather_rows, rows, ids)
        yield partial(copy_pages, rows, 0, 8, None)
        buffer = torch.zeros(1, 1, 2048, rows.width, dtype=half)
        yield partial(resident.fetch, rows, ids[:, :, 0], ids[:, :, 0], buffer)
        for heads in (20, 128):
            query = torch.zeros(1, heads, 1, dim, dtype=half)
            yield partial(gather.gather_partials, query, rows, ids, 0.1, None)
            yield partial(scores_of.gather_scores, query, rows, ids, 0.1, None)
            outs, lses = torch.zeros(1, heads, 1, 16, value_dim), torch.zeros(1, heads, 1, 16)
            others = Partials(outs, lses, torch.zeros(1, heads, 1, dtype=torch.int32))
            arguments = query, keys, values, others, 0.1, None, None, None, None, ids, selected
            yield partial(step.step_attention, *arguments, half)
        many = torch.zeros(1, 128, 256, dim, dtype=half)
        yield partial(prompt.prompt_partials, many, keys, values, 0.1, 584, None, None)
        for bits in (3, 4) if within else ():
            codec = HiggsCodec(bits, 32)
            sizes = codec.code_bytes(dim), codec.scale_bytes(dim)
            page = torch.zeros(8, 1, 64, sum(sizes), dtype=torch.uint8)
            pages = PagedRows([page], table, sizes[0], apart=True)
            coded = CodedRows(pages, codec, dim, value_dim, value_in_key=True)
            yield partial(triton_attend.attend_partials, query, coded, ids, 0.1, None)


def _calls_of_higgs() -> Iterator[partial]:
    """Every number of bits, short groups and long ones, heads of whole groups and of several."""
    from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, triton_attend
    from hf_kvret_kernels.paged import PagedRows

    half, full = torch.bfloat16, torch.float32
    cases = [(HiggsCodec(bits, 64), half) for bits in (2, 3, 4)]
    cases += [(HiggsCodec(2, 1024), full), (HiggsCodec(3, 128), full), (HiggsCodec(4, 8), full)]
    for codec, dtype in cases:
        rows = torch.zeros(5, 1024, dtype=dtype)
        codes, scales = codec.encode(rows, "naive")
        yield partial(codec.encode_rows, rows, "triton")
        yield partial(codec.decode_rows, codes, scales, dtype, "triton")
        if codec.group > 128:
            continue
        sizes = 2 * codec.code_bytes(128), 2 * codec.scale_bytes(128)
        page = torch.zeros(8, 2, 64, sum(sizes), dtype=torch.uint8)
        paged = PagedRows([page], torch.zeros(1, 8).int(), sizes[0], apart=True)
        query, ids = torch.zeros(1, 8, 1, 128, dtype=dtype), torch.zeros(1, 2, 1, 256).int()
        mean = torch.zeros(1, 2, 128)
        for softcap in (None, 50.0) if codec.bits == 2 else (None,):
            for key_mean in (None, mean) if isinstance(codec, HiggsCodec) else (None,):
                coded = CodedRows(paged, codec, 128, 128, key_mean=key_mean)
                yield partial(triton_attend.attend_partials, query, coded, ids, 0.1, softcap)
