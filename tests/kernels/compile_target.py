"""GPUs that are not at hand, for which ``compile_target.py sm90`` compiles every Triton kernel.

A driver only names its target, and a launch stops after the compilation. The calls are those of the
table of operations, in several shapes, and of what it lacks. Prints for each launch whose call it
is, the kernel, ``fused`` for products and sums in one, ``spills`` where registers do not suffice.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from machine_code import NamedTarget, label_of, usage_of

import hf_kvret_kernels
from hf_kvret_kernels import _dispatch
from hf_kvret_kernels.catalog import OPERATIONS, Draw, KernelShape

TARGETS = {"sm80": 80, "sm90": 90}
HALF, FULL = torch.bfloat16, torch.float32
SHAPES = (
    KernelShape(5001, 1, 2, 4, 128, HALF, 1000, 4096, 64, 1251, 312, 2500),
    KernelShape(501, 1, 2, 1, 64, FULL, 100, 300, 200, 251, 31, 250),
    # Rows of latent attention, and as many query heads as read them.
    KernelShape(501, 1, 1, 20, 576, HALF, 100, 45, 32, 251, 31, 250, tiers=(0.15, 0.5, 1.0)),
)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of the table of operations, of what it lacks, and of latent attention."""
    for operation in OPERATIONS:
        for shape in SHAPES:
            call = operation.prepare(shape, Draw(torch.device("cpu"), 0))
            yield "table", partial(call.run, "triton")
    yield from (("more", call) for call in _more_calls())
    yield from (("latents", call) for call in _calls_with_values_in_keys())


