"""Pictures: plain numbers on their axes, and a number in every cell of a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report import plots
from hf_kvret.lab.report.plots import count_label, plot_heat_maps, plot_lines


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, with their layout, in place of files."""
    drawn: list[Any] = []

    def keep(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        drawn.append(figure)

    monkeypatch.setattr(plots, "_save", keep)
    return drawn


def labels(ticks: list[Any]) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_counts_are_said_in_k_and_m() -> None:
    counts = (1, 256, 1000, 4096, 131_072, 3 * 1024**2, 1536)
    assert [*map(count_label, counts)] == ["1", "256", "1,000", "4K", "128K", "3M", "1,536"]


@pytest.mark.parametrize(
    ("values", "some"),
    [
        ((150.0, 151.0), {"150", "151"}),
        ((0.5, 60), {"0.5", "1", "10", "50"}),
        ((0.002, 30_000), {"0.01", "1", "10,000"}),
    ],
)
def test_logarithmic_axes_show_plain_numbers(
    values: tuple[float, float], some: set[str], figures: list[Any]
) -> None:
    lines = {"paris": ([4096.0, 16_384.0], values)}
    plot_lines(Path("x.png"), lines, title="t", x="x", y="y", log_x=True, log_y=True)
    (axis,) = figures[0].axes
    assert labels(axis.get_xticklabels()) == ["4K", "16K"]
    assert some <= {*labels(axis.get_yticklabels())}
    assert not axis.get_yticklabels(minor=True)


def test_every_cell_of_a_map_shows_its_number(figures: list[Any]) -> None:
    percents = {("full", 1, 3): 100.0, ("full", 1, 4): 50.0, ("full", 2, 3): 0.0}
    rows, columns = {1: "a", 2: "b"}, {3: "c", 4: "d"}
    plot_heat_maps(Path("x.png"), percents, rows=rows, columns=columns, title="t", x="x", y="y")
    texts = [(text.get_text(), text.get_color()) for text in figures[0].axes[0].texts]
    assert texts == [("100", "white"), ("50", "black"), ("0", "white")]
