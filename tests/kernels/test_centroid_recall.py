"""What a recall needs: cosines with centroids, their lists unpacked, each token once."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels import centroid
from hf_kvret_kernels.centroid import naive

Place = tuple[str, str]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_similarity(place: Place, query: torch.Tensor, centroids: torch.Tensor) -> None:
    """Against float64; ``centroids`` may be a view of a buffer, and stays one."""
    backend, device = place
    room = centroids.untyped_storage().nbytes() // centroids.element_size()
    moved = centroids.as_strided((room,), (1,), 0).to(device)
    moved = moved.as_strided(centroids.shape, centroids.stride(), centroids.storage_offset())
    norms = torch.linalg.vector_norm(moved.float(), dim=-1)
    found = centroid.similarity(query.to(device), moved, 1 / norms, backend=backend)
    cosines = torch.nn.functional.cosine_similarity(
        query.unsqueeze(3).double(), centroids.unsqueeze(2).double(), dim=-1
    )
    assert found.dtype == torch.float32 and found.device.type == device
    assert found.shape == cosines.shape[:4]
    # Some hundred fp32 products of a sum that is 1 at most.
    torch.testing.assert_close(found.cpu().double(), cosines.amax(-1), atol=1e-6, rtol=0)


@pytest.mark.factor(
    ("queries", "centroids", "group", "dim"),
    [(1, 1, 1, 16), (3, 5, 2, 16), (1, 70, 4, 20), (70, 33, 2, 64), (2, 40, 7, 9), (1, 20, 1, 256)],
)
def test_similarity_is_the_largest_cosine_of_the_group(
    place: Place, queries: int, centroids: int, group: int, dim: int
) -> None:
    shape = (group, dim)
    check_similarity(place, normal(1, 2, 2, queries, *shape), normal(2, 2, 2, centroids, *shape))


@pytest.mark.factor("dtype", [torch.float16, torch.bfloat16])
def test_similarity_of_narrow_dtypes_is_exact(place: Place, dtype: torch.dtype) -> None:
    """Also where the query has another dtype: nothing is rounded to the narrower one."""
    centroids = normal(2, 2, 2, 9, 2, 16).to(dtype)
    check_similarity(place, normal(1, 2, 2, 3, 2, 16).to(dtype), centroids)
    check_similarity(place, normal(1, 2, 2, 3, 2, 16), centroids)


def test_similarity_reads_no_spare_room(place: Place) -> None:
    room = torch.full((2, 2, 40, 3, 16), float("nan"))
    room[:, :, :35] = normal(2, 2, 2, 35, 3, 16)
    query = normal(1, 2, 3, 2, 3, 16).transpose(1, 2)
    check_similarity(place, query, room[:, :, :35])


def test_a_query_of_zeros_is_near_to_none(place: Place) -> None:
    backend, device = place
    centroids = normal(2, 1, 1, 5, 2, 16).to(device)
    query = torch.zeros(1, 1, 1, 2, 16, device=device)
    found = centroid.similarity(query, centroids, 1 / centroids.norm(dim=-1), backend=backend)
    assert (found == 0).all()


@pytest.mark.factor("with_high", [False, True])
@pytest.mark.factor("rho", [1, 37, 1100])
def test_lists_are_unpacked_as_they_were_packed(place: Place, rho: int, with_high: bool) -> None:
    """All numbers from -1 to the largest that fits, out of buffers with spare room."""
    backend, device = place
    most = (1 << 24 if with_high else 1 << 16) - 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, most, (2, 3, 9, rho), generator=generator)
    ids[..., 0] = torch.tensor([-1, 0, 32766, 32767, 32768, 65533, 65534, most - 2, most - 1])
    kept = (ids + 1).to(device)
    low = torch.where((kept & 65535) > 32767, (kept & 65535) - 65536, kept & 65535).short()
    room = torch.zeros(2, 3, 12, rho, dtype=torch.int16, device=device)
    room[:, :, :9] = low
    high = (kept >> 16).byte() if with_high else None
    index = torch.randint(0, 9, (2, 3, 2, 4), generator=generator)
    found = centroid.take_lists(room[:, :, :9], high, index.to(device), backend=backend)
    assert found.shape == (2, 3, 2, 4, rho) and found.dtype == torch.int32
    for b, h, q, c in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        assert found[b, h, q, c].tolist() == ids[b, h, index[b, h, q, c]].tolist()


def test_without_indices_no_lists_are_taken(place: Place) -> None:
    backend, device = place
    low = torch.zeros(1, 2, 3, 5, dtype=torch.int16, device=device)
    index = torch.zeros(1, 2, 0, 4, dtype=torch.int64, device=device)
    found = centroid.take_lists(low, None, index, backend=backend)
    assert found.shape == (1, 2, 0, 4, 5) and found.dtype == torch.int32


def check_united(place: Place, drawn: torch.Tensor, valid: torch.Tensor) -> None:
    """Against a loop over each query's ids."""
    backend, device = place
    ids = centroid.unite(drawn.to(device), valid.to(device), backend=backend)
    assert ids.shape == drawn.shape
    assert ids.dtype == drawn.dtype and ids.device.type == device
    held = valid.shape[1]
    for b in range(len(drawn)):
        for named, mine in zip(
            drawn[b].flatten(0, 1).tolist(), ids[b].flatten(0, 1).tolist(), strict=True
        ):
            seen, expected = set(), []
            for token in named:
                new = 0 <= token < held and bool(valid[b, token]) and token not in seen
                seen.add(token)
                expected.append(token if new else -1)
            assert mine == expected


