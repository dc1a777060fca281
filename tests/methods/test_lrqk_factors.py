"""Factors of LRQK: the closed form against the SVD, algorithm 1 against full matrices."""

import math

import pytest
import torch

from hf_kvret.methods.lrqk.als import Moments, alternating
from hf_kvret.methods.lrqk.factors import Factors, KeyGrams, QueryGrams, closed_form
from hf_kvret.testing.tape import TapeRecorder

DIM, RANK = 24, 8
CASES = ("full", "ragged", "deficient", "few_rows", "zero", "scaled", "thin_overlap")


def _case(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K, fp64, ``[*, DIM]``."""
    generator = torch.Generator().manual_seed(CASES.index(name))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "ragged":
        return normal(200, DIM), normal(70, DIM)
    if name == "deficient":
        return normal(90, 5) @ normal(5, DIM), normal(90, 6) @ normal(6, DIM)
    if name == "few_rows":
        return normal(90, DIM), normal(5, DIM)
    if name == "zero":
        return normal(90, DIM), torch.zeros(90, DIM, dtype=torch.float64)
    if name == "scaled":
        columns = torch.logspace(-3, 3, DIM, dtype=torch.float64)
        return normal(90, DIM) * columns, normal(90, DIM) * columns
    if name == "thin_overlap":
        # Each is of rank 12 and they share 3 directions: Q K^T is of rank 3.
        q, k = normal(90, DIM), normal(90, DIM)
        return q * (torch.arange(DIM) < 12), k * (torch.arange(DIM) >= 9) * (torch.arange(DIM) < 21)
    return normal(90, DIM), normal(90, DIM)


def _gram(rows: torch.Tensor) -> torch.Tensor:
    return rows.mT @ rows


def _relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).norm() / exact.norm().clamp(min=1e-300))


def _error(q: torch.Tensor, k: torch.Tensor, to_query: torch.Tensor, to_key: torch.Tensor) -> float:
    """Relative Frobenius error on the full matrix of scores, fp64."""
    return _relative((q @ to_query.double()) @ (k @ to_key.double()).mT, q @ k.mT)


def _optimum(q: torch.Tensor, k: torch.Tensor, rank: int) -> float:
    singular = torch.linalg.svdvals(q @ k.mT)
    return float(singular[rank:].norm() / singular.norm().clamp(min=1e-300))


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [(1, torch.float64), (RANK, torch.float64), (DIM, torch.float64), (RANK, torch.float32)],
)
@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_the_truncated_svd(name: str, rank: int, dtype: torch.dtype) -> None:
    """An index adds Grams up in fp32. With fp64 ones, the rounding of fp32 maps is left."""
    q, k = _case(name)
    factors = closed_form(_gram(q.to(dtype)), _gram(k.to(dtype)), rank)
    assert factors.to_query.shape == factors.to_key.shape == (DIM, rank)
    assert factors.to_query.dtype == factors.to_key.dtype == torch.float32
    assert factors.to_query.isfinite().all() and factors.to_key.isfinite().all()
    error = _error(q, k, factors.to_query, factors.to_key)
    assert abs(error - _optimum(q, k, rank)) < (1e-5 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_the_one_counted_over_all_pairs(name: str) -> None:
    """Also of factors that are far from the best, and of other queries than they were made for."""
    q, k = _case(name)
    generator = torch.Generator().manual_seed(9)
    other = torch.randn(40, DIM, generator=generator, dtype=torch.float64)
    some = [torch.randn(DIM, 3, generator=generator) * 0.2 for _ in range(2)]
    for factors in (closed_form(_gram(q), _gram(k), RANK), Factors(some[0], some[1])):
        for queries in (q, other):
            counted = _error(queries, k, factors.to_query, factors.to_key)
            result = float(factors.error(_gram(queries), _gram(k)).sqrt())
            assert result == pytest.approx(counted, rel=1e-6, abs=1e-7)


def _literal(
    q: torch.Tensor,
    k: torch.Tensor,
    a_q: torch.Tensor,
    a_k: torch.Tensor,
    rounds: int,
    penalty: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 1 line by line, and the authors' last fit of B; everything l rows long, fp64."""
    inverse = torch.linalg.inv
    for _ in range(rounds):
        b_q = inverse(a_q.T @ a_q) @ a_q.T @ q
        b_k = inverse(a_k.T @ a_k) @ a_k.T @ k
        a_k = k @ (q.T @ a_q + penalty * b_k.T) @ inverse(a_q.T @ a_q + penalty * b_k @ b_k.T)
        a_q = q @ (k.T @ a_k + penalty * b_q.T) @ inverse(a_k.T @ a_k + penalty * b_q @ b_q.T)
    return a_q, a_k, inverse(a_q.T @ a_q) @ a_q.T @ q, inverse(a_k.T @ a_k) @ a_k.T @ k


@pytest.mark.factor("rounds", [1, 2, 4])
@pytest.mark.factor("penalty", [1.0, 30.0])
def test_als_on_grams_is_algorithm_1_on_full_matrices(penalty: float, rounds: int) -> None:
    """Grams were added up in fp32: 1e-7, times the condition of what is solved, some hundred."""
    q, k = (rows.float().double() for rows in _case("ragged"))
    of_q, of_k = Moments(), Moments()
    of_q.add(q.float()[None, None], RANK, 5)
    of_k.add(k.float()[None, None], RANK, 6)
    starts = of_q.start(), of_k.start()
    factors, bases = alternating(of_q.gram, of_k.gram, *starts, rounds, penalty)
    # A_Q and A_K of eq. 22.
    literal_starts = [
        torch.randn(len(rows), RANK, generator=torch.Generator().manual_seed(seed)).double()
        for seed, rows in ((5, q), (6, k))
    ]
    a_q, a_k, b_q, b_k = _literal(q, k, *literal_starts, rounds, penalty)
    assert _relative(q @ factors.to_query[0, 0].double(), a_q) < 1e-4
    assert _relative(k @ factors.to_key[0, 0].double(), a_k) < 1e-4
    assert _relative(bases.query[0, 0].double(), b_q) < 1e-4
    assert _relative(bases.key[0, 0].double(), b_k) < 1e-4


def _tokens(batch: int = 2, heads: int = 4, count: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[B, H, n, D]`` and a ragged ``valid [B, n]`` with a hole."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(batch, heads, count, DIM, generator=generator)
    valid = torch.ones(batch, count, dtype=torch.bool)
    valid[1, :70] = False
    valid[0, 90:95] = False
    return rows, valid


CUTS = [(), (40, 41, 100)]


def _spans(length: int, cuts: tuple[int, ...]) -> list[slice]:
    return [slice(a, b) for a, b in zip((0, *cuts), (*cuts, length), strict=True)]


@pytest.mark.parametrize("cuts", CUTS, ids=len)
def test_key_grams_of_blocks_add_up_and_leave_padding_out(cuts: tuple[int, ...]) -> None:
    rows, valid = _tokens()
    rows = (rows + 3.0).masked_fill(~valid[:, None, :, None], float("nan"))
    grams = KeyGrams()
    for span in _spans(150, cuts):
        grams.add(rows[:, :, span], valid[:, span])
    for b in range(2):
        for h in range(4):
            real = rows[b, h, valid[b]].double()
            mean = real.mean(0)
            torch.testing.assert_close(grams.mean()[b, h].double(), mean, rtol=1e-5, atol=1e-5)
            expected, result = _gram(real - mean), grams.matrix()[b, h]
            # fp32 sums of 1400 with the mean in them.
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("cuts", CUTS, ids=len)
@pytest.mark.parametrize("sets", [2, 4])
def test_query_grams_are_sums_however_passes_are_cut(sets: int, cuts: tuple[int, ...]) -> None:
    """All queries of a head are of one length here, so that any pass settles the same scale."""
    half_life, recency = 11.0, 0.3
    rows, valid = _tokens()
    lengths = torch.tensor([1.0, 50.0, 0.01, 2.0])
    rows = rows / rows.norm(dim=-1, keepdim=True) * lengths[:, None, None]
    grams = QueryGrams(sets, half_life)
    for span in _spans(150, cuts):
        grams.add(rows[:, :, span].masked_fill(~valid[:, None, span, None], 1e4), valid[:, span])
    result = grams.weighted(recency)
    assert result.shape == (2, sets, DIM, DIM)
    for b in range(2):
        for s in range(sets):
            group = range(s * 4 // sets, (s + 1) * 4 // sets)
            alike = torch.zeros(DIM, DIM, dtype=torch.float64)
            newest = torch.zeros(DIM, DIM, dtype=torch.float64)
            for t in valid[b].nonzero().flatten().tolist():
                for h in group:
                    q = rows[b, h, t].double() / lengths[h]
                    alike += q.outer(q)
                    newest += q.outer(q) * 2.0 ** (-(149 - t) / half_life)
            expected = (1 - recency) * alike / alike.trace() + recency * newest / newest.trace()
            torch.testing.assert_close(result[b, s].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cuts", CUTS, ids=len)
def test_sums_for_als_are_of_one_random_matrix_without_padding(cuts: tuple[int, ...]) -> None:
    rows, valid = _tokens()
    rows = rows.masked_fill(~valid[:, None, :, None], 0.0)
    moments, draws = Moments(), []
    for span in _spans(150, cuts):
        moments.add(rows[:, :, span], RANK, span.start)
        chance = torch.Generator().manual_seed(span.start)
        draws.append(torch.randn(2, 4, span.stop - span.start, RANK, generator=chance))
    start = torch.cat(draws, dim=2).masked_fill(~valid[:, None, :, None], 0.0)
    sketch = moments.start()
    torch.testing.assert_close(moments.gram, rows.mT @ rows, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(sketch.cross, (start.mT @ rows).double(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(sketch.own, (start.mT @ start).double(), rtol=1e-5, atol=1e-3)
    assert math.isclose(float(start.std()), math.sqrt(float(valid.float().mean())), rel_tol=0.05)


@pytest.mark.parametrize("earlier", range(1, 6))
def test_queries_of_replayed_steps_are_summed_in_the_groups_of_usual_ones(
    earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the step was captured; usual ones were left to a kernel that never came."""
    monkeypatch.setattr("hf_kvret.methods.lrqk.factors._PENDING", 4)
    queries = torch.randn(earlier + 5, 1, 2, 1, DIM)
    usual, replayed = (QueryGrams(1, half_life=3.0) for _ in range(2))
    for query in queries[:earlier]:
        replayed.add(query, None)
    step_query = queries[0].clone()
    replayed.before_capture()
    _, replay = TapeRecorder(step_query.device).record(lambda: replayed.add(step_query, None))
    for number, query in enumerate(queries[earlier:]):
        if number:
            replayed.before_replay()
        step_query.copy_(query)
        replay()
    for query in queries:
        usual.add(query, None, later=True)
    assert replayed.buffer.count == usual.buffer.count
    assert torch.equal(replayed.weighted(0.5), usual.weighted(0.5))
