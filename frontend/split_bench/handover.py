# SPDX-License-Identifier: Apache-2.0
"""What handing over costs: one client, the engines in turns, time to the first token and from there to the second.

The first token goes ahead of the last pages, so the push shows between the first and the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrail.frontend.load.answer import Trace
from kvrail.frontend.load.arrivals import Load
from kvrail.frontend.split_bench.engines import Engine
from kvrail.frontend.split_bench.runner import Clock, Row, Runner, Settings, in_turn, was_cut
from kvrail.frontend.split_bench.watch import look

__all__ = ["handover_part"]

_OUT = 4


def handover_part(engines: Sequence[Engine], settings: Settings, runner: Runner, clock: Clock) -> None:
    """One row an engine and length; rows of single engines also have what the split took longer, round by round."""
    runner.warm_up(engines, settings.handover_in, clock)
    for place, length in enumerate(settings.handover_in):
        share = Clock(clock.left_s / (len(settings.handover_in) - place))
        _measure(engines, length, settings.rounds, runner, share)


def _measure(engines: Sequence[Engine], length: int, rounds: int, runner: Runner, clock: Clock) -> None:
    traces: dict[str, list[Trace]] = {engine.name: [] for engine in engines}
    split = next((engine for engine in engines if engine.pe is not None), None)
    before = look(split) if split is not None else None
    for turn in range(rounds):
        runner.say(f"handover: {length} tokens, round {turn + 1} of {rounds}")
        # A round is whole or is not begun, so that every engine has its counterpart.
        if clock.left_s <= 0:
            break
        for engine in in_turn(engines, turn):
            traces[engine.name] += runner.traces(engine, Load(length, _OUT, requests=1), clock)
    ours = traces[split.name] if split is not None else []
    for engine in engines:
        found = traces[engine.name]
        good = [trace for trace in found if not trace.error]
        errors = [trace.error for trace in found if trace.error]
        row: Row = {
            "part": "handover",
            "engine": engine.name,
            "devices": engine.plan.devices,
            "in": length,
            "rounds": len(good),
            "cut": len(found) < rounds or was_cut(errors),
            "errors": len(errors),
            "error_messages": errors[:3],
            "ttft_ms": _spread([1e3 * trace.first_s for trace in good]),
            "second_ms": _spread([1e3 * gap for trace in good for gap in np.diff(trace.arrivals[:2])]),
        }
        if engine is split and before is not None and good:
            row["carried"] = look(engine).since(before, sum(t.ended - t.begun for t in good)).record()
        elif ours:
            pairs = [(a, b) for a, b in zip(ours, found, strict=False) if not (a.error or b.error)]
            row["split_takes_longer_ms"] = _spread([1e3 * (a.first_s - b.first_s) for a, b in pairs])
        runner.keep(row)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the range of the middle four fifths."""
    if not values:
        return {}
    low, median, high = np.percentile(values, (10, 50, 90))
    return {"p10": round(float(low), 3), "p50": round(float(median), 3), "p90": round(float(high), 3)}
