"""Keys and queries for ``bench index-build``: synthetic ones with structure, and a model's own."""

from __future__ import annotations

from pathlib import Path

import index_build_keys
import pytest
import torch
from bench_index_build import IndexBuild
from index_build_keys import (
    LayerShape,
    check_memory,
    model_source,
    random_layer,
)
from transformers import DynamicCache

from hf_kvret.core.recall import exact_scores
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.evaluation.texts import token_ids

SHAPE = LayerShape(heads=2, group=3, dim=32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("reference")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("The river rose in the night, and by morning the bridge had gone. " * 20)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_keys_have_the_shape_that_was_asked_for_and_depend_on_the_seed(
    dtype: torch.dtype,
) -> None:
    layer = random_layer(SHAPE, 130, dtype, CPU, seed=1)
    assert layer.queries.shape == (1, 6, 130, 32) and layer.keys.shape == (1, 2, 130, 32)
    assert layer.queries.dtype == layer.keys.dtype == dtype
    assert layer.scale == 32**-0.5 and layer.softcap is None and len(layer) == 130
    again, other = (random_layer(SHAPE, 130, dtype, CPU, seed) for seed in (1, 2))
    assert torch.equal(layer.keys, again.keys) and torch.equal(layer.queries, again.queries)
    assert not torch.equal(layer.keys, other.keys)
    assert not torch.equal(layer.keys[:, 0], layer.keys[:, 1])


@pytest.mark.parametrize("tokens", [7, 1000, 1024, 1025, 2500])
def test_a_longer_layer_begins_as_a_shorter_one_does(tokens: int) -> None:
    longest = random_layer(SHAPE, 3000, torch.float32, CPU, seed=1)
    shorter = random_layer(SHAPE, tokens, torch.float32, CPU, seed=1)
    # The same draws; sums over ranks may be taken in another order.
    for name in ("queries", "keys"):
        want = getattr(longest, name)[:, :, :tokens]
        torch.testing.assert_close(getattr(shorter, name), want, rtol=1e-5, atol=1e-5)


def test_random_queries_are_like_their_neighbours_and_drift_away() -> None:
    queries = random_layer(SHAPE, 2048, torch.float32, CPU, seed=1).queries
    near, far = (
        torch.cosine_similarity(queries[:, :, :1024], queries[:, :, gap : 1024 + gap], dim=-1)
        for gap in (1, 1000)
    )
    assert near.mean() > 0.8
    assert far.mean() < 0.6 < near.mean(dim=2).min()


def test_random_queries_prefer_some_keys_by_far() -> None:
    layer = random_layer(SHAPE, 2048, torch.float32, CPU, seed=1)
    shares = exact_scores(layer.queries[:, :, -16:], layer.keys, layer.scale).softmax(-1)
    best = shares.topk(64, dim=-1).values.sum(-1).mean()
    # Even shares would give 3%, a query that sees one key only gives 100%.
    assert 0.3 < best < 0.99


def test_an_odd_head_dim_has_no_rope() -> None:
    with pytest.raises(ValueError, match="--dim 33"):
        random_layer(LayerShape(1, 1, 33), 8, torch.float32, CPU, seed=1)


def test_a_model_gives_the_keys_that_its_own_cache_holds(subject: Subject, text: Path) -> None:
    source = model_source(subject, text, layer=1, needed=200)
    layer = source.read(200)
    heads = source.shape
    assert layer.queries.shape == (1, heads.heads * heads.group, 200, heads.dim)
    cache = DynamicCache(config=subject.model.config)
    with torch.inference_mode():
        ids = token_ids(subject.need_tokenizer("test"), text.read_text())
        subject.model(ids[None, :200], past_key_values=cache)
    torch.testing.assert_close(layer.keys, cache.layers[1].keys, rtol=1e-4, atol=1e-4)
    assert source.description["layer"] == 1 and source.description["heads"] == heads.heads


def test_the_middle_layer_is_read_where_none_is_named(subject: Subject, text: Path) -> None:
    source = model_source(subject, text, layer=None, needed=10)
    assert source.description["layer"] == subject.model.config.num_hidden_layers // 2


def test_a_text_that_is_too_short_says_what_it_gives(subject: Subject, text: Path) -> None:
    with pytest.raises(
        ValueError, match="tokens, the longest --context, 256 recent ones and --queries take 9999"
    ):
        model_source(subject, text, layer=None, needed=9999)


def test_a_layer_that_the_model_lacks_is_refused(subject: Subject, text: Path) -> None:
    with pytest.raises(ValueError, match="--layer 99: layers of full attention in reference are 0"):
        model_source(subject, text, layer=99, needed=10)


def test_sizes_that_are_not_given_are_the_usual_ones() -> None:
    source = IndexBuild(dim=64).source
    assert source.shape == LayerShape(8, 4, 64)
    assert source.description == {"keys": "random", "heads": 8, "group": 4, "dim": 64}


@pytest.mark.parametrize("needed", [300, 2500])
def test_a_longer_text_of_the_needle_model_begins_as_a_shorter_one_does(needed: int) -> None:
    needle = load_subject("needle")
    short, long = (model_source(needle, None, 0, count, seed=1) for count in (200, needed))
    torch.testing.assert_close(short.read(200).keys, long.read(200).keys)
    assert short.description == long.description


def test_keys_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Queries and keys 4, store and its copy 4, faiss 3 times 2 heads x 32 numbers of 4 bytes.
    needed = 1000 * 2 * 32 * 4 * (4 + 4 + 3)
    monkeypatch.setattr(index_build_keys, "available_host_memory", lambda: needed)
    check_memory(SHAPE, 1000, torch.float32, "cpu")
    monkeypatch.setattr(index_build_keys, "available_host_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match="shorter --context"):
        check_memory(SHAPE, 1000, torch.float32, "cpu")
