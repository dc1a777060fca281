"""PaperLRQKIndex: LRQK as published, for comparison. Algorithm 1, and the steps of algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import State, number, part, tensor, transient
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import Factors, Proxies, finite, float_chunks, project
from hf_kvret_kernels import proxy
from hf_kvret_kernels.host_step import HostSearch, ProxySearch

_FP32 = torch.float32
_small = partial(TokenBuffer, 64)
_BASIS: dict[str, Any] = {"optional": True, "shared": True, "dims": "B Q r D", "dtype": _FP32}


@dataclass(frozen=True, eq=False)
class Sketch:
    """A factor A ``[l, r]`` of Q or K, described by its products alone.

    Attributes:
        cross: ``A^T Q`` (or ``A^T K``), ``[..., r, D]``.
        own: ``A^T A``, ``[..., r, r]``.
    """

    cross: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of_map(cls, factor_map: torch.Tensor, gram: torch.Tensor) -> Sketch:
        """The sketch of ``A = Q X`` with ``X [..., D, r]`` and the Gram of Q."""
        cross = factor_map.mT @ gram
        return cls(cross, cross @ factor_map)

    @classmethod
    def of_rows(cls, factor: torch.Tensor, rows: torch.Tensor) -> Sketch:
        """The sketch of A = ``factor [..., l, r]`` with K = ``rows [..., l, D]``, in fp32."""
        factor, rows = factor.float(), rows.float()
        return cls((rows.mT @ factor).mT, factor.mT @ factor)

    def plus(self, other: Sketch) -> Sketch:
        """The sketch of the rows of both."""
        return Sketch(self.cross + other.cross, self.own + other.own)

    def basis(self) -> torch.Tensor:
        """``B = (A^T A)^-1 A^T Q``, ``[..., r, D]``: least squares of ``Q = A B`` (eq. 6)."""
        return solve(self.own, self.cross)


def alternating(
    query_gram: torch.Tensor,
    key_gram: torch.Tensor,
    query_start: Sketch,
    key_start: Sketch,
    iterations: int,
    penalty: float,
) -> tuple[Factors, Bases]:
    """Algorithm 1: ``iterations`` rounds of B_Q, B_K, A_K, A_Q (eq. 6), then B_Q, B_K once more.

    Returns X_Q and X_K of A_Q = Q X_Q and A_K = K X_K, and B_Q and B_K fitted to them.
    Each update needs A_Q and A_K by their products with Q, K and themselves only, and gives
    A_K = K X_K: so Grams are enough. B is refitted at the end, as the authors' code does, because
    decoding starts from it.
    """
    g_q, g_k = finite(query_gram, key_gram)
    a_q, a_k = query_start, key_start
    to_query = to_key = g_q.new_empty(0)
    for _ in range(iterations):
        b_q, b_k = a_q.basis(), a_k.basis()
        to_key = _update(a_q, b_k, penalty)
        a_k = Sketch.of_map(to_key, g_k)
        to_query = _update(a_k, b_q, penalty)
        a_q = Sketch.of_map(to_query, g_q)
    bases = Bases(a_q.basis().float(), a_k.basis().float())
    return Factors(to_query.float(), to_key.float()), bases


def _update(other: Sketch, basis: torch.Tensor, penalty: float) -> torch.Tensor:
    """X ``[..., D, r]`` of eq. 6: (C^T + penalty B^T)(M + penalty B B^T)^-1."""
    numerator = other.cross.mT + penalty * basis.mT
    return solve(other.own + penalty * basis @ basis.mT, numerator.mT).mT


def solve(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``matrix^-1 @ right`` for symmetric, positive ``[..., r, r]``; never waits for the device.

    A ridge of 1e-12 of the mean diagonal entry (1e-6 in fp32) makes singular matrices solvable.
    """
    r = matrix.shape[-1]
    share = 1e-12 if matrix.dtype == torch.float64 else 1e-6
    ridge = matrix.diagonal(dim1=-2, dim2=-1).mean(-1) * share
    ridge = ridge.clamp(min=torch.finfo(matrix.dtype).tiny)
    eye = torch.eye(r, dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_ex(matrix + ridge[..., None, None] * eye, right).result


class Moments(State):
    """Running sums over the rows of Q, or of K, of each query head, fp32.

    Attributes:
        gram: ``[B, Hq, D, D]``.
        cross, own: the products of a random A ~ N(0, 1) with the rows and with itself (eq. 22).
    """

    gram: torch.Tensor | None = tensor(shared=True, dims="B Q D D", dtype=_FP32)
    cross: torch.Tensor | None = tensor(shared=True, dims="B Q r D", dtype=_FP32)
    own: torch.Tensor | None = tensor(shared=True, dims="B Q r r", dtype=_FP32)

    def add(self, rows: torch.Tensor, rank: int, seed: int) -> None:
        """Add ``rows [B, Hq, n, D]``, zeros for padding; A has ``rank`` columns, drawn by ``seed``.

        Each pass has a seed of its own: equal rows of A would not be independent.
        """
        generator = torch.Generator().manual_seed(seed)
        for chunk in float_chunks(rows, None):
            # On the CPU, whatever device and dtype are the defaults.
            shape = (*chunk.shape[:3], rank)
            start = torch.randn(shape, generator=generator, dtype=_FP32, device="cpu")
            start = start.to(chunk.device) * (chunk != 0).any(-1, keepdim=True)
            products = {
                "gram": chunk.mT @ chunk,
                "cross": start.mT @ chunk,
                "own": start.mT @ start,
            }
            for name, product in products.items():
                total = getattr(self, name)
                setattr(self, name, product if total is None else total + product)

    def start(self) -> Sketch:
        """The sketch of the random A."""
        assert self.cross is not None and self.own is not None, "rows were added"
        return Sketch(self.cross.double(), self.own.double())


@dataclass(frozen=True, eq=False)
class Bases:
    """B_Q and B_K, ``[B, Hq, r, D]`` fp32: they map proxies back to queries and keys."""

    query: torch.Tensor
    key: torch.Tensor

    def guess(self, keys: torch.Tensor) -> torch.Tensor:
        """Proxies ``[B, Hq, n, r]`` of ``keys [B, Hkv, n, D]``: k B_K^T (B_K B_K^T)^-1."""
        keys = keys.repeat_interleave(self.key.shape[1] // keys.shape[1], dim=1)
        return solve(self.key @ self.key.mT, self.key @ keys.float().mT).mT

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        omega: Sketch | None,
        iterations: int,
        penalty: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Self]:
        """One token's proxies, and the bases after it (eq. 9 to 12).

        Args:
            query, key: ``[B, Hq, D]`` fp32.
            omega: of the keys on the device in the step before (Omega, eq. 7) and their proxies;
                None when nothing was selected yet.
            iterations: rounds.
            penalty: lambda_d1 and lambda_d2.

        Returns:
            ``q_hat, k_hat [B, Hq, r]`` fp32, and the new bases.
        """
        q, k = query.unsqueeze(2), key.unsqueeze(2)
        dots = (q * k).sum(-1, keepdim=True)
        own_q, own_k = self.query @ self.query.mT, self.key @ self.key.mT
        from_q, from_k = q @ self.query.mT, k @ self.key.mT
        if omega is not None:
            own_q = own_q + penalty * omega.own
            from_q = from_q + penalty * q @ omega.cross.mT
        k_hat = solve(own_k, from_k.mT).mT
        q_hat = torch.zeros_like(k_hat)
        for _ in range(iterations):
            q_hat = _solve_proxy(own_q, from_q, k_hat, penalty, dots)
            k_hat = _solve_proxy(own_k, from_k, q_hat, penalty, dots)
        bases = type(self)(_correct(self.query, q_hat, q), _correct(self.key, k_hat, k))
        return q_hat.squeeze(2), k_hat.squeeze(2), bases


def _solve_proxy(
    own: torch.Tensor, right: torch.Tensor, other: torch.Tensor, penalty: float, dots: torch.Tensor
) -> torch.Tensor:
    """(right + penalty (q.k) other)(own + penalty other^T other)^-1, ``[B, Hq, 1, r]``."""
    matrix = own + penalty * other.mT @ other
    return solve(matrix, (right + penalty * dots * other).mT).mT


def _correct(basis: torch.Tensor, proxy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One gradient step (eq. 10) of the optimal size: eq. 11 and 12 come to 1 / |proxy|^2."""
    error = proxy @ basis - target
    return basis - proxy.mT @ error / proxy.square().sum(-1, keepdim=True).clamp(min=1e-30)


class RecentProxies(State):
    """The tokens that are not cold; before the factors are made only the last ``room``.

    Attributes:
        keys: ``[B, Hkv, m, D]``, of slots ``end - m .. end``; rows of zeros for padding.
        proxies: ``[B, Hq, m, r]`` fp32; empty before ``start``.
        end: slot after the newest.
    """

    keys: TokenBuffer = passed(_small, dims="B H m D")
    proxies: TokenBuffer = passed(_small, may_be_empty=True, dims="B Q m r", dtype=torch.float32)
    end: int = number(0)
    _pass_len: int = number(0, key="end")

    def __init__(self, room: int) -> None:
        self.room = room

    def add(self, keys: torch.Tensor, start: int, bases: Bases | None) -> None:
        """Put ``keys [B, Hkv, q, D]`` at slot ``start``, in place of all from there on."""
        self.end, self._pass_len = start + keys.shape[2], keys.shape[2]
        if bases is None:
            first = max(start, self.end - self.room)
            self.keys.put(keys[:, :, first - start :], first)
            self.keys.drop(self.end - self.room)
            return
        self.keys.put(keys, start)
        self.proxies.put(bases.guess(keys), start)

    def start(self, to_key: torch.Tensor) -> None:
        """Make the proxies of all tokens with ``to_key [B, Hq, D, r]``."""
        keys = _repeat(self.keys.rows.float(), to_key.shape[1])
        self.proxies.put(keys @ to_key, self.keys.first)

    def newest(self, count: int, query_heads: int) -> torch.Tensor:
        """Keys ``[B, Hq, count, D]`` fp32 of the newest tokens."""
        return _repeat(self.keys.since(self.end - count).float(), query_heads)

    def omega(self, count: int) -> Sketch:
        """The sketch of the ``count`` newest tokens before the last pass."""
        keys, proxies = self.keys.rows, self.proxies.rows
        last = keys.shape[2] - min(self._pass_len, keys.shape[2])
        newest = slice(max(0, last - count), last)
        return Sketch.of_rows(proxies[:, :, newest], _repeat(keys[:, :, newest], proxies.shape[1]))

    def pop_cold(self, block: TokenBlock, bases: Bases) -> torch.Tensor:
        """Remove a block that became cold; returns its proxies ``[B, Hq, n, r]``.

        Tokens dropped before the factors were made get a guess (``Bases.guess``).
        """
        first = self.proxies.first
        unknown = min(max(0, first - block.start), len(block))
        guesses = bases.guess(block.keys[:, :, :unknown])
        span = slice(max(0, block.start - first), max(0, block.end - first))
        proxies = torch.cat([guesses, self.proxies.rows[:, :, span]], dim=2)
        self.keys.drop(block.end)
        self.proxies.drop(block.end)
        return proxies

    def loaded(self) -> None:
        for rows in (self.keys, self.proxies):
            rows.first = self.end - len(rows)


def _repeat(keys: torch.Tensor, query_heads: int) -> torch.Tensor:
    """``keys [B, Hkv, n, D]`` for each query head, ``[B, Hq, n, D]``."""
    return keys.repeat_interleave(query_heads // keys.shape[1], dim=1)


class PaperLRQKIndex(Index):
    """Algorithms 1 and 2: ALS factors for each query head, and solves at every step.

    Each query head selects for itself. A step solves for the proxies of its query and key, fitted
    to the keys that were on the device in the step before (the selected ones and the
    ``fit_recent`` newest), and updates B_Q and B_K. Proxies of tokens in the window are kept apart
    until they become cold.

    Departures: the factors come from Gram matrices, with the same result (see ``alternating``); a
    prompt is factorized when the first token after it is decoded, so that it may come in
    chunks; a pass of several tokens takes their steps one after the other; of a prompt's tokens
    that are in the window then, all but the newest ``max(fit_recent, max_draft)`` get the
    proxies of algorithm 2's first guess, when they leave it.
    """

    capture_obstacle = "the published lrqk tracks the tokens of the window on the host"

    _queries: Moments = part(may_be_empty=True)
    _keys: Moments = part(may_be_empty=True)
    _proxies: Proxies = part(may_be_empty=True)
    _recent: RecentProxies = part(key="waiting")
    # B_Q and B_K, [B, Hq, r, D].
    _query_basis: torch.Tensor | None = tensor(key="bases.query", **_BASIS)
    _key_basis: torch.Tensor | None = tensor(key="bases.key", **_BASIS)
    # The tokens that the newest query selected, [B, Hq, 1, k] int32.
    _selection: torch.Tensor | None = tensor(
        key="selected.ids", optional=True, shared=True, dims="B Q 1 k", dtype=torch.int32
    )

    # The validity of the newest pass, [B, q], and what its queries are fitted to.
    _valid: torch.Tensor | None = transient()
    _omega: Sketch | None = transient()

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._queries, self._keys = Moments(), Moments()
        self._proxies = Proxies()
        self._recent = RecentProxies(self._room(options))

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        rank = self.options.rank_of(keys.shape[-1])
        self._valid = valid
        if valid is not None:
            # Padding becomes rows of zeros, which add nothing to the products below.
            queries, keys = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (queries, keys))
        if self._bases is None:
            group = queries.shape[1] // keys.shape[1]
            seed = self.options.seed + 2 * start
            self._queries.add(queries, rank, seed)
            self._keys.add(keys.repeat_interleave(group, dim=1), rank, seed + 1)
        self._recent.add(keys, start, self._bases)

    def build(self, cold: ColdTokens) -> None:
        options = self.options
        queries, keys = self._queries, self._keys
        assert queries.gram is not None and keys.gram is not None, "on_forward comes first"
        starts = queries.start(), keys.start()
        limits = options.iterations, options.penalty
        factors, bases = alternating(queries.gram, keys.gram, *starts, *limits)
        self._query_basis, self._key_basis = bases.query, bases.key
        self._omega = None
        self._recent.start(factors.to_key)
        chunks = (chunk for _, chunk in cold.store.key_chunks())
        self._proxies.replace(project(factors.to_key, chunks))
        queries.reset()
        keys.reset()

    def add(self, block: TokenBlock) -> None:
        """After ``build``, add proxies of the block; those of the prompt are made by ``build``."""
        if self._bases is not None:
            self._proxies.append(self._recent.pop_cold(block, self._bases))

    def before_search(self, cold: ColdTokens) -> None:
        """Read the keys selected in the step before, to which the next query is fitted."""
        self._omega = self._recent.omega(self.options.fit_recent)
        if self._selection is not None:
            ids = self._selection
            keys, _ = cold.store.gather(ids)
            indices = ids[:, :, 0].clamp(min=0).long().unsqueeze(-1)
            rows = self._proxies.rows
            proxies = rows.gather(2, indices.expand(*indices.shape[:3], rows.shape[-1]))
            proxies = proxies.float().masked_fill(ids[:, :, 0, :, None] < 0, 0.0)
            self._omega = self._omega.plus(Sketch.of_rows(proxies, keys[:, :, 0]))

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        proxies, rows, scoring = self._solve(query), self._proxies.rows, cold.scoring._asdict()
        return proxy.top_indices(proxies, rows, query.shape[1], cold.budget, **scoring)

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch:
        rows, heads = self._proxies.rows, query.shape[1]
        return ProxySearch(self._solve(query) * cold.scale, rows, heads=heads)

    def after_search(self, ids: torch.Tensor) -> None:
        """Remember the selection of the newest query."""
        self._selection = ids[:, :, -1:]

    def _solve(self, query: torch.Tensor) -> torch.Tensor:
        """Proxies ``[B, Hq, Q, r]`` fp32 of the queries; takes the steps of the bases."""
        assert self._bases is not None, "build comes first"
        options = self.options
        if self._valid is not None:
            # Padding must not change the bases.
            query = query.masked_fill(~self._valid[:, None, :, None], 0.0)
        keys = self._recent.newest(query.shape[2], query.shape[1])
        query_proxies, key_proxies, bases = [], [], self._bases
        for q, k in zip(query.unbind(2), keys.unbind(2), strict=True):
            limits = options.iterations, options.penalty
            q_hat, k_hat, bases = bases.step(q.float(), k, self._omega, *limits)
            query_proxies.append(q_hat)
            key_proxies.append(k_hat)
        self._query_basis, self._key_basis = bases.query, bases.key
        newest = torch.stack(key_proxies, dim=2)
        self._recent.proxies.put(newest, self._recent.end - newest.shape[2])
        return torch.stack(query_proxies, dim=2)

    def crop(self, length: int) -> None:
        """As for every state; drops the selection, which may contain cropped tokens."""
        if length == 0:
            self.reset()
        super().crop(length)
        self._selection = None

    def set_options(self, options: Any) -> None:
        super().set_options(options)
        self._recent.room = self._room(options)

    def cost(self, n: int, budget: int) -> SearchCost:
        """All proxies, the bases twice (read and written), and the keys of the query's fit."""
        bases = self._bases
        if bases is None:
            return SearchCost(0, 0)
        keys = self._recent.keys.rows
        fit_bytes = keys.nbytes + self._recent.proxies.rows.nbytes
        if self._selection is not None:
            fit_bytes += self._selection.numel() * keys.shape[-1] * keys.element_size()
        both = 2 * (bases.query.nbytes + bases.key.nbytes)
        return SearchCost(0, self._proxies.rows.nbytes + both + fit_bytes)

    @property
    def _bases(self) -> Bases | None:
        if self._query_basis is None or self._key_basis is None:
            return None
        return Bases(self._query_basis, self._key_basis)

    @staticmethod
    def _room(options: LRQKConfig) -> int:
        """Number of recent tokens to keep: those of a step, or those it fits its query to."""
        return max(options.fit_recent, options.max_draft)
