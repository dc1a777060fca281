"""Every study on its smallest setting, and its mathematics against loops and whole matrices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import misses
import pytest
import torch
from a2ats_ablation import OWN, A2ATSAblation, measure, similarity
from aqua_ablation import AquaAblation, PrunedCache, TwoLayerCalibration, kept_shares
from assumptions import AFTER, BEFORE, Assumptions, drift, energies, explained, query_cosines
from ctkvr_ablation import CTkvrAblation, Recalled, centroid_count, changed
from distances import follow, read_contexts
from latent_heads import LatentHeads, at, counted
from lrqk_factors import ALTERNATING, PER_HEAD, VARIANTS, LayerStudy, LRQKFactors, Shared
from misses import Generation, Misses
from paris_ablation import (
    SWITCHES,
    ClusterConfig,
    ParisAblation,
    PrefillClusterIndex,
    RefittedClusterIndex,
    k_means,
    variant,
)
from paris_stages import ALPHA, ParisStages, drawn_keys, products
from prompts import Prompts, Recipe, mean_scores
from rest_tokens import MeanTokens, follow_all, rest_options

from hf_kvret import FlatKVCache, H2OCache, RetrievalCache, TokenBlock
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import learn_at_once
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.recording import RecordedLayer
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.texts import read_text, token_ids
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.layer.prompt_groups import attended_share
from hf_kvret.methods.a2ats.learned import KeySpace, LearnedLayer
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.prompt import PromptRecipe
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid
from hf_kvret.testing.cold import cold_tokens
from hf_kvret_kernels.block_lse import block_lse
from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens

GROUP, HEADS, LENGTH, LAST, DIM = 2, 2, 60, 8, 16


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def study() -> LayerStudy:
    keys = _draw(1, HEADS, LENGTH, DIM) + 2.0
    queries = _draw(2, HEADS * GROUP, LENGTH, DIM)
    return LayerStudy(0, queries, keys, DIM**-0.5, None, last=LAST)


@pytest.mark.parametrize("name", ["closed per head", "shared", "shared centered", "shared int8"])
def test_errors_are_those_of_the_whole_matrix_of_scores(study: LayerStudy, name: str) -> None:
    proxies = VARIANTS[name](study, 6, LRQKConfig())
    exact = study.queries.double() @ study.spread(study.keys).double().mT
    scores = study.queries @ study.spread(proxies.to_query) @ study.spread(proxies.rows).mT
    scores = scores + study.queries @ study.spread(proxies.mean).mT
    missed = (exact - scores).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    torch.testing.assert_close(study.errors(proxies), missed, rtol=1e-4, atol=1e-6)
    assert study.judge(proxies, 5)["errors"] == study.errors(proxies).tolist()


def test_the_closed_form_is_the_best_of_its_rank(study: LayerStudy) -> None:
    """As far off as the truncated SVD of each head's scores (Eckart, Young)."""
    exact = study.queries.double() @ study.spread(study.keys).double().mT
    singular = torch.linalg.svdvals(exact).square()
    best = (singular[:, 6:].sum(-1) / singular.sum(-1)).sqrt()
    closed = study.errors(VARIANTS["closed per head"](study, 6, LRQKConfig()))
    torch.testing.assert_close(closed, best, rtol=0, atol=1e-5)


def test_recall_is_counted_among_the_tokens_before_each_query(study: LayerStudy) -> None:
    proxies, overlap = VARIANTS["shared"](study, 4, LRQKConfig()), []
    guess = study.queries @ study.spread(proxies.to_query) @ study.spread(proxies.rows).mT
    exact = study.queries @ study.spread(study.keys).mT
    for query in range(LENGTH - LAST, LENGTH):
        for head in range(HEADS):
            own = slice(head * GROUP, (head + 1) * GROUP)
            best, chosen = (
                (scores[own, query, :query] * study.scale).softmax(-1).amax(0).topk(5).indices
                for scores in (exact, guess)
            )
            overlap.append(len({*best.tolist()} & {*chosen.tolist()}) / 5)
    assert study.judge(proxies, 5)["recall"] == pytest.approx(sum(overlap) / len(overlap))


