"""Centroid lists against float64, and recalls: cosines, lists unpacked, ids united."""

import itertools
from typing import Any

import pytest
import torch

from hf_kvret_kernels import centroid
from hf_kvret_kernels.centroid import naive

from .draws import Place, draw, generator, moved_with_room, run_at


def _similarity(
    place: Place, query: torch.Tensor, centroids: torch.Tensor, metric: Any = None, **options: Any
) -> torch.Tensor:
    units, inverse = centroid.units(query, metric)[0], centroid.units(centroids, metric)[1]
    return run_at(place, centroid.similarity, units, centroids, inverse, **options)


@pytest.mark.factor("largest", [False, True])
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_similarity_is_the_mean_or_the_largest_cosine_of_the_group(
    place: Place, dtype: torch.dtype, largest: bool
) -> None:
    """A query of zeros is near to none."""
    query, centroids = draw(2, 2, 3, 2, 20, seed=1), draw(2, 2, 5, 2, 20, seed=2).to(dtype)
    query[0, 0, 0] = 0
    result = _similarity(place, query, centroids, largest=largest)
    cosines = torch.nn.functional.cosine_similarity(
        query.unsqueeze(3).double(), centroids.unsqueeze(2).double(), dim=-1
    )
    expected = cosines.amax(-1) if largest else cosines.mean(-1)
    # Some fp32 products of a sum that is 1 at most; Triton rounds the query to bf16.
    rounds = dtype == torch.bfloat16 and place[0] == "triton"
    torch.testing.assert_close(result.double(), expected, atol=2e-3 if rounds else 1e-6, rtol=0)


def test_with_the_covariance_of_keys_similarity_is_the_correlation_of_scores(place: Place) -> None:
    """A number that all keys share, however large, says nothing."""
    query, centroids = draw(2, 2, 3, 2, 20, seed=1), draw(2, 2, 5, 2, 20, seed=2)
    keys = draw(2, 2, 60, 20, seed=3)
    keys[..., :4] *= 5
    query[..., 7] = centroids[..., 7] = 300.0
    keys[..., 7] = 11.0
    metric = torch.func.vmap(torch.func.vmap(lambda rows: torch.cov(rows.T)))(keys)
    result = _similarity(place, query, centroids, metric)
    scores = [
        torch.einsum("bhqgd,bhnd->bhqgn", x.double(), keys.double()) for x in (query, centroids)
    ]
    apart = [x - x.mean(-1, keepdim=True) for x in scores]
    expected = torch.nn.functional.cosine_similarity(
        apart[0].unsqueeze(3), apart[1].unsqueeze(2), dim=-1
    ).mean(-1)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.factor("with_high", [False, True])
@pytest.mark.factor("rho", [37, 1100])
def test_lists_are_unpacked_as_they_were_packed(place: Place, rho: int, with_high: bool) -> None:
    """All numbers from -1 to the largest that fits, out of buffers with spare room."""
    most = (1 << 24 if with_high else 1 << 16) - 1
    ids = torch.randint(-1, most, (2, 3, 9, rho), generator=generator(0))
    ids[..., 0] = torch.tensor([-1, 0, 32766, 32767, 32768, 65533, 65534, most - 2, most - 1])
    low = torch.zeros(2, 3, 12, rho, dtype=torch.int16)[:, :, :9]
    low.copy_((ids + 1 + 0x8000) % 0x10000 - 0x8000)
    high = (ids + 1 >> 16).byte() if with_high else None
    index = torch.randint(0, 9, (2, 3, 2, 4), generator=generator(0))
    result = run_at(place, centroid.take_lists, low, high, index)
    assert result.dtype == torch.int32
    expected = ids.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    expected = expected.gather(3, index.unsqueeze(-1).expand(*index.shape, rho))
    assert torch.equal(result.long(), expected)


def check_united(place: Place, drawn: torch.Tensor, valid: torch.Tensor) -> None:
    """Against a loop over each query's ids."""
    ids = run_at(place, centroid.unite, drawn, valid)
    assert ids.shape == drawn.shape and ids.dtype == drawn.dtype
    for b, h, q in itertools.product(*map(range, drawn.shape[:3])):
        wanted: dict[int, int] = {}
        for at, token in enumerate(drawn[b, h, q].tolist()):
            if 0 <= token < valid.shape[1] and valid[b, token]:
                wanted.setdefault(token, at)
        expected = [-1] * drawn.shape[3]
        for token, at in wanted.items():
            expected[at] = token
        assert ids[b, h, q].tolist() == expected


