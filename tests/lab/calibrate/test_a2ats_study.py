"""A2ATS's study of one layer: the metric, what it learns from which tokens, its figures."""

import math
from typing import Any

import pytest
import torch

from hf_kvret.lab.calibrate import a2ats
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, query_metric
from hf_kvret.lab.calibrate.study import LayerFindings
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope
from hf_kvret.methods.a2ats.learned import at_distance
from hf_kvret_model_patches.rope import Rope

from .draws import CPU, DIM, HEADS, NO_ROPE, ROPE, draw

QUERY_HEADS = 4
WINDOW = 50


def tokens(
    n: int, seed: int, dtype: torch.dtype = torch.float32, rope: Rope = ROPE, skew: float = 1.0
) -> LayerTokens:
    """Tokens whose queries are `skew` times larger in the first quarter of their numbers."""
    query = draw(1, QUERY_HEADS, n, DIM, seed=seed)
    query[..., : DIM // 4] *= skew
    query, key = query.to(dtype), draw(1, HEADS, n, DIM, seed=seed + 1, dtype=dtype) + 3
    positions = torch.arange(n)
    return LayerTokens(rope.rotate(query, positions), rope.rotate(key, positions), key)


def study(
    learned: list[LayerTokens],
    held_out: list[LayerTokens] | None = None,
    rope: Rope = ROPE,
    **options: Any,
) -> LayerFindings:
    options = {"codewords": 8, "distance": WINDOW, "rounds": 10, **options}
    made = A2ATSCalibration(**options).study(0, rope, CPU)
    for one in learned:
        made.add(one, False)
    for one in held_out or []:
        made.add(one, True)
    return made.finish(lambda done: None)


def seen_moments(
    seen: list[LayerTokens], rope: Rope = ROPE, seen_rope: Rope | None = None
) -> torch.Tensor:
    """The second moments of queries at the window's end, in fp64, by a loop."""
    total = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    for one in seen:
        at = torch.full((one.query.shape[2],), WINDOW)
        turned = rope.rotate(before_rope(one.query, seen_rope or rope), at, dtype=torch.float32)
        turned = turned.double()[0]
        # Once more: keys before RoPE lack the factor that attention's keys have.
        turned[..., : rope.rotary_dim] *= rope.attention_factor
        for head in range(QUERY_HEADS):
            total[head // (QUERY_HEADS // HEADS)] += turned[head].T @ turned[head]
    return total


PARTIAL = Rope(10000.0 ** -(torch.arange(0, DIM // 2, 2) / DIM), 1.5)


def test_scores_of_partly_rotated_heads_are_those_of_attention() -> None:
    # Where the factor is wrong, numbers that pass count too much or too little in the metric.
    seen = tokens(60, 0, rope=PARTIAL)
    result = study([seen], rope=PARTIAL, codewords=60, rounds=0).tensors
    expected, _ = query_metric(seen_moments([seen], PARTIAL))
    assert torch.allclose(result["metric"], expected, rtol=1e-5, atol=1e-6)
    # A query at position b sees a key at position 0 by the score of attention itself.
    before, key = before_rope(seen.query, PARTIAL), before_rope(seen.key, PARTIAL)
    query = at_distance(before, PARTIAL, WINDOW)
    there, here = torch.full((60,), WINDOW), torch.zeros(60, dtype=torch.long)
    rotated = PARTIAL.rotate(before, there), PARTIAL.rotate(key, here)
    for head in range(QUERY_HEADS):
        of = head // (QUERY_HEADS // HEADS)
        exact = rotated[0][0, head] @ rotated[1][0, of].T
        assert torch.allclose(query[0, head] @ key[0, of].T, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_metric_is_that_of_queries_at_one_position(dtype: torch.dtype) -> None:
    seen = [tokens(30, 0, dtype), tokens(40, 10, dtype)]
    result = study(seen).tensors["metric"]
    expected, _ = query_metric(seen_moments(seen))
    assert result.dtype == torch.float32
    # Sums are in fp64 and only their order differs.
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    unturned, _ = query_metric(seen_moments(seen, NO_ROPE, ROPE))
    assert not torch.allclose(result, unturned, rtol=1e-2, atol=1e-2)


def test_figures_are_the_variance_that_held_out_scores_lose() -> None:
    held = tokens(50, 20)
    result = study([tokens(200, 0)], [held])
    factor, words = result.tensors["metric"], result.tensors["codewords"].float()
    at = torch.full((50,), WINDOW)
    queries = ROPE.rotate(before_rope(held.query, ROPE), at)[0]
    shares = []
    for head in range(HEADS):
        keys = before_rope(held.key, ROPE)[0, head]
        nearest = torch.cdist(keys @ factor[head], words[head]).argmin(1)
        restored = words[head][nearest] @ factor[head].inverse()
        group = queries[2 * head : 2 * head + 2].flatten(0, 1)
        exact, near = group @ keys.T, group @ restored.T
        shares.append((exact - near).var(dim=1).mean() / exact.var(dim=1).mean())
    assert 0 < result.quality["score_error"] < 1
    assert result.quality["score_error"] == pytest.approx(float(sum(shares) / HEADS), rel=1e-4)


def test_codebooks_that_know_queries_lose_less_of_held_out_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned = [tokens(300, 0, skew=8.0), tokens(300, 30, skew=8.0)]
    held_out = [tokens(200, 60, skew=8.0)]
    aware = study(learned, held_out, codewords=32).quality["score_error"]
    identity = torch.eye(DIM).expand(HEADS, -1, -1)
    monkeypatch.setattr(a2ats, "query_metric", lambda moments: (identity, identity))
    plain = study(learned, held_out, codewords=32).quality["score_error"]
    assert 0 < aware < 0.8 * plain


def test_nothing_is_learned_from_what_is_held_out() -> None:
    first = study([tokens(100, 0)], [tokens(50, 20)])
    other = study([tokens(100, 0)], [tokens(70, 40), tokens(5, 60)])
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert first.quality["score_error"] != other.quality["score_error"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codewords_have_the_dtype_that_was_asked_for(dtype: str) -> None:
    words = study([tokens(300, 0)], codewords=64, codeword_dtype=dtype).tensors["codewords"]
    assert words.dtype == getattr(torch, dtype) and words.shape == (HEADS, 64, DIM)


def moments(queries: torch.Tensor) -> torch.Tensor:
    """``[H, D, D]`` fp64 mean of q^T q of ``queries [H, m, D]``."""
    queries = queries.double()
    return queries.mT @ queries / queries.shape[1]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_the_factor_reproduces_the_second_moment(size: float) -> None:
    """Whatever its unit: divided by the rms entry, with the ridge on the diagonal."""
    second = moments(draw(3, 100, 16, seed=0) * draw(16, seed=1).exp()) * size
    factor, inverse = query_metric(second)
    assert factor.dtype == inverse.dtype == torch.float32
    assert factor.shape == inverse.shape == (3, 16, 16)
    assert torch.equal(factor, factor.tril())
    rms = second.square().mean((1, 2), keepdim=True).sqrt()
    expected = second / rms + 1e-6 * torch.eye(16)
    # The factor is rounded to fp32, and sums of 16 of its products are compared.
    product = factor.double() @ factor.double().mT
    assert (product - expected).abs().max() <= 1e-6 * expected.abs().max()
    identity = factor.double() @ inverse.double() - torch.eye(16)
    assert identity.abs().max() <= 1e-5


def test_matrices_that_are_no_second_moments_are_refused() -> None:
    good = moments(draw(3, 50, 4, seed=15))
    broken = good.clone()
    broken[1, 2, 3] = math.nan
    with pytest.raises(ValueError, match="of head 1 are zero, not finite or"):
        query_metric(broken)
    with pytest.raises(ValueError, match=r"of head 0, 1, 2 are .*not positive definite"):
        query_metric(good - 2 * torch.eye(4))
