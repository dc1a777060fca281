"""A2ATS's study of one layer: what it learns from which tokens, and its figures."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hf_kvret.calibration.a2ats import A2ATSCalibration
from hf_kvret.calibration.study import LayerFindings
from hf_kvret.calibration.vector_quantization import query_metric
from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens

QUERY_HEADS, HEADS, DIM = 4, 2, 16
WINDOW = 50
ROPE = Rope(10000.0 ** -(torch.arange(0, DIM, 2) / DIM), 1.5)
NO_ROPE = Rope(torch.empty(0), 1.0, "none")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(
    n: int, seed: int, dtype: torch.dtype = torch.float32, rope: Rope = ROPE, skew: float = 1.0
) -> LayerTokens:
    """Tokens whose queries are `skew` times larger in the first quarter of their numbers."""
    query = draw(1, QUERY_HEADS, n, DIM, seed=seed)
    query[..., : DIM // 4] *= skew
    query, key = query.to(dtype), draw(1, HEADS, n, DIM, seed=seed + 1, dtype=dtype) + 3
    positions = torch.arange(n)
    return LayerTokens(
        query_before=query,
        key_before=key,
        query=rope.rotate(query, positions),
        key=rope.rotate(key, positions),
        value=key,
        cos=None,
        sin=None,
        hidden=None,
        position_ids=positions[None],
    )


def study(
    learned: list[LayerTokens],
    held_out: list[LayerTokens] | None = None,
    rope: Rope = ROPE,
    **options: Any,
) -> LayerFindings:
    options = {"codewords": 8, "window": WINDOW, "rounds": 10, **options}
    made = A2ATSCalibration(**options).study(0, rope, torch.device("cpu"))
    for one in learned:
        made.add(one, False)
    for one in held_out or []:
        made.add(one, True)
    return made.finish(lambda done: None)


def seen_moments(seen: list[LayerTokens], rope: Rope = ROPE) -> torch.Tensor:
    """The second moments of queries at the window's end, in fp64, by a loop."""
    total = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    for one in seen:
        at = torch.full((one.query_before.shape[2],), WINDOW)
        turned = rope.rotate(one.query_before, at, dtype=torch.float32).double()[0]
        for head in range(QUERY_HEADS):
            total[head // (QUERY_HEADS // HEADS)] += turned[head].T @ turned[head]
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_metric_is_that_of_queries_at_one_position(dtype: torch.dtype) -> None:
    seen = [tokens(30, 0, dtype), tokens(40, 10, dtype)]
    found = study(seen).tensors["metric"]
    expected, _ = query_metric(seen_moments(seen))
    assert found.dtype == torch.float32
    # Sums are in fp64 and only their order differs.
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    unturned, _ = query_metric(seen_moments(seen, NO_ROPE))
    assert not torch.allclose(found, unturned, rtol=1e-2, atol=1e-2)


def test_with_a_word_for_each_key_the_words_are_the_keys_before_rope() -> None:
    seen = tokens(6, 3)
    for space, keys in (("windowed", seen.key_before[0]), ("rotated", seen.key[0])):
        found = study([seen], codewords=6, rounds=0, space=space, query_aware=False)
        assert torch.equal(found.tensors["metric"], torch.eye(DIM).expand(HEADS, -1, -1))
        distances = torch.cdist(found.tensors["codewords"], keys)
        # The mean is taken off and put back, which rounds.
        assert distances.amin(1).max() < 1e-5 and distances.amin(2).max() < 1e-5


def test_in_query_aware_space_the_words_are_keys_times_the_metric() -> None:
    seen = tokens(6, 3)
    found = study([seen], codewords=6, rounds=0).tensors
    restored = torch.linalg.solve(found["metric"], found["codewords"], left=False)
    assert torch.cdist(restored, seen.key_before[0]).amin(2).max() < 1e-2


def test_figures_are_the_variance_that_held_out_scores_lose() -> None:
    held = tokens(50, 20)
    found = study([tokens(200, 0)], [held])
    factor, words = found.tensors["metric"], found.tensors["codewords"]
    at = torch.full((50,), WINDOW)
    queries = ROPE.rotate(held.query_before, at)[0]
    shares = []
    for head in range(HEADS):
        keys = held.key_before[0, head]
        nearest = torch.cdist(keys @ factor[head], words[head]).argmin(1)
        restored = words[head][nearest] @ factor[head].inverse()
        group = queries[2 * head : 2 * head + 2].flatten(0, 1)
        exact, near = group @ keys.T, group @ restored.T
        shares.append((exact - near).var(dim=1).mean() / exact.var(dim=1).mean())
    assert 0 < found.quality["score_error"] < 1
    assert found.quality["score_error"] == pytest.approx(float(sum(shares) / HEADS), rel=1e-4)


def test_query_aware_codebooks_lose_less_of_held_out_scores() -> None:
    learned = [tokens(300, 0, skew=8.0), tokens(300, 30, skew=8.0)]
    quality = study(learned, [tokens(200, 60, skew=8.0)], codewords=32).quality
    assert quality["score_error"] < 0.8 * quality["plain_score_error"]
    alone = study(learned, [tokens(200, 60, skew=8.0)], codewords=32, query_aware=False).quality
    assert alone["score_error"] == quality["plain_score_error"]
    assert "plain_score_error" not in alone


def test_nothing_is_learned_from_what_is_held_out() -> None:
    first = study([tokens(100, 0)], [tokens(50, 20)])
    other = study([tokens(100, 0)], [tokens(70, 40), tokens(5, 60)])
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert first.quality["score_error"] != other.quality["score_error"]


def test_where_nothing_is_held_out_there_is_no_error() -> None:
    assert study([tokens(20, 0)]).quality["score_error"] is None
    # One key has no variance.
    quality = study([tokens(20, 0)], [tokens(1, 5)]).quality
    assert quality["score_error"] is None and quality["plain_score_error"] is None


def test_tokens_are_copied_and_what_they_were_a_part_of_is_let_go() -> None:
    made = A2ATSCalibration(codewords=4, window=WINDOW, rounds=3).study(
        0, ROPE, torch.device("cpu")
    )
    fused = draw(1, QUERY_HEADS + 2 * HEADS, 20, DIM, seed=0)
    whole = weakref.ref(fused)
    query, key, value = fused.split([QUERY_HEADS, HEADS, HEADS], dim=1)
    given = LayerTokens(query, key, query, key, value, None, None, None, None)
    expected = study(
        [
            LayerTokens(
                *(x.clone() for x in (query, key, query, key, value)), None, None, None, None
            )
        ],
        codewords=4,
        rounds=3,
    )
    made.add(given, False)
    fused.fill_(float("nan"))
    del fused, query, key, value, given
    gc.collect()
    assert whole() is None
    found = made.finish(lambda done: None)
    assert torch.equal(found.tensors["codewords"], expected.tensors["codewords"])


def test_keys_wait_in_the_dtype_of_the_model() -> None:
    made = A2ATSCalibration(codewords=4).study(0, ROPE, torch.device("cpu"))
    made.add(tokens(20, 0, torch.bfloat16), False)
    (held,) = made._keys[False]
    assert held.dtype == torch.bfloat16
    assert held.untyped_storage().nbytes() == 20 * HEADS * DIM * 2


@pytest.mark.parametrize(
    ("options", "books"), [({}, 2), ({"compare": False}, 1), ({"query_aware": False}, 1)], ids=str
)
def test_progress_adds_up_to_the_work(options: dict[str, bool], books: int) -> None:
    made = A2ATSCalibration(codewords=4, rounds=7, **options).study(0, ROPE, torch.device("cpu"))
    made.add(tokens(40, 0), False)
    steps: list[int] = []
    made.finish(steps.append)
    assert sum(steps) == made.work == books * HEADS * 7


def test_a_layer_tells_how_it_rotates() -> None:
    found = study([tokens(20, 0)])
    assert found.told == {"layout": "half", "attention_factor": 1.5}
    assert torch.equal(found.tensors["inv_freq"], ROPE.inv_freq)
    found = study([tokens(20, 0, rope=NO_ROPE)], rope=NO_ROPE)
    assert found.told == {"layout": "none", "attention_factor": 1.0}
    assert found.tensors["inv_freq"].shape == (0,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codewords": 0}, "codewords=0: 1 to 32768"),
        ({"codewords": 32769}, "codewords=32769"),
        ({"window": -1}, "window=-1: 0 or more"),
        ({"rounds": -1}, "rounds=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"tolerance": -1.0}, "tolerance=-1.0: 0 or more"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"space": "plain"}, "space='plain': choose 'windowed' or 'rotated'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A2ATSCalibration(**wrong)


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(ValueError, match="no tokens to learn from"):
        study([])
