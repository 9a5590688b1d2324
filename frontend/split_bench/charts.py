# SPDX-License-Identifier: Apache-2.0
"""The rows of bench_split as charts: throughput against speed for a user, and times to the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrail.frontend.chart import Chart
from kvrail.frontend.split_bench.runner import Row

__all__ = ["charts"]

_ROUND = (1.0, 2.0, 5.0)


def charts(rows: Sequence[Row], device: str) -> list[Chart]:
    """Those of the parts that have rows; what was cut is left out."""
    found = []
    whole = [row for row in rows if not row.get("cut") and not row.get("errors")]
    load = _lines(
        [row for row in whole if row["part"] == "load"],
        lambda row: [(row["tok_per_s_user"], row["tok_per_s_device"])],
    )
    if load:
        users = [x for points in load.values() for x, _ in points]
        title = f"output tokens a second of a {device} against those of a user"
        found.append(
            Chart(title, "tok/s per user", f"tok/s per {device}", load, _ticks(min(users), max(users)))
        )
    first = _lines(
        [row for row in whole if row["part"] == "handover" and row["ttft_ms"]],
        lambda row: [(float(row["in"]), row["ttft_ms"]["p50"])],
    )
    if first:
        lengths = sorted({x for points in first.values() for x, _ in points})
        found.append(Chart("time to the first token, one client", "prompt tokens", "ms", first, lengths))
    talks = _lines(
        [row for row in whole if row["part"] == "replay"],
        lambda row: [(n + 1.0, ms) for n, ms in enumerate(row["ttft_ms_by_turn"]) if ms],
        lambda row: f"{row['engine']}, {row['routing']}, cache {row['host_cache_gb']}",
    )
    if talks:
        turns = sorted({x for points in talks.values() for x, _ in points})
        found.append(Chart("time to the first token of each turn", "turn", "ms", talks, turns))
    return found


def _lines(
    rows: Sequence[Row],
    points: Callable[[Row], list[tuple[float, float]]],
    name: Callable[[Row], str] = lambda row: row["engine"],
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(name(row), []).extend((x, y) for x, y in points(row) if x > 0 and y > 0)
    return {name: sorted(found) for name, found in lines.items() if found}


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within, or the two ends when there are none."""
    found = [base * 10.0**power for power in range(-3, 7) for base in _ROUND]
    return [value for value in found if low <= value <= high] or [low, high]
