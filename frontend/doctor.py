# SPDX-License-Identifier: Apache-2.0
"""`runtime doctor`: what this machine offers to links, each finding with what to do about it.

A check that fails says so and the rest go on. The exit status is 0 when links can work here at all.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from kvrail.runtime.checkpoint import cache_dir
from kvrail.runtime.config import environment, mps_sign, ucx_overrides
from kvrail.transfer.cuda import open_device
from kvrail.transfer.gpu import Gpu, offered
from kvrail.transfer.interfaces import with_our_scope
from kvrail.transfer.lanes import put_carrier, rails_for
from kvrail.transfer.memory import HostPool
from kvrail.transfer.stream_socket import dial_stream, listen_stream
from kvrail.transfer.ucx import EventKind, load_library, open_context, open_reactor

__all__ = ["examine"]

_PUT_BYTES = 1 << 20
_WITHIN_S = 10.0


def examine(*, kv_host: str, ucx: str | None, json_file: Path | None) -> int:
    """Run every check, print a table, and return the exit status."""
    say = Console()
    findings: list[dict[str, Any]] = []

    def check(name: str, what: Callable[[], str], *, vital: bool = False) -> None:
        try:
            found, good = what(), True
        except Exception as error:  # a check must not stop the others, whatever it meets
            found, good = f"{type(error).__name__}: {error}", False
        findings.append({"check": name, "good": good, "vital": vital, "found": found})

    library = ucx or environment("KVRAIL_UCX")
    check("UCX library", lambda: _library(library), vital=True)
    for transport in ("auto", "tcp"):
        check(
            f"transports ({'any' if transport == 'auto' else transport} put, {kv_host})",
            lambda t=transport: _transports(t, kv_host, library),  # type: ignore[misc]
            vital=True,
        )
    for transport in ("cma", "tcp"):
        check(
            f"loopback put over {transport}",
            lambda t=transport: _loopback("put", t, kv_host, library),  # type: ignore[misc]
            vital=transport == "tcp",
        )
    check("loopback of lane stream", lambda: _loopback("stream", "tcp", kv_host, library))
    check("pool memory", lambda: _backing(kv_host, library))
    check("locked memory limit", _memlock)
    check("same-host proof (pidfd)", _pidfd)
    check("processors", lambda: f"{os.cpu_count()} cores")
    check("GPUs", lambda: _gpus(library))
    check("CUDA MPS", _mps)
    table = Table(title="kvrail doctor", show_lines=False)
    for column in ("", "check", "found"):
        table.add_column(column)
    for finding in findings:
        mark = "[green]ok[/]" if finding["good"] else "[red]no[/]" if finding["vital"] else "[yellow]no[/]"
        table.add_row(mark, finding["check"], finding["found"])
    say.print(table)
    say.print(
        "The UCX port is unauthenticated, and over tcp and cma a connected peer can write any address of the process: "
        "--kv-host belongs on a trusted network.",
        style="dim",
    )
    if json_file:
        json_file.write_text(json.dumps(findings, indent=2) + "\n")
    return 0 if all(finding["good"] or not finding["vital"] for finding in findings) else 1


def _library(choice: str | None) -> str:
    facts = load_library(choice)
    origin = choice or "wheel"
    return f"{'.'.join(map(str, facts.version))} ({origin}), {facts.path}; lane shm copies with {facts.copy}"


def _transports(put_transport: Any, kv_host: str, library: str | None) -> str:
    context = open_context(put_transport, kv_host, library=library, overrides=ucx_overrides())
    try:
        return ", ".join(context.transports())
    finally:
        context.close()


def _loopback(lane: Literal["put", "stream"], put_transport: Any, kv_host: str, library: str | None) -> str:
    """Push 1 MiB from one link to another of this process, and look at what arrived."""
    context = open_context(put_transport, kv_host, library=library, overrides=ucx_overrides())
    reactor = open_reactor(context, spin_us=0, copy_threads=1)
    source = HostPool(context, units=1, unit_bytes=_PUT_BYTES, name="doctor-source")
    target = HostPool(context, units=1, unit_bytes=_PUT_BYTES, name="doctor-target")
    try:
        ours, theirs = (reactor.open_link(epoch=1, cookie=7) for _ in range(2))
        ours.connect(theirs.address())
        theirs.connect(ours.address())
        if lane == "stream":
            secret, listening = os.urandom(32), listen_stream(kv_host)
            host, port = listening.getsockname()[:2]
            connection = dial_stream(with_our_scope(host, kv_host), port)
            pools = [(0, target.address, _PUT_BYTES, _PUT_BYTES)]
            theirs.read_stream(listening.detach(), secret=secret, pools=pools)
            ours.write_stream(connection.detach(), secret=secret)
            ours.import_stream(0, nbytes=_PUT_BYTES, unit_bytes=_PUT_BYTES)
        else:
            ours.import_put(
                0, base=target.address, nbytes=_PUT_BYTES, unit_bytes=_PUT_BYTES, key=target.packed_key()
            )
        pattern = np.random.default_rng(1).integers(0, 256, _PUT_BYTES, dtype=np.uint8)
        assert source.buffer is not None
        assert target.buffer is not None
        source.buffer[:] = pattern.tobytes()
        unit = np.zeros(1, dtype=np.uint32)
        writer = ours.writer(1, ttl_s=_WITHIN_S)
        started = time.perf_counter()
        writer.push(0, source.address, unit, unit)
        writer.ring(b"arrived")
        while not any(kind == EventKind.MESSAGE for kind, *_ in _events(reactor)):
            if time.perf_counter() - started > _WITHIN_S:
                raise TimeoutError(f"nothing arrived within {_WITHIN_S:.0f} s")
            time.sleep(0.0001)
        took = time.perf_counter() - started
        if target.buffer != pattern.tobytes():
            raise ValueError("what arrived differs from what was sent")
        names = ours.transports()
        carriers, threads = ", ".join(names), rails_for(put_carrier(names))
        for link in (ours, theirs):
            link.close()
        found = f"1 MiB in {took * 1e6:.0f} µs, content right"
        return found if lane == "stream" else f"{found}; lanes {carriers}; threads that put: {threads}"
    finally:
        reactor.close()
        source.close()
        target.close()
        context.close()


def _events(reactor: Any) -> list[tuple[int, int, int, int, bytes]]:
    events: list[tuple[int, int, int, int, bytes]] = reactor.drain()
    for kind, _, _, status, payload in events:
        if kind in (EventKind.FAILED, EventKind.LINK_ERROR):
            raise RuntimeError(f"{payload.decode(errors='replace')} (status {status})")
    return events


def _backing(kv_host: str, library: str | None) -> str:
    context = open_context("tcp", kv_host, library=library, overrides=ucx_overrides())
    try:
        pool = HostPool(context, units=16, unit_bytes=1 << 20, name="doctor")
        backing = pool.backing
        pool.close()
    finally:
        context.close()
    advice = {
        "hugetlb": "reserved huge pages",
        "thp": "transparent huge pages",
        "4k": "4 KiB pages: set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise for faster copies",
    }
    return advice[backing]


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{soft >> 20} MiB (RDMA pins every pool: raise it with `ulimit -l` before using a network card)"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "available: lanes shm and put/cma can be proven quiet when a peer dies"


def _gpus(library: str | None) -> str:
    """Each GPU, opened as a rank would open it, and what lies between each two of them."""
    import torch

    if not torch.cuda.is_available():
        return "none visible to torch (not needed: --device cpu is the default)"
    found = []
    facts = []
    for number in range(torch.cuda.device_count()):
        device = open_device(number, cache_dir(), library=library)
        facts.append(Gpu(uuid=device.uuid, name=device.name))
        found.append(f"{number}: {device.name}, page-copy kernels load")
    for one, other in itertools.combinations(range(len(facts)), 2):
        path = offered(facts[one], facts[other])
        if path is not None:
            trouble = f", {path.trouble}" if path.trouble else ""
            found.append(f"{one}-{other}: {path.what}, {path.gb_per_s:.3g} GB/s{trouble}")
    return "; ".join(found)


def _mps() -> str:
    sign = mps_sign()
    if sign:
        raise RuntimeError(f"GPUs are shared through MPS ({sign}): no lane peer and no put/cuda_ipc")
    return "not running: lane peer can be proven quiet when a peer dies"
