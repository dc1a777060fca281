"""faiss in ``bench index-build``: what is made, what is searched, what counts as found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_index_build import judge
from index_build_keys import LayerShape, random_layer
from index_build_ways import FAISS_WAYS, Prompt, find_faiss

from hf_kvret.evaluation.results import Results

pytest.importorskip("faiss", reason="faiss is not installed: pip install faiss-cpu")


@pytest.fixture
def faiss() -> Any:
    return find_faiss()


@pytest.fixture
def prompt() -> Prompt:
    layer = random_layer(LayerShape(2, 3, 32), 1288, torch.float32, torch.device("cpu"), seed=3)
    return Prompt.of(layer, 1024, asked=8, top_k=16)


@pytest.mark.parametrize("name", FAISS_WAYS)
def test_an_index_holds_all_keys_of_each_head(name: str, prompt: Prompt, faiss: Any) -> None:
    made = FAISS_WAYS[name](faiss).prepare(prompt)()
    assert [index.ntotal for index in made] == [1024, 1024]
    assert {index.metric_type for index in made} == {faiss.METRIC_INNER_PRODUCT}


@pytest.mark.parametrize("name", FAISS_WAYS)
def test_what_is_searched_is_found(name: str, prompt: Prompt, faiss: Any) -> None:
    way = FAISS_WAYS[name](faiss)
    found = judge(way, way.prepare(prompt)(), prompt)
    assert found["recall"] > 0.6 and 16 <= found["compared"] < 1024
    assert found["mass"] <= found["best_mass"] + 1e-6


@pytest.mark.parametrize("name", ["ivf", "kmeans"])
def test_all_lists_hold_the_exact_top_k_of_the_group(
    name: str, prompt: Prompt, faiss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = FAISS_WAYS[name]
    monkeypatch.setattr(kind, "_nprobe", lambda self, prompt: self.lists(len(prompt)))
    way = kind(faiss)
    found = judge(way, way.prepare(prompt)(), prompt)
    assert found["recall"] == 1.0 and found["compared"] == pytest.approx(1024, rel=0.1)


def test_lists_hold_about_as_many_keys_as_those_of_ctkvr(prompt: Prompt, faiss: Any) -> None:
    ivf, kmeans = (FAISS_WAYS[name](faiss) for name in ("ivf", "kmeans"))
    # 4 lists of 2.5 x 16 keys are 160 of 1,024; 4 x 32 and 1,024 / 16 lists.
    assert ivf.settings(prompt) == "128 lists, 20 probed"
    assert kmeans.settings(prompt) == "64 lists, 10 probed"
    made = ivf.prepare(prompt)()
    assert made[0].nlist == 128 and made[0].cp.niter == 10
    lists = kmeans.prepare(prompt)()[0]
    assert lists.nlist == 64 and lists.cp.niter == 25


def test_an_index_has_the_sizes_that_the_table_says(prompt: Prompt, faiss: Any) -> None:
    way = FAISS_WAYS["hnsw"](faiss)
    made = way.prepare(prompt)()
    way.ask(made, prompt, prompt.asked)
    assert way.settings(prompt) == "M 32, efSearch 16"
    assert made[0].hnsw.efSearch == 16 and made[0].hnsw.efConstruction == 40
    assert made[0].hnsw.nb_neighbors(1) == 32


def test_faiss_runs_on_as_many_threads_as_torch() -> None:
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            found = find_faiss()
            assert found is not None and found.omp_get_max_threads() == count
    finally:
        torch.set_num_threads(before)
        find_faiss()


def test_rows_that_waited_for_faiss_are_measured_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Callable[..., int]
) -> None:
    file = tmp_path / "b.json"
    sizes = ["--heads", "1", "--group", "2", "--dim", "32", "--top-k", "16", "--queries", "2"]
    given = ["--context", "256", "--methods", "flat", "--json", str(file)]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "faiss", None)
        assert bench("index-build", *sizes, *given) == 0
    assert bench("index-build", *sizes, *given) == 0
    rows = {cell["cache"]: row for cell, row in Results.load(file)}
    assert set(rows) == {"flat", "faiss-ivf", "faiss-hnsw", "faiss-kmeans"}
    assert all(row["seconds"] > 0 and "skipped" not in row for row in rows.values())
