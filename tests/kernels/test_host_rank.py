"""host_rank: the compiled ranking, torch's, and a loop in Python agree."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import host_attention as host

BACKENDS = [
    "naive",
    pytest.param("cpp", marks=pytest.mark.skipif(not host.available(), reason=host.why_not())),
]


def _wanted(scores: torch.Tensor, ids: torch.Tensor, count: int) -> list[list[int]]:
    """Query after query, by Python's own arithmetic."""
    batch, heads, queries, named = ids.shape
    group = scores.shape[1] // heads
    found = []
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                relevance = [-math.inf] * named
                for g in range(group):
                    row = scores[b, h * group + g, q].tolist()
                    finite = [s for s in row if s > -math.inf]
                    lse = 0.0
                    if finite and group > 1:
                        top = max(finite)
                        lse = top + math.log(sum(math.exp(s - top) for s in finite))
                    relevance = [max(r, s - lse) for r, s in zip(relevance, row, strict=True)]
                order = sorted(range(named), key=lambda k: (-relevance[k], k))
                row_ids = ids[b, h, q].tolist()
                best = [row_ids[k] for k in order if row_ids[k] >= 0 and relevance[k] > -math.inf]
                found.append((best + [-1] * count)[:count])
    return found


@pytest.mark.factor("backend", BACKENDS)
@pytest.mark.factor("group", [1, 3])
@pytest.mark.factor("count", [1, 7, 40, 55])
def test_the_best_come_first(backend: str, group: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.rand(2, 2, 3, 40, generator=generator).argsort(-1).int() * 3
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    ids[0, 0, 0] = -1
    scores = 4 * torch.randn(2, 2 * group, 3, 40, generator=generator)
    scores = scores.masked_fill((ids < 0).repeat_interleave(group, dim=1), float("-inf"))
    best = host.host_rank(scores, ids, count, backend=backend)
    assert best.dtype == torch.int32 and best.shape == (2, 2, 3, count)
    assert best.flatten(0, 2).tolist() == _wanted(scores, ids, count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_tokens_the_first_named_comes_first(backend: str) -> None:
    ids = torch.tensor([[[[9, 4, -1, 7, 1]]]], dtype=torch.int32)
    for group in (1, 2):
        best = host.host_rank(torch.zeros(1, group, 1, 5), ids, 3, backend=backend)
        assert best.flatten().tolist() == [9, 4, 7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 2])
def test_a_score_that_is_no_number_is_never_chosen_and_moves_no_other(
    backend: str, group: int
) -> None:
    ids = torch.arange(6, dtype=torch.int32).view(1, 1, 1, 6)
    scores = torch.tensor([1.0, float("nan"), 3.0, float("-inf"), 2.0, 0.0])
    scores = scores.expand(1, group, 1, 6).contiguous()
    best = host.host_rank(scores, ids, 6, backend=backend).flatten().tolist()
    assert best == [2, 4, 0, 5, -1, -1]
    scores[..., 5] = float("inf")
    best = host.host_rank(scores, ids, 6, backend=backend).flatten().tolist()
    assert best[0] == 5 and 1 not in best and 3 not in best
    assert group > 1 or best == [5, 2, 4, 0, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_choose_from_or_nothing_wanted(backend: str) -> None:
    none = torch.zeros(2, 2, 3, 0, dtype=torch.int32)
    best = host.host_rank(torch.zeros(2, 4, 3, 0), none, 5, backend=backend)
    assert best.shape == (2, 2, 3, 5) and int(best.max()) == -1
    some = torch.zeros(2, 2, 3, 4, dtype=torch.int32)
    assert host.host_rank(torch.zeros(2, 4, 3, 4), some, 0, backend=backend).shape == (2, 2, 3, 0)


@pytest.mark.skipif(not host.available(), reason=host.why_not())
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_change_nothing(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(3000, dtype=torch.int32).expand(1, 4, 2, 3000)
    scores = torch.randn(1, 8, 2, 3000, generator=generator)
    best = host.host_rank(scores, ids, 200, threads=threads)
    assert torch.equal(best, host.host_rank(scores, ids, 200, backend="naive"))


@pytest.mark.parametrize(
    ("scores", "ids", "count", "said"),
    [
        (torch.zeros(1, 3, 1, 4), torch.zeros(1, 2, 1, 4, dtype=torch.int32), 1, "a multiple of 2"),
        (torch.zeros(1, 2, 1, 5), torch.zeros(1, 2, 1, 4, dtype=torch.int32), 1, "scores is"),
        (torch.zeros(1, 2, 1, 4).half(), torch.zeros(1, 2, 1, 4).int(), 1, "pass fp32"),
        (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 1, "pass int32"),
        (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4).int(), -1, "count=-1"),
    ],
)
def test_bad_input_is_refused(
    scores: torch.Tensor, ids: torch.Tensor, count: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        host.host_rank(scores, ids, count)
