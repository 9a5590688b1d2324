# SPDX-License-Identifier: Apache-2.0
"""transfer-bench's table: whole at 80 columns, and wrong bytes stand out."""

from __future__ import annotations

import io

from rich.console import Console

from kvrail.frontend.bench_record import Record, record_table


def shown(*records: Record) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(record_table(records))
    return out.getvalue()


def record(us: float, pages: int, *, verified: bool = True, pace: str = "") -> Record:
    return Record.of(
        "put/gpu", "cuda_ipc", "host->host", (512 << 10, pages), [us, 2 * us], verified, "thp", "sleep", pace
    )


def test_the_longest_rows_fit_into_80_columns() -> None:
    text = shown(
        record(1_645_802.4, 131072), record(987_654.3, 1, pace="paused"), record(9.87, 1, pace="tight")
    )
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in (
        "put/cuda_ipc",
        "512 KiB x 131072",
        "512 KiB sleep paused",
        "2,468,704",
        "1,481,482",
        "14.8",
    ):
        assert words in text
    assert "same" not in text


def test_batches_of_both_modes_stand_apart() -> None:
    def batch(threads: str, mode: str) -> Record:
        return Record.of("nixl", "ucx", "host->host", (4096, 16), [9.0], True, "thp", threads, mode=mode)

    lines = [line.rstrip() for line in shown(batch("poll", "asleep"), batch("spin", "awake")).splitlines()]
    first, second = (
        next(n for n, line in enumerate(lines) if end in line) for end in ("x 16  ", "x 16 awake")
    )
    assert second == first + 2
    assert not lines[first + 1]


def test_pages_that_did_not_arrive() -> None:
    text = shown(record(1_645_802.4, 131072), record(987_654.3, 1, pace="paused", verified=False))
    assert "…" not in text
    assert (text.count("yes"), text.count("NO")) == (1, 1)