@pytest.mark.factor("dtype", [torch.int32, torch.int64])
@pytest.mark.factor("count", [1, 90, 1300])
def test_united_lists_name_each_valid_token_once_where_it_came_first(
    place: Place, count: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-2, 40, (2, 2, 3, count), generator=generator).to(dtype)
    valid = torch.rand(2, 35, generator=generator) < 0.7
    check_united(place, drawn, valid)
    check_united(place, drawn.transpose(1, 2), valid.expand(2, 35).t().contiguous().t())


def test_one_token_named_by_all_is_kept_once(place: Place) -> None:
    check_united(place, torch.full((1, 1, 2, 1500), 3).int(), torch.ones(1, 4, dtype=torch.bool))


def test_rows_that_share_a_small_table_do_not_mix(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table holds some queries at a time."""
    for module in _modules_with_tables(place):
        monkeypatch.setattr(module, "MOST_MARKS", 150)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-1, 30, (2, 1, 5, 40), generator=generator).int()
    check_united(place, drawn, torch.rand(2, 30, generator=generator) < 0.8)


def test_of_nothing_comes_nothing(place: Place) -> None:
    for shape in ((1, 2, 0, 5), (1, 2, 3, 0)):
        check_united(place, torch.zeros(shape, dtype=torch.int32), torch.ones(1, 4).bool())


def _modules_with_tables(place: Place) -> list:
    if place[0] == "naive":
        return [naive]

    from hf_kvret_kernels.centroid import triton

    return [triton]


def test_what_does_not_fit_is_refused_by_name() -> None:
    query, norms = torch.zeros(2, 2, 7, 2, 16), torch.zeros(2, 2, 7, 2)
    with pytest.raises(ValueError, match="third dimension"):
        centroid.similarity(query, query[:, :1], norms[:, :1])
    for wrong in (query, norms.double()):
        with pytest.raises(ValueError, match=r"inverse_norms is .* pass fp32 \[2, 2, 7, 2\]"):
            centroid.similarity(query, query, wrong)
    with pytest.raises(ValueError, match="centroids is on meta"):
        centroid.similarity(query, query.to("meta"), norms)
    with pytest.raises(ValueError, match="requires gradients"):
        centroid.similarity(query.clone().requires_grad_(), query, norms)
    with pytest.raises(ValueError, match="backend='cpp'"):
        centroid.similarity(query, query, norms, backend="cpp")
    low, index = torch.zeros(2, 2, 5, 3, dtype=torch.int16), torch.zeros(2, 2, 1, 4).long()
    with pytest.raises(ValueError, match=r"low is torch\.int32"):
        centroid.take_lists(low.int(), None, index)
    for high in (low, low[:, :, :4].byte()):
        with pytest.raises(ValueError, match=r"pass uint8 \[2, 2, 5, 3\]"):
            centroid.take_lists(low, high, index)
    for wrong in (index.int(), index[:, :1]):
        with pytest.raises(ValueError, match=r"pass int64 \[2, 2, any, any\]"):
            centroid.take_lists(low, None, wrong)
    with pytest.raises(ValueError, match=r"index is .* on meta"):
        centroid.take_lists(low, None, index.to("meta"))
    valid = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="ids"):
        centroid.unite(torch.zeros(2, 3), valid)
    with pytest.raises(ValueError, match="no token"):
        centroid.unite(torch.zeros(2, 1, 1, 3, dtype=torch.int32), valid[:, :0])
    with pytest.raises(ValueError, match=r"valid is .* on meta"):
        centroid.unite(torch.zeros(2, 1, 1, 3, dtype=torch.int32), valid.to("meta"))
