"""ParisKV: codes of the keys, whose sign patterns collide with a query's, find the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import CapturableIndex, ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import Schema, Tensors, number, tensor, transient
from hf_kvret.contracts.store import Store
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import FLAG, OneOf, integer, option, real
from hf_kvret_kernels import paris
from hf_kvret_kernels.host_step import HostSearch, ParisSearch
from hf_kvret_kernels.paris import naive

# Shares of rho at which a centroid's points drop by one: the paper's six (section 5.4), or as many
# as a byte can hold the points of.
_TIERS = ((0.05, 0.15, 0.30, 0.50, 0.75, 1.0), (0.15, 0.50, 1.0), (0.30, 1.0), (1.0,))
_MOST_POINTS = 254
SCHEDULES = {
    "ours": (
        (5_000, 0.50, 0.75),
        (30_000, 0.25, 0.75),
        (512 << 10, 0.08, 0.75),
        (math.inf, 0.07, 0.75),
    ),
    "paper": (
        (5_000, 0.50, 0.50),
        (10_000, 0.25, 0.30),
        (30_000, 0.20, 0.25),
        (math.inf, 0.10, 0.20),
    ),
}
"""By the name of ``tables``, rows ``(length, beta, rho)``.

Below ``length`` cold tokens a share beta of them are candidates, and rho of the keys earn points.
"""
# Least energy of a coordinate, as a share of their mean.
_LEAST = 1e-3
# Fewest tokens of a block, most blocks of the keys whose means are taken at once, and a block that
# has all tokens.
_BLOCK, _BLOCKS, _LONGEST = 256, 64, 1 << 30
# A block has _SAMPLED over its length samples, or one if it is longer. An index has _MOST_SAMPLES
# at most.
_SAMPLED, _MOST_SAMPLES = 1024, 512
# Keys that are read at a time; numbers that are scaled at once, 16 MiB.
_CHUNK, _NUMBERS = 4096, 1 << 22
# Keys that tell a block's mean and their variance, and its least share of the means' square.
_ENOUGH, _CLOSE = 64, 1e-4
# Queries that say what others will ask for.
_FEWEST = 8
# How tensors are kept that not every index has.
_CENTERED: dict[str, Any] = {"optional": True, "shared": True, "dtype": torch.float32}
_PAPER_LEVELS = (0.0420, 0.1266, 0.2129, 0.3023, 0.3968, 0.4990, 0.6148, 0.7604)


@dataclass(frozen=True)
class ParisConfig(RetrievalConfig):
    """ParisKV's options beside those of every retrieval cache.

    Attributes:
        tables: shares by length, the points of a sign pattern and the magnitudes of a code. The
            shares are β, of the cold tokens that are candidates, and ρ, of the keys that earn
            points. ``"paper"``: the published code's tables, and points by rank. ``"ours"``:
            points go by similarity up to 288 dims; else by rank, and more keys earn them.
            Magnitudes are the Lloyd-Max levels.
        per_selected: candidates for each selected token at least, where β gives fewer.
        group_reduce: how the query heads of a KV head share a selection. ``"max"``: by the largest
            of their softmax weights. ``"mean"``: by the mean of their queries, as in the authors'
            code.
        center: subtract the mean key of a block of tokens before keys are coded, and scale
            coordinates so that none outweighs the others. Queries are scaled inversely, and a
            block's tokens get the product of query and mean key back.
        seed: for the random signs, the same in all layers and heads.
    """

    gone: ClassVar[Mapping[str, Any]] = {"subspace_dim": 8}
    # Section 5 and table 1; tables and the mean of a group are the published code's.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "top_k": 100,
            "sink": 4,
            "recent": 256,
            "flush": 512,
            "group_reduce": "mean",
            "center": False,
            "tables": "paper",
            "per_selected": 1.0,
            "rest": None,
        }
    }

    tables: str = option("ours", OneOf(*SCHEDULES))
    per_selected: float = option(
        5.0, real(note="candidates for a selected token", least=1, below=math.inf)
    )
    group_reduce: str = option("max", OneOf("max", "mean"))
    center: bool = option(True, FLAG)
    seed: int = option(0, integer(-(2**63), below=2**63))

    @property
    def even_len(self) -> int:
        """See ``RetrievalConfig``; changes of the shares beyond 64K tokens are left out."""
        changes = [int(row[0]) for row in SCHEDULES[self.tables] if row[0] <= 1 << 16]
        window = self.sink + self.recent + self.flush
        return max(super().even_len, max(changes) + window)

    def check_head_dim(self, head_dim: int) -> None:
        """ValueError for rows of this dim that have no codes."""
        super().check_head_dim(head_dim)
        if head_dim > paris.MAX_HEAD_DIM:
            raise ValueError(
                f"head dim {head_dim}: paris codes exist up to {paris.MAX_HEAD_DIM}; use "
                "cache_implementation='flat'"
            )

    def tiers_for(self, subspaces: int) -> tuple[float, ...]:
        """Tiers for keys of so many subspaces, none where points are by similarity."""
        if self.tables == "ours" and paris.has_similarities(subspaces):
            return ()
        return next(tiers for tiers in _TIERS if len(tiers) * subspaces <= _MOST_POINTS)

    def ratios(self, cold_len: int) -> tuple[float, float]:
        """``(beta, rho)`` for that many cold tokens."""
        rows = SCHEDULES[self.tables]
        return next((beta, rho) for length, beta, rho in rows if cold_len < length)


class ParisIndex(CapturableIndex, Index):
    """Codes of every cold key: signs, and records of magnitudes and weights.

    Keys are centered, their coordinates scaled, normalized, rotated by random signs and a
    Walsh-Hadamard transform (long ones in blocks), and cut into subspaces. Stage 1 gives each key
    points for subspaces whose sign pattern lies close to the query's, and keeps the keys with most
    points. Stage 2 estimates their inner products from the codes. New keys are encoded like old
    ones. Means and scales are those of a prompt, and taken anew whenever a context has doubled.

    A code's error is a share of its key's length. Where few coordinates are large, as with a bias
    of the keys, and queries hardly ask for them, it would bury the others. The expected error is
    least where keys and queries have the same energy in each coordinate, and scales go two thirds
    of the way there. RoPE turns a bias with the position. So blocks of tokens have mean keys of
    their own, whose products with a query count in both stages.

    Query heads of a group compare tokens by their softmax weights. Stage 1 knows no softmax, so it
    estimates from a sample, a key of every 64 tokens or more, which logits each head selects.
    Points count from there.

    Args:
        options: of the method.
    """

    # Codes of the tokens, as in ``ParisCodes``.
    _sign: TokenBuffer = tokens(dims="B H N p", dtype=torch.uint8)
    _record: TokenBuffer = tokens(dims="B H N q", dtype=torch.uint8)
    # Keys in each centroid of each subspace.
    _counts: torch.Tensor | None = tensor(shared=True, dims="B H s c", dtype=torch.int32)
    # Mean keys of blocks of tokens, [B, Hkv, blocks, D] fp32, and the length of a block; how many
    # tokens they were taken of at once.
    _means: torch.Tensor | None = tensor(dims="B H b D", **_CENTERED)
    _block_len: int = number(_BLOCK)
    _mean_len: int = number(0)
    # Each stride of tokens has a key here, [B, Hkv, *, D] fp32.
    _samples: torch.Tensor | None = tensor(dims="B H e D", **_CENTERED)
    # Sums of squares of a prompt's newest queries; what queries are multiplied by.
    _energy: torch.Tensor | None = tensor(dims="B g D", **_CENTERED)
    _factors: torch.Tensor | None = tensor(dims="B H D", **_CENTERED)
    # Random signs of the rotation, times the factors, [B, H, P] fp32, and the [8] fp32 levels of
    # magnitudes.
    _signs: torch.Tensor | None = tensor(saved=False, shared=True)
    _levels: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)
    # The last search on a CPU, and the options and scoring that it was made for.
    _host_search: ParisSearch | None = transient()
    _host_search_key: tuple[object, ...] | None = transient()

    def __init__(self, options: ParisConfig) -> None:
        self.options = options

    def add(self, block: TokenBlock) -> None:
        valid = block.valid
        if valid is None:
            valid = block.keys.new_ones(len(block.keys), len(block), dtype=torch.bool)
        if self._counts is None:
            batch, heads, _, dim = block.keys.shape
            self._make_basis(batch, heads, dim, block.keys.device)
            self._mean_len = len(block)
            if self.options.center:
                self._learn(block.keys[:, :, :0].float(), lambda _: [(0, block.keys)], valid)
        elif self._means is not None:
            start = len(self._sign)
            self._means, _ = self._mean_keys(self._means, start, block.keys, valid)
            # Some caches were saved without samples.
            if self._samples is not None:
                self._samples = self._more_samples(self._samples, start, block.keys, valid)
        self._append(block.keys, block.valid)

    def on_prompt(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        if queries.shape[2] < _FEWEST:
            return
        squares = queries.float().square()
        if valid is not None:
            squares = squares.masked_fill(~valid[:, None, :, None], 0.0)
        self._energy = squares.sum(dim=2)

    def _learn(
        self,
        means: torch.Tensor,
        read: Callable[[int], Iterable[tuple[int, torch.Tensor]]],
        valid: torch.Tensor,
    ) -> None:
        """Take means, samples and factors of what ``read`` brings; ``means`` has no row yet."""
        squares, samples = [], means
        self._block_len = max(_BLOCK, 1 << (-(-self._mean_len // _BLOCKS) - 1).bit_length())
        for start, keys in read(max(_CHUNK, self._block_len)):
            own = valid[:, start : start + keys.shape[2]]
            means, some = self._mean_keys(means, start, keys, own)
            samples = self._more_samples(samples, start, keys, own)
            squares.append(some)
        self._means, self._samples = means, samples
        count = valid.sum(dim=1)[:, None, None]
        # Few keys may lie closer together than later ones will.
        least = means.square().mean(2).sum(-1, keepdim=True) * _CLOSE
        least = least.where(count >= _ENOUGH, least / _CLOSE)
        self._balance(torch.stack(squares).sum(0) / count.clamp(min=1), least)

    def _mean_keys(
        self, means: torch.Tensor, start: int, keys: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``means`` and those of the blocks that begin with ``keys``, the tokens from ``start`` on.

        Blocks of padding in front take the mean of the first one behind them. Then the sums of
        squared distances of all ``keys`` from the means, ``[B, Hkv, D]`` fp32.
        """
        squares = keys.new_zeros(*keys.shape[:2], keys.shape[3], dtype=torch.float32)
        for block, part in self._by_block(start, keys.shape[2]):
            own, padding = keys[:, :, part], ~valid[:, None, part, None]
            count = (~padding).sum(2, keepdim=True)
            mean = own.masked_fill(padding, 0.0).sum(2, keepdim=True, dtype=torch.float32)
            mean /= count.clamp(min=1)
            before, after = means[:, :, :block], means[:, :, block + 1 :]
            if block < means.shape[2]:
                old = means[:, :, block : block + 1]
                mean = old.where(old.any(-1, keepdim=True), mean)
            elif block:
                last, share = before[:, :, -1:], (count / _ENOUGH).clamp(max=1.0)
                mean = last.lerp(mean, share.where(last.any(-1, keepdim=True), 1.0))
            means = torch.cat([before, mean, after], dim=2)
            squares += (own - mean).masked_fill_(padding, 0.0).square_().sum(2)
        indices = torch.arange(means.shape[2], device=means.device)
        indices = indices.where(means.any(-1), len(indices) - 1)
        indices = indices.flip(-1).cummin(-1).values.flip(-1)
        return means.gather(2, indices.unsqueeze(-1).expand_as(means)), squares

    def _more_samples(
        self, samples: torch.Tensor, start: int, keys: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """``samples [B, Hkv, s, D]`` and those of the strides that begin with ``keys``.

        A stride has its newest key, as the first keys of a prompt are no sample. Padding in front
        takes keys from behind it.
        """
        stride, length = _stride(self._block_len), keys.shape[2]
        begin, end = -(-start // stride), min(-(-(start + length) // stride), _MOST_SAMPLES)
        if end <= begin:
            return samples
        firsts = torch.arange(begin, end)
        ends = (((firsts + 1) * stride - start).clamp(max=length) - 1).to(keys.device)
        some = valid.byte().argmax(1, keepdim=True)
        ends = ends.where(ends >= some, some + ends % (length - some))
        newest = torch.arange(length, device=keys.device).where(valid, 0).cummax(1).values
        places = newest.gather(1, ends)[:, None, :, None]
        new = keys.gather(2, places.expand(*keys.shape[:2], -1, keys.shape[3]))
        # A sequence without a key here repeats its last sample, or has zeros for now.
        last = samples[:, :, -1:] if samples.shape[2] else 0.0
        new = new.float().where(valid.any(1)[:, None, None, None], last)
        samples = torch.cat([samples, new], dim=2)
        # Samples replace the zeros before them, one after the other.
        some = samples.any(-1).byte().argmax(-1, keepdim=True)
        places = torch.arange(end, device=keys.device)
        places = places.where(places >= some, some + places % (end - some))
        return samples.gather(2, places.unsqueeze(-1).expand_as(samples))

    def _by_block(self, start: int, length: int) -> Iterator[tuple[int, slice]]:
        """Each block that has some of these tokens, the first being ``start``, and which ones."""
        size, end = self._block_len, start + length
        for block in range(start // size, -(-end // size) if length else 0):
            first, last = max(start, block * size), min(end, (block + 1) * size)
            yield block, slice(first - start, last - start)

    def _balance(self, keys: torch.Tensor, least: torch.Tensor) -> None:
        """Make factors for keys whose coordinates have variances ``keys [B, Hkv, D]``.

        ``least [B, Hkv, 1]`` is the least of their sum, as they are scaled.
        """
        queries = torch.zeros_like(keys)
        if self._energy is not None:
            queries = self._energy.unflatten(1, (keys.shape[1], -1)).sum(dim=2)
        shares = [x / x.mean(-1, keepdim=True).clamp(min=1e-30) + _LEAST for x in (keys, queries)]
        # With the fourth root the energies would be the same, but later queries may be others. A
        # rounding more or less changes none of the factors.
        exponents = (shares[0] / shares[1]).log2() / 6
        exponents = (exponents - exponents.mean(-1, keepdim=True)).round()
        # Numbers of rotated keys get the size that points count on.
        signs, _ = self._basis()
        squares = (keys * (-2 * exponents).exp2()).sum(-1, keepdim=True).maximum(least)
        # A sequence without keys takes the size of others.
        squares = squares.where(squares > 0, squares.amax(0, keepdim=True))
        size = (squares / len(signs)).where(squares > 0, 1.0).log2() / 2
        self._factors = (exponents + (4 * size).round() / 4).exp2()
        self._signs = paris.scaled_signs(signs, self._factors)

    def _append(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        codes = self.encode(keys, len(self._sign))
        if valid is not None:
            # A crop must know which tokens the counts leave out.
            codes.mark_padding(valid)
        self._sign.append(codes.sign)
        self._record.append(codes.record)
        counts = paris.count_centroids(codes.sign, valid=valid)
        self._counts = counts if self._counts is None else self._counts + counts

    def build(self, cold: ColdTokens) -> None:
        """Code a prompt that came in pieces by its own means, not by those of the first piece."""
        if len(cold) > self._mean_len:
            self._renew(cold.store)

    def is_stale(self, cold: ColdTokens) -> bool:
        """Factors of half as many tokens, or fewer, no longer are those of the keys."""
        return cold.valid.shape[1] >= 2 * self._mean_len

    def _renew(self, store: Store) -> None:
        """Take means and factors of all keys and code them anew.

        Reads all keys twice, in chunks. Where a store codes its rows there are no exact keys, and
        what was taken stays.
        """
        self._mean_len = length = len(self._sign)
        if self._means is None or store.codes_rows:
            return
        valid = self._codes().is_valid()
        self._learn(self._means[:, :, :0], store.key_chunks, valid)
        self._counts = None
        for plane in (self._sign, self._record):
            # Room for all at once, also where a fork still reads the memory.
            plane.crop(0)
            plane.reserve(length, plane.rows)
            plane.crop(0)
        for start, keys in store.key_chunks():
            self._append(keys, valid[:, start : start + keys.shape[2]])

    def rotate(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, Q, P]`` fp32 of ``query [B, Hq, Q, D]``, in the coordinates of the codes."""
        assert self._signs is not None, "add comes first"
        return naive.rotate(self._grouped(query), self._signs).flatten(1, 2)

    def encode(self, keys: torch.Tensor, start: int) -> paris.ParisCodes:
        """Codes of ``keys [B, Hkv, n, D]``, the tokens from ``start`` on."""
        signs, levels = self._basis()
        if self._factors is None or self._means is None:
            return paris.encode(keys, signs, levels)
        codes = paris.ParisCodes.empty(*keys.shape, device=keys.device)
        step = max(1, _NUMBERS // max(1, keys[:, :, :1].numel()))
        for block, part in self._by_block(start, keys.shape[2]):
            for first in range(part.start, part.stop, step):
                end = min(first + step, part.stop)
                own = keys[:, :, first:end] - self._means[:, :, block : block + 1]
                own /= self._factors.unsqueeze(2)
                paris.encode(own, signs, levels, out=codes.tokens(first, end))
        return codes

    def _basis(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The signs of the rotation as they are, ``[P]``, and the levels of the magnitudes."""
        assert self._signs is not None and self._levels is not None, "add comes first"
        return self._signs[0, 0].sign(), self._levels

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        levels, options, counts = self._levels, self.options, self._counts
        assert counts is not None and levels is not None, "a block was added"
        length, grouped = len(self._sign), self._grouped(query)
        if options.group_reduce == "mean":
            grouped = grouped.float().mean(dim=2, keepdim=True)
        _, rho = options.ratios(length)
        call = paris.SearchCall(
            *(grouped.transpose(2, 3), self._signs, self._codes(), counts, levels, cold.budget),
            survivors=self._candidates(length, cold.budget),
            shares=paris.share_units(rho, options.tiers_for(counts.shape[2])),
            **cold.scoring._asdict(),
            means=self._means,
            block_len=self._block_len,
            samples=self._sample_of(grouped.shape[2], counts, cold),
        )
        return paris.search_unchecked(call)

    def _sample_of(self, group: int, counts: torch.Tensor, cold: ColdTokens) -> torch.Tensor | None:
        """Keys that tell how the softmaxes of so many query heads compare; None where none do.

        Points by rank are no estimates of logits.
        """
        samples, by_rank = self._samples, self.options.tiers_for(counts.shape[2])
        if samples is None or by_rank or group == 1 or self.options.group_reduce == "mean":
            return None
        return samples if samples.shape[2] > 1 and cold.scale > 0 else None

    def _grouped(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, Hkv, G, Q, D]`` of ``query [B, Hq, Q, D]``."""
        return query.unflatten(1, (self._sign.rows.shape[1], -1))

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch | None:
        options, counts, search = self.options, self._counts, self._host_search
        key = options, cold.budget
        # Whatever changes the codes makes new counts.
        if search is None or search.counts is not counts or self._host_search_key != key:
            signs, levels = self._signs, self._levels
            assert counts is not None and signs is not None and levels is not None, "add was called"
            _, rho = options.ratios(len(self._sign))
            self._host_search_key = key
            search = self._host_search = ParisSearch(
                self._codes(),
                counts,
                signs,
                levels,
                paris.tier_shares(rho, options.tiers_for(counts.shape[2])),
                self._candidates(len(self._sign), cold.budget),
                means=self._means,
                block_len=self._block_len,
                samples=self._sample_of(query.shape[1] // counts.shape[1], counts, cold),
                mean_query=options.group_reduce == "mean",
            )
        return search

    def _candidates(self, n: int, budget: int) -> int:
        options = self.options
        beta, _ = options.ratios(n)
        return min(n, max(math.ceil(options.per_selected * budget), math.ceil(beta * n)))

    def cost(self, n: int, budget: int) -> SearchCost:
        """Stage 1 reads the signs of all tokens, stage 2 the whole codes of the candidates."""
        count, candidates = len(self._sign), self._candidates(n, budget)
        if not count:
            return SearchCost(candidates, 0)
        code = (self._sign.rows_nbytes + self._record.rows_nbytes) / count
        fewest = self._candidates(count, 0)
        return SearchCost(candidates, self._sign.rows_nbytes + int(fewest * code))

    def crop(self, length: int) -> None:
        """As for every state; dropped tokens are no longer counted. Means and samples stay."""
        if length == 0:
            self.reset()
        if self._counts is None or length >= len(self._sign):
            return
        # So that what comes in place of the dropped tokens gets means of its own in time.
        self._mean_len = min(self._mean_len, length)
        if self._means is not None:
            self._means = self._means[:, :, : -(-length // self._block_len)].contiguous()
        if self._samples is not None:
            count = -(-length // _stride(self._block_len))
            self._samples = self._samples[:, :, :count].contiguous()
        dropped = self._codes()
        counted = dropped.is_valid()[:, length:]
        self._counts = self._counts - paris.count_centroids(
            dropped.sign[:, :, length:], valid=counted
        )
        super().crop(length)

    def state_dict(self) -> Tensors:
        """As for every state; before the first block what a prompt's queries said, if any."""
        if self._counts is None:
            return {} if self._energy is None else {"energy": self._energy}
        return super().state_dict()

    def check_saved(self, state: Tensors, schema: Schema) -> None:
        """As for every state; widths of records and numbers of means follow from other tensors."""
        state = _current(state)
        super().check_saved(state, schema)
        if {"sign", "means"} <= state.keys():
            size = int(state["block_len"])
            if not _BLOCK <= size <= _LONGEST or size & (size - 1):
                raise ValueError(f"block_len is {size}: the file is damaged; save the cache again")
            blocks = -(-state["sign"].shape[2] // size)
            schema.check("means", state["means"], f"B H {blocks} D", torch.float32)
            if "samples" in state:
                count = min(-(-state["sign"].shape[2] // _stride(size)), _MOST_SAMPLES)
                schema.check("samples", state["samples"], f"B H {count} D", torch.float32)
        has_means = "means" in state
        if has_means != ("factors" in state) or ("samples" in state and not has_means):
            raise ValueError("means come with factors: the file is damaged; save the cache again")
        if {"sign", "counts", "record"} <= state.keys():
            width = 3 * state["sign"].shape[3] + state["counts"].shape[2]
            schema.check("record", state["record"], f"B H N {width}", torch.uint8)

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        """As for every state; codes of 0.1.0 have one mean key, and are renewed from exact keys."""
        if "counts" in state:
            super().load_state_dict(_current(state), device)
            return
        self.reset()
        if "energy" in state:
            self._energy = state["energy"].to(device)

    def loaded(self) -> None:
        """Make the rotation anew, from the seed."""
        # The rotated dimension is all that it takes to know of the keys.
        batch, heads, _, nbytes = self._sign.rows.shape
        self._make_basis(batch, heads, 8 * nbytes, self._sign.rows.device)
        if self._factors is not None:
            self._signs = paris.scaled_signs(self._basis()[0], self._factors)

    def _make_basis(self, batch: int, heads: int, dim: int, device: torch.device) -> None:
        """Make signs and levels for keys of ``dim`` elements, before or after the rotation."""
        signs = paris.random_signs(paris.rotated_dim(dim), self.options.seed).to(device)
        self._signs = signs.expand(batch, heads, -1).contiguous()
        levels = paris.magnitude_levels()
        if self.options.tables == "paper":
            levels = torch.tensor(_PAPER_LEVELS, dtype=torch.float32)
        self._levels = levels.to(device)

    def _codes(self) -> paris.ParisCodes:
        return paris.ParisCodes(self._sign.rows, self._record.rows)


def _stride(block_len: int) -> int:
    """Tokens of which one is a sample."""
    return -(-block_len // max(1, _SAMPLED // block_len))


def _current(state: Tensors) -> Tensors:
    """A saved state of 0.1.0 as one of today; others as they are."""
    if "mean" not in state:
        return {"block_len": torch.tensor(_BLOCK)} | state if "counts" in state else state
    mean, size = state["mean"], {"block_len": torch.tensor(_LONGEST)}
    means = mean.reshape(*mean.shape[:-1], 1, *mean.shape[-1:])
    state = {"factors": torch.ones_like(mean)} | state | {"means": means}
    # A length of 0 has exact keys coded again.
    return state | size | {"mean_len": torch.tensor(0)}


class ParisKVCache(RetrievalCache):
    """Finds cold tokens by sign-pattern collisions and reranks them by 4-bit codes.

    ``ParisKVCache(config=model.config)`` uses our best variant;
    ``ParisKVCache(model.config, preset="paper")`` the published algorithm.
    """

    name: ClassVar[str] = "paris"
    Config: ClassVar[type[RetrievalConfig]] = ParisConfig
    IndexClass: ClassVar[type[Any] | None] = ParisIndex
