"""Pictures: plain numbers on their axes, a number in every cell, labels beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report import plots
from hf_kvret.lab.report.plots import (
    count_label,
    plot_heat_maps,
    plot_lines,
)


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
    counts = (1, 256, 1000, 3000, 4096, 131_072, 3 * 1024**2, 1536)
    said = ["1", "256", "1,000", "3,000", "4K", "128K", "3M", "1,536"]
    assert [*map(count_label, counts)] == said


@pytest.mark.parametrize(
    ("values", "some"),
    [
        ((4096, 9000), ["6,000"]),
        ((1.5, 9.0), ["2", "5"]),
        ((0.5, 60), ["0.5", "1", "10", "50"]),
        ((0.00002, 0.3), ["0.0001", "0.01"]),
        ((150.0, 151.0), ["150", "151"]),
    ],
)
def test_axes_show_plain_numbers(
    values: tuple[float, float], some: list[str], figures: list[Any]
) -> None:
    lines = {"paris": ([4096.0, 16_384.0], values)}
    plot_lines(Path("x.png"), lines, title="t", x="x", y="y", log_x=True, log_y=True)
    (line,) = figures[0].axes
    assert labels(line.get_xticklabels()) == ["4K", "16K"]
    shown = labels(line.get_yticklabels())
    assert not [label for label in shown if "10^" in label or "e" in label]
    assert not [label for label in some if label not in shown]
    assert not line.get_yticklabels(minor=True)


def test_every_cell_of_a_map_shows_its_number(figures: list[Any]) -> None:
    percents = {("full", 1, 3): 100.0, ("full", 1, 4): 50.0, ("full", 2, 3): 0.0}
    rows, columns = {1: "a", 2: "b"}, {3: "c", 4: "d"}
    plot_heat_maps(Path("x.png"), percents, rows=rows, columns=columns, title="t", x="x", y="y")
    (figure,) = figures
    assert [text.get_text() for text in figure.axes[0].texts] == ["100", "50", "0"]
    assert [text.get_color() for text in figure.axes[0].texts] == ["white", "black", "white"]
