"""``hf-kvret bench batch`` on a CPU: which batches are measured, and which one is the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.lab.bench.batches import Batch, best_batches
from hf_kvret.lab.report.results import Results

SMALL = "dense_below=0:recent=16:flush=16"
QUICK = ["--context", "128", "--steps", "2", "--warmup", "0"]
# The tiny shape in float32: its weights, and a sequence of 128 tokens, 2 steps.
WEIGHTS = 6_823_936
SEQUENCE = 2 * 2 * 2 * 256 * 130


def note_batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Cache and batch of every turn from now on."""
    turns: list[tuple[str, int]] = []
    once = Batch.once

    def noting(self: Batch, turn: Any) -> Any:
        turns.append((turn.choice.name, turn.batch))
        return once(self, turn)

    monkeypatch.setattr(Batch, "once", noting)
    return turns


def test_powers_of_two_and_the_largest_batch_are_measured(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns, file, picture = note_batches(monkeypatch), tmp_path / "b.json", tmp_path / "b.png"
    # Room for 13 sequences and a half.
    limit = WEIGHTS + 13 * SEQUENCE + SEQUENCE // 2
    arguments = [*QUICK, "--caches", "full", "--device-memory", str(limit)]
    assert bench("batch", *arguments, "--json", str(file), "--plot", str(picture)) == 0
    assert turns == [("full", batch) for batch in (1, 2, 4, 8, 13)]
    results = Results.load(file)
    rows = {cell["batch"]: row for cell, row in results}
    assert set(rows) == {1, 2, 4, 8, 13, 16}
    assert (results.setup["limit"], results.setup["most"]) == (60.0, 256)
    assert rows[13]["device_peak_bytes"] == 13 * SEQUENCE
    assert rows[16]["out_of_memory"] == "does not fit (predicted: 13 fit)"
    (batch, rate), *_ = best_batches(results).values()
    assert rate == max(row["tokens_per_second"] for row in rows.values() if "seconds" in row)
    assert rate == pytest.approx(batch / rows[batch]["seconds"])
    assert picture.stat().st_size > 1000
    # The same command again measures nothing.
    capsys.readouterr()
    assert bench("batch", *arguments, "--json", str(file)) == 0
    assert len(turns) == 5 and "| full  | 128     | 13 " in capsys.readouterr().out


def test_caches_are_compared_with_the_best_dense_one(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    caches = f"full,dense,flat:{SMALL}:graph=false"
    arguments = [*QUICK, "--caches", caches, "--most", "3", "--device-memory", "1GB"]
    assert bench("batch", *arguments, "--json", str(file)) == 0
    results = Results.load(file)
    best = {cache: rate for (_, cache), (_, rate) in best_batches(results).items()}
    over = best[f"flat:{SMALL}:graph=false"] / max(best["full"], best["dense"])
    assert f"| {over:.2f} " in Batch.table(results)
    # --most 3: 1, 2, and 3 as the largest.
    assert sorted(cell["batch"] for cell, _ in results if cell["cache"] == "full") == [1, 2, 3]


def test_a_batch_that_runs_out_of_memory_is_halved_towards_what_fits(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    once = Batch.once

    def scarce(self: Batch, turn: Any) -> Any:
        turns.append(turn.batch)
        if turn.batch > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return once(self, turn)

    monkeypatch.setattr(Batch, "once", scarce)
    file = tmp_path / "b.json"
    arguments = [*QUICK, "--caches", "full", "--device-memory", "1GB", "--json", str(file)]
    assert bench("batch", *arguments) == 0
    # 16 fails; the line through 4 and 8 says that more fit, so 15, 11, 9 and 10 are tried.
    assert turns == [1, 2, 4, 8, 16, 15, 11, 9, 10]
    rows = {cell["batch"]: row for cell, row in Results.load(file)}
    assert "seconds" in rows[9] and "CUDA out of memory" in rows[11]["out_of_memory"]


def test_between_a_batch_that_fits_and_one_that_does_not_others_are_tried(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    once = Batch.once

    def scarce(self: Batch, turn: Any) -> Any:
        turns.append(turn.batch)
        if turn.batch > 14:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return once(self, turn)

    monkeypatch.setattr(Batch, "once", scarce)
    file = tmp_path / "b.json"
    arguments = [*QUICK, "--caches", "full", "--device-memory", "1GB", "--json", str(file)]
    assert bench("batch", *arguments) == 0
    # 11 fits, and so do 13 and 14: the largest is found, not the first that fits.
    assert turns == [1, 2, 4, 8, 16, 15, 11, 13, 14]


def test_what_exceeds_the_limit_counts_as_not_fitting(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    limit = WEIGHTS + SEQUENCE + SEQUENCE // 2
    arguments = [*QUICK, "--caches", "full", "--device-memory", str(limit), "--json", str(file)]
    assert bench("batch", *arguments) == 0
    rows = {cell["batch"]: row for cell, row in Results.load(file)}
    assert set(rows) == {1, 2} and "seconds" in rows[1]
    assert rows[2]["out_of_memory"].startswith("does not fit (0.01 GB of")


def test_a_store_with_a_budget_is_tried_and_not_predicted(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, file = note_batches(monkeypatch), tmp_path / "b.json"
    cache = f"flat:{SMALL}:store=split:device_budget=400KB"
    arguments = [*QUICK, "--caches", cache, "--most", "8", "--device-memory", "1GB"]
    assert bench("batch", *arguments, "--json", str(file)) == 0
    rows = {cell["batch"]: row for cell, row in Results.load(file)}
    assert [batch for _, batch in turns] == [1, 2, 4, 8]
    # Rows of one sequence fit into the budget, of two they don't: no line leads on from there.
    assert rows[1]["host_bytes"] == 0 < rows[2]["host_bytes"]
    turns.clear()
    limit = str(WEIGHTS + rows[8]["device_peak_bytes"])
    arguments = [*QUICK, "--caches", cache, "--device-memory", limit, "--most", "16"]
    assert bench("batch", *arguments) == 0
    # 16 is beyond the limit; 15, 11 and 9 are too, as the halving finds.
    assert [batch for _, batch in turns] == [1, 2, 4, 8, 16, 15, 11, 9]


def test_a_cache_of_which_nothing_fits_has_no_best(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    arguments = [*QUICK, "--caches", "full", "--device-memory", str(WEIGHTS + 100)]
    assert bench("batch", *arguments, "--json", str(file)) == 0
    results = Results.load(file)
    assert best_batches(results) == {} and "| full  | 128     | 0 " in Batch.table(results)


def test_mistakes_of_a_batch_search_are_refused(bench: Callable[..., int]) -> None:
    with pytest.raises(ValueError, match="bench batch on a CPU needs --device-memory"):
        bench("batch", *QUICK, "--caches", "full")
    with pytest.raises(ValueError, match="--layers: which batch fits"):
        bench("batch", *QUICK, "--caches", "full", "--device-memory", "1GB", "--layers", "2")
    assert Batch(device="cpu", device_memory=7).room == 7
