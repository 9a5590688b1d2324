# SPDX-License-Identifier: Apache-2.0
"""Figures from traces: time to first token, time between chunks, tokens a second, errors; and two servers compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from kvrail.frontend.load.answer import Trace, read
from kvrail.frontend.load.arrivals import Effort, Turn

__all__ = ["Cell", "compare", "comparison_table", "table"]

_POINTS = (50, 90, 99)


class Cell:
    """All turns of one load at one server. `name`: what the load was; `facts`: its settings."""

    def __init__(self, url: str, name: str, facts: dict[str, Any]) -> None:
        self.url, self.name, self.facts = url, name, facts
        self._traces: list[Trace] = []
        self._windows: list[tuple[float, float]] = []
        self._efforts: list[Effort] = []
        self._tokens = 0
        self._gaps: dict[str, list[float]] = {}

    def add(self, turn: Turn) -> None:
        """Take what one turn recorded."""
        begin, end = turn.window
        self._windows.append(turn.window)
        self._efforts.append(turn.effort)
        for trace in map(read, turn.recordings):
            self._traces.append(trace)
            inside = [came for came in trace.arrivals if begin <= came <= end]
            if trace.arrivals:
                # A chunk may carry more than one token.
                self._tokens += round(len(inside) * trace.tokens / len(trace.arrivals))
            gaps = np.diff(trace.arrivals)[: max(0, len(inside) - 1)]
            self._gaps.setdefault(trace.label, []).extend(gaps.tolist())

    @property
    def labels(self) -> list[str]:
        """Kinds of requests: "short", and "long" where there are some."""
        return sorted({trace.label for trace in self._traces}, reverse=True)

    def record(self) -> dict[str, Any]:
        """Everything, for JSON. Times in ms."""
        seconds = sum(end - begin for begin, end in self._windows)
        errors = Counter(trace.error for trace in self._traces if trace.error)
        chunks = sum(len(trace.arrivals) for trace in self._traces)
        wall = sum(effort.wall_s for effort in self._efforts)
        cpu = sum(effort.cpu_s for effort in self._efforts)
        return {
            "url": self.url,
            "load": self.name,
            **self.facts,
            "seconds": round(seconds, 3),
            "tok_per_s": round(self._tokens / seconds, 2) if seconds else 0.0,
            "errors": sum(errors.values()),
            "error_messages": dict(errors.most_common(5)),
            "kinds": {label: self._kind(label) for label in self.labels},
            "generator": {
                "cpu_share": round(cpu / wall, 4) if wall else 0.0,
                "cpu_us_per_chunk": round(1e6 * cpu / chunks, 1) if chunks else 0.0,
                "lag_p99_ms": round(1e3 * max(effort.lag_p99_s for effort in self._efforts), 3),
            },
        }

    def _kind(self, label: str) -> dict[str, Any]:
        traces = [trace for trace in self._traces if trace.label == label]
        good = [trace for trace in traces if not trace.error]
        chunks = sum(len(trace.arrivals) for trace in good)
        return {
            "requests": len(traces),
            "good": len(good),
            "prompt_tokens": round(float(np.mean([trace.prompt_tokens for trace in good])), 1)
            if good
            else 0.0,
            "tokens_per_chunk": round(sum(trace.tokens for trace in good) / chunks, 3) if chunks else 0.0,
            "ttft_ms": _points([trace.first_s for trace in good]),
            "itl_ms": _points(self._gaps.get(label, [])),
        }


def _points(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = 1e3 * np.array(seconds)
    found = {f"p{point}": round(float(np.percentile(values, point)), 3) for point in _POINTS}
    return {**found, "max": round(float(values.max()), 3), "mean": round(float(values.mean()), 3)}


def table(records: Sequence[dict[str, Any]]) -> Table:
    """One row for each load, server and kind of request."""
    shown = Table(box=box.SIMPLE, title="ms: p50 / p90 / p99 / max")
    # Names and rates stay whole; where there is no room beside them, the times take two lines.
    shown.add_column("load")
    shown.add_column("server", no_wrap=True)
    shown.add_column("good", justify="right", no_wrap=True)
    for column in ("time to first token", "between chunks"):
        shown.add_column(column, justify="right")
    shown.add_column("tok/s", justify="right", no_wrap=True)
    for record in records:
        for label, kind in record["kinds"].items():
            shown.add_row(
                record["load"] if label == "short" else f"  {label} prompts",
                record["url"].rpartition("://")[2],
                f"{kind['good']}/{kind['requests']}",
                _four(kind["ttft_ms"]),
                _four(kind["itl_ms"]),
                f"{record['tok_per_s']:,.1f}" if label == "short" else "",
                style="" if kind["good"] == kind["requests"] else "red",
            )
    return shown


def _four(points: dict[str, float]) -> str:
    if not points:
        return "-"
    return " / ".join(f"{points[name]:,.1f}" for name in ("p50", "p90", "p99", "max"))


def compare(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load, the second server against the first: differences in ms, and ratios (second / first)."""
    found = []
    for one, two in zip(records[::2], records[1::2], strict=True):
        for label in one["kinds"].keys() & two["kinds"].keys():
            first, second = one["kinds"][label], two["kinds"][label]
            entry: dict[str, Any] = {"load": one["load"], "kind": label}
            for what in ("ttft_ms", "itl_ms"):
                if first[what] and second[what]:
                    entry[what] = {
                        point: {
                            "difference": round(second[what][point] - first[what][point], 3),
                            "ratio": round(second[what][point] / max(first[what][point], 1e-6), 3),
                        }
                        for point in ("p50", "p90", "p99")
                    }
            if label == "short" and one["tok_per_s"]:
                entry["tok_per_s_ratio"] = round(two["tok_per_s"] / one["tok_per_s"], 3)
            found.append(entry)
    return found


def comparison_table(entries: Sequence[dict[str, Any]]) -> Table:
    """What `compare` found."""
    shown = Table(box=box.SIMPLE, title="second server against the first: p50 / p90 / p99")
    shown.add_column("load")
    for column in ("first token, ms more", "first token, ratio", "between chunks, ratio", "tok/s, ratio"):
        shown.add_column(column, justify="right")

    def three(entry: dict[str, Any], what: str, field: str, form: str) -> str:
        points = entry.get(what)
        return " / ".join(format(point[field], form) for point in points.values()) if points else "-"

    for entry in entries:
        shown.add_row(
            entry["load"] if entry["kind"] == "short" else f"  {entry['kind']} prompts",
            three(entry, "ttft_ms", "difference", "+,.1f"),
            three(entry, "ttft_ms", "ratio", ".2f"),
            three(entry, "itl_ms", "ratio", ".2f"),
            f"{entry['tok_per_s_ratio']:.2f}" if "tok_per_s_ratio" in entry else "",
        )
    return shown
