# SPDX-License-Identifier: Apache-2.0
"""`transfer-bench`: how fast pages move between two processes of this host, by every way that there is, in one run.

All ways take turns within each round, so that a busy moment of the machine hits them alike. Pages go in random order
on both sides, into poisoned targets, and what arrived is compared with what was sent. The time runs from the call
that starts a batch until the receiver's Python knows that it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrail.frontend.bench_nixl import nixl_version
from kvrail.frontend.bench_rank import OPTIONS
from kvrail.frontend.bench_session import Receiver, Session
from kvrail.transfer.errors import TransferError

__all__ = ["Plan", "Record", "main", "measure"]

WAYS = (*OPTIONS, "socket", "memcpy", "nixl")
# (page bytes, pages): batches of 16 MiB and more; smaller ones are judged by latency.
_FULL = (
    (4 << 10, 4096),
    (16 << 10, 2048),
    (64 << 10, 1024),
    (256 << 10, 256),
    (512 << 10, 128),
    (4 << 20, 16),
)
_QUICK = ((4 << 10, 4096), (64 << 10, 256), (512 << 10, 32), (4 << 20, 4))
_LATENCY_PAGE = 64 << 10
# A progress thread that spins this long after each event spins through the pauses between batches.
_SPIN_US = 20_000
# A dozen cells with their set-up fit into a minute.
_QUICK_CELL_S = 2.0


@dataclass(frozen=True)
class Record:
    """One measured cell. `threads`: whether the progress threads slept or spun when the batch came."""

    lane: str
    transport: str
    memory: str
    page_bytes: int
    pages: int
    median_us: float
    p99_us: float
    gb_per_s: float
    us_per_page: float
    verified: bool
    rounds: int
    backing: str
    threads: str


@dataclass(frozen=True)
class Plan:
    """What to measure. A cell stops early, after at least three rounds, when it has taken `cell_s` seconds."""

    cells: tuple[tuple[int, int], ...]
    ways: tuple[str, ...]
    rounds: int
    cell_s: float = math.inf
    latency: bool = True


def measure(plan: Plan, say: Callable[[str], object] = print) -> Iterator[Record]:
    """Every way at each (page bytes, pages), then, if wanted, the latency of one 64 KiB page."""
    receiver = Receiver()
    with tempfile.TemporaryDirectory(prefix="kvrail-bench-") as name, contextlib.closing(receiver):
        folder = Path(name)  # mode 0700
        for page_bytes, pages in plan.cells:
            yield from _cell(receiver, plan, page_bytes, pages, 0, folder, say)
        if not plan.latency:
            return
        for spin_us in (0, _SPIN_US):
            # One at a time: the spinning threads of several would share the cores.
            for way in plan.ways:
                if way in OPTIONS or (way != "memcpy" and not spin_us):
                    alone = dataclasses.replace(plan, ways=(way,), rounds=max(plan.rounds, 50))
                    yield from _cell(receiver, alone, _LATENCY_PAGE, 1, spin_us, folder, say)


def _cell(
    receiver: Receiver,
    plan: Plan,
    page_bytes: int,
    pages: int,
    spin_us: int,
    folder: Path,
    say: Callable[[str], object],
) -> Iterator[Record]:
    session = Session(receiver, plan.ways, page_bytes, pages, spin_us, folder)
    try:
        for way, reason in session.missing.items():
            say(f"{way}: not measured: {reason}")
        rng = np.random.default_rng(2)
        times: dict[str, list[float]] = {way: [] for way in session.facts}
        good = dict.fromkeys(session.facts, True)
        number = 0
        until = time.monotonic() + plan.cell_s
        for turn in range(plan.rounds + 1):
            if turn > 3 and time.monotonic() > until:
                break
            for way in session.facts:
                number += 1
                us, verified = session.batch(way, number, pages, rng)
                good[way] &= verified
                if turn:  # The first round warms up: page tables, socket buffers, caches of keys.
                    times[way].append(us)
        for way, facts in session.facts.items():
            median = float(np.median(times[way]))
            yield Record(
                lane=way.partition("/")[0],
                transport=facts["transport"],
                memory=facts["memory"],
                page_bytes=page_bytes,
                pages=pages,
                median_us=round(median, 1),
                p99_us=round(float(np.percentile(times[way], 99)), 1),
                gb_per_s=round(page_bytes * pages / median / 1000, 3),
                us_per_page=round(median / pages, 3),
                verified=good[way],
                rounds=len(times[way]),
                backing=session.backing,
                threads=session.threads,
            )
    finally:
        session.close()


def _table(records: list[Record]) -> Table:
    table = Table(
        title="from the call until the receiver's Python knows that all pages are there", box=box.SIMPLE
    )
    for column in ("way", "page"):
        table.add_column(column, no_wrap=True)
    for column in ("pages", "median µs", "p99 µs", "GB/s", "µs/page", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    before = None
    for record in records:
        cell = (record.page_bytes, record.pages, record.threads)
        if before not in (None, cell):
            table.add_section()
        before = cell
        table.add_row(
            record.lane if record.lane != "put" else f"put/{record.transport}",
            _bytes(record.page_bytes),
            f"{record.pages}{' (spin)' if record.threads == 'spin' else ''}",
            f"{record.median_us:,.1f}",
            f"{record.p99_us:,.1f}",
            f"{record.gb_per_s:.2f}",
            f"{record.us_per_page:.2f}",
            "yes" if record.verified else "[bold red]NO[/]",
        )
    return table


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _command(
    page_bytes: Annotated[list[int] | None, typer.Option(help="bytes of a page (repeat for several)")] = None,
    pages: Annotated[list[int] | None, typer.Option(help="pages in a batch (repeat for several)")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="batches of each way and size")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"only these: {', '.join(WAYS)}")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write the records to this file")
    ] = None,
    latency: Annotated[
        bool, typer.Option(help="also one 64 KiB page at a time, threads asleep and awake")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="fewer sizes and rounds: under a minute")] = False,
) -> None:
    """Measure how fast pages move between two processes of this host, by every way that there is."""
    console = Console()
    wanted = tuple(way or WAYS)
    for name in wanted:
        if name not in WAYS:
            raise typer.BadParameter(f"--way {name}: one of {', '.join(WAYS)}")
    for size in page_bytes or []:
        if size < 4096 or size % 4096:
            raise typer.BadParameter(f"--page-bytes {size}: a multiple of 4096")
    cells: tuple[tuple[int, int], ...] = _QUICK if quick else _FULL
    if page_bytes or pages:
        sizes = page_bytes or [64 << 10]
        cells = tuple((size, count) for size in sizes for count in pages or [max(1, (16 << 20) // size)])
    version = nixl_version()
    records: list[Record] = []
    with console.status("measuring") as status:
        plan = Plan(
            cells,
            wanted,
            rounds or (15 if quick else 30),
            cell_s=_QUICK_CELL_S if quick else math.inf,
            latency=latency,
        )
        for record in measure(plan, console.print):
            records.append(record)
            status.update(f"measuring: {_bytes(record.page_bytes)} x {record.pages}")
    console.print(_table(records))
    console.print("(spin): the receiver's progress thread spins; else all threads sleep when a batch comes")
    if (os.cpu_count() or 1) <= 2:
        console.print(
            "on 2 cores a spinning thread may hold the core that the others need: read (spin) with care"
        )
    console.print(f"pools: host memory, {records[0].backing} pages; {os.cpu_count()} cores")
    if "socket" in wanted:
        console.print(
            "socket: one TCP connection over loopback, sendmsg/recvmsg_into of up to 1024 pages a call"
        )
    if "memcpy" in wanted:
        console.print(
            "memcpy: one thread, random source rows to consecutive target rows; no second process, no notice"
        )
    if "nixl" in wanted:
        told = (
            f"nixl {version}: no progress thread, both sides poll"
            if version
            else "nixl: not measured: not installed"
        )
        console.print(told)
    console.print("nccl: not measured: no GPU")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
    if not all(record.verified for record in records):
        console.print("[bold red]some pages did not arrive as they were sent[/]")
        raise typer.Exit(1)


def main() -> None:
    """Entry point of `transfer-bench`: what cannot work ends in one clear line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command)
    try:
        app()
    except TransferError as error:
        Console(stderr=True).print(f"[bold red]transfer-bench:[/] {error}", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
