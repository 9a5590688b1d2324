# SPDX-License-Identifier: Apache-2.0
"""Bandwidth against page size, one line a way, the limit dashed: as a page of its own (html), or a picture (png)."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrail.frontend.bench_record import Record, bytes_text, way_text

__all__ = ["plot"]

_LIMIT = "memcpy"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 170, 40, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")

Lines = dict[str, list[tuple[int, float]]]


def plot(records: Sequence[Record], path: Path) -> None:
    """Write `path`; its ending says what. Raises ValueError for another ending, or png without matplotlib."""
    charts: dict[str, Lines] = {}
    for record in records:
        if not record.pace:
            lines = charts.setdefault(record.memory, {})
            lines.setdefault(way_text(record), []).append((record.page_bytes, record.gb_per_s))
    for lines in charts.values():
        for points in lines.values():
            points.sort()
    if path.suffix in (".html", ".htm"):
        path.write_text(_page(charts))
    elif path.suffix == ".png":
        _picture(charts, path)
    else:
        raise ValueError(f"--plot {path}: a file that ends in .html or .png")


def _page(charts: dict[str, Lines]) -> str:
    body = "\n".join(f"<h2>{html.escape(name)}</h2>\n{_svg(lines)}" for name, lines in charts.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>transfer-bench</title>\n'
        "<style>body{font-family:sans-serif;margin:2em;color:#222;background:#fff}text{font-size:12px;fill:#222}</style>\n"
        "<h1>transfer-bench</h1><p>GB/s by page size, both on logarithmic scales; dashed: one copy of the whole "
        f"batch by the driver or by one thread.</p>\n{body}\n</html>\n"
    )


def _svg(lines: Lines) -> str:
    sizes = sorted({size for points in lines.values() for size, _ in points})
    rates = [rate for points in lines.values() for _, rate in points if rate > 0]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    high = max(high, low + 1)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size: int) -> float:
        return _LEFT + wide * ((math.log2(size) - first) / (last - first) if last > first else 0.5)

    def y(rate: float) -> float:
        return _TOP + tall * (high - math.log10(rate)) / (high - low)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for size in sizes:
        parts.append(
            f'<text x="{x(size):.1f}" y="{_TOP + tall + 18}" text-anchor="middle">{bytes_text(size)}</text>'
        )
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 14}">GB/s</text>')
    parts.append(f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">page</text>')
    for place, (name, points) in enumerate(lines.items()):
        colour = "#000" if name == _LIMIT else _COLOURS[place % len(_COLOURS)]
        dash = ' stroke-dasharray="6 4"' if name == _LIMIT else ""
        drawn = [(x(size), y(rate)) for size, rate in points if rate > 0]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"><title>{html.escape(name)}, {bytes_text(size)}: '
            f"{rate:g} GB/s</title></circle>"
            for (a, b), (size, rate) in zip(drawn, [p for p in points if p[1] > 0], strict=True)
        ]
        at = _TOP + 18 * place
        parts.append(
            f'<line x1="{_LEFT + wide + 20}" x2="{_LEFT + wide + 50}" y1="{at}" y2="{at}" stroke="{colour}" '
            f'stroke-width="2"{dash}/><text x="{_LEFT + wide + 56}" y="{at + 4}">{html.escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _picture(charts: dict[str, Lines], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"--plot {path}: a png needs matplotlib (install kvrail with the extra plot); an .html needs nothing"
        ) from None
    figure = Figure(figsize=(9, 4.5 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (memory, lines) in enumerate(charts.items()):
        axes = figure.add_subplot(len(charts), 1, place + 1)
        for name, points in lines.items():
            style: dict[str, Any] = (
                {"color": "black", "linestyle": "--"} if name == _LIMIT else {"marker": "o"}
            )
            axes.plot([size for size, _ in points], [rate for _, rate in points], label=name, **style)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axes.set(xscale="log", yscale="log", xlabel="page", ylabel="GB/s", title=memory)
        axes.set_xticks(sizes, [bytes_text(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