def test_unseen_queries_do_not_move_the_factors(study: LayerStudy) -> None:
    queries = study.queries.clone()
    queries[:, -LAST:] = _draw(3, HEADS * GROUP, LAST, DIM)
    other = LayerStudy(0, queries, study.keys, study.scale, None, last=LAST)
    for seen in (False, True):
        one, two = (Shared(seen=seen).fit(layer, 6, LRQKConfig()) for layer in (study, other))
        assert torch.allclose(one.to_query @ one.to_key.mT, two.to_query @ two.to_key.mT) != seen


def test_similarity_is_the_papers_whatever_order_and_length() -> None:
    """Equation 7, by loops, for codebooks of different sizes."""
    first, second = _draw(0, 2, 5, 3), _draw(1, 2, 7, 3)
    for head, value in enumerate(similarity(first, second).tolist()):
        halves = []
        for one, other in ((first[head], second[head]), (second[head], first[head])):
            best = [max(float(a @ b / a.norm() / b.norm()) for b in other) for a in one]
            halves.append(sum(best) / len(best))
        assert value == pytest.approx(sum(halves) / 2, abs=1e-5)
    assert similarity(first, 3.0 * first.flip(1)).tolist() == pytest.approx([1.0, 1.0])


def test_contexts_begin_where_the_calibration_ends(tiny_model_dir: Path, tiny_text: Path) -> None:
    subject = load_subject(str(tiny_model_dir))
    ids = token_ids(subject.tokenizer, read_text(tiny_text))
    sizes: dict[str, Any] = {"calibration_tokens": 600, "calibration_length": 150}
    texts = A2ATSAblation(text=tiny_text, uuid_tokens=100, new_tokens=10, windows=2, **sizes)
    corpus = texts.corpus(subject)
    # One sequence of UUIDs, four of the text, the last of them held out.
    assert [len(one) for one in corpus.sequences] == [100, 150, 150, 150, 150]
    assert corpus.held_out == 1 and torch.equal(torch.cat(corpus.sequences[1:]), ids[:600])
    first, second = texts.contexts(subject, "switches", 190)
    assert torch.equal(torch.cat([first, second]), torch.cat([ids[:1], ids[600:999]]))
    inputs = texts.pieces(subject, count=3, size=50)
    assert list(inputs) == ["text 1", "text 2", "text 3", "UUIDs"]
    for text, message in ((None, "give --text too"), (tiny_text, "is --text, too")):
        with pytest.raises(ValueError, match=message):
            A2ATSAblation(text=text, calibration_text=tiny_text)


def test_documents_of_needles_differ_from_the_calibrations() -> None:
    needle, texts = (
        load_subject("needle"),
        A2ATSAblation(windows=3, calibration_tokens=600, calibration_length=150),
    )
    shown = [*texts.contexts(needle, "switches", 300), *texts.pieces(needle, 3, 150).values()]
    learned = {tuple(one[:100].tolist()) for one in texts.corpus(needle).sequences}
    assert learned.isdisjoint(tuple(one[:100].tolist()) for one in shown)


def test_ctkvr_variants_change_what_they_are_called() -> None:
    given = CTkvrConfig()
    assert changed("choice", "first, causal", given, 4096).causal
    assert changed("centroids", "1/2x", given, 4096).centroids_for(3840) == (
        given.centroids_for(3840) // 2
    )
    assert changed("probes", "7", given, 4096).nprobe == 7
    reranked = changed("rerank", "codes, ratio 1.5", given, 4096)
    assert (reranked.rerank, reranked.list_ratio) == ("codes", 1.5)
    assert changed("budget", "0.04", given, 4096).top_k == 0.04
    assert changed("update", "off", given, 4096).update == 0
    assert [centroid_count(text, 100) for text in ("512", "1/8x", "0.001x")] == [512, 12, 1]
    with pytest.raises(ValueError, match="write a count as 512"):
        centroid_count("many", 100)


