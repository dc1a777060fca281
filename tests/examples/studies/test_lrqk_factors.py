"""LRQK's factors on a model: what is recorded, and each number against full matrices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation import needle_tokens
from lrqk_factors import MEASUREMENT
from lrqk_proxies import (
    ALTERNATING,
    OPTIMUM,
    PER_HEAD,
    VARIANTS,
    Approximation,
    LayerStudy,
    Shared,
)
from transformers import AutoModelForCausalLM

from hf_kvret import LRQKConfig
from hf_kvret.evaluation.contexts import text_windows
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import load_subject
from hf_kvret.methods.lrqk.factors import Factors

LENGTH, LAST, TOP_K, DIM, GROUP = 150, 12, 10, 64, 2
OPTIONS = LRQKConfig()


@pytest.fixture(scope="module")
def tokens(tiny_model_dir: Path, tiny_text: Path) -> torch.Tensor:
    subject = load_subject(str(tiny_model_dir))
    return text_windows(subject, "test", tiny_text, LENGTH, 0, 1, None)[0]


@pytest.fixture(scope="module")
def studies(tiny_model_dir: Path, tokens: torch.Tensor) -> list[LayerStudy]:
    layers = read_layers(load_subject(str(tiny_model_dir)).model, tokens)
    return [LayerStudy(**vars(layer), last=LAST) for layer in layers]


@pytest.fixture(scope="module")
def study(studies: list[LayerStudy]) -> LayerStudy:
    return studies[1]


def _scores(study: LayerStudy) -> torch.Tensor:
    """Q K^T of all tokens, ``[Hq, l, l]`` fp64."""
    return study.queries.double() @ study.keys.double().repeat_interleave(GROUP, dim=0).mT


def _shares(study: LayerStudy, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative errors of ``found [Hq, l, l]``, plain and less each query's mean score."""
    exact = _scores(study)
    missed = (exact - found).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    exact, found = (x - x.mean(-1, keepdim=True) for x in (exact, found))
    return missed, (exact - found).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--context", str(LENGTH)]
    return [*arguments, "--queries", str(LAST), "--top-k", str(TOP_K)]


