"""``hf-kvret bench index-build``: times, recall, limits, with and without faiss."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_index_build as index_build
import pytest
import torch
from bench_index_build import IndexBuild, expected_seconds, judge, time_builds
from index_build_keys import LayerShape, random_layer
from index_build_ways import Answer, MethodWay, Prompt, Way

from hf_kvret.core.recall import exact_scores
from hf_kvret.evaluation.report import write_report
from hf_kvret.evaluation.results import Results
from hf_kvret.registry import registered_methods
from hf_kvret_kernels.relevance import group_relevance

SIZES = {"heads": 2, "group": 2, "dim": 32, "top-k": 16, "queries": 4, "repeats": 2}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
Run = Callable[..., int]
METHODS = ["flat", "paris", "lrqk", "ctkvr"]


@pytest.fixture
def measure(bench: Run) -> Run:
    return partial(bench, "index-build", *SMALL)


def rows_of(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(cell.values()): row for cell, row in Results.load(file)}


@pytest.fixture
def prompt() -> Prompt:
    layer = random_layer(LayerShape(2, 2, 32), 776, torch.float32, torch.device("cpu"), seed=3)
    return Prompt.of(layer, 512, asked=8, top_k=16)


@pytest.fixture
def no_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)


class Told(Way):
    """Answers what it was told to; its index is the number of the build."""

    name = "told"

    def __init__(self, ids: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.ids, self.made = ids, 0

    def prepare(self, prompt: Prompt) -> Callable[[], int]:
        def build() -> int:
            self.made += 1
            return self.made

        return build

    def ask(self, made: int, prompt: Prompt, query: torch.Tensor) -> Answer:
        return Answer(self.ids(query), 10.0 * query.shape[2])

    def settings(self, prompt: Prompt) -> str:
        return "as told"


def exact_ids(prompt: Prompt, query: torch.Tensor) -> torch.Tensor:
    relevance = group_relevance(exact_scores(query, prompt.keys, prompt.cold.scale), 2)
    return relevance.topk(16, dim=-1).indices.int()


def test_a_prompt_holds_its_tokens_in_a_store_and_the_queries_behind_them(prompt: Prompt) -> None:
    assert len(prompt) == len(prompt.cold.store) == len(prompt.cold) == 512
    assert prompt.cold.budget == 16 and bool(prompt.cold.valid.all())
    stored = torch.cat([keys for _, keys, _ in prompt.cold.store.chunks()], dim=2)
    assert torch.equal(stored, prompt.keys)
    layer = random_layer(LayerShape(2, 2, 32), 776, torch.float32, torch.device("cpu"), seed=3)
    assert torch.equal(prompt.asked, layer.queries[:, :, 768:])
    assert torch.equal(prompt.queries, layer.queries[:, :, :768])
    assert torch.equal(prompt.passed, layer.keys[:, :, :768])
    assert torch.equal(prompt.keys, layer.keys[:, :, :512])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_makes_a_new_index_that_finds_keys(name: str, prompt: Prompt) -> None:
    way = MethodWay(registered_methods()[name], top_k=16)
    build = way.prepare(prompt)
    first, second = build(), build()
    assert first is not second
    found = judge(way, second, prompt)
    # 16 of 512 at random are 0.03; the synthetic keys are not that hard.
    assert found["recall"] > 0.4
    assert 0 < found["mass"] <= found["best_mass"] + 1e-6 < 1
    if name == "flat":
        assert found["recall"] == 1.0 and found["compared"] == 512
        assert found["mass"] == pytest.approx(found["best_mass"], abs=1e-6)


def test_an_index_of_paris_for_each_share_of_candidates(tmp_path: Path, measure: Run) -> None:
    file = tmp_path / "build.json"
    shares = ["--methods", "", "--faiss", "", "--candidates", "0.1,0.5,1"]
    assert measure(*shares, "--context", "256", "--json", str(file)) == 0
    rows = rows_of(file)
    assert [name for name, _ in rows] == [f"paris, {share} of all" for share in ("0.1", "0.5", "1")]
    assert [row["compared"] for row in rows.values()] == [26, 128, 256]
    recalls = [row["recall"] for row in rows.values()]
    assert recalls[0] < recalls[1] <= recalls[2]
    with pytest.raises(SystemExit):
        measure("--candidates", "1.5")


def test_recall_is_that_of_what_was_selected_however_queries_are_cut(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(query: torch.Tensor) -> torch.Tensor:
        ids = exact_ids(prompt, query)
        ids[..., 8:] = -1
        return ids

    for most in (1 << 24, 3 * 4 * 512, 1):
        monkeypatch.setattr(index_build, "_MOST_SCORES", most)
        exact = judge(Told(lambda query: exact_ids(prompt, query)), 1, prompt)
        assert exact["recall"] == 1.0
        assert exact["mass"] == pytest.approx(exact["best_mass"], abs=1e-6)
        found = judge(Told(half), 1, prompt)
        assert found["recall"] == pytest.approx(0.5) and found["mass"] < exact["mass"]
        nothing = judge(Told(lambda query: exact_ids(prompt, query) * 0 - 1), 1, prompt)
        assert nothing["recall"] == nothing["mass"] == 0.0
        assert nothing["best_mass"] == pytest.approx(exact["best_mass"])


@pytest.mark.parametrize(
    ("repeats", "limit", "builds"), [(3, 100.0, 3), (1, 100.0, 1), (5, 3.5, 3), (5, 0.1, 1)]
)
def test_builds_are_repeated_as_long_as_the_limit_allows(
    repeats: int, limit: float, builds: int, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every reading of the clock is a second after the one before.
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    way = Told(lambda query: query)
    index, seconds = time_builds(way.prepare(prompt), repeats, limit, prompt)
    assert index == builds and seconds == [1.0] * builds


def test_expected_time_follows_the_growth_that_was_seen() -> None:
    assert expected_seconds([], 4096) is None
    assert expected_seconds([(1024, 2.0)], 4096) == pytest.approx(8.0)
    assert expected_seconds([(2048, 3.0), (1024, 1.0)], 4096) == pytest.approx(9.0)
    # Never slower than linear, never quicker than quadratic.
    assert expected_seconds([(1024, 3.0), (2048, 3.0)], 4096) == pytest.approx(6.0)
    assert expected_seconds([(1024, 1.0), (2048, 16.0)], 4096) == pytest.approx(64.0)


def test_without_faiss_our_methods_are_measured_and_the_table_names_the_remedy(
    no_faiss: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: Run
) -> None:
    file, picture, table = (tmp_path / name for name in ("b.json", "b.png", "b.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    assert measure("--context", "512,256", *files) == 0
    rows = rows_of(file)
    for length in (256, 512):
        for name in METHODS:
            row = rows[name, length]
            low, high = row["seconds_quartiles"]
            assert 0 < row["seconds_least"] <= low <= row["seconds"] <= high and row["timed"] == 2
        for name in ("faiss-ivf", "faiss-hnsw", "faiss-kmeans"):
            assert "pip install faiss-cpu" in rows[name, length]["skipped"]
    assert len(rows) == 14 and picture.stat().st_size > 1000
    text, _, _ = table.read_text().partition("\n\n<!--")
    assert text.strip() in capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:]]
    assert [line[0] for line in lines] == ["256"] * 7 + ["512"] * 7
    assert {line[1]: line[4] for line in lines[:4]}["ctkvr"] == "1"
    assert {line[1]: line[5] for line in lines[:4]}["flat"] == "1.000"


def test_results_make_a_page(no_faiss: None, tmp_path: Path, measure: Run) -> None:
    file = tmp_path / "b.json"
    assert measure("--context", "256", "--methods", "flat", "--json", str(file)) == 0
    (page, overview), skipped, _ = write_report(tmp_path, {"bench index-build": IndexBuild})
    assert not skipped
    assert "| flat " in page.read_text() and "b.json" in page.read_text()
    assert "bench index-build" in overview.read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_of_a_model_are_indexed_while_it_reads_a_text(
    dtype: str, no_faiss: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: Run
) -> None:
    file, text = tmp_path / "b.json", tmp_path / "text.txt"
    text.write_text(" ".join(f"Letter {number} came on a Monday." for number in range(99)))
    some = ["--keys", "model", "--text", str(text), "--top-k", "16", "--queries", "4"]
    given = ["--context", "256", "--dtype", dtype, "--faiss", "", "--json", str(file)]
    assert bench("index-build", "--model", "reference", *some, *given) == 0
    results = Results.load(file)
    assert results.setup["model"] == "reference" and results.setup["dtype"] == dtype
    assert f"Keys of layer {results.setup['layer']}" in capsys.readouterr().out
    rows = {cell["cache"]: row for cell, row in results}
    assert list(rows) == METHODS
    assert rows["flat"]["recall"] > 0.97 and min(row["recall"] for row in rows.values()) > 0.3


def test_what_would_take_too_long_is_left_out_until_the_limit_allows_it(
    no_faiss: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: Run
) -> None:
    file = tmp_path / "b.json"
    some = ["--methods", "flat,lrqk", "--faiss", "", "--json", str(file)]
    assert measure("--context", "256", *some) == 0
    results = Results("bench index-build", Results.load(file).setup, file)
    slow = {"cache": "lrqk", "length": 256}
    results.add(slow, (results.find(slow) or {}) | {"seconds": 100.0})
    assert measure("--context", "256,512,1K", *some, "--limit", "150") == 0
    rows = rows_of(file)
    assert "over --limit 150 s, expected 200 s" in rows["lrqk", 512]["skipped"]
    assert "expected 400 s" in rows["lrqk", 1024]["skipped"]
    assert rows["flat", 512]["seconds"] > 0 and rows["flat", 1024]["seconds"] > 0
    assert "skipped: over --limit 150 s" in capsys.readouterr().out
    assert measure("--context", "256,512", *some, "--limit", "1000") == 0
    assert rows_of(file)["lrqk", 512]["seconds"] > 0


def test_memory_that_runs_out_leaves_a_row_that_says_so(
    no_faiss: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Run
) -> None:
    file = tmp_path / "b.json"

    def full(*given: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(index_build, "time_builds", full)
    assert measure("--context", "256", "--methods", "flat", "--faiss", "", "--json", str(file)) == 0
    assert rows_of(file) == {("flat", 256): {"skipped": "out of memory (no room)"}}


def test_the_bundled_needle_model_reads_documents_of_its_own(
    no_faiss: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Run
) -> None:
    file = tmp_path / "b.json"
    # As in an installation without a checkout.
    monkeypatch.setattr(index_build, "default_model", lambda: "needle")
    given = ["--keys", "model", "--top-k", "16", "--queries", "4", "--methods", "flat,paris"]
    assert bench("index-build", *given, "--context", "256", "--json", str(file)) == 0
    results = Results.load(file)
    assert results.setup["model"] == "needle" and results.setup["text"] == "needle language"
    rows = {cell["cache"]: row for cell, row in results}
    assert rows["flat"]["recall"] > 0.97 and rows["paris"]["recall"] > 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "16"], "--top-k 16 with --context 16"),
        (["--context", "256", "--queries", "0"], "--queries: '0' is no whole number from 1"),
        (["--context", "256", "--repeats", "0"], "--repeats: '0' is no whole number from 1"),
        (["--context", "256", "--heads", "0"], "--heads: '0' is no whole number from 1"),
        (["--context", "256", "--methods", "faiss"], "--methods: unknown: faiss; choose among"),
        (["--context", "256", "--methods", "flat,flat"], "--methods: the same name twice"),
        (["--context", "256", "--faiss", "pq"], "--faiss: unknown: pq; choose among ivf"),
        (["--context", "256", "--methods", "", "--faiss", ""], "name an index to make"),
        (["--context", "256", "--dim", "31"], "--dim 31"),
        (["--context", "256", "--text", "a.txt"], "--text belongs to --keys model"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused("index-build", *SMALL, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "64"], "--dim belongs to --keys random"),
        (["--model", "reference"], "give --text FILE"),
        (["--model", "needle", "--text", __file__], "leave --text out"),
    ],
)
def test_keys_of_a_model_need_its_own_options(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    given = ["--keys", "model", "--context", "512", *arguments]
    assert message in refused("index-build", *given)


def test_other_keys_do_not_go_into_the_same_file(
    no_faiss: None, tmp_path: Path, measure: Run
) -> None:
    file = tmp_path / "b.json"
    some = ["--context", "256", "--methods", "flat", "--faiss", "", "--json", str(file)]
    assert measure(*some) == 0
    with pytest.raises(ValueError, match="seed was 42, now 1"):
        measure(*some, "--seed", "1")
    assert json.loads(file.read_text())["setup"]["keys"] == "random"
