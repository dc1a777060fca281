"""What all tasks share beside the loop: points that compare caches on the same cells."""

from __future__ import annotations

import pytest

from hf_kvret.lab.evaluate.task import mean_points
from hf_kvret.lab.report.results import Results


def test_means_are_over_the_cells_that_every_cache_has() -> None:
    results = Results("eval x", {})
    for cache, length, score, read in (
        ("full", 1, 0.5, 8),
        ("full", 2, 1.0, 16),
        ("paris", 2, 0.25, 4),
        ("full", 3, 0.0, 16),
        ("paris", 3, 0.75, 2),
    ):
        found = {"score": score, "step_bytes": read, "full_bytes": 16}
        results.add({"cache": cache, "length": length}, found)
    points = mean_points(results, "score")
    assert points == {"full": (1.0, 0.5), "paris": (pytest.approx(3 / 16), 0.5)}
    assert mean_points(results, "score", best=2.0)["full"] == (1.0, 0.25)


def test_without_a_shared_cell_there_are_no_points() -> None:
    results = Results("eval x", {})
    assert mean_points(results, "score") == {}
    for cache, length in (("full", 1), ("paris", 2)):
        found = {"score": 1.0, "step_bytes": 1, "full_bytes": 2}
        results.add({"cache": cache, "length": length}, found)
    assert mean_points(results, "score") == {}
