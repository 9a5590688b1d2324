# SPDX-License-Identifier: Apache-2.0
"""Line charts with logarithmic scales: as a page that fetches nothing (html), or as a picture (png, by matplotlib)."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Chart", "write"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 170, 40, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")

Lines = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Chart:
    """`lines`: points (x, y), all above 0, by the line's name, at least one. `dashed`: the line that is a limit."""

    title: str
    x_label: str
    y_label: str
    lines: Lines
    ticks: Sequence[float]
    tick_text: Callable[[float], str] = "{:g}".format
    dashed: str = ""


def write(charts: Sequence[Chart], path: Path, title: str, note: str) -> None:
    """Write `path`; its ending says what. Raises ValueError for another ending, or png without matplotlib."""
    if path.suffix in (".html", ".htm"):
        path.write_text(_page(charts, title, note))
    elif path.suffix == ".png":
        _picture(charts, path)
    else:
        raise ValueError(f"--plot {path}: a file that ends in .html or .png")


def _page(charts: Sequence[Chart], title: str, note: str) -> str:
    body = "\n".join(f"<h2>{html.escape(chart.title)}</h2>\n{_svg(chart)}" for chart in charts)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em;color:#222;background:#fff}text{font-size:12px;fill:#222}</style>\n"
        f"<h1>{name}</h1><p>{html.escape(note)}</p>\n{body}\n</html>\n"
    )


def _svg(chart: Chart) -> str:
    every = [x for points in chart.lines.values() for x, _ in points] + list(chart.ticks)
    heights = [y for points in chart.lines.values() for _, y in points if y > 0]
    low, high = math.floor(math.log10(min(heights))), math.ceil(math.log10(max(heights)))
    high = max(high, low + 1)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    first, last = math.log2(min(every)), math.log2(max(every))

    def x(value: float) -> float:
        return _LEFT + wide * ((math.log2(value) - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return _TOP + tall * (high - math.log10(value)) / (high - low)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for tick in chart.ticks:
        text = html.escape(chart.tick_text(tick))
        parts.append(f'<text x="{x(tick):.1f}" y="{_TOP + tall + 18}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 14}">{html.escape(chart.y_label)}</text>')
    parts.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(chart.x_label)}</text>'
    )
    for place, (name, points) in enumerate(chart.lines.items()):
        colour = "#000" if name == chart.dashed else _COLOURS[place % len(_COLOURS)]
        dash = ' stroke-dasharray="6 4"' if name == chart.dashed else ""
        shown = [(a, b) for a, b in points if b > 0]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in shown)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"><title>{html.escape(name)}, '
            f"{html.escape(chart.tick_text(a))}: {b:g} {html.escape(chart.y_label)}</title></circle>"
            for a, b in shown
        ]
        at = _TOP + 18 * place
        parts.append(
            f'<line x1="{_LEFT + wide + 20}" x2="{_LEFT + wide + 50}" y1="{at}" y2="{at}" stroke="{colour}" '
            f'stroke-width="2"{dash}/><text x="{_LEFT + wide + 56}" y="{at + 4}">{html.escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _picture(charts: Sequence[Chart], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"--plot {path}: a png needs matplotlib (install kvrail with the extra plot); an .html needs nothing"
        ) from None
    figure = Figure(figsize=(9, 4.5 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(len(charts), 1, place + 1)
        for name, points in chart.lines.items():
            style: dict[str, Any] = (
                {"color": "black", "linestyle": "--"} if name == chart.dashed else {"marker": "o"}
            )
            axes.plot([a for a, _ in points], [b for _, b in points], label=name, **style)
        axes.set(xscale="log", yscale="log", xlabel=chart.x_label, ylabel=chart.y_label, title=chart.title)
        axes.set_xticks(list(chart.ticks), [chart.tick_text(tick) for tick in chart.ticks])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
