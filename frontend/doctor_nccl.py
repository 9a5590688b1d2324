# SPDX-License-Identifier: Apache-2.0
"""`runtime doctor --nccl`: what NCCL would do between two GPUs, to compare with; of one host, or of two.

Which transport it picks and how fast its send/recv is, for single blocks and for the page lists of a KV cache.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrail.frontend.refusing import refuse
from kvrail.runtime.config import child_environment
from kvrail.transfer.nccl_log import NcclFacts, parse_log
from kvrail.transfer.rendezvous import rendezvous_address

__all__ = ["examine_nccl", "nccl_unusable"]

# For the child alone: what it logs is read, not shown.
_NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,P2P,GRAPH,TUNING"}
_WITHIN_S = 60.0
_RUN_S = 240.0


def nccl_unusable(*, ranks_here: int) -> str | None:
    """Why NCCL cannot run that many ranks on this host; None when it can."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU is visible to torch, and NCCL moves data between GPUs only"
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    if torch.cuda.device_count() < ranks_here:
        return (
            "one GPU only, and NCCL refuses two ranks on one GPU; for two hosts give --rendezvous HOST:PORT and "
            "--rank 0 there, --rank 1 here"
        )
    return None


def examine_nccl(*, rendezvous: str | None, rank: int | None, json_file: Path | None) -> int:
    """Run both ranks on this host, or one of them; print what was found. The exit status: 0 when all arrived."""
    say = Console()
    if (rendezvous is None) != (rank is None):
        refuse("runtime doctor", "--rendezvous HOST:PORT and --rank 0 or 1 go together")
    if rendezvous is not None and (wrong := _wrong_address(rendezvous, rank)):
        refuse("runtime doctor", f"--rendezvous {wrong}")
    ranks = (0, 1) if rank is None else (rank,)
    reason = nccl_unusable(ranks_here=len(ranks))
    if reason:
        say.print(f"[red]NCCL cannot be measured:[/] {reason}", highlight=False, soft_wrap=True)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvrail-nccl-") as name:
        folder = Path(name)
        with say.status(f"rank {rank}: waiting for the other" if rank is not None else "measuring NCCL"):
            found = _run(folder, ranks, rendezvous or f"127.0.0.1:{_free_port()}")
        facts = parse_log(
            line
            for log in sorted(folder.glob("log.*"))
            for line in log.read_text(errors="replace").splitlines()
        )
    errors = [f"rank {one['rank']}: {one['error']}" for one in found if "error" in one]
    for line in errors:
        say.print(f"[red]{escape(line)}[/]", highlight=False, soft_wrap=True)
    _show(facts, found, say)
    if json_file:
        record = {"ranks": found, "log": _plain(facts)}
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    good = all(row["verified"] for one in found for row in one.get("rows", []))
    if not good:
        say.print("[bold red]some bytes did not arrive as they were sent[/]")
    return 0 if good and not errors else 1


def _run(folder: Path, ranks: tuple[int, ...], rendezvous: str) -> list[dict[str, Any]]:
    """Start the ranks of this host and wait for all of them."""
    processes = []
    for rank in ranks:
        # The children's logs, whatever NCCL's settings are here.
        environment = {
            "NCCL_NVLS_ENABLE": "0",
            **child_environment(),
            **_NCCL_LOG,
            "NCCL_DEBUG_FILE": str(folder / f"log.{rank}"),
        }
        command = [sys.executable, "-P", "-m", "kvrail.transfer.nccl_probe", "--rank", str(rank)]
        command += ["--rendezvous", rendezvous, "--device", str(rank if len(ranks) > 1 else 0)]
        command += ["--within", str(_WITHIN_S), "--out", str(folder / f"found.{rank}")]
        with (folder / f"output.{rank}").open("w") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + _RUN_S
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # it has written nothing, which is told below
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        _outcome(folder, rank, process.returncode) for rank, process in zip(ranks, processes, strict=True)
    ]


def _outcome(folder: Path, rank: int, status: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / f"found.{rank}").read_text())
        return found
    tail = (folder / f"output.{rank}").read_text(errors="replace").strip()[-600:]
    ended = (
        f"did not end within {_RUN_S:.0f} s" if status == -signal.SIGKILL else f"ended with status {status}"
    )
    return {"rank": rank, "error": f"{ended}, without a result: {tail or 'it said nothing'}"}


def _wrong_address(rendezvous: str, rank: int | None) -> str:
    """What is wrong with the address where the ranks are to meet, as far as this host can tell; else ""."""
    try:
        host, port = rendezvous_address(rendezvous)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        return str(error) if rendezvous in str(error) else f"{rendezvous}: {error}"
    if rank != 0:
        return ""
    trouble = ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                # NCCL dials addresses of interfaces, so there is no way through a translated one either.
                trouble = f"{rendezvous}: rank 0 must listen there, on an address and free port of this host: {error}"
            else:
                return ""
    return trouble


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def _show(facts: NcclFacts, found: list[dict[str, Any]], say: Console) -> None:
    names = {one["name"] for one in found if "name" in one}
    say.print(
        f"NCCL {facts.version or '?'} (CUDA {facts.cuda or '?'}), {', '.join(sorted(names))}", highlight=False
    )
    for kind, ways in (("send/recv", facts.sendrecv), ("collectives", facts.collectives)):
        for pair, counts in sorted(ways.items()):
            told = ", ".join(f"{name} x {count}" for name, count in counts.most_common())
            say.print(f"{kind} {pair}: {told}", highlight=False)
    for (collective, size), picked in sorted(facts.algorithms.items()):
        say.print(f"{collective} of {_bytes(size)}: {picked}", highlight=False)
    if facts.channels:
        say.print(
            "channels: " + ", ".join(f"{count} {name}" for name, count in facts.channels.items()),
            highlight=False,
        )
    if facts.network:
        told = f" ({'; '.join(facts.interfaces)})" if facts.interfaces else ""
        say.print(f"network between hosts: {facts.network}{told}", highlight=False)
    for line in facts.warnings:
        say.print(f"[yellow]NCCL warns: {escape(line)}[/]", highlight=False, soft_wrap=True)
    rows: list[dict[str, Any]] = next((one["rows"] for one in reversed(found) if "rows" in one), [])
    if not rows:
        return
    table = Table(title="send/recv, from the call until it is complete", box=box.SIMPLE)
    table.add_column("what")
    for column in ("size", "pages", "µs", "GB/s", "µs/page", "same"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["what"],
            _bytes(row["page_bytes"]),
            str(row["pages"]),
            f"{row['median_us']:,.1f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['us_per_page']:.2f}",
            "yes" if row["verified"] else "[bold red]NO[/]",
        )
    say.print(table)


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"


def _plain(facts: NcclFacts) -> dict[str, Any]:
    return {
        **vars(facts),
        "transport": facts.transport,
        "algorithms": [
            {"collective": name, "bytes": size, "picked": picked}
            for (name, size), picked in facts.algorithms.items()
        ],
    }
