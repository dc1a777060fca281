"""Heads that select together: masses by other means, rows of unions, and the script's cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation import made
from head_caches import follow_all, noting, read_contexts
from head_tables import at
from latent_heads import LatentHeads
from shared_heads import (
    Selections,
    cold_mask,
    relevance,
    select,
    shuffled,
    token_ranks,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvret import FlatKVCache
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import load_subject
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.testing import LATENT_MODELS

HEADS = 4
OPTIONS = {"sink": 4, "recent": 16, "flush": 16, "dense_below": 0}
SMALL = ":".join(f"{name}={value}" for name, value in OPTIONS.items())


@pytest.fixture(scope="module")
def latent_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The tiny DeepSeek-V2, with four heads and the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-latent")
    config = LATENT_MODELS["deepseek_v2"].build().config
    config.vocab_size, config.bos_token_id = 400, 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_" in name or "kv_b" in name:
                # Random heads would attend to all tokens alike.
                weight.mul_(8.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def _scores(seed: int = 0, heads: int = HEADS, queries: int = 5, count: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(heads, queries, count, generator=generator)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_selections_hold_what_a_loop_over_heads_finds(size: int) -> None:
    scores, count = _scores(), 9
    shares = scores.softmax(-1)
    ranks = token_ranks(relevance(scores, size, "largest"))
    selection = select(shares, ranks, size, count, together=False)
    masses, unions = torch.zeros(HEADS), 0
    for query in range(5):
        union: set[int] = set()
        for first in range(0, HEADS, size):
            group = shares[first : first + size, query]
            best = group.max(0).values.topk(count).indices
            masses[first : first + size] += group[:, best].sum(-1) / 5
            union |= set(best.tolist())
        unions += len(union)
    torch.testing.assert_close(selection.mass, masses)
    assert selection.rows == count and selection.union == pytest.approx(unions / 5)
    assert selection.count == -(-HEADS // size) and selection.queries == 5


def test_a_union_is_as_long_as_it_may_be() -> None:
    scores = _scores(queries=1)
    shares, ranks = scores.softmax(-1), token_ranks(relevance(scores, 1, "largest"))
    for most in (5, 17, 40):
        selection = select(shares, ranks, 1, most, together=True)
        more = select(shares, ranks, 1, int(selection.rows) + 1, together=False)
        assert selection.union <= most < more.union


def test_the_mean_of_weights_holds_most_when_all_heads_attend_to_the_same() -> None:
    scores = _scores(heads=3)
    shares = scores.softmax(-1)
    selections = {
        pooling: select(shares, token_ranks(relevance(scores, 3, pooling)), 3, 8, together=False)
        for pooling in ("largest", "mean")
    }
    best = shares.sum(0).topk(8).values.sum(-1).mean() / 3
    assert float(selections["mean"].mass.mean()) == pytest.approx(float(best))
    assert selections["largest"].mass.mean() < selections["mean"].mass.mean()


def test_shuffled_heads_hold_as_much_alone_and_less_together() -> None:
    # All heads attend alike.
    scores = _scores(heads=1, count=200).expand(HEADS, -1, -1).clone()
    mask = torch.ones(5, 200, dtype=torch.bool)
    mask[:, :3] = False
    scores.masked_fill_(~mask, float("-inf"))
    masses = {}
    for name, one in {"alike": scores, "apart": shuffled(scores, mask, 0)}.items():
        for size in (1, HEADS):
            ranks = token_ranks(relevance(one, size, "largest"))
            masses[name, size] = select(one.softmax(-1), ranks, size, 10, together=False).mass
    torch.testing.assert_close(masses["alike", 1], masses["alike", HEADS])
    torch.testing.assert_close(masses["apart", 1], masses["alike", 1])
    assert (masses["apart", HEADS] < 0.8 * masses["apart", 1]).all()


def test_queries_choose_among_what_left_sinks_and_window() -> None:
    mask = cold_mask(20, queries=2, sink=3, recent=5)
    assert mask.nonzero().tolist() == [
        *([0, place] for place in range(3, 14)),
        *([1, place] for place in range(3, 15)),
    ]


@pytest.mark.parametrize("size", [1, 3, None])
def test_masses_are_what_the_cache_tracks(size: int | None, latent_dir: Path) -> None:
    """``noting`` undoes the folding of groups; the library's own recall does it elsewhere."""
    model = load_subject(str(latent_dir)).model
    options = {**OPTIONS, "top_k": 12, "select_heads": size, "track_recall": True}
    cache = FlatKVCache(model.config, **options)
    tokens = torch.randint(3, 400, (1, 200), generator=torch.Generator().manual_seed(1))
    notes_of_layers: list[list[Selections]] = []
    with torch.inference_mode():
        model(tokens[:, :180], past_key_values=cache)
        for layer in cache.retrieval_layers:
            notes_of_layers.append([])
            index: Any = layer.regions and layer.regions.index
            index.search = noting(index.search, HEADS, notes_of_layers[-1])
        for start in range(180, 200, 4):
            model(tokens[:, start : start + 4], past_key_values=cache)
    for notes, stats in zip(notes_of_layers, cache.stats()["layers"], strict=True):
        mean = Selections.mean(notes)
        groups = -(-HEADS // (size or HEADS))
        assert mean.count == groups and mean.queries == 20 and mean.rows == 12
        assert 12 < mean.union <= 12 * groups if groups > 1 else mean.union == 12
        if size != 3:
            # With a last group that is filled up, its heads count twice there.
            assert float(mean.mass.mean()) == pytest.approx(stats["recall_mass"], rel=1e-5)


def test_all_rows_are_full_attention_and_groups_between_one_and_all(latent_dir: Path) -> None:
    subject = load_subject(str(latent_dir))
    window = torch.randint(3, 400, (160,), generator=torch.Generator().manual_seed(2))
    kls, unions = [], []
    choice = made("flat", FlatKVCache, FlatConfig(**OPTIONS))
    readers = read_contexts(subject, choice, [window], 128)
    for size, top_k in ((None, 1.0), (None, 8), (1, 8)):
        means = follow_all(readers, [window], 8, select_heads=size, top_k=top_k)
        kls.append(means["kl"])
        unions.append(means["union"])
    assert abs(kls[0]) < 1e-5 < 0.3 * kls[1]
    assert kls[2] < kls[1] and unions[2] > unions[1] == 8


def test_the_script_measures_each_cell_and_draws_them(
    tmp_path: Path, latent_dir: Path, tiny_text: Path, measured: Callable[..., Any]
) -> None:
    path, picture = tmp_path / "heads.json", tmp_path / "heads.png"
    caches = ",".join(f"{name}:{SMALL}" for name in ("flat", "ctkvr"))
    arguments = ["--model", str(latent_dir), "--text", str(tiny_text), "--context", "200"]
    arguments += ["--windows", "2", "--new-tokens", "16", "--top-ks", "8,16"]
    arguments += ["--select-heads", "2,4", "--caches", caches]
    results = measured(LatentHeads, path, *arguments, "--plot", str(picture))
    cells = [one["cell"] for one in json.loads(path.read_text())["cells"]]
    # A method that can't select in groups is measured with one for all heads.
    assert [one["variant"] for one in cells if one["cache"].startswith("ctkvr")] == [
        "4, 8",
        "4, 16",
    ]
    (real,) = (one for cell, one in results.items() if cell[1] == "the model's")
    own = {(one["of"], one["select_heads"], one["count"]): one for one in real["selections"]}
    assert own["selection", 4, 8]["union"] == 8 < own["selection", 2, 8]["union"] <= 16
    assert own["union", 2, 16]["union"] <= 16
    assert len(real["cold"]) == 2 and all(
        0 < share < 1 for layer in real["cold"] for share in layer
    )
    table = LatentHeads.table(Results.load(path))
    assert "8 rows in all: mass, worst head" in table and "4 (all)" in table
    assert picture.is_file() and (tmp_path / "heads-rows.png").is_file()


def test_what_can_not_be_measured_is_said(
    latent_dir: Path, tiny_model_dir: Path, tiny_text: Path, refused: Callable[..., str]
) -> None:
    text = ["--text", str(tiny_text), "--context", "200", "--new-tokens", "8", "--top-ks", "8"]
    small = ["--caches", f"flat:{SMALL}"]
    line = refused(LatentHeads, "--model", str(tiny_model_dir), *text, *small)
    assert "llama has no latent attention" in line
    line = refused(LatentHeads, "--model", str(latent_dir), *text, "--caches", "flat:top_k=9")
    assert "--select-heads and --top-ks name them" in line
    line = refused(LatentHeads, "--model", str(latent_dir), *text, "--caches", "aqua")
    assert "flat and paris and lrqk and ctkvr" in line
    line = refused(LatentHeads, "--model", str(latent_dir), *text, "--caches", "flat")
    assert "leave nothing to choose" in line


def test_numbers_between_points_lie_on_a_line_of_logarithms() -> None:
    rows = [{"union": 100, "kl": 0.1}, {"union": 400, "kl": 0.025}]
    assert at(rows, "union", "kl", 200) == pytest.approx(0.05)
    assert at(rows, "union", "kl", 99) is None