def test_paris_variants_change_what_they_are_called() -> None:
    given = ParisConfig(top_k=16)
    for name, switch in SWITCHES.items():
        options = variant("switches", name, given, 0.1).options
        assert options is not None
        assert all(getattr(options, key) == value for key, value in switch.changes.items())
    ratios = variant("ratios", "0.2", given).options
    assert isinstance(ratios, ParisConfig) and ratios.ratios(10_000)[0] == 0.2
    clusters = variant("drift", "prefill clusters", given, 0.1, 32).options
    assert isinstance(clusters, ClusterConfig)
    assert (clusters.clusters, clusters.candidate_ratio, clusters.top_k) == (32, 0.1, 16)


def test_k_means_finds_clusters_that_are_there() -> None:
    centers = 10 * _draw(0, 2, HEADS, 8, DIM)
    which = torch.arange(8).repeat_interleave(30)
    keys = centers[:, :, which] + 0.1 * _draw(1, 2, HEADS, 240, DIM)
    # Ten rounds of noise 0.1 / sqrt(30) leave them next to the true ones.
    assert (k_means(keys, 8) - centers).abs().max() < 0.1


def test_keys_of_another_kind_are_lost_by_clusters_of_the_prompt_alone() -> None:
    """The drift that the comparison is about."""
    prompt, later = _draw(0, 1, HEADS, 400, DIM), 4.0 + _draw(1, 1, HEADS, 400, DIM)
    keys, query = torch.cat([prompt, later], dim=2), _draw(2, 1, HEADS, 6, DIM)
    best = (query @ keys.mT).topk(20, dim=-1).indices
    recalls = []
    for kind in (PrefillClusterIndex, RefittedClusterIndex):
        index = kind(ClusterConfig(clusters=32, candidate_ratio=0.1))
        index.add(TokenBlock(prompt, prompt, 0))
        index.build(all_valid(PagedStore(DeviceMemory(torch.device("cpu"))), 1))
        index.add(TokenBlock(later, later, 400))
        ids = index.search(query, cold_tokens(torch.ones(1, 800, dtype=torch.bool), 0.25, 20))
        recalls.append(float((ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean()))
    assert recalls[0] < recalls[1] - 0.05


def test_rows_of_selections_and_of_their_union_are_counted() -> None:
    """Four heads in two groups come as two queries a query; -1 is no row."""
    ids = torch.tensor([[0, 1, 2], [2, 3, -1], [5, 6, 7], [5, 6, 7]])[None, None].int()
    unions: list[tuple[float, float]] = []
    search = counted(lambda query, cold: ids, 4, unions)
    assert search(torch.zeros(1, 2, 4, 8), [None] * 10) is ids  # type: ignore[arg-type]
    # Selections of 3, 2, 3 and 3 rows; unions of 4 and of 3.
    assert unions == [(11 / 4, 3.5)]


def test_numbers_between_points_lie_on_a_line_of_logarithms() -> None:
    rows = [{"union": 100, "kl": 0.1}, {"union": 400, "kl": 0.025}]
    assert at(rows, "union", "kl", 200) == pytest.approx(0.05)
    assert at(rows, "union", "kl", 99) is None


def test_a_budget_of_everything_is_full_attention() -> None:
    subject = load_subject("needle")
    window = torch.randint(0, NeedleLanguage().vocab_size, (200,))
    options = FlatConfig(sink=4, recent=16, flush=16, dense_below=0)
    choice = CacheChoice(
        "flat", lambda config, capacity: FlatKVCache(config=config, options=options)
    )
    readers = read_contexts(subject, choice, [window], 168)
    numbers = follow_all(readers, [window], 8, top_k=1.0, **rest_options("mean"))
    assert numbers["kl"] < 1e-6 and numbers["equal"] == 1.0
    assert numbers["lost"] < 1e-6 and numbers["rows"] > 0.9
    # The context's reader stays where it was.
    assert readers[0].length == 168
    assert follow(readers[0], window, 8, top_k=1.0)[0].length == 200


@pytest.mark.parametrize(
    ("study", "arguments", "message"),
    [
        (MeanTokens, ["--rests", "median"], "choose nothing, mean, or tokens of a mean"),
        (MeanTokens, ["--caches", "flat:rest=mean"], "--rests and --shares name them"),
        (
            LatentHeads,
            ["--text", __file__, "--caches", "aqua"],
            "flat and paris and lrqk and ctkvr",
        ),
        (LatentHeads, ["--text", __file__, "--caches", "flat:top_k=9"], "--top-ks name them"),
        (CTkvrAblation, ["--model", "needle", "--centroids", "x"], "write a count as 512"),
        (ParisAblation, ["--text", __file__, "--caches", "flat"], "paris-ablation is about paris"),
        (ParisAblation, ["--text", __file__, "--every", "30", "--step", "8"], "--every"),
        (Misses, ["--text", __file__, "--caches", "full"], "name caches that retrieve"),
        (Misses, ["--text", __file__, "--caches", "paris:slots=2.0"], "leave it out, use --slots"),
        (Misses, ["--text", __file__, "--top-ks", "8,8"], "the same number twice"),
    ],
)
def test_mistakes_are_one_line_each(
    refused: Any, study: Any, arguments: list[str], message: str
) -> None:
    assert message in refused(study, *arguments)


Rows = dict[tuple[Any, ...], dict[str, Any]]
Run = Callable[..., tuple[Rows, str]]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def smallest(smallest: Run) -> Run:
    """As there, without the cache of a cell, which comes first."""

    def run(study: Any, *more: str) -> tuple[Rows, str]:
        rows, table = smallest(study, *more)
        return {cell[1:]: row for cell, row in rows.items()}, table

    return run


def test_paris(smallest: Run) -> None:
    rows, table = smallest(ParisAblation, "--windows", "1")
    recalls = {variant: row["overlap"] for (_, variant, _), row in rows.items()}
    assert recalls["all on"] > recalls["rotation off"]
    assert recalls["stage 2 alone"] >= recalls["all on"]
    drift = {variant: row for (part, variant, _), row in rows.items() if part == "drift"}
    assert list(drift) == ["paris", "prefill clusters", "refitted clusters"]
    assert all([one["end"] for one in row["stretches"]] == [16, 32] for row in drift.values())
    for row in rows.values():
        assert 0.0 < row["overlap"] <= 1.0 and row["mass"] <= row["best_mass"] + 1e-6
    assert "candidate ratio" in table and "recall, first" in table


def test_ctkvr(smallest: Run) -> None:
    rows, table = smallest(CTkvrAblation)
    updates = {variant: row for (part, variant, _), row in rows.items() if part == "update"}
    assert len(updates) == 7 and updates["every 1, of recalled keys"]["list_builds"] >= 0
    assert all(len(row["stretches"]) == 2 for row in updates.values())
    ranks = {variant: row for (part, variant, _), row in rows.items() if part == "rerank"}
    assert ranks["auto, ratio 2"]["overlap"] >= ranks["lists"]["overlap"]
    assert ranks["auto, ratio 2"]["rerank_ratio"] > 1.0
    assert "C', recalled centroids" in table and "| turn 2 |" in table
    assert ranks["none, ratio 2"]["read_ratio"] > 2 * ranks["auto, ratio 2"]["read_ratio"]
    (step,) = [row for (part, _, _), row in rows.items() if part == "time"]
    parts = ("centroids", "lists", "rerank", "attention", "window", "update", "list of all keys")
    for layer in step["layers"]:
        assert list(layer) == [*parts, "attention to all recalled"]
        assert all(value > 0.0 for name, value in layer.items() if name != "lists")
    assert "| alpha " in table and "| rerank, ms " in table


def test_tokens_that_several_lists_name_are_counted() -> None:
    layer = RecordedLayer(0, _draw(1, HEADS * GROUP, 80, DIM), _draw(2, HEADS, 80, DIM), 0.25, None)
    options = CTkvrConfig(top_k=6, tokens_per_centroid=4, nprobe=3)
    one = Recalled.of(layer, 70, options)
    assert one.index._file.queue is not None
    alphas, twice = [], []
    lists = one.index._file.queue.recall(one.index._grouped(one.queries), 3)
    for row in lists.flatten(0, 2):
        tokens = [slot for each in row.tolist() for slot in each if slot >= 0]
        alphas.append((len(set(tokens)), len(tokens)))
        twice.append(sum(tokens.count(slot) > 1 for slot in set(tokens)))
    different = sum(count for count, _ in alphas)
    numbers = one.duplicates()
    assert numbers["alpha"] == pytest.approx(different / sum(count for _, count in alphas))
    assert numbers["twice"] == pytest.approx(sum(twice) / different)
    assert numbers["listed"] == pytest.approx(different / (len(alphas) * 70))


@pytest.mark.parametrize("name", ["preset paper", "default"])
def test_alpha_takes_the_shrinkage_out_of_the_estimates(name: str) -> None:
    keys, results = drawn_keys(500, 8, 0), []
    for each in (name, f"{name}, alpha off"):
        changes, corrected = ALPHA[each]
        options = ParisConfig().replace(**{**changes, "top_k": 50})
        results.append(products(keys, options, corrected=corrected))
    with_alpha, plain = results
    assert with_alpha["error"] < plain["error"] < 0.1
    assert abs(with_alpha["slope"] - 1) < abs(plain["slope"] - 1)
    assert 0.5 < plain["recall"] <= 1.0


def test_paris_stages(smallest: Run) -> None:
    rows, table = smallest(ParisStages, "--parts", "model-alpha,drawn", "--queries", "2")
    assert {part for part, *_ in rows} == {"model-alpha", "drawn"}
    assert "relative error of the products" in table and "recall of stage 1" in table


def test_a2ats(smallest: Run) -> None:
    rows, table = smallest(A2ATSAblation)
    recalls = {name: row["overlap"] for (part, name, *_), row in rows.items() if part == "switches"}
    # Exact keys lose nothing to codewords.
    assert recalls["windowed, exact keys"] >= recalls["windowed, query-aware"]
    errors = rows["errors", "windowed, query-aware"]["layers"]
    assert all(one["score_error"] > 0.0 for one in errors)
    (layer, *_) = rows["alike", "before RoPE"]["layers"]
    assert layer["alike"][0][0] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < layer["alike"][0][1] < 1.0
    assert "paper's accuracy, table 2" in table and "before RoPE: needles / needles" in table
    layers = rows["layers", "all rows", 256]["rows"]
    assert [len(own) for own in layers.values()] == [2] * 5 and OWN in layers
    assert all(one["mass"] <= one["best_mass"] + 1e-6 for own in layers.values() for one in own)
    assert "recall at 256, layer" in table


def test_a_codeword_for_every_key_loses_nothing() -> None:
    keys, query = _draw(3, 1, HEADS, LENGTH, DIM), _draw(4, 1, HEADS * GROUP, LENGTH, DIM)
    tokens = LayerTokens(query, keys, query, keys, keys, None, None, None, None)
    eye = torch.eye(DIM).expand(HEADS, -1, -1)
    space = KeySpace(Rope(torch.zeros(0), layout="none"), 0)
    length = LENGTH - LAST

    def recall(words: torch.Tensor) -> float:
        return measure(LearnedLayer(words, eye, space), tokens, length, 5).overlap

    assert recall(keys[0, :, :length].contiguous()) == 1.0
    assert 0.0 < recall(keys[0, :, : length // 2].contiguous()) < 1.0


def test_pruned_rows_are_those_that_h2o_keeps() -> None:
    """Uncoded the cache is H2O's; coded, rows that are kept decoded give the same as codes."""
    model = load_subject("needle").model
    tokens = torch.randint(0, NeedleLanguage().vocab_size, (1, 150))
    usual = {"top_k": 0.2, "recent": 16, "flush": 16, "dense_below": 0, "sink": 4}
    plain = {"predictor": "none", **usual}

    def logits(cache: RetrievalCache) -> torch.Tensor:
        passes = [tokens[:, :120], *tokens[:, 120:].split(1, dim=1)]
        with torch.inference_mode():
            return torch.cat([model(x, past_key_values=cache).logits[:, -1] for x in passes])

    h2o = logits(H2OCache(config=model.config, **usual))
    pruned = PrunedCache(config=model.config, bits=16, **plain)
    torch.testing.assert_close(logits(pruned), h2o, rtol=0, atol=1e-4)
    shares = kept_shares(pruned)
    assert 0.15 < shares["kept"] < 0.3 and shares["kept"] < shares["needed"] <= 1.0
    for options in ({"bits": 2, **plain}, {"bits": 2, **usual}):
        codes, rows = (
            logits(PrunedCache(config=model.config, keep=keep, **options))
            for keep in ("codes", "rows")
        )
        torch.testing.assert_close(codes, rows, rtol=0, atol=1e-4)
        assert (codes - h2o).abs().max() > 1e-3


def test_predictors_of_two_layers_read_two_layers() -> None:
    """From the second predicted layer on: one more input of keys, and one more of values."""
    model, ids = load_subject("needle").model, torch.randint(0, 100, (400,))
    corpus = Corpus([ids[:200], ids[200:300], ids[300:]], 1, {})
    options: dict[str, Any] = {"bits": 16, "first_bits": 16}
    learned = learn_at_once(
        model,
        corpus,
        {"one": AquaCalibration(**options), "two": TwoLayerCalibration(**options)},
    )
    one, two = ({n: x.tensors for n, x in learned[name].items()} for name in ("one", "two"))
    width = one[1]["key.weight"].shape[1]
    assert two[1]["key.weight"].shape[1] == width and two[2]["key.weight"].shape[1] == 2 * width
    assert two[2]["value.weight"].shape[1] == 3 * width == one[2]["value.weight"].shape[1] + width


def test_aqua(smallest: Run) -> None:
    rows, table = smallest(AquaAblation)
    bits = {name: row for (part, name, *_), row in rows.items() if part == "bits"}
    full = bits["full"]
    assert full["bits"] == full["full_bits"] == 32.0
    # Two bits, a scale for each group, and a first layer of four.
    assert 2.0 < bits["aqua, 2 bits"]["bits"] < 4.0
    losses = [abs(bits[f"higgs, {count} bits"]["nats"] - full["nats"]) for count in (2, 4)]
    assert losses[0] > losses[1]
    assert bits["aqua, 2 bits"]["predictor_bytes"] > 0 == bits["higgs, 2 bits"]["predictor_bytes"]
    explained = rows["variance", "exact"]["layers"]
    assert all(one["key_explained"] <= 1.0 for one in explained if one.get("key_explained"))
    assert "bits a value" in table and "keys explained, layer" in table
    pruned = {name: row for (part, name, *_), row in rows.items() if part == "pruned"}
    assert len(pruned) == 6 and "kept" not in pruned["full"]
    assert 0.0 < pruned["h2o"]["kept"] <= pruned["h2o"]["needed"] <= 1.0
    assert len(rows["depth", "all rows"]["rows"]) == 4 and "values: error, layer" in table


def test_lrqk(smallest: Run) -> None:
    rows, table = smallest(LRQKFactors)
    layers = {variant: row["layers"] for (_, variant, _), row in rows.items()}
    for name in ALTERNATING:
        for ours, theirs in zip(layers[PER_HEAD], layers[name], strict=True):
            pairs = zip(ours["errors"], theirs["errors"], strict=True)
            assert all(one <= other + 1e-6 for one, other in pairs)
    for own in layers.values():
        assert all(0.0 < one["recall"] <= 1.0 and one["mass"] <= 1.0 for one in own)
    assert "closed form no worse than ALS in any head (up to 1e-06): 9 of 9" in table


def test_latent_heads(smallest: Run) -> None:
    rows, table = smallest(LatentHeads)
    together, groups = (rows["tokens", f"{size}, 8", 512] for size in (16, 4))
    assert together["union"] == together["rows"] == 8.0 and together["selections"] == 1
    assert groups["rows"] == 8.0 < groups["union"] <= 32.0 and groups["selections"] == 4
    assert rows["tokens", "16, 16", 512]["kl"] < together["kl"]
    assert "| 16 (all) " in table and "KL at 32 rows in all" in table


def test_rest_tokens(smallest: Run) -> None:
    rows, table = smallest(MeanTokens)
    nothing, mean = (rows["tokens", f"0.05, {rest}", 512] for rest in ("nothing", "mean"))
    assert nothing["rows"] == pytest.approx(0.05, abs=0.01) and 0.0 < nothing["lost"] < 1.0
    assert mean["kl"] < nothing["kl"] and mean["step_bytes"] < mean["full_bytes"]
    assert "5%: KL +- s.e., equal" in table and "5%: mass of the cold ones lost" in table


def test_prompts(smallest: Run) -> None:
    rows, table = smallest(Prompts)
    for part in ("text", "needles"):
        # Three groups of 512 have something to choose of, and the last one attends to everything.
        share = attended_share(PromptRecipe(0.1, floor=0, above=0, exact=128), 2048)
        assert rows[part, "top_k=0.1:exact=128", 2048]["pairs"] == pytest.approx(share)
        assert rows[part, "mass=0.5", 2048]["pairs"] < rows[part, "mass=0.99", 2048]["pairs"]
        assert rows[part, "top_k=1.0", 2048]["pairs"] == 1.0
    text, needles = (rows[part, "top_k=1.0", 2048] for part in ("text", "needles"))
    assert abs(text["kl behind"]) + abs(text["kl inside"]) < 1e-5 and needles["found"] == 1.0
    chosen = rows["text", "top_k=0.1:exact=128", 2048]
    assert chosen["kl inside"] > chosen["kl behind"] and chosen["lost"] > 0.0
    assert "| KL behind +- s.e. " in table and "| found inside " in table


def test_blocks_of_equal_keys_are_scored_alike_by_their_means() -> None:
    query, slots = _draw(1, 1, 4, 3, DIM), torch.tensor([[130, 140, 200]])
    key = _draw(2, 1, 2, 4, DIM).repeat_interleave(64, dim=2)[:, :, :201]
    options: dict[str, Any] = {"scale": 0.3, "block": 64, "valid": None, "softcap": None}
    exact = block_lse(query, key, slots, **options)
    torch.testing.assert_close(mean_scores(query, key, slots, **options), exact)


@pytest.mark.parametrize("text", ["top=1", "top_k", "score="])
def test_a_recipe_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give name=value, of top_k, exact"):
        Recipe.of(text)


def _layer(seed: int, count: int = 256) -> dict[str, torch.Tensor]:
    queries, keys, values = (_draw(seed + n, HEADS, count, DIM) for n in range(3))
    places = {f"queries {place}": queries for place in (AFTER, BEFORE)}
    return {**places, f"keys {AFTER}": keys, f"keys {BEFORE}": keys, "values": values}


def test_queries_that_turn_with_their_distance_are_less_alike() -> None:
    turns = torch.arange(256)[None, :, None] * 0.01
    queries = torch.cat([turns.cos(), turns.sin()], dim=-1)
    layer = _layer(1) | {f"keys {AFTER}": _draw(4, 1, 256, 2), f"queries {AFTER}": queries}
    means = query_cosines([[layer]], 0, AFTER)
    for distance in (1, 4, 16, 64):
        assert means[str(distance)] == pytest.approx(math.cos(0.01 * distance), abs=1e-5)
    assert "256" not in means and means["correlation"] > 0.8


def test_energies_are_those_of_the_singular_values() -> None:
    layer = _layer(5)
    queries, keys = (layer[f"{name} {AFTER}"] for name in ("queries", "keys"))
    means = energies([[layer]], 0, AFTER)
    for name, matrix in (("keys", keys), ("scores", queries @ keys.mT)):
        squares = torch.linalg.svdvals(matrix.double()).square()
        share = squares[:, : DIM // 4].sum(-1) / squares.sum(-1)
        assert means[f"{name}, 1/4"] == pytest.approx(float(share.mean()), abs=1e-4)


def test_what_follows_from_the_layer_below_is_explained() -> None:
    texts = []
    for seed in (10, 20):
        below = _layer(seed)
        noise = 0.5 * _draw(seed + 5, HEADS, 256, DIM)
        texts.append([below, _layer(seed + 6) | {f"keys {BEFORE}": below["values"] + noise}])
        texts[-1][0] |= {f"keys {BEFORE}": below["values"]}
    shares = explained(texts, 1, "keys")
    assert shares["layer -1"] == pytest.approx(0.8, abs=0.1)
    assert max(shares["token -1"], shares["own values"]) < 0.1 and "layer -2" not in shares
    for text in texts:
        text[1][f"keys {BEFORE}"] = _walk(text[1]["values"])
    assert explained(texts, 1, "keys")["token -1"] > 0.6


def _walk(draws: torch.Tensor) -> torch.Tensor:
    """A random walk that forgets a tenth of itself a step."""
    rows = [draws[:, 0]]
    for step in range(1, draws.shape[1]):
        rows.append(0.9 * rows[-1] + 0.3 * draws[:, step])
    return torch.stack(rows, dim=1)


def test_centroids_of_a_prompt_miss_keys_of_another_kind() -> None:
    layer = _layer(30)
    layer[f"keys {AFTER}"] = _draw(31, HEADS, 256, DIM) + torch.arange(256)[:, None].ge(128) * 5.0
    errors = drift([[layer]], 0, AFTER)
    later, prompt = (errors[f"centroids of prompt, {keys} keys"] for keys in ("later", "prompt"))
    assert later > 1.1 * prompt and errors["centroids of all, later keys"] < later
    assert max(errors["ParisKV, prompt keys"], errors["ParisKV, later keys"]) < prompt / 2


def test_assumptions(smallest: Run, refused: Callable[..., str], tiny_text: Path) -> None:
    rows, table = smallest(Assumptions)
    assert all(len(row["layers"]) == 3 for row in rows.values()) and len(rows) == 9
    before, after = (rows["a2ats", place, 300]["layers"] for place in (BEFORE, AFTER))
    assert all(one["own"] < one["other"] for one in before + after)
    assert "layer -1" not in rows["aqua", "keys", 300]["layers"][0]
    assert "| ctkvr: cosine of two queries, after RoPE, 300 tokens; layer | 1 " in table
    words = ["--model", "reference", "--text", str(tiny_text), "--context", "4K"]
    assert "--windows 9: --text has" in refused(Assumptions, *words, "--windows", "9")


def test_misses(smallest: Run) -> None:
    ((key, row),) = smallest(Misses)[0].items()
    assert key == (256, 16, 1.0)
    assert 0.0 < row["miss_ratio"] < 1.0 and row["equal_tokens"] == 24
    assert [one["end"] for one in row["stretches"]] == [8, 16, 24]
    # All steps count alike, so the mean of stretches is the whole.
    ratios = [one["miss_ratio"] for one in row["stretches"]]
    assert sum(ratios) / 3 == pytest.approx(row["miss_ratio"])
    assert row["saved_ratio"] == pytest.approx(1 - row["bus_bytes"] / row["plain_bus_bytes"])


def test_a_context_is_read_once_for_all_budgets(smallest: Run, tmp_path: Path) -> None:
    few = ("--new-tokens", "8", "--top-ks")
    together, table = smallest(Misses, *few, "8,16")
    (tmp_path / "x.json").unlink()
    ((key, alone),) = smallest(Misses, *few, "16")[0].items()
    kept = {name for name in alone if not name.endswith("seconds")}
    assert {name: together[key][name] for name in kept} == {name: alone[name] for name in kept}
    ratios = [row["miss_ratio"] for row in together.values()]
    assert f"mean miss ratio {sum(ratios) / 2:.1%}, standard deviation" in table


def test_misses_stop_at_a_token_that_a_buffer_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(misses.Generation, "first_difference", lambda self, other: 5)
    assert run_script(Misses, ["--smallest"]) == 1
    assert "a store must not change a result" in capsys.readouterr().out


def test_generations_differ_where_a_token_or_the_best_one_does() -> None:
    def run(tokens: list[int], choices: list[int]) -> Generation:
        return Generation(torch.tensor(tokens), torch.tensor(choices), [], None, 0.0)  # type: ignore[arg-type]

    one = run([1, 2, 3], [1, 2, 3, 4])
    assert one.first_difference(run([1, 2, 3], [1, 2, 3, 4])) is None
    assert one.first_difference(run([1, 5, 3], [1, 2, 3, 4])) == 1
    assert one.first_difference(run([1, 2, 3], [1, 2, 3, 9])) == 3