@pytest.mark.factor("dtype", [torch.int32, torch.int64])
@pytest.mark.factor("count", [0, 90, 1300])
def test_united_lists_name_each_token_once(place: Place, count: int, dtype: torch.dtype) -> None:
    drawn = torch.randint(-2, 40, (2, 2, 3, count), generator=generator(0)).to(dtype)
    valid = torch.rand(2, 35, generator=generator(0)) < 0.7
    check_united(place, drawn, valid)
    check_united(place, drawn.transpose(1, 2), valid.t().contiguous().t())


def test_rows_in_a_small_table_do_not_mix(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table holds some queries at a time."""
    monkeypatch.setattr(f"hf_kvret_kernels.centroid.{place[0]}.MOST_MARKS", 150)
    drawn = torch.randint(-1, 30, (2, 1, 5, 40), generator=generator(1)).int()
    check_united(place, drawn, torch.rand(2, 30, generator=generator(1)) < 0.8)


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of few centroids are made as those of many: chunk by chunk."""
    monkeypatch.setattr(naive, "_MOST_HELD", 0)


def in_chunks(keys: torch.Tensor, chunk: int) -> centroid.KeyChunks:
    starts = range(0, keys.shape[2], chunk)
    return lambda: ((start, keys[:, :, start : start + chunk]) for start in starts)


def ragged(held: int) -> torch.Tensor:
    """``[2, held]``: a hole in one row, padding on the left of the other."""
    valid = torch.ones(2, held, dtype=torch.bool)
    valid[0, 10:13] = False
    valid[1, : held * 3 // 5] = False
    return valid


def poisoned(keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The same keys as a view of rows that go on with NaN; those that are not valid are NaN."""
    rows = keys.new_full((*keys.shape[:3], keys.shape[3] + 8), float("nan"))
    rows[..., : keys.shape[3]] = keys.masked_fill(~valid[:, None, :, None], float("nan"))
    return rows[..., : keys.shape[3]]


def best_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    count: int,
    valid: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """``centroid.top_keys`` in float64; of equal keys the first."""
    logits = queries.double() @ keys.double().mT.unsqueeze(2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~valid[:, None, None, None], float("-inf"))
    if queries.shape[3] > 1:
        logits = logits.log_softmax(-1)
    order = logits.amax(3).sort(descending=True, stable=True)
    ids = order.indices.masked_fill(order.values == float("-inf"), -1)[..., :count].int()
    return torch.nn.functional.pad(ids, (0, count - ids.shape[-1]), value=-1)


def check(
    place: Place,
    queries: torch.Tensor,
    keys: torch.Tensor,
    count: int,
    valid: torch.Tensor,
    *,
    chunk: int = 32,
    softcap: float | None = None,
) -> None:
    """Run in ``place`` and compare with float64."""
    scale = queries.shape[-1] ** -0.5
    chunks = in_chunks(moved_with_room(keys, place[1]), chunk)
    options: dict[str, Any] = {"valid": valid, "scale": scale, "softcap": softcap}
    ids = run_at(place, centroid.top_keys, queries, chunks, count, **options)
    expected = best_keys(queries, keys, count, valid, scale, softcap)
    assert ids.dtype == torch.int32 and torch.equal(ids, expected)


@pytest.mark.factor(
    ("group", "softcap", "count"), [(1, 2.0, 9), (1, None, 60), (3, 2.0, 9), (3, None, 1)]
)
def test_lists_are_the_best_keys_by_the_largest_softmax_weight(
    place: Place, group: int, softcap: float | None, count: int
) -> None:
    valid = ragged(50)
    queries, keys = 3 * draw(2, 1, 3, group, 16, seed=1), poisoned(draw(2, 1, 50, 16), valid)
    check(place, queries, keys, count, valid, softcap=softcap)


@pytest.mark.factor(("centroids", "group", "dim"), [(4, 5, 9), (17, 1, 36), (3, 2, 256)])
def test_more_than_one_tile_of_each_side(
    place: Place, monkeypatch: pytest.MonkeyPatch, centroids: int, group: int, dim: int
) -> None:
    if place[0] == "triton":
        monkeypatch.setattr("hf_kvret_kernels.centroid.triton._ROWS", 16)
    queries, keys = draw(1, 1, centroids, group, dim, seed=1), draw(1, 1, 70, dim, seed=2)
    valid = torch.rand(1, 70, generator=generator(3)) < 0.8
    check(place, queries, poisoned(keys, valid), 6, valid, chunk=70)


@pytest.mark.factor(("chunk", "most"), [(13, 1 << 24), (30, 1), (50, 900)])
def test_chunks_do_not_change_the_lists(
    place: Place, chunk: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place[0] == "triton":
        monkeypatch.setattr("hf_kvret_kernels.centroid.triton._MOST_SCORES", most)
    valid = ragged(50)
    queries, keys = draw(2, 1, 2, 2, 16, seed=1), poisoned(draw(2, 1, 50, 16), valid)
    check(place, queries, keys, 9, valid, chunk=chunk)


@pytest.mark.parametrize("count", [1, 9, 60])
def test_few_lists_at_a_time_are_those_of_all(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = ragged(50)
    queries, keys = draw(2, 2, 7, 3, 16, seed=1), poisoned(draw(2, 2, 50, 16), valid)
    for name, size in {"_MOST_HELD": 1, "_QUERIES": 9, "_KEYS": 7, "_MOST_READINGS": 1}.items():
        monkeypatch.setattr(naive, name, size)
    check(("naive", "cpu"), queries, keys, count, valid, chunk=20)
    options = {"valid": valid, "scale": 0.25, "backend": "naive"}
    parts = list(centroid.key_lists(queries, in_chunks(keys, 20), count, **options))
    assert [part.shape for part in parts] == [(2, 2, size, count) for size in (3, 3, 1)]
    whole = centroid.top_keys(queries, in_chunks(keys, 20), count, **options)
    assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize(("count", "group"), [(1, 3), (60, 1), (60, 3)])
def test_few_lists_come_at_once(count: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = ragged(50)
    queries, keys = draw(2, 2, 7, group, 16, seed=1), poisoned(draw(2, 2, 50, 16), valid)
    # Three of the seven at a time.
    monkeypatch.setattr(naive, "_MOST_HELD", queries[:, :, :3, :, 0].numel() * 50)
    monkeypatch.setattr(naive, "_QUERIES", 1)
    monkeypatch.setattr(naive, "_collected", None)
    check(("naive", "cpu"), queries, keys, count, valid, chunk=20, softcap=9.0)


def test_keys_of_several_dtypes_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naive, "_MOST_READINGS", 0)
    queries, keys = draw(2, 2, 7, 2, 16, seed=1), draw(2, 2, 50, 16)
    keys[:, :, :20] = keys[:, :, :20].bfloat16()
    chunks = [(0, keys[:, :, :20].bfloat16()), (20, keys[:, :, 20:])]
    valid = torch.ones(2, 50, dtype=torch.bool)
    options = {"valid": valid, "scale": 1.0, "backend": "naive"}
    result = centroid.top_keys(queries, lambda: iter(chunks), 9, **options)
    assert torch.equal(result, best_keys(queries, keys, 9, valid, 1.0))


def test_equal_keys_are_listed_once_each_and_none_better_is_left_out(place: Place) -> None:
    """Scores are small whole numbers, so that many are equal to the bit; Triton takes the first."""
    queries = torch.randint(-1, 2, (1, 2, 2, 1, 4), generator=generator(4)).float()
    keys = torch.randint(-1, 2, (1, 2, 60, 4), generator=generator(5)).float()
    valid, chunks = torch.ones(1, 60, dtype=torch.bool), in_chunks(keys.to(place[1]), 25)
    result = run_at(place, centroid.top_keys, queries, chunks, 20, valid=valid, scale=1.0)
    expected = best_keys(queries, keys, 20, valid, 1.0)
    scores = torch.einsum("bhcgd,bhnd->bhcn", queries, keys)
    assert torch.equal(scores.gather(-1, result.long()), scores.gather(-1, expected.long()))
    assert all(len(set(ids)) == 20 for ids in result.flatten(0, 2).tolist())
    if place[0] == "triton":
        assert torch.equal(result, expected)


def test_without_centroids_there_are_no_lists(place: Place) -> None:
    queries, chunks = torch.zeros(2, 2, 0, 2, 16), in_chunks(torch.zeros(2, 2, 50, 16), 50)
    options = {"valid": ragged(50), "scale": 1.0}
    assert run_at(place, centroid.top_keys, queries, chunks, 3, **options).shape == (2, 2, 0, 3)
