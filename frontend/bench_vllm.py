# SPDX-License-Identifier: Apache-2.0
"""A pair of vLLM engines that kvrail splits, against the same with vLLM's own NIXL connector: same vLLM, same prompts.

Both pairs are up on this host's CPU and are asked in turns, a few seconds each, one there at a time. Needs vLLM, and
`pip install nixl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrail.frontend.bench_vllm_model import tiny_model
from kvrail.frontend.bench_vllm_pairs import CONNECTORS, NAME, Engines, KvrailPair, NixlPair, Pair
from kvrail.frontend.launched import LaunchFailed, undisturbed
from kvrail.frontend.load.answer import read
from kvrail.frontend.load.arrivals import Load, run_load
from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.report import Cell, compare, comparison_table, table
from kvrail.frontend.load.request import Target
from kvrail.frontend.refusing import refuse
from kvrail.runtime.output_file import writable

__all__ = ["main"]

# Of the whole run: engines have started by the first, and no load begins after the second.
_START_S, _LOADS_UNTIL_S = 420.0, 600.0
# At most: one answer, and all that begins of one load.
_ANSWER_S, _LOAD_S = 60.0, 20.0
# vLLM's processes wait for each other without sleeping for a second after each message. That of the pair that was asked
# before is over by then.
_SETTLE_S = 1.2


# What a user waits for. A pair that gives the first token ahead of the pages has its hand-over between the first two.
_MOMENTS = {"first token": 0, "second token": 1, "last token": -1}


class _Side:
    """One pair, its figures, and when each moment came in each round (median, ms since the question), by load."""

    def __init__(self, name: str, pair: Pair, loads: Sequence[tuple[str, Load]]) -> None:
        self.name, self.pair = name, pair
        self.cells = [
            Cell(name, what, {"in": load.tokens_in, "clients": load.concurrency}) for what, load in loads
        ]
        self.came: list[dict[str, list[float]]] = [{moment: [] for moment in _MOMENTS} for _ in loads]

    def turn(self, loads: Sequence[tuple[str, Load]], prompts: Prompts, first: int, until: float) -> bool:
        """Ask it all loads once; no number of a prompt is used twice. False when `until` came first."""
        with self.pair.awake():
            time.sleep(_SETTLE_S)
            target = Target(self.pair.url)
            for at, (_, load) in enumerate(loads):
                if time.monotonic() > until:
                    return False
                number = first + 1000 * at
                # What comes first after a pause, or first of all, is not what is measured.
                asyncio.run(run_load(replace(load, requests=1, concurrency=1), target, prompts, number + 999))
                turn = asyncio.run(run_load(load, target, prompts, number))
                self.cells[at].add(turn)
                good = [trace for trace in map(read, turn.recordings) if not trace.error]
                for moment, place in _MOMENTS.items():
                    after = [1e3 * (t.arrivals[min(place, len(t.arrivals) - 1)] - t.begun) for t in good]
                    self.came[at][moment].append(float(np.median(after)) if after else float("nan"))
            return True


def main(
    model: Annotated[
        str, typer.Option(help="folder of a model; without it a tiny one with random weights is made")
    ] = "",
    against: Annotated[str, typer.Option(help="nixl or nixl-push")] = "nixl",
    tokens_in: Annotated[
        str, typer.Option("--in", help="tokens of a prompt; several: a load each")
    ] = "128,500,1500",
    tokens_out: Annotated[int, typer.Option("--out", min=2, help="tokens of an answer")] = 24,
    requests: Annotated[int, typer.Option(min=1, help="requests of each load, pair and round")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="how often the pairs are asked in turns")] = 12,
    clients: Annotated[
        int, typer.Option(min=1, help="also so many clients at a time, with the middle one of the lengths")
    ] = 4,
    quick: Annotated[bool, typer.Option(help="two rounds and one length, to see whether it works")] = False,
    nixl_threads: Annotated[
        int,
        typer.Option(
            min=0, help="NIXL's num_threads beside its progress thread; vLLM's default is 4, and all spin"
        ),
    ] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="number type of all engines")
    ] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(min=2, help="of all engines")] = 2048,
    vllm_args: Annotated[
        str, typer.Option(help="what else all engines are given, in vLLM's words")
    ] = "--max-num-seqs 16 --enforce-eager --kv-cache-memory-bytes 134217728",
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write everything to this file")
    ] = None,
) -> None:
    """Compare first-token and inter-token times of two pairs, within twelve minutes. Exits 1 when a request failed."""
    say = Console()
    if against not in CONNECTORS:
        raise typer.BadParameter(f"--against {against}: {' or '.join(CONNECTORS)}")
    try:
        lengths = [int(part) for part in tokens_in.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise typer.BadParameter(f"--in {tokens_in}: token counts such as 128,700")
    if max(lengths) + tokens_out > max_model_len:
        raise typer.BadParameter(
            f"--in {max(lengths)} and --out {tokens_out} are more than --max-model-len {max_model_len}"
        )
    if quick:
        lengths, rounds, requests, clients = lengths[:1], 2, 2, 1
    loads = _loads(lengths, tokens_out, requests, clients)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As by ctrl-C: the engines are stopped on the way out.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    began, started = datetime.now(UTC), time.monotonic()
    busy = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="bench_vllm", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        engines = Engines(
            model or str(tiny_model(folder / "model", dtype)), dtype, max_model_len, shlex.split(vllm_args)
        )
        sides = [
            _Side(against, NixlPair(against, nixl_threads, engines, folder), loads),
            _Side("kvrail", KvrailPair(engines, folder), loads),
        ]
        try:
            with contextlib.ExitStack() as stack:
                for side in sides:
                    stack.callback(_stop, side.pair)
                    say.print(f"{time.monotonic() - started:4.0f} s: starting two engines, {side.name}")
                    side.pair.start(started + _START_S)
                cut = _rounds(sides, loads, rounds, started, busy, say)
        except LaunchFailed as error:
            refuse("bench_vllm", str(error))
    records = [cell.record() for both in zip(*(side.cells for side in sides), strict=True) for cell in both]
    entries = compare(records)
    pairs = [
        _by_pairs(what, moment, *(side.came[at][moment] for side in sides))
        for at, (what, _) in enumerate(loads)
        for moment in _MOMENTS
    ]
    say.print(table(records), comparison_table(entries), _pairs_table(pairs))
    say.print(f"load average {busy[0]:.1f} before, {min(busy):.1f} to {max(busy):.1f} meanwhile{cut}")
    if json_file is not None:
        whole = {
            "command": sys.argv,
            "began": began.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "cut": cut,
            "load_averages": busy,
            "machine": {
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
            },
            "records": records,
            "kvrail_against_nixl": entries,
            "by_pairs": pairs,
        }
        json_file.write_text(json.dumps(whole, indent=1) + "\n")
    if any(record["errors"] for record in records):
        raise typer.Exit(1)


def _loads(lengths: Sequence[int], tokens_out: int, requests: int, clients: int) -> list[tuple[str, Load]]:
    loads = [
        (f"{length:,} in", Load(length, tokens_out, requests=requests, seconds=_LOAD_S, within_s=_ANSWER_S))
        for length in lengths
    ]
    if clients > 1:
        name, load = loads[len(loads) // 2]
        many = replace(load, concurrency=clients, requests=requests * clients)
        loads.append((f"{name}, {clients} clients", many))
    return loads


def _rounds(
    sides: Sequence[_Side],
    loads: Sequence[tuple[str, Load]],
    rounds: int,
    started: float,
    busy: list[float],
    say: Console,
) -> str:
    """Ask the pairs in turns; says why there were fewer rounds than wanted, or ""."""
    prompts = Prompts(NAME, (300, 2000), 0)
    for number in range(rounds):
        # Who begins changes, so that neither always comes second. The prompts are the same for both.
        for side in sides if number % 2 == 0 else reversed(sides):
            if not side.turn(loads, prompts, 1_000_000 * (1 + number), started + _LOADS_UNTIL_S):
                return f"; stopped after {number} of {rounds} rounds, for time"
        busy.append(os.getloadavg()[0])
        found = "; ".join(
            f"{what}: " + ", ".join(f"{side.name} {side.came[at]['first token'][-1]:,.1f}" for side in sides)
            for at, (what, _) in enumerate(loads)
        )
        say.print(
            f"{time.monotonic() - started:4.0f} s: round {number + 1} of {rounds}, first token in ms: {found}",
            highlight=False,
            soft_wrap=True,
        )
    return ""


def _stop(pair: Pair) -> None:
    # A second ctrl-C comes when all of it is stopped.
    with undisturbed():
        pair.stop()


def _by_pairs(what: str, moment: str, theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Of the medians of each round: how much later `moment` came with kvrail, in ms."""
    later = np.array([one - other for one, other in zip(ours, theirs, strict=False)])
    later = later[~np.isnan(later)]
    points = np.percentile(later, (10, 50, 90)).round(3).tolist() if len(later) else []
    return {
        "load": what,
        "moment": moment,
        "ms": {"theirs": _median(theirs), "ours": _median(ours)},
        "rounds": len(later),
        "sooner_in": int((later < 0).sum()),
        "later_ms": dict(zip(("p10", "p50", "p90"), points, strict=False)),
    }


def _median(values: Sequence[float]) -> float | None:
    """Of the rounds that had a good answer."""
    good = [value for value in values if not np.isnan(value)]
    return round(float(np.median(good)), 3) if good else None


def _pairs_table(pairs: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE, title="ms since the question, round by round (medians of each)")
    shown.add_column("load")
    shown.add_column("until the")
    for column in ("NIXL", "kvrail", "kvrail later: p10 / p50 / p90", "sooner in"):
        shown.add_column(column, justify="right")
    for one in pairs:
        medians = ("-" if ms is None else f"{ms:,.1f}" for ms in one["ms"].values())
        points = " / ".join(f"{point:+,.1f}" for point in one["later_ms"].values())
        shown.add_row(
            one["load"], one["moment"], *medians, points or "-", f"{one['sooner_in']} of {one['rounds']}"
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
