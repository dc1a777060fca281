"""Pictures of results: lines, bars and heat maps in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def require_matplotlib() -> None:
    """ModuleNotFoundError with the remedy when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install matplotlib") from error


def plot_lines(
    path: Path,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> None:
    """One line a name, each ``(xs, ys)``, with markers; ``low`` and ``high`` bound y.

    ``whole_x`` is for counts and numbers of layers: no tick falls between two of them.
    """
    figure, axis = _figure(6.4, 4.0)
    for name, (xs, ys) in lines.items():
        axis.plot(xs, ys, marker="o", markersize=3.5, linewidth=1.4, label=name)
    if log_x:
        axis.set_xscale("log", base=2)
        ticks = sorted({value for xs, _ in lines.values() for value in xs})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    elif whole_x:
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if log_y:
        axis.set_yscale("log")
    axis.set_ylim(low, high)
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_points(
    path: Path,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
) -> None:
    """Points without lines, one colour a name; x is logarithmic."""
    figure, axis = _figure(6.4, 4.0)
    for name, (xs, ys) in points.items():
        axis.plot(xs, ys, marker="o", markersize=5, linestyle="none", label=name)
    axis.set_xscale("log")
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_groups(
    path: Path,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    y: str,
) -> None:
    """Bars side by side: one group a name of ``groups``, one colour a name of ``bars``.

    None leaves a bar out.
    """
    figure, axis = _figure(max(5.0, 0.35 * len(groups) * len(bars) + 2.0), 3.8)
    width = 0.8 / max(1, len(bars))
    for number, (name, values) in enumerate(bars.items()):
        places = np.arange(len(groups)) - 0.4 + width * (number + 0.5)
        heights = [np.nan if value is None else value for value in values]
        axis.bar(places, heights, width=0.92 * width, label=name)
    axis.set_xticks(np.arange(len(groups)), groups, **_slanted(len(groups)))
    axis.set(title=title, ylabel=y)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_heat_maps(
    path: Path,
    maps: Mapping[str, np.ndarray],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    x: str,
    y: str,
    low: float = 0.0,
    high: float = 1.0,
) -> None:
    """One map a name, each ``[len(rows), len(columns)]``; NaN where nothing was measured."""
    wide = max(2.6, 0.42 * len(columns) + 1.0)
    figure, axes = _figure(wide * len(maps) + 1.0, 0.34 * len(rows) + 2.0, columns=len(maps))
    for axis, (name, values) in zip(np.atleast_1d(axes), maps.items(), strict=True):
        image = axis.imshow(values, cmap="RdYlGn", vmin=low, vmax=high, aspect="auto")
        axis.set_xticks(range(len(columns)), columns, rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(rows)), rows, fontsize=7)
        axis.set(title=name, xlabel=x, ylabel=y)
    figure.colorbar(image, ax=axes, shrink=0.85)
    figure.suptitle(title)
    _save(figure, path)


def _slanted(labels: int) -> dict[str, Any]:
    """Labels that would run into each other end at their mark."""
    return {"rotation": 35, "ha": "right"} if labels > 5 else {}


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