def _more_calls() -> Iterator[partial]:
    """Soft caps, masks, other dtypes, lists of centroids, and rows that are gathered."""
    from hf_kvret_kernels.centroid import triton as centroid
    from hf_kvret_kernels.centroid.naive import Scoring
    from hf_kvret_kernels.codebook import triton as codebook
    from hf_kvret_kernels.paged import PagedRows
    from hf_kvret_kernels.paged_triton import gather_rows
    from hf_kvret_kernels.paris import triton_encode
    from hf_kvret_kernels.proxy import ROW_DTYPES, Projection, ProxyCall, triton as proxy
    from hf_kvret_kernels.relevance import triton as relevance

    valid = torch.ones(1, 501, dtype=torch.bool)
    for dtype in ROW_DTYPES:
        for rank, queries, heads, softcap in (
            (16, 1, 8, None),
            (64, 1, 8, None),
            (200, 9, 2, 50.0),
        ):
            query, proxies = torch.zeros(1, 8, queries, rank), torch.zeros(1, 2, 501, rank)
            call = ProxyCall(query, proxies.to(dtype), heads, valid, softcap)
            yield partial(proxy.relevance, call)
            maps, steps, mean = (
                torch.zeros(1, 2, *size) for size in ((128, rank), (1, rank), (128,))
            )
            query = torch.zeros(1, 8, queries, 128, dtype=HALF)
            projection = Projection(maps, steps, mean)
            yield partial(proxy.relevance, call._replace(query=query, projection=projection))
    # Programs share the codewords of few tokens.
    for x_dtype, dtype, dim in ((HALF, HALF, 128), (FULL, FULL, 256), (FULL, HALF, 576)):
        words, x = torch.zeros(2, 4000, dim, dtype=dtype), torch.zeros(1, 2, 1, dim, dtype=x_dtype)
        yield partial(codebook.encode, x, words, torch.zeros(2, 4000), 8)
    for dtype, softcap in ((HALF, 50.0), (FULL, None)):
        queries = torch.zeros(1, 2, 65, 4, 256, dtype=dtype)
        chunks = partial(iter, [(0, torch.zeros(1, 2, 501, 512, dtype=dtype)[..., :256])])
        yield partial(centroid.top_keys, queries, chunks, 100, Scoring(valid, 0.1, softcap))
    low = torch.zeros(1, 2, 65, 2560, dtype=torch.int16)
    index = torch.zeros(1, 2, 1, 4, dtype=torch.int64)
    for high in (None, low.byte()):
        yield partial(centroid.take_lists, low, high, index)
    for dtype in (torch.int32, torch.int64):
        yield partial(centroid.unite, index.to(dtype), valid)
        yield partial(relevance.count_ids, index.to(dtype), torch.zeros((), dtype=torch.int64))
    for dim in (128, 136):
        sign = torch.zeros(1, 2, 501, dim // 8)
        yield partial(triton_encode.count_centroids, sign.byte(), valid)
    ids, table = torch.zeros(1, 2, 1, 256, dtype=torch.int32), torch.zeros(1, 8).int()
    for width, dtype, apart in ((256, HALF, False), (132, torch.uint8, True)):
        pages = torch.zeros(8, 2, 64, width, dtype=dtype)
        yield partial(gather_rows, PagedRows([pages], table, 128, apart=apart), ids)


def _calls_with_values_in_keys() -> Iterator[partial]:
    """One KV head, and up to 128 query heads that read it."""
    from hf_kvret_kernels.gather_attention import triton as gather
    from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, triton_attend
    from hf_kvret_kernels.mean_tokens import MeanToken
    from hf_kvret_kernels.merge import Partials
    from hf_kvret_kernels.paged import PagedRows
    from hf_kvret_kernels.prompt_attention import triton as prompt
    from hf_kvret_kernels.step_attention import triton as step

    table, selected = torch.zeros(1, 8, dtype=torch.int32), torch.zeros((), dtype=torch.long)
    ids = torch.zeros(1, 1, 1, 1024, dtype=torch.int32)
    for dim, value_dim in ((576, 512), (320, 256), (160, 128)):
        chunk = torch.zeros(8, 1, 64, dim, dtype=HALF)
        rows = PagedRows([chunk], table, dim, value_in_key=value_dim)
        keys = torch.zeros(1, 1, 840, dim, dtype=HALF)
        values, sinks = keys[..., :value_dim], torch.zeros(128, dtype=HALF)
        for heads in (20, 128):
            query = torch.zeros(1, heads, 1, dim, dtype=HALF)
            yield partial(gather.gather_partials, query, rows, ids, 0.1, 50.0)
            yield partial(gather.gather_scores, query, rows, ids, 0.1, 50.0)
            outs, lses = torch.zeros(1, heads, 1, 16, value_dim), torch.zeros(1, heads, 1, 16)
            others = Partials(outs, lses, torch.zeros(1, heads, 1, dtype=torch.int32))
            call = _dispatch.DenseCall(query, keys, values, 0.1, None, None, 50.0)
            moments = torch.zeros(1, 1, 1 + dim + value_dim, dim)
            mean = MeanToken(moments, torch.zeros(1, 1, 1, value_dim), torch.ones(1, 1).long())
            more = others, sinks, ids, selected, HALF, None
            for rest in (None, mean):
                yield partial(step.step_attention, call, *more, rest)
        many = torch.zeros(1, 128, 256, dim, dtype=HALF)
        call = _dispatch.DenseCall(many, keys, values, 0.1, 584, None, None)
        yield partial(prompt.prompt_partials, call)
        for bits in (2, 3):
            codec = HiggsCodec(bits, 32)
            sizes = codec.code_bytes(dim), codec.scale_bytes(dim)
            page = torch.zeros(8, 1, 64, sum(sizes), dtype=torch.uint8)
            pages = PagedRows([page], table, sizes[0], apart=True)
            coded = CodedRows(pages, codec, dim, value_dim, value_in_key=True)
            yield partial(triton_attend.gather_partials, query, coded, ids, 0.1, 50.0)


def _compile_instead_of_launching(capability: int) -> list[str]:
    """Make Triton compile for ``capability``; the list gets a line for each launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    for package in hf_kvret_kernels.__path__:
        for file in Path(package).rglob("*triton*.py"):
            name = ".".join(file.relative_to(package).with_suffix("").parts)
            importlib.import_module(f"hf_kvret_kernels.{name}")
    # Wrappers take tensors on the CPU; kernels, which know better by now, are no interpreter's.
    _dispatch.interpreted = lambda: True
    driver.set_active(NamedTarget(capability))
    run = JITFunction.run
    launches: list[str] = []

    @functools.wraps(run)
    def compile_only(self: JITFunction, *args: object, warmup: bool, **kwargs: object) -> object:
        # Triton's own choice for it is about to change.
        assert kwargs.get("enable_fp_fusion") is True, self.fn.__name__
        kernel = run(self, *args, warmup=True, **kwargs)
        fused = "fused" if "fma.rn" in kernel.asm["ptx"] else ""
        # The stack of a thread holds the registers that were spilled.
        spills = "spills" if usage_of(kernel.asm["cubin"])["STACK"] else ""
        label = label_of(self.fn.__module__, self.fn.__name__)
        launches.append(f"{label} {fused} {spills}")
        # What it did not write may be anything, and torch may look places up in it.
        for argument in args:
            if isinstance(argument, torch.Tensor):
                argument.zero_()
        return kernel

    JITFunction.run = compile_only
    return launches


if __name__ == "__main__":
    lines = _compile_instead_of_launching(TARGETS[sys.argv[1]])
    for caller, run_call in calls():
        run_call()
        for line in lines:
            print(caller, line)
        lines.clear()
