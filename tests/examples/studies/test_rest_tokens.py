"""What stands for the rest: the study's cells, its numbers and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation import made
from head_caches import read_contexts
from rest_distances import follow
from rest_tokens import OFF, RestTokens, rest_options

from hf_kvret import FlatKVCache
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import load_subject
from hf_kvret.methods.flat import FlatConfig

OPTIONS = {"sink": 4, "recent": 16, "flush": 16, "dense_below": 0}


def test_numbers_are_those_of_a_cache_that_follows_the_text() -> None:
    subject = load_subject("needle")
    window = torch.randint(0, NeedleLanguage().vocab_size, (240,))
    choice = made("flat", FlatKVCache, FlatConfig(**OPTIONS))
    readers = read_contexts(subject, choice, [window], 200)
    covering = follow(readers, [window], 8, top_k=1.0, **rest_options("mean"))
    assert covering["kl"] < 1e-6 and covering["equal"] == 1.0
    assert covering["lost"] < 1e-6 and covering["rows"] > 0.9
    results = {
        name: follow(readers, [window], 8, top_k=0.05, **rest_options(name))
        for name in (OFF, "mean", "64")
    }
    for found in results.values():
        assert found["rows"] == pytest.approx(0.05, abs=0.01) and 0.0 < found["lost"] < 1.0
        assert found["kl"] > 1e-4 and 0.0 < found["kl_error"] < math.inf
    assert len({found["kl"] for found in results.values()}) == 3
    # The oracle's estimates are exact.
    assert results["mean"]["estimated"] == pytest.approx(results["mean"]["lost_of_all"], abs=1e-5)
    # Where it started from a cache stays.
    assert follow(readers, [window], 8, top_k=0.05, **rest_options(OFF)) == results[OFF]


def test_the_script_measures_each_cell_and_draws_them(
    tmp_path: Path, measured: Callable[..., Any]
) -> None:
    path, picture = tmp_path / "rest.json", tmp_path / "rest.png"
    arguments = ["--model", "needle", "--context", "512", "--windows", "1", "--new-tokens", "32"]
    arguments += ["--caches", "flat:recent=16:flush=16", "--shares", "0.05,0.1"]
    found = measured(
        RestTokens, path, *arguments, "--rests", "nothing,mean", "--plot", str(picture)
    )
    assert [cell[1] for cell in found] == [
        f"{share}, {rest}" for share in ("0.05", "0.1") for rest in ("nothing", "mean")
    ]
    table = RestTokens.table(Results.load(path))
    assert "share of all attention lost, estimated, exact" in table
    assert "10%: KL +- s.e., equal" in table and "5%: mass of the cold ones lost" in table
    assert picture.is_file()


def test_what_can_not_be_measured_is_said(refused: Callable[..., str]) -> None:
    assert "choose nothing, mean, or tokens" in refused(RestTokens, "--rests", "median")
    line = refused(RestTokens, "--caches", "flat:rest=mean")
    assert "--rests and --shares name them" in line