def test_recorded_queries_and_keys_give_the_models_own_attention(
    studies: list[LayerStudy], tiny_model_dir: Path, tokens: torch.Tensor
) -> None:
    """The last token too, which comes alone; weights are fp32 softmaxes, rounded at 1e-7."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager")
    with torch.no_grad():
        weights = model(tokens[None], output_attentions=True).attentions
    assert [study.layer for study in studies] == [0, 1]
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for study, expected in zip(studies, weights, strict=True):
        assert study.queries.shape == (4, LENGTH, DIM) and study.keys.shape == (2, LENGTH, DIM)
        assert study.queries.dtype == study.keys.dtype == torch.float32
        found = (_scores(study) * study.scale).masked_fill(later, float("-inf")).softmax(-1)
        torch.testing.assert_close(found.float(), expected[0], rtol=1e-3, atol=1e-5)


def test_the_optimum_is_the_truncated_svd_of_the_whole_matrix(study: LayerStudy) -> None:
    left, singular, right = torch.linalg.svd(_scores(study), full_matrices=False)
    cut = left[..., :8] * singular[:, None, :8] @ right[:, :8]
    found = VARIANTS[OPTIMUM](study, 8, OPTIONS)
    plain, centered = _shares(study, cut)
    torch.testing.assert_close(found.error.sqrt(), plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.centered_error.sqrt(), centered, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.dots, cut[:, -LAST:].float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("center", [False, True])
def test_errors_are_those_of_the_whole_matrix_of_scores(study: LayerStudy, center: bool) -> None:
    """By Grams, and by rows of proxies; fp32 maps and proxies leave about 1e-6."""
    factors = Shared(center=center).fit(study, 16, OPTIONS)
    assert factors.to_query.shape == (2, DIM, 16)
    mean = study.mean_key(center)
    assert bool(mean.any()) is center
    rows = study.project(factors, mean)
    asked = study.queries @ factors.to_query.repeat_interleave(GROUP, dim=0)
    whole = asked.double() @ rows.double().repeat_interleave(GROUP, dim=0).mT
    whole += study.queries.double() @ mean.double().repeat_interleave(GROUP, dim=0).mT
    plain, centered = _shares(study, whole)
    assert plain.min() > 0.01
    for found in (study.by_factors(factors, center), study.by_rows(factors, rows, mean)):
        torch.testing.assert_close(found.error.sqrt(), plain, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.centered_error.sqrt(), centered, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.dots, whole[:, -LAST:].float(), rtol=1e-3, atol=1e-4)


def test_recall_and_mass_are_counted_among_the_tokens_before_each_query(study: LayerStudy) -> None:
    """Token by token in plain Python; the selection is by the best softmax weight of a group."""
    found = VARIANTS["shared"](study, 8, OPTIONS)
    quality = study.judge(found, TOP_K)
    overlap, mass, best_mass = [], [], []
    exact = _scores(study)[:, -LAST:].float() * study.scale
    likely = found.dots * study.scale
    for number in range(LAST):
        before = LENGTH - LAST + number
        weights, guesses = (x[:, number, :before].softmax(-1) for x in (exact, likely))
        for head in range(2):
            own = slice(head * GROUP, (head + 1) * GROUP)
            best, chosen = (
                set(x[own].amax(0).argsort(descending=True)[:TOP_K].tolist())
                for x in (weights, guesses)
            )
            overlap.append(len(best & chosen) / TOP_K)
            mass += weights[own][:, list(chosen)].sum(-1).tolist()
            best_mass += weights[own][:, list(best)].sum(-1).tolist()
    assert 0.1 < quality["recall"] < 0.999
    assert quality["recall"] == pytest.approx(sum(overlap) / len(overlap))
    assert quality["mass"] == pytest.approx(sum(mass) / len(mass), rel=1e-5)
    assert quality["best_mass"] == pytest.approx(sum(best_mass) / len(best_mass), rel=1e-5)
    assert quality["mass"] < quality["best_mass"]


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(
    "name", [OPTIMUM, PER_HEAD, *(name for name in VARIANTS if name.startswith("shared"))]
)
def test_with_as_many_numbers_as_the_head_dim_all_is_found(
    study: LayerStudy, name: str, softcap: float | None
) -> None:
    """But for rounding. A cap bends scores, so the mean key's part of them must be there."""
    capped = dataclasses.replace(study, softcap=softcap)
    found = VARIANTS[name](capped, DIM, OPTIONS)
    quality = capped.judge(found, TOP_K)
    # Of rounded proxies a percent of the score is lost, and neighbours in rank change places.
    rounded = name in ("shared bf16", "shared int8")
    assert (0.9 if rounded else 0.99) <= quality["recall"] <= 1.0
    exact = _scores(study)[:, -LAST:].float()
    close = 0.02 if rounded else 1e-4
    assert max(quality["errors"]) < close
    assert (found.dots - exact).norm() < close * exact.norm()
    if not rounded:
        assert quality["mass"] == pytest.approx(quality["best_mass"], rel=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_misses_less_than_the_optimum_but_what_keeps_the_mean_key_too(
    studies: list[LayerStudy], name: str
) -> None:
    for study in studies:
        best = VARIANTS[OPTIMUM](study, 16, OPTIONS).error.sqrt()
        found = VARIANTS[name](study, 16, OPTIONS).error.sqrt()
        assert found.shape == (4,) and best.min() > 0.01
        if "centered" not in name:
            assert (found >= best - 1e-6).all()
        if name == PER_HEAD:
            torch.testing.assert_close(found, best, rtol=0, atol=1e-6)


def test_numbers_a_token_are_counted_for_a_kv_head(study: LayerStudy) -> None:
    counts = {name: variant(study, 16, OPTIONS).numbers for name, variant in VARIANTS.items()}
    for name, count in counts.items():
        per_head = name in (OPTIMUM, PER_HEAD, *ALTERNATING)
        assert count == (16 * GROUP if per_head else 16), name


def test_unseen_queries_do_not_move_the_factors(study: LayerStudy) -> None:
    other = study.queries.clone()
    other[:, -LAST:] = torch.randn(4, LAST, DIM, generator=torch.Generator().manual_seed(1))
    changed = dataclasses.replace(study, queries=other)

    def product(one: LayerStudy, seen: bool, weighted: bool) -> torch.Tensor:
        factors: Factors = Shared(weighted=weighted, seen=seen).fit(one, 16, OPTIONS)
        return factors.to_query @ factors.to_key.mT

    for weighted in (False, True):
        assert torch.equal(product(study, False, weighted), product(changed, False, weighted))
        assert not torch.allclose(product(study, True, weighted), product(changed, True, weighted))
    # Of the newest queries alone, half of the weight moves the factors.
    assert not torch.allclose(product(study, True, True), product(study, True, False), atol=1e-3)


def test_rounding_costs_a_little_and_int8_more(study: LayerStudy) -> None:
    rounded = {
        name: VARIANTS[name](study, DIM, OPTIONS).error.sqrt()
        for name in ("shared", "shared bf16", "shared int8")
    }
    # Half a unit in the last of bf16's 8 bits is 0.2% of a number, a step of int8 1/127 of a
    # column's largest.
    assert (rounded["shared"] < 1e-4).all()
    assert (rounded["shared bf16"] > 5e-4).all() and (rounded["shared bf16"] < 4e-3).all()
    assert (rounded["shared int8"] > 2 * rounded["shared bf16"]).all()
    assert (rounded["shared int8"] < 0.02).all()


def test_one_command_makes_tables_and_pictures(
    measured: Any, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, studies: list[LayerStudy]
) -> None:
    picture, table = tmp_path / "f.png", tmp_path / "f.txt"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--table", str(table)]
    arguments += ["--ranks", "8,16,80", "--plot", str(picture)]
    found = measured(MEASUREMENT, tmp_path / "f.json", *arguments)
    assert len(found) == 3 * len(VARIANTS)
    for (_, variant, rank), result in found.items():
        assert result["top_k"] == TOP_K
        # No proxy has more numbers than a key.
        assert [one["layer"] for one in result["layers"]] == ([] if rank == 80 else [0, 1])
        if rank == 8:
            again = VARIANTS[variant](studies[0], 8, OPTIONS)
            for key, value in studies[0].judge(again, TOP_K).items():
                assert result["layers"][0][key] == pytest.approx(value, rel=1e-5), key
    lines = table.read_text().splitlines()[:-2]
    assert lines[-1].endswith(": 12 of 12 layer x rank x start")
    assert sum(line.startswith("| 150 ") for line in lines) == 2 * 2 * len(VARIANTS)
    assert "80" not in {line.split("|")[2].strip() for line in lines if line.startswith("| 150")}
    for name in ("f.png", "f-recall.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_the_cache_says_what_variants_leave_open(
    measured: Any, tmp_path: Path, tiny_model_dir: Path, tiny_text: Path
) -> None:
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--ranks", "16"]
    arguments += ["--variants", "als top,closed per head,shared weighted"]
    first, second = (
        {
            variant: one
            for (_, variant, _), one in measured(
                MEASUREMENT, tmp_path / f"{n}.json", *arguments, "--caches", cache
            ).items()
        }
        for n, cache in enumerate(("lrqk", "lrqk:iterations=12:recency=0:top_k=5"))
    )
    assert (first["als top"]["top_k"], second["als top"]["top_k"]) == (TOP_K, 5)
    for layer in (0, 1):

        def error(found: dict[str, Any], variant: str, layer: int = layer) -> float:
            return found[variant]["layers"][layer]["error"]

        assert error(first, PER_HEAD) <= error(second, "als top") < error(first, "als top")
        assert error(second, "shared weighted") < error(first, "shared weighted")


def test_a_start_that_beats_the_closed_form_is_counted() -> None:
    results = Results("eval lrqk-factors", {})
    layer = {name: 0.5 for name in ("error", "centered_error", "recall", "mass", "best_mass")}
    for variant, errors in (
        (PER_HEAD, [0.4, 0.6]),
        ("als randn", [0.4, 0.6]),
        ("als top", [0.5, 0.5]),
    ):
        cell = {"cache": "lrqk", "length": 9, "variant": variant, "rank": 2}
        one = {"layer": 3, **layer, "numbers": 4, "errors": errors}
        results.add(cell, {"top_k": 1, "layers": [one]})
    shown = MEASUREMENT.table(results)
    assert shown.endswith(": 1 of 2 layer x rank x start")
    assert "layer 3" in shown and "optimum" not in shown


def test_without_a_text_the_needle_language_is_read(measured: Any, tmp_path: Path) -> None:
    language = NeedleLanguage()
    text = needle_tokens(700, 13, seed=3)
    # Three turns of Q k k -> v v, the first of which the 13 newest tokens only touch.
    turns = text[-18:].view(3, 6)
    assert text.shape == (700,) and text[0] == language.bos
    assert (turns[:, 0] == language.question).all() and (turns[:, 3] == language.arrow).all()
    assert not (text[:-18] == language.question).any()
    needles = {tuple(text[i + 1 : i + 5].tolist()) for i in (text == language.needle).nonzero()}
    assert {(*turn[1:3].tolist(), *turn[4:].tolist()) for turn in turns} <= needles
    arguments = ["--model", "needle", "--context", "300", "--top-k", "20", "--ranks", "8"]
    arguments += ["--variants", "shared"]
    (found,) = measured(MEASUREMENT, tmp_path / "n.json", *arguments).values()
    assert [one["layer"] for one in found["layers"]] == [0, 1, 2]
    assert all(0 < one["recall"] <= 1 for one in found["layers"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "300", "--top-k", "280"], "leave nothing to choose"),
        (["--variants", "shared,best"], "--variants: unknown: best"),
        (["--ranks", "8,8"], "--ranks: the same value twice"),
        (["--caches", "paris"], "lrqk-factors is about lrqk, so name lrqk"),
        (["--caches", "lrqk:rank=8"], "chooses rank itself, leave it out: --ranks and --variants"),
        (["--store", "host"], "stores nothing"),
        (["--ranks", "80,96"], "above the head dim 64"),
        (["--context", "300,32K", "--text", __file__], "needs a tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused(refused: Any, arguments: list[str], message: str) -> None:
    assert message in refused(MEASUREMENT, "--model", "needle", *arguments)


def test_an_approximation_without_error_has_no_negative_one(study: LayerStudy) -> None:
    """Rounding leaves shares of about 1e-16 on either side of 0, whose root must be a number."""
    for variant in (VARIANTS[OPTIMUM], VARIANTS[PER_HEAD], Shared(center=True)):
        found: Approximation = variant(study, DIM, OPTIONS)
        for share in (found.error, found.centered_error):
            assert share.isfinite().all() and (share >= 0).all() and (share < 1e-8).all()
