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
QUICK = ["batch", "--context", "128", "--steps", "2", "--warmup", "0"]
FULL = [*QUICK, "--caches", "full"]
# The tiny shape in float32: its weights, and a sequence of 128 tokens, 2 steps.
WEIGHTS = 6_823_936
SEQUENCE = 2 * 2 * 2 * 256 * 130

Measure = Callable[..., Results]
Watch = Callable[..., list[tuple[str, int]]]


def rows_of(results: Results) -> dict[int, dict[str, Any]]:
    """Rows of one cache by batch."""
    return {cell["batch"]: row for cell, row in results}


def test_powers_of_two_and_the_largest_batch_are_measured(
    bench: Callable[..., int], tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, file, picture = watch(Batch), tmp_path / "b.json", tmp_path / "b.png"
    # The limit leaves room for 13 sequences and a half.
    limit = WEIGHTS + 13 * SEQUENCE + SEQUENCE // 2
    arguments = [*FULL, "--device-memory", str(limit), "--json", str(file)]
    assert bench(*arguments, "--plot", str(picture)) == 0
    assert turns == [("full", batch) for batch in (1, 2, 4, 8, 13)]
    results = Results.load(file)
    rows = rows_of(results)
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
    assert bench(*arguments) == 0
    assert len(turns) == 5 and "| full  | 128     | 13 " in capsys.readouterr().out


def test_caches_are_compared_with_the_best_dense_one(measure: Measure) -> None:
    caches = f"full,dense,flat:{SMALL}:graph=false"
    results = measure(*QUICK, "--caches", caches, "--most", "3", "--device-memory", "1GB")
    best = {cache: rate for (_, cache), (_, rate) in best_batches(results).items()}
    over = best[f"flat:{SMALL}:graph=false"] / max(best["full"], best["dense"])
    assert f"| {over:.2f} " in Batch.table(results)
    # --most 3: 1, 2, and 3 as the largest.
    assert sorted(cell["batch"] for cell, _ in results if cell["cache"] == "full") == [1, 2, 3]


@pytest.mark.parametrize(
    ("most", "error", "search"),
    [
        # The line through 4 and 8 says that more fit, so the search begins at 15.
        (9, torch.OutOfMemoryError("CUDA out of memory"), [15, 11, 9, 10]),
        # 11 fits, and so do 13 and 14: the search ends at the largest, not the first that fits.
        (14, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), [15, 11, 13, 14]),
    ],
)
def test_a_batch_that_runs_out_of_memory_is_halved_towards_the_largest_that_fits(
    most: int, error: Exception, search: list[int], measure: Measure, watch: Watch
) -> None:
    def fail(turn: Any) -> None:
        if turn.batch > most:
            raise error

    turns = watch(Batch, fail)
    rows = rows_of(measure(*FULL, "--device-memory", "1GB"))
    assert [batch for _, batch in turns] == [1, 2, 4, 8, 16, *search]
    assert "seconds" in rows[most] and str(error) in rows[most + 1]["out_of_memory"]


def test_what_exceeds_the_limit_counts_as_not_fitting(measure: Measure) -> None:
    limit = WEIGHTS + SEQUENCE + SEQUENCE // 2
    rows = rows_of(measure(*FULL, "--device-memory", str(limit)))
    assert set(rows) == {1, 2} and "seconds" in rows[1]
    assert rows[2]["out_of_memory"].startswith("does not fit (0.01 GB of")


def test_a_store_with_a_budget_is_tried_and_not_predicted(measure: Measure, watch: Watch) -> None:
    turns = watch(Batch)
    arguments = [*QUICK, "--caches", f"flat:{SMALL}:store=split:device_budget=400KB"]
    rows = rows_of(measure(*arguments, "--most", "8", "--device-memory", "1GB"))
    assert [batch for _, batch in turns] == [1, 2, 4, 8]
    # Rows of one sequence fit into the budget, those of two don't: no line leads on from there.
    assert rows[1]["host_bytes"] == 0 < rows[2]["host_bytes"]
    turns.clear()
    limit = str(WEIGHTS + rows[8]["device_peak_bytes"])
    measure(*arguments, "--device-memory", limit, "--most", "16")
    # 16 is beyond the limit; 15, 11 and 9 are too, as the halving finds.
    assert [batch for _, batch in turns] == [1, 2, 4, 8, 16, 15, 11, 9]


def test_a_cache_of_which_nothing_fits_has_no_best(measure: Measure) -> None:
    results = measure(*FULL, "--device-memory", str(WEIGHTS + 100))
    assert best_batches(results) == {} and "| full  | 128     | 0 " in Batch.table(results)


def test_mistakes_of_a_batch_search_are_refused(refused: Callable[..., str]) -> None:
    assert "bench batch on a CPU needs --device-memory" in refused(*FULL)
    arguments = ["--device-memory", "1GB", "--layers", "2"]
    assert "--layers: which batch fits" in refused(*FULL, *arguments)
    assert Batch(device="cpu", device_memory=7).room == 7
