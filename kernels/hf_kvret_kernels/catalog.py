"""The table of operations: random inputs of a shape, the call, its twin in torch, the rounding.

Tests of kernels, their compilation for GPUs that are not at hand, the self-test and ``bench
kernels`` run these. An entry draws its inputs from a ``KernelShape``, so that a new shape is a row
of a list, for all operations at once.

Coded rows are as ``store="higgs"`` has them by default: with 4 bits, in groups of a head, and in
the dtype of the model. A2ATS brings keys and queries to the space of its codewords in fp32, and
LRQK keeps proxies in bytes, so that they don't depend on the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_kvret_kernels import centroid, codebook, higgs, paris, proxy, relevance
from hf_kvret_kernels.block_lse import block_lse
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.host_library import why_not
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials, merge_partials
from hf_kvret_kernels.paged import PagedRows, copy_pages, lay_apart
from hf_kvret_kernels.prompt_attention import prompt_attention
from hf_kvret_kernels.resident import SlotMap, assign, fetch
from hf_kvret_kernels.step_attention import step_attention
from hf_kvret_kernels.top_k import top_k

PAGE_LEN = 64
HIGGS_BITS = 4
# CTkvr reads its store in pieces of so many tokens.
_PIECE_LEN = 1 << 14


@dataclass(frozen=True)
class KernelShape:
    """Sizes that the operations share; each takes what it needs.

    Attributes:
        length: tokens n of a sequence.
        batch: sequences B.
        heads, group, head_dim: KV heads H, query heads G of each, head dim D.
        dtype: of keys, values and queries as a model has them.
        top_k: tokens that a head selects, K.
        codewords: C of a codebook.
        rank: numbers of a proxy, r.
        candidates: of ParisKV's first stage.
        centroids, listed: CTkvr's past queries, and the keys in the list of each.
        tiers, rho: ParisKV's shares of centroids that get points, and the share of keys.
        queries: of a step, Q.
        value_dim: head dim of values, Dv; None for that of keys.
        holes: share of the tokens that are padding, and of the ids that are -1.
        softcap: of the scores, or None.
    """

    length: int
    batch: int
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    top_k: int
    codewords: int = 1
    rank: int = 1
    candidates: int = 1
    centroids: int = 1
    listed: int = 1
    tiers: tuple[float, ...] = ()
    rho: float = 0.75
    queries: int = 1
    value_dim: int | None = None
    holes: float = 0.0
    softcap: float | None = None

    @property
    def query_heads(self) -> int:
        """Hq."""
        return self.heads * self.group

    @property
    def value_width(self) -> int:
        """Dv."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def pages(self) -> int:
        """Pages of a sequence in a paged store."""
        return -(-self.length // PAGE_LEN)

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5

    @property
    def scoring(self) -> dict[str, Any]:
        """How scores are made of dot products."""
        return {"scale": self.scale, "softcap": self.softcap}

    @property
    def rotated_dim(self) -> int:
        """The head dim as ParisKV rotates it, P."""
        return paris.rotated_dim(self.head_dim)

    @property
    def codec(self) -> higgs.HiggsCodec:
        """The codec of rows, with the largest groups that keys and values are made of."""
        both = self.head_dim | self.value_width
        return higgs.HiggsCodec(HIGGS_BITS, both & -both)


class Draw:
    """Random inputs on a device, the same for a seed.

    Args:
        room: spare rows behind the tokens of dense inputs, as in a buffer that grows; their floats
            are NaN.
    """

    def __init__(self, device: torch.device, seed: int, room: int = 0) -> None:
        self.device, self.room = device, room
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype, device=self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Integers from 0 to ``high - 1``, each as probable."""
        return torch.randint(high, shape, generator=self.generator, dtype=dtype, device=self.device)

    def chance(self, share: float, *shape: int) -> torch.Tensor:
        """Bool, True for about that share."""
        return torch.rand(shape, generator=self.generator, device=self.device) < share

    def in_buffer(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, H, n, ...]`` as a view of a buffer with ``room``, where there is some."""
        if not self.room:
            return x
        batch, heads, length, *sizes = x.shape
        none = float("nan") if x.is_floating_point() else 0
        buffer = x.new_full((batch, heads, length + self.room, *sizes), none)
        return buffer[:, :, :length].copy_(x)

    def tokens(self, length: int, lead: tuple[int, ...], count: int) -> torch.Tensor:
        """``[*lead, count]`` int32: distinct numbers below ``length`` in random order, each row
        others."""
        ids = torch.empty(*lead, count, dtype=torch.int32, device=self.device)
        for row in ids.view(-1, count):
            order = torch.randperm(length, generator=self.generator, device=self.device)
            row.copy_(order[:count])
        return ids

    def valid(self, shape: KernelShape) -> torch.Tensor:
        """``[B, n]`` bool: which tokens are no padding; the newest one always."""
        valid = ~self.chance(shape.holes, shape.batch, shape.length)
        valid[:, -1] = True
        return valid.new_zeros(*valid.shape, 2)[..., 0].copy_(valid) if self.room else valid

    def query(self, shape: KernelShape) -> torch.Tensor:
        """``[B, Hq, Q, D]`` in the shape's dtype."""
        sizes = (shape.batch, shape.query_heads, shape.queries, shape.head_dim)
        return self.in_buffer(self.normal(*sizes, dtype=shape.dtype))

    def keys(self, shape: KernelShape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[B, H, n, D]``, in the shape's dtype unless another is given."""
        sizes = (shape.batch, shape.heads, shape.length, shape.head_dim)
        return self.in_buffer(self.normal(*sizes, dtype=dtype or shape.dtype))

    def values(self, shape: KernelShape) -> torch.Tensor:
        """``[B, H, n, Dv]`` in the shape's dtype."""
        sizes = (shape.batch, shape.heads, shape.length, shape.value_width)
        return self.in_buffer(self.normal(*sizes, dtype=shape.dtype))

    def ids(self, shape: KernelShape, count: int) -> torch.Tensor:
        """``[B, H, Q, count]`` int32: tokens of each KV head in random order, -1 for holes."""
        ids = self.tokens(shape.length, (shape.batch, shape.heads, shape.queries), count)
        return ids.masked_fill_(self.chance(shape.holes, *ids.shape), -1)

    def pages(self, shape: KernelShape) -> torch.Tensor:
        """``[B, pages]`` int32: the page table of a store in which pages lie in random order."""
        count = shape.batch * shape.pages
        return self.tokens(count, (), count).view(shape.batch, -1)

    def chosen_rows(self, shape: KernelShape) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
        """Query, a paged store of normal rows, ids of ``top_k``."""
        table = self.pages(shape)
        sizes = (table.numel(), shape.heads, PAGE_LEN, shape.head_dim + shape.value_width)
        chunk = self.normal(*sizes, dtype=shape.dtype)
        ids = self.ids(shape, shape.top_k)
        return self.query(shape), PagedRows([chunk], table, shape.head_dim), ids


Error = Callable[[Sequence[Any], Sequence[Any]], float]
"""``(results, naive's)`` to a number, 0 for equal."""


def distance(results: Sequence[Any], want: Sequence[Any]) -> float:
    """Root mean square of the difference over that of what is wanted: the worst row of any tensor.

    Infinite where infinities or NaN stand in other places.
    """
    worst = 0.0
    for one, other in zip(results, want, strict=True):
        finite = other.isfinite()
        if one.shape != other.shape or not torch.equal(finite, one.isfinite()):
            return float("inf")
        off = (one.float() - other.float()).masked_fill(~finite, 0.0).square().mean(-1)
        size = other.float().masked_fill(~finite, 0.0).square().mean(-1)
        worst = max(worst, (off / size.clamp_min(1e-30)).sqrt().max().item())
    return worst


def unequal(results: Sequence[Any], want: Sequence[Any]) -> float:
    """Share of elements that differ, of the tensor in which most do."""
    return max(
        (one != other).float().mean().item() if one.shape == other.shape else float("inf")
        for one, other in zip(results, want, strict=True)
    )


def not_shared(results: Sequence[Any], want: Sequence[Any]) -> float:
    """Share of the ids of ``want [..., K]`` that the same row of ``results [..., K]`` lacks."""
    (one,), (other,) = results, want
    if one.shape != other.shape:
        return float("inf")
    own = one.sort(dim=-1).values
    place = torch.searchsorted(own, other).clamp(max=own.shape[-1] - 1)
    return (own.gather(-1, place) != other).float().mean().item()


SCORE_ERROR = 1e-3
"""The largest error of sums of products in fp32, taken in another order."""
ATTENTION_ERRORS = {torch.float32: 1e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Kernels round softmax weights to the rows' dtype before they meet the values."""


@dataclass(frozen=True)
class Call:
    """An operation with its inputs.

    Attributes:
        run: takes a backend, returns a tuple of tensors.
        error: of what it returns.
        tolerance: the largest error that rounding explains.
    """

    run: Callable[[str], tuple[torch.Tensor, ...]]
    error: Error
    tolerance: float


@dataclass(frozen=True)
class KernelOp:
    """An operation, to be compared with plain torch.

    Attributes:
        name: the folder first.
        inputs: draws inputs; what it returns takes ``backend`` and returns one tensor or several.
        error: of a backend against plain torch.
        tolerance: the largest error that rounding explains, maybe by dtype.
        compiled: whether the compiled library has it, for CPU tensors.
        error_of: makes the error of what ``inputs`` returned, where it depends on the inputs.
    """

    name: str
    inputs: Callable[[KernelShape, Draw], Callable[..., Any]]
    error: Error
    tolerance: float | Mapping[torch.dtype, float]
    compiled: bool = False
    error_of: Callable[[Any], Error] | None = None

    def backends(self, device: torch.device) -> tuple[str, ...]:
        """The backends of this operation there, the one that ``"auto"`` means first."""
        if device.type == "cuda":
            return ("triton", "naive")
        return ("cpp", "naive") if self.compiled and not why_not() else ("naive",)

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        """A call with inputs of its own, and its check."""
        call, allowed = self.inputs(shape, draw), self.tolerance
        error = self.error if self.error_of is None else self.error_of(call)
        tolerance = allowed[shape.dtype] if isinstance(allowed, Mapping) else allowed

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            returned = call(backend=backend)
            return (returned,) if isinstance(returned, torch.Tensor) else returned

        return Call(run, error, tolerance)


def _paris_encode(shape: KernelShape, draw: Draw) -> Any:
    keys, (signs, levels) = draw.keys(shape), _basis(shape, draw)

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        codes = paris.encode(keys, signs, levels, backend=backend)
        return codes.sign, codes.magnitude, codes.weight

    return run


def _code_error(results: Sequence[Any], want: Sequence[Any]) -> float:
    # A number between two levels goes to either, which changes the weight of its subspace: so the
    # weights are compared as a whole, not by the worst row.
    weights = [[each.reshape(1, -1) for each in part[2:]] for part in (results, want)]
    return max(unequal(results[:2], want[:2]), distance(*weights))


def _paris_search(shape: KernelShape, draw: Draw) -> Any:
    codes, (signs, levels) = _codes(shape, draw), _basis(shape, draw)
    lead = (shape.batch, shape.heads, shape.queries, shape.group)
    query = draw.normal(*lead, shape.head_dim, dtype=shape.dtype)
    counts = paris.count_centroids(codes.sign)
    means = None if shape.tiers else draw.normal(*lead[:2], 1, shape.head_dim)
    return partial(
        paris.search,
        *(query, signs, codes, counts, levels, shape.top_k),
        survivors=shape.candidates,
        softcap=shape.softcap,
        means=means,
        block_len=1 << 30,
        samples=means,
        rho=shape.rho,
        tiers=shape.tiers,
        valid=draw.valid(shape),
    )


def _best_ids(shape: KernelShape, draw: Draw) -> Any:
    lead = (shape.batch, shape.heads, shape.queries, shape.group)
    scores = draw.normal(*lead, shape.candidates)
    return partial(relevance.best_ids, scores, _candidate_ids(shape, draw), shape.top_k)


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(shape.rotated_dim, 0)
    return signs.to(draw.device), paris.magnitude_levels().to(draw.device)


def _codes(shape: KernelShape, draw: Draw) -> paris.ParisCodes:
    """Codes of random bytes: the cost of a code does not depend on what it says."""
    lead, dim = (shape.batch, shape.heads, shape.length), shape.rotated_dim
    # Three bits of magnitude for each bit of sign.
    signs, magnitudes = (
        draw.integers(256, *lead, bits * dim // 8, dtype=torch.uint8) for bits in (1, 3)
    )
    weight = paris.code_weights(draw.normal(*lead, dim // 8).abs())
    planes = signs, torch.cat([magnitudes, weight], dim=-1)
    return paris.ParisCodes(*map(draw.in_buffer, planes))


def _candidate_ids(shape: KernelShape, draw: Draw) -> torch.Tensor:
    """Ids as stage 1 returns them: ascending, and behind them -1."""
    lead = (shape.batch, shape.heads, shape.queries)
    ids = draw.tokens(shape.length, lead, shape.candidates)
    ids = ids.sort(dim=-1).values
    ids[..., round((1 - shape.holes) * shape.candidates) :] = -1
    return ids


PARIS_OPS = (
    # Keys to their codes, the mean key of each head subtracted, as a flush does. Coordinates at
    # the border of two levels go to either, and weights are rounded to bf16.
    KernelOp("paris.encode", _paris_encode, _code_error, 1e-2, compiled=True),
    # All of a step's search: the tokens that matter most, by the full codes of the candidates.
    # Patterns at the border of two tiers go to either.
    KernelOp("paris.search", _paris_search, not_shared, 1e-2),
    # The candidates that matter most to any query head of a group. Any of the candidates that
    # matter equally is right.
    KernelOp("relevance.best_ids", _best_ids, not_shared, 1e-3),
)


def _higgs_encode(shape: KernelShape, draw: Draw) -> Any:
    return partial(shape.codec.encode, draw.keys(shape))


def _higgs_decode(shape: KernelShape, draw: Draw) -> Any:
    lead = (shape.batch, shape.heads, shape.length)
    parts = _coded_vectors(shape, draw, lead, shape.head_dim)
    return partial(shape.codec.decode, *parts, shape.dtype)


def _attention_to_codes(shape: KernelShape, draw: Draw) -> Any:
    codec, dims, table = shape.codec, (shape.head_dim, shape.value_width), draw.pages(shape)
    parts = _coded_vectors(shape, draw, (table.numel(), shape.heads, PAGE_LEN), *dims)
    code_bytes = sum(map(codec.code_bytes, dims))
    # Elsewhere bytes of codes would be read as scales, some of them infinite.
    pages = lay_apart(torch.cat(parts, dim=-1), code_bytes)
    paged = PagedRows([pages], table, code_bytes, apart=True)
    rows = higgs.CodedRows(paged, codec, *dims)
    query, ids = draw.query(shape), draw.ids(shape, shape.top_k)
    return partial(gather_attention, query, rows, ids, **shape.scoring)


def _coded_vectors(
    shape: KernelShape, draw: Draw, lead: tuple[int, ...], *dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of vectors of ``dims``: the cost does not depend on them."""
    code_bytes, scale_bytes = (
        sum(map(size, dims)) for size in (shape.codec.code_bytes, shape.codec.scale_bytes)
    )
    codes = draw.integers(256, *lead, code_bytes, dtype=torch.uint8)
    scales = draw.normal(*lead, scale_bytes // 2, dtype=torch.float16)
    return codes, scales.abs().view(torch.uint8)


_CODED_ERRORS = {dtype: 2 * error for dtype, error in ATTENTION_ERRORS.items()}
"""Scaled grid points are rounded to the query's dtype too."""

HIGGS_OPS = (
    # Keys, or values, to codes and scales, as a flush does. Pairs nearly half-way between two
    # points go to either; scales are rounded to fp16.
    KernelOp("higgs.encode", _higgs_encode, unequal, 1e-2, compiled=True),
    # Codes and scales to vectors, as exact attention over a second prompt does. Both are rounded
    # to the vectors' dtype.
    KernelOp("higgs.decode", _higgs_decode, distance, ATTENTION_ERRORS, compiled=True),
    # Attention of a step over k chosen coded rows of each KV head.
    KernelOp("higgs.gather_attention", _attention_to_codes, distance, _CODED_ERRORS, compiled=True),
)


def _gather_attention(shape: KernelShape, draw: Draw) -> Any:
    return partial(gather_attention, *draw.chosen_rows(shape), **shape.scoring)


def _gather_scores(shape: KernelShape, draw: Draw) -> Any:
    return partial(gather_scores, *draw.chosen_rows(shape), **shape.scoring)


def _prompt(shape: KernelShape, draw: Draw) -> Any:
    return partial(prompt_attention, **_window(shape, draw))


def _step(shape: KernelShape, draw: Draw) -> Any:
    others, ids = Partials(*_partials(shape, draw, 5)), draw.ids(shape, shape.top_k)
    lead, dim = (shape.batch, shape.heads), shape.head_dim
    parts = draw.normal(*lead, 1 + dim + shape.value_width, dim) / dim**0.5
    moments = parts @ parts[:, :, 1 : 1 + dim].mT
    counts = torch.full((shape.batch, 1), shape.length, device=draw.device)
    mean = MeanToken(moments, draw.normal(*lead, 1, shape.value_width), counts)
    counting: dict[str, Any] = {"ids": ids, "selected": counts.new_zeros(()), "mean": mean}
    return partial(step_attention, others=others, **counting, **_window(shape, draw))


def _window(shape: KernelShape, draw: Draw) -> dict[str, Any]:
    """The query of a step and all tokens in a dense window; the output is to be merged."""
    return dict(
        query=draw.query(shape),
        key=draw.keys(shape),
        value=draw.values(shape),
        scale=shape.scale,
        causal_offset=shape.length - shape.queries,
        valid=draw.valid(shape),
        softcap=shape.softcap,
        out_dtype=torch.float32,
    )


def _merge(shape: KernelShape, draw: Draw) -> Any:
    outs, lses = zip(*(_partials(shape, draw, splits) for splits in (1, 3, 7)), strict=True)
    return partial(merge_partials, outs, lses, sink_logits=draw.normal(shape.query_heads))


def _partials(shape: KernelShape, draw: Draw, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (shape.batch, shape.query_heads, shape.queries, splits)
    return draw.normal(*lead, shape.value_width), draw.normal(*lead)


def _block_sums(shape: KernelShape, draw: Draw) -> Any:
    probes = 4
    lead = (shape.batch, shape.query_heads, probes, shape.head_dim)
    last = torch.arange(probes, device=draw.device) * (shape.length // probes)
    positions = last.expand(shape.batch, probes).contiguous()
    queries = draw.normal(*lead, dtype=shape.dtype)
    return partial(block_lse, queries, draw.keys(shape), positions, block=PAGE_LEN, **shape.scoring)


ATTENTION_OPS = (
    # Attention of a step's query over k chosen rows of each KV head: an output and a log-sum.
    KernelOp(
        "gather_attention", _gather_attention, distance, ATTENTION_ERRORS,
        compiled=True,
    ),
    # Exact scores of k chosen keys of each KV head.
    KernelOp(
        "gather_scores", _gather_scores, distance, SCORE_ERROR, compiled=True
    ),
    # A decode step's query over a dense window of all tokens, masked; the output is to be merged.
    KernelOp(
        "prompt_attention", _prompt, distance, ATTENTION_ERRORS,
        compiled=True,
    ),
    # It merges the same with what attention to chosen rows left, and with the mean of all others.
    KernelOp("step_attention", _step, distance, ATTENTION_ERRORS),
    KernelOp("merge", _merge, distance, SCORE_ERROR),
    # Log-sums of blocks of keys for the probes of a prompt that is read by retrieval.
    KernelOp("block_lse", _block_sums, distance, SCORE_ERROR, compiled=True),
)  # fmt: skip


def _encode_keys(shape: KernelShape, draw: Draw) -> Any:
    keys, book = draw.keys(shape, torch.float32), _codewords(shape, draw)
    return partial(codebook.encode, keys, book, norms=codebook.half_norms(book))


def _score_table(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, shape.queries, shape.head_dim)
    return partial(codebook.score_table, query, _codewords(shape, draw), **shape.scoring)


def _codewords(shape: KernelShape, draw: Draw) -> torch.Tensor:
    # `hf-kvret calibrate a2ats` saves codewords in this dtype by default.
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=torch.bfloat16)


def _lookup(name: str, shape: KernelShape, draw: Draw) -> Any:
    table = draw.normal(shape.batch, shape.query_heads, shape.queries, shape.codewords)
    lead = (shape.batch, shape.heads, shape.length)
    codes = draw.in_buffer(draw.integers(shape.codewords, *lead, dtype=torch.int16))
    return partial(getattr(codebook, name), table, codes, valid=draw.valid(shape))


CODEBOOK_OPS = (
    # Keys to ids of their nearest codewords, the half norms given, as when tokens arrive. Keys
    # nearly half-way between two codewords go to either.
    KernelOp("codebook.encode", _encode_keys, unequal, 1e-3),
    # Products of a step's query and all codewords; the same for every length.
    KernelOp("codebook.score_table", _score_table, distance, SCORE_ERROR),
    # Scores of all tokens for each query head, as budget_of="union" needs them.
    KernelOp("codebook.lookup", partial(_lookup, "lookup"), unequal, 0.0),
    # Scores of all tokens for each KV head, as a step calls it.
    KernelOp("codebook.lookup_scores", partial(_lookup, "lookup_scores"), distance, SCORE_ERROR),
)


def _proxy_top(shape: KernelShape, draw: Draw) -> Any:
    lead = shape.batch, shape.heads
    maps = draw.normal(*lead, shape.head_dim, shape.rank) * shape.head_dim**-0.5
    projection = proxy.Projection(maps, maps.new_full((*lead, 1, shape.rank), 1 / 16))
    rows = draw.in_buffer((16 * draw.normal(*lead, shape.length, shape.rank)).to(torch.int8))
    call = partial(proxy.top_indices, draw.query(shape), rows, shape.heads, shape.top_k)
    return partial(call, valid=draw.valid(shape), projection=projection, **shape.scoring)


def _top_k(shape: KernelShape, draw: Draw) -> Any:
    scores = draw.normal(shape.batch, shape.heads, shape.queries, shape.length)
    return partial(top_k, scores, shape.top_k)


def _top_k_error(call: Any) -> Error:
    """Which of equal scores are taken is open, so the scores of the ids are compared."""
    scores = call.args[0]

    def values(ids: Sequence[Any]) -> list[torch.Tensor]:
        # NaN marks ids out of range, and those that are there twice.
        known = ((ids[0] >= 0) & (ids[0] < scores.shape[3])).all()
        taken = scores.gather(3, ids[0].long().clamp(0, scores.shape[3] - 1))
        distinct = ids[0].sort(dim=-1).values.diff(dim=-1).ne(0).all()
        return [torch.where(known & distinct, taken.sort(dim=-1).values, float("nan"))]

    return lambda result, want: unequal(values(result), values(want))


def _top_keys(shape: KernelShape, draw: Draw) -> Any:
    queries, keys, valid = _bundles(shape, draw), draw.keys(shape), draw.valid(shape)

    def pieces() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, shape.length, _PIECE_LEN):
            yield start, keys[:, :, start : start + _PIECE_LEN]

    return partial(centroid.top_keys, queries, pieces, shape.listed, valid=valid, **shape.scoring)


def _similarity(shape: KernelShape, draw: Draw) -> Any:
    query, centroids = _bundles(shape, draw, shape.queries), _bundles(shape, draw)
    return partial(
        centroid.similarity, centroid.units(query)[0], centroids, centroid.units(centroids)[1]
    )


def _bundles(shape: KernelShape, draw: Draw, count: int | None = None) -> torch.Tensor:
    """``[B, H, count, G, D]`` past queries, as many as there are centroids."""
    lead = (shape.batch, shape.heads, count or shape.centroids)
    return draw.in_buffer(draw.normal(*lead, shape.group, shape.head_dim, dtype=shape.dtype))


SEARCH_OPS = (
    # The best tokens of each group by proxies of their keys. Any of the tokens that score nearly
    # the same is right.
    KernelOp("proxy.top_indices", _proxy_top, not_shared, 1e-2),
    # The highest scores of each KV head.
    KernelOp("top_k", _top_k, unequal, 0.0, error_of=_top_k_error),
    # Lists of the best keys for past queries. Keys at the end of a list are nearly as good as
    # those behind it.
    KernelOp("centroid.top_keys", _top_keys, not_shared, 1e-2),
    # Mean cosines of a step's query and all centroids; Triton rounds the query.
    KernelOp("centroid.similarity", _similarity, distance, ATTENTION_ERRORS),
)


def _resident(shape: KernelShape, draw: Draw) -> Any:
    """Which slots are taken, and what lies in them after a call; not who got which of them."""
    _, rows, ids = draw.chosen_rows(shape)
    tokens = ids[:, :, 0]

    def run(backend: str) -> torch.Tensor:
        lead, slots = tokens.shape[:2], shape.top_k
        empty = partial(torch.full, fill_value=-1, dtype=torch.int32, device=draw.device)
        table = empty((*lead, shape.length))
        token, stamp = empty((*lead, slots)), empty((*lead, slots))
        clock = torch.zeros(1, dtype=torch.int32, device=draw.device)
        buffer = rows.chunks[0].new_zeros(*lead, slots, rows.width)
        indices, fetched = assign(SlotMap(table, token, stamp, clock), tokens, backend=backend)
        fetch(rows, tokens, fetched, buffer, backend=backend)
        held = buffer.gather(
            2, indices.long().clamp(min=0)[..., None].expand(*indices.shape, rows.width)
        )
        return held * (indices >= 0)[..., None]

    return run


def _copied_pages(shape: KernelShape, draw: Draw) -> Any:
    _, rows, _ = draw.chosen_rows(shape)
    return partial(copy_pages, rows, shape.pages // 2, shape.pages)


STORE_OPS = (
    KernelOp("resident", _resident, unequal, 0.0),
    KernelOp("copy_pages", _copied_pages, unequal, 0.0),
)

OPERATIONS: tuple[KernelOp, ...] = (
    *(*CODEBOOK_OPS, *SEARCH_OPS, *PARIS_OPS, *HIGGS_OPS, *ATTENTION_OPS, *STORE_OPS),
)
"""Every operation that has a kernel."""
