# SPDX-License-Identifier: Apache-2.0
"""Loads of fixed lengths: rising concurrency, prompts that keep every link busy, and the mixed load.

Each takes the engines in turns and keeps one row an engine and cell: a dict that says which part it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrail.frontend.load.answer import read
from kvrail.frontend.load.arrivals import Load
from kvrail.frontend.load.report import Cell
from kvrail.frontend.split_bench.engines import Engine
from kvrail.frontend.split_bench.runner import Clock, Row, Runner, Settings, in_turn, was_cut
from kvrail.frontend.split_bench.watch import Carried, added, look

__all__ = ["load_part", "mixed_part", "push_part"]

_ROUNDS = 2


def load_part(engines: Sequence[Engine], settings: Settings, runner: Runner, clock: Clock) -> None:
    """Fixed lengths at rising concurrency: output tokens a second of a device against those of a user."""
    runner.warm_up(engines, [settings.tokens_in], clock)
    for concurrency in settings.concurrency:
        for engine in engines:
            row = _row("load", engine, concurrency=concurrency)
            runner.say(f"load: {engine.name}, {concurrency} at a time")
            requests = concurrency * settings.per_stream
            load = Load(settings.tokens_in, settings.tokens_out, concurrency=concurrency, requests=requests)
            _measure(row, [load], engine, runner, clock)
            runner.keep(row)


def mixed_part(engines: Sequence[Engine], settings: Settings, runner: Runner, clock: Clock) -> None:
    """Streams of short prompts, and a long one now and then."""
    runner.warm_up(engines, [settings.mixed_in, settings.mixed_long_in], clock)
    load = Load(
        settings.mixed_in,
        settings.mixed_out,
        concurrency=settings.mixed_streams,
        seconds=settings.mixed_s / _ROUNDS,
        long_in=settings.mixed_long_in,
        long_out=1,
        long_every_s=settings.mixed_every_s,
    )
    rows = {engine.name: _row("mixed", engine) for engine in engines}
    cells = {engine.name: Cell(engine.url, "mixed", {}) for engine in engines}
    for turn, engine in _rounds(engines):
        runner.say(f"mixed: {engine.name}, round {turn + 1} of {_ROUNDS}")
        if clock.left_s < settings.mixed_s / _ROUNDS:
            rows[engine.name]["cut"] = True
            continue
        cells[engine.name].add(runner.run(engine, load, clock))
    for name, row in rows.items():
        if not row.get("cut"):
            _fill(row, cells[name].record())
        runner.keep(row)


def push_part(engines: Sequence[Engine], settings: Settings, runner: Runner, clock: Clock) -> None:
    """Two long prompts at a time for every rank that prefills: prompt tokens a second, and what the links carry.

    The prompts of the split are pushed meanwhile; those of a single engine are not, which is the comparison.
    """
    runner.warm_up(engines, [settings.push_in], clock)
    rows = {engine.name: _row("push", engine) for engine in engines}
    found: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    carried: list[Carried] = []
    for turn, engine in _rounds(engines):
        runner.say(f"push: {engine.name}, round {turn + 1} of {_ROUNDS}")
        if clock.left_s <= 0:
            rows[engine.name]["cut"] = True
            continue
        ranks = engine.plan.prefill_ranks
        requests = max(1, settings.push_requests * ranks // _ROUNDS)
        # Two tokens: a request that ends with its first needs no pages.
        load = Load(settings.push_in, 2, concurrency=2 * ranks, requests=requests)
        before = look(engine) if engine.pe is not None else None
        result = runner.run(engine, load, clock)
        if before is not None:
            carried.append(look(engine).since(before, result.effort.wall_s))
        traces = [read(recording) for recording in result.recordings]
        errors = [trace.error for trace in traces if trace.error]
        rows[engine.name].setdefault("errors", []).extend(errors)
        done = sum(trace.prompt_tokens for trace in traces if not trace.error)
        found[engine.name].append((done, result.effort.wall_s))
    for engine in engines:
        row = rows[engine.name]
        errors = row.pop("errors", [])
        tokens, seconds = sum(done for done, _ in found[engine.name]), sum(s for _, s in found[engine.name])
        rate = tokens / seconds / engine.plan.prefill_ranks if seconds else 0.0
        row |= {
            "in": settings.push_in,
            "errors": len(errors),
            "error_messages": errors[:3],
            "cut": bool(row.get("cut")) or was_cut(errors),
            "prompt_tok_per_s_rank": round(rate, 1),
        }
        if engine.pe is not None and carried:
            row["carried"] = added(carried).record()
        runner.keep(row)


def _rounds(engines: Sequence[Engine]) -> list[tuple[int, Engine]]:
    return [(turn, engine) for turn in range(_ROUNDS) for engine in in_turn(engines, turn)]


def _row(part: str, engine: Engine, **facts: Any) -> Row:
    return {"part": part, "engine": engine.name, "devices": engine.plan.devices, **facts}


def _measure(row: Row, loads: Sequence[Load], engine: Engine, runner: Runner, clock: Clock) -> None:
    if clock.left_s <= 0:
        row["cut"] = True
        return
    cell = Cell(engine.url, row["part"], {})
    for load in loads:
        cell.add(runner.run(engine, load, clock))
    _fill(row, cell.record())


def _fill(row: Row, record: dict[str, Any]) -> None:
    """The figures of a load from the generator's record."""
    kinds = record["kinds"]
    short = kinds["short"]
    itl = short["itl_ms"].get("mean")
    row |= {
        "cut": was_cut(record["error_messages"]),
        "errors": record["errors"],
        "error_messages": record["error_messages"],
        "seconds": record["seconds"],
        "tok_per_s_device": round(record["tok_per_s"] / row["devices"], 2),
        "tok_per_s_user": round(1e3 * short["tokens_per_chunk"] / itl, 2) if itl else 0.0,
        "kinds": kinds,
        "generator": record["generator"],
    }
