# SPDX-License-Identifier: Apache-2.0
"""What transfer-bench found: one record a cell, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

__all__ = ["Record", "bytes_text", "record_table", "way_text"]


@dataclass(frozen=True)
class Record:
    """One measured cell. `memory`: from which kind into which.

    `mode`: of the whole session, "asleep" or "awake" (our progress threads spin; ways that can only poll do so in
    both). `threads`, of this way when the batch came: "sleep": all threads slept; "spin": the progress threads of both
    sides spun, the receiver's Python slept; "poll": that spun, too (of a way without progress threads: both sides'
    Python). `pace`: "" for batches; of single pages "paused" (some ms between them) or "tight" (the next one as soon
    as the last was seen). `clock_us`: between two hosts, how far a time may be wrong because there are two clocks.
    """

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
    pace: str = ""
    mode: str = "asleep"
    clock_us: float | None = None

    @staticmethod
    def of(
        way: str,
        transport: str,
        memory: str,
        shape: tuple[int, int],
        times_us: Sequence[float],
        verified: bool,
        backing: str,
        threads: str,
        pace: str = "",
        mode: str = "asleep",
        clock_us: float | None = None,
    ) -> Record:
        """From the times of all rounds; `shape`: page bytes, pages."""
        page_bytes, pages = shape
        median = float(np.median(times_us))
        return Record(
            lane=way.partition("/")[0],
            transport=transport,
            memory=memory,
            page_bytes=page_bytes,
            pages=pages,
            median_us=round(median, 1),
            p99_us=round(float(np.percentile(times_us, 99)), 1),
            gb_per_s=round(page_bytes * pages / median / 1000, 3),
            us_per_page=round(median / pages, 3),
            verified=verified,
            rounds=len(times_us),
            backing=backing,
            threads=threads,
            pace=pace,
            mode=mode,
            clock_us=None if clock_us is None else round(clock_us, 1),
        )


def way_text(record: Record) -> str:
    """The lane, with its transport where one lane has several."""
    return f"{record.lane}/{record.transport}" if record.lane in ("put", "peer") else record.lane


def bytes_text(count: int) -> str:
    """Whole KiB or MiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def record_table(records: Sequence[Record]) -> Table:
    """A row a record of one pair of memory kinds, in their order, with an empty line between cells; 80 columns hold it.

    Whether pages arrived as they were sent has a column only when some did not.
    """
    kinds = records[0].memory if records else ""
    if any(record.clock_us is not None for record in records):
        kinds += " between two hosts"
    table = Table(
        title=f"{kinds}: until the receiver's Python knows that all pages are there",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="underline",
    )
    for column in ("way", "pages"):
        table.add_column(column, no_wrap=True)
    for column in ("median µs", "p99 µs", "GB/s", "µs/page"):
        table.add_column(column, justify="right", no_wrap=True)
    wrong = not all(record.verified for record in records)
    if wrong:
        table.add_column("same", no_wrap=True)
    before = None
    for record in records:
        cell = (record.page_bytes, record.pages, record.mode)
        if before not in (None, cell):
            table.add_row()
        before = cell
        awake = " awake" if record.mode == "awake" else ""
        how = f"{record.threads} {record.pace}" if record.pace else f"x {record.pages}{awake}"
        row = [
            way_text(record),
            f"{bytes_text(record.page_bytes)} {how}",
            _figure(record.median_us),
            _figure(record.p99_us),
            _figure(record.gb_per_s),
            "" if record.pace else _figure(record.us_per_page),
        ]
        table.add_row(*row, *(["yes" if record.verified else "[bold red]NO[/]"] if wrong else []))
    return table


def _figure(value: float) -> str:
    """Three digits, or all before the point, or three behind it."""
    digits = next((digits for digits, least in ((0, 100), (1, 10), (2, 1)) if value >= least), 3)
    return f"{value:,.{digits}f}"
