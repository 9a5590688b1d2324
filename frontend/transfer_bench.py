# SPDX-License-Identifier: Apache-2.0
"""`transfer-bench`: how fast pages move between two processes, by every way that there is, in one run.

Both on this host; or, with --rendezvous, one on each of two.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvrail.frontend.bench_measure import GPU_WAYS, HOST_WAYS, NETWORK_WAYS, PAIRS, Plan, measure
from kvrail.frontend.bench_nixl import nixl_version
from kvrail.frontend.bench_peer import Receiver
from kvrail.frontend.bench_plot import plot
from kvrail.frontend.bench_record import Record, bytes_text, record_table
from kvrail.frontend.bench_socket import congestion_control
from kvrail.frontend.bench_two_hosts import Rendezvous
from kvrail.runtime.output_file import writable
from kvrail.transfer.errors import TransferError

__all__ = ["main"]

WAYS = tuple(dict.fromkeys((*HOST_WAYS, *GPU_WAYS)))
_KIB, _MIB = 1 << 10, 1 << 20
# So many pages of these in host memory, besides: batches as small as the tail of a push.
_SMALL_PAGES, _SMALL = 16, (4 * _KIB, 64 * _KIB, 512 * _KIB)
# Page bytes → MiB of a batch.
_HOST_FULL = (
    (4 * _KIB, 16),
    (16 * _KIB, 32),
    (64 * _KIB, 64),
    (256 * _KIB, 64),
    (512 * _KIB, 64),
    (4 * _MIB, 64),
)
_HOST_QUICK = ((4 * _KIB, 16), (64 * _KIB, 16), (512 * _KIB, 16), (4 * _MIB, 16))
_GPU_FULL = tuple(
    (size, 256 if size == 4 * _KIB else 512)
    for size in (4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, 512 * _KIB, _MIB, 4 * _MIB, 64 * _MIB)
)
_GPU_QUICK = tuple((size, 256) for size in (4 * _KIB, 64 * _KIB, 512 * _KIB, 4 * _MIB))
_MOST_PAGES = 1 << 20
_TWO_HOSTS = "Between two hosts"
# Cells with their set-up: a dozen fit into a minute.
_QUICK_CELL_S = 2.0
_GPU_CELL_S = 6.0
_NETWORK_CELL_S = 10.0


def _cells(quick: bool, gpu: bool) -> tuple[tuple[int, int], ...]:
    sizes = (_GPU_QUICK if quick else _GPU_FULL) if gpu else (_HOST_QUICK if quick else _HOST_FULL)
    small = () if gpu else tuple((size, _SMALL_PAGES) for size in _SMALL)
    return small + tuple((size, batch * _MIB // size) for size, batch in sizes)


def _cell_s(far: Receiver | None, no_gpu: str | None) -> float:
    """How long a cell may take: a network may be slow."""
    return _NETWORK_CELL_S if far is not None else math.inf if no_gpu else _GPU_CELL_S


def _no_gpu() -> str | None:
    """Why no row with a GPU can be measured; None when it can."""
    import torch

    return None if torch.cuda.is_available() else "no GPU"


def _command(
    page_bytes: Annotated[list[int] | None, typer.Option(help="bytes of a page (repeat for several)")] = None,
    pages: Annotated[list[int] | None, typer.Option(help="pages in a batch (repeat for several)")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="batches of each way and size")] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"only these: {', '.join(WAYS)}; between two hosts: {', '.join(NETWORK_WAYS)}"),
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help=f"only these: {', '.join(PAIRS)} (default: what there is)")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="also write the records to this file")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            callback=writable,
            help="also draw GB/s by page size: FILE.html, or FILE.png (matplotlib)",
        ),
    ] = None,
    latency: Annotated[
        bool, typer.Option(help="also one 64 KiB page at a time: asleep and awake, with pauses and without")
    ] = True,
    awake: Annotated[
        bool,
        typer.Option(help="also batches of 8 MiB and less in host memory while our progress threads spin"),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="fewer sizes and rounds")] = False,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="between two hosts: HOST:PORT where rank 0 listens; the same command on both, but for --rank",
            rich_help_panel=_TWO_HOSTS,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, max=1, help="0: sends, and has the table; 1: receives", rich_help_panel=_TWO_HOSTS
        ),
    ] = None,
    kv_host: Annotated[
        str | None,
        typer.Option(
            help="this rank's address (or interface) of the network to measure (default: that of the rendezvous)",
            rich_help_panel=_TWO_HOSTS,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="the same file on both hosts: nobody else gets in while the ranks wait for each other",
            rich_help_panel=_TWO_HOSTS,
        ),
    ] = None,
    within: Annotated[
        float,
        typer.Option(min=1, max=86400, help="seconds to wait for the other rank", rich_help_panel=_TWO_HOSTS),
    ] = 60.0,
) -> None:
    """Measure how fast pages move between two processes, by every way that there is: on this host, or between two."""
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    if (rendezvous is None) != (rank is None):
        raise typer.BadParameter("--rendezvous HOST:PORT and --rank 0 or 1 go together")
    if rendezvous is None and (kv_host or token_file):
        raise typer.BadParameter("--kv-host and --token-file are for --rendezvous")
    meeting = None if rendezvous is None else Rendezvous(rendezvous, kv_host, token_file, within, say)
    if meeting is not None and rank == 1:
        # What is measured, and what becomes of it, is rank 0's to say.
        meeting.receive()
        return
    there, where = (WAYS, "") if meeting is None else (NETWORK_WAYS, " between two hosts")
    wanted = tuple(way or there)
    for name in wanted:
        if name not in there:
            raise typer.BadParameter(f"--way {name}:{where} one of {', '.join(there)}")
    for pair in memory or []:
        if pair not in PAIRS:
            raise typer.BadParameter(f"--memory {pair}: one of {', '.join(PAIRS)}")
    for size in page_bytes or []:
        if size < 4096 or size % 4096:
            raise typer.BadParameter(f"--page-bytes {size}: a multiple of 4096")
    for count in pages or []:
        if not 1 <= count <= _MOST_PAGES:
            raise typer.BadParameter(f"--pages {count}: 1 to {_MOST_PAGES}")
    if plot_file is not None and plot_file.suffix not in (".html", ".htm", ".png"):
        raise typer.BadParameter(f"--plot {plot_file}: a file that ends in .html or .png")
    with_gpu = [pair for pair in memory or [] if pair != "host->host"]
    if meeting is not None and with_gpu:
        raise typer.BadParameter(f"--memory {with_gpu[0]}: between two hosts host->host only")
    no_gpu = "between two hosts" if meeting is not None else _no_gpu()
    if no_gpu and with_gpu:
        raise TransferError(f"--memory {', '.join(with_gpu)}: {no_gpu}")
    pairs = memory or (["host->host"] if no_gpu else list(PAIRS))
    cells = {}
    for pair in pairs:
        cells[pair] = _cells(quick, pair != "host->host")
        if page_bytes or pages:
            sizes, batch = page_bytes or [64 * _KIB], (16 if pair == "host->host" else 256) * _MIB
            cells[pair] = tuple((size, count) for size in sizes for count in pages or [max(1, batch // size)])
    far = meeting.sender() if meeting is not None else None
    records: list[Record] = []
    with console.status("measuring") as status:
        cell_s = _QUICK_CELL_S if quick else _cell_s(far, no_gpu)
        plan = Plan(
            cells, wanted, rounds or (15 if quick else 30), cell_s=cell_s, latency=latency, awake=awake
        )
        failures: list[str] = []
        for record in measure(plan, say, failures, far):
            records.append(record)
            if json_file is not None:  # at once: what is interrupted has been written
                json_file.write_text(json.dumps([asdict(one) for one in records], indent=1) + "\n")
            status.update(f"measuring: {record.memory} {bytes_text(record.page_bytes)} x {record.pages}")
    for pair in pairs:
        console.print(record_table([record for record in records if record.memory == pair]))
    _explain(console, records, wanted, no_gpu)
    if plot_file is not None:
        try:
            plot(records, plot_file)
        except ValueError as error:
            raise TransferError(str(error)) from None
    for failure in failures:
        console.print(f"[bold red]{escape(failure)}[/]", soft_wrap=True)
    if not records:
        console.print("[bold red]nothing could be measured[/]")
        raise typer.Exit(1)
    if all(record.verified for record in records):
        console.print("all pages arrived as they were sent")
    else:
        console.print("[bold red]some pages did not arrive as they were sent[/]")
        raise typer.Exit(1)
    if failures:
        raise typer.Exit(1)


def _explain(console: Console, records: list[Record], wanted: tuple[str, ...], no_gpu: str | None) -> None:
    lanes = {record.lane for record in records}
    if any(record.mode == "awake" and not record.pace for record in records):
        console.print(
            "awake: our progress threads spin, or poll where there are cores for it (JSON: threads); in other batches "
            "all threads of ours sleep until one comes",
            soft_wrap=True,
        )
    if any(record.pace for record in records):
        console.print(
            "sleep: all threads sleep when a page comes; spin: the progress threads of both sides spin, the "
            "receiver's Python sleeps; poll: that spins, too. paused: some ms between pages "
            "(tight: the next as soon as the last was seen). With GPUs and 16 cores or more batches are polled for",
            soft_wrap=True,
        )
    if (os.cpu_count() or 1) <= 2:
        console.print(
            "on 2 cores it matters which thread runs beside which: single pages take one of two times, 25 us apart",
            soft_wrap=True,
        )
    backing = sorted({record.backing for record in records if record.memory == "host->host"})
    if backing:
        console.print(f"pools: host memory, {', '.join(backing)} pages; {os.cpu_count()} cores")
    clocks = [record.clock_us for record in records if record.clock_us is not None]
    if clocks:
        console.print(
            "times are one way, by two clocks that were compared before each batch: right to within "
            f"{max(clocks):,.0f} us (half of a round trip)",
            soft_wrap=True,
        )
        console.print(
            f"congestion control of the sender's TCP connections: {congestion_control()}",
            soft_wrap=True,
        )
    over = "between the hosts" if clocks else "over loopback"
    notes = {
        "socket": f"socket: one TCP connection {over}, writev and recvmsg of up to 1024 pages a call",
        "tcp": "tcp: gathered on the GPU, through pinned host memory and one TCP connection, scattered on the GPU",
        "nccl": "nccl: one send and one receive a page, batched by torch.distributed",
        "memcpy": "memcpy: host->host one thread, random source rows to consecutive target rows; with GPUs one block "
        "in one call (the limit). One process, no notice to anybody",
        "memcpy-batch": "memcpy-batch: the page list in one cuMemcpyBatchAsync; one process, no notice to anybody",
    }
    for lane, note in notes.items():
        if lane in lanes:
            console.print(note, soft_wrap=True)
    if "nixl" in wanted:
        version = nixl_version()
        told = (
            f"nixl {version}: no progress thread, both sides poll"
            if version
            else "nixl: not measured: not installed"
        )
        console.print(told)
    if no_gpu and set(wanted) & {"nccl"}:
        console.print(f"nccl: not measured: {no_gpu}")


def main() -> None:
    """Entry point of `transfer-bench`: what cannot work ends in one clear line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command)
    try:
        app()
    except TransferError as error:
        Console(stderr=True).print(
            f"[bold red]transfer-bench:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
