"""Pictures of results: lines, bars and heat maps in one style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hf_kvret.saved.folder import replace_file

# Lines whose names have room beside them.
_MOST_INSIDE = 8


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
    many = len(lines) > _MOST_INSIDE
    figure, axis = _figure(8.4 if many else 6.4, 4.0)
    for name, (xs, ys) in lines.items():
        axis.plot(xs, ys, marker="o", markersize=3.5, linewidth=1.4, label=name)
    if log_x:
        ticks = sorted({value for xs, _ in lines.values() for value in xs})
        counts = all(value == int(value) for value in ticks)
        axis.set_xscale("log", base=2 if counts else 10)
        if counts:
            axis.set_xticks(ticks, [count_label(tick) for tick in ticks])
            axis.minorticks_off()
        else:
            _write_out(axis.xaxis, *axis.get_xlim())
    elif whole_x:
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if log_y:
        axis.set_yscale("log")
    axis.set_ylim(low, high)
    if log_y:
        _write_out(axis.yaxis, *axis.get_ylim())
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.grid(alpha=0.25)
    _save_with_legend(figure, path, beside=many)


def series(
    points: Iterable[tuple[str, float, float]],
) -> dict[str, tuple[list[float], list[float]]]:
    """Lines for ``plot_lines`` of points ``(name, x, y)``."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for name, x, y in points:
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(x)
        ys.append(y)
    return lines


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
        positions = np.arange(len(groups)) - 0.4 + width * (number + 0.5)
        heights = [np.nan if value is None else value for value in values]
        axis.bar(positions, heights, width=0.92 * width, label=name)
    # Labels that would run into each other end at their mark.
    slant = {"rotation": 35, "ha": "right"} if len(groups) > 5 else {}
    axis.set_xticks(np.arange(len(groups)), groups, **slant)
    axis.set(title=title, ylabel=y)
    _save_with_legend(figure, path)


def plot_front(
    path: Path, points: Mapping[str, tuple[float, float]], *, title: str, x: str, y: str
) -> None:
    """A point a name, ``(cost, loss)``, with a line through those that no other one beats in both.

    Loss is on a logarithmic axis.
    """
    figure, axis = _figure(10.0, 5.0)
    best: list[tuple[float, float]] = []
    by_cost = sorted(points.items(), key=lambda one: one[1])
    for number, (name, (cost, loss)) in enumerate(by_cost, 1):
        if loss < (best[-1][1] if best else np.inf):
            best.append((cost, loss))
        axis.plot(cost, loss, marker="o", markersize=4, linestyle="", label=f"{number}  {name}")
        axis.annotate(number, (cost, loss), (4, 4), textcoords="offset points", fontsize=7)
    axis.step(*np.reshape(best, (-1, 2)).T, where="post", color="gray", linewidth=1.0)
    axis.set_yscale("log")
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.grid(alpha=0.25)
    _save_with_legend(figure, path, beside=True)


def plot_heat_maps(
    path: Path,
    percents: Mapping[tuple[str, Any, Any], float],
    *,
    rows: Mapping[Any, str],
    columns: Mapping[Any, str],
    title: str,
    x: str,
    y: str,
) -> None:
    """Percentages by map, row and column, with the labels of rows and columns; some may be missing.

    Every cell shows its number too: colours alone don't tell 90 from 100.
    """
    maps: dict[str, np.ndarray] = {}
    for (name, row, column), percent in percents.items():
        values = maps.setdefault(name, np.full((len(rows), len(columns)), np.nan))
        values[[*rows].index(row), [*columns].index(column)] = percent
    wide = max(2.6, 0.42 * len(columns) + 1.0)
    figure, axes = _figure(wide * len(maps) + 1.0, 0.34 * len(rows) + 2.0, columns=len(maps))
    for axis, (name, values) in zip(np.atleast_1d(axes), maps.items(), strict=True):
        image = axis.imshow(values, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axis.set_xticks(range(len(columns)), columns.values(), rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(rows)), rows.values(), fontsize=7)
        axis.set(title=name, xlabel=x, ylabel=y)
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                # Both ends of the colours are dark.
                color = "white" if abs(value / 100 - 0.5) > 0.35 else "black"
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
                axis.text(column, row, f"{value:.0f}", **style)
    figure.colorbar(image, ax=axes, shrink=0.85)
    figure.suptitle(title)
    _save(figure, path)


def count_label(count: float) -> str:
    """A count as one would say it: ``256``, ``4K`` for 4,096, ``1M`` for 1,048,576."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if count >= size and count % size == 0:
            return f"{count / size:,.0f}{unit}"
    return f"{count:,g}"


def _write_out(axis: Any, low: float, high: float) -> None:
    """Plain numbers on a logarithmic axis; less than a decade has ticks at even distances."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    subs = (1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)
    is_short = high < 10 * low
    axis.set_major_locator(MaxNLocator(5) if is_short else LogLocator(subs=subs, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.10g}")


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def _save_with_legend(figure: Any, path: Path, *, beside: bool = False) -> None:
    """Save a picture of one axis, whose legend stands inside or ``beside`` it."""
    (axis,) = figure.axes
    if axis.get_legend_handles_labels()[0]:
        place = {"loc": "outside right upper"} if beside else {}
        (figure if beside else axis).legend(frameon=False, fontsize=8, **place)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    picture, path = BytesIO(), path if path.suffix else path.with_suffix(".png")
    figure.savefig(picture, format=path.suffix.removeprefix("."), dpi=150)
    pyplot.close(figure)
    replace_file(path, picture.getvalue())
