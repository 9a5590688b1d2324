# SPDX-License-Identifier: Apache-2.0
"""transfer-bench's plot: bandwidth against page size, one line a way, the limit dashed, a chart a pair of memories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvrail.frontend.bench_record import Record, bytes_text, way_text
from kvrail.frontend.chart import Chart, write

__all__ = ["plot"]

_LIMIT = "memcpy"


def plot(records: Sequence[Record], path: Path) -> None:
    """Write `path`; its ending says what. Raises ValueError for another ending, or png without matplotlib."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in _largest(records):
        lines = found.setdefault(record.memory, {})
        lines.setdefault(way_text(record), []).append((record.page_bytes, record.gb_per_s))
    charts = [
        Chart(
            title=memory,
            x_label="page",
            y_label="GB/s",
            lines={name: sorted(points) for name, points in lines.items()},
            ticks=sorted({size for points in lines.values() for size, _ in points}),
            tick_text=lambda size: bytes_text(round(size)),
            dashed=_LIMIT,
        )
        for memory, lines in found.items()
    ]
    write(
        charts,
        path,
        "transfer-bench",
        "GB/s by page size, both on logarithmic scales; dashed: one copy of a whole batch, by driver or thread.",
    )


def _largest(records: Sequence[Record]) -> list[Record]:
    """Of each way and page size the batch of most pages: bandwidth is what large ones have. Asleep before awake."""
    kept: dict[tuple[str, str, int], Record] = {}
    for record in records:
        cell = (record.memory, way_text(record), record.page_bytes)
        if not record.pace and (cell not in kept or record.pages > kept[cell].pages):
            kept[cell] = record
    return list(kept.values())
