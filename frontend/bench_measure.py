# SPDX-License-Identifier: Apache-2.0
"""The rounds of transfer-bench: all ways take turns within each, so that a busy moment of the machine hits them alike.

Pages go in random order on both sides, into poisoned targets, and what arrived is compared with what was sent. The
time runs from the call that starts a batch until the receiver's Python knows that it is complete.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvrail.frontend.bench_lines import OtherGone
from kvrail.frontend.bench_peer import LocalReceiver, Receiver
from kvrail.frontend.bench_rank import OPTIONS
from kvrail.frontend.bench_record import Record
from kvrail.frontend.bench_session import HostSession, Session
from kvrail.runtime.config import child_environment
from kvrail.transfer.errors import TransferError
from kvrail.transfer.nccl_log import parse_log

__all__ = ["GPU_WAYS", "HOST_WAYS", "LATENCY_PAGE", "NETWORK_WAYS", "PAIRS", "Plan", "measure"]

GPU_WAYS = ("peer/kernel", "peer/engine", "put/gpu", "nccl", "nixl", "tcp", "memcpy", "memcpy-batch")
HOST_WAYS = ("shm", "put/cma", "put/tcp", "stream", "socket", "memcpy", "nixl")
# Between two hosts.
NETWORK_WAYS = ("stream", "put", "socket", "nixl")
_NATIVE_WAYS = (*OPTIONS, "peer/kernel", "peer/engine", "put/gpu")
# These know no other manner of waiting.
_POLLING_WAYS = ("nixl", "nccl")
# Three lanes with a thread on each side, and the rest.
_CORES_TO_SPIN = 16
PAIRS = ("gpu->gpu", "host->gpu", "gpu->host", "host->host")
LATENCY_PAGE = 64 << 10
# A progress thread that spins this long after each event spins through the pauses between batches.
_SPIN_US = 20_000
# Beyond it they sleep, and leave the cores to the next way.
_SPUN_OUT_S = 1.25e-6 * _SPIN_US
# Batches in host memory up to this are measured awake, too: larger ones do not notice how anybody waits.
_AWAKE_BYTES = 8 << 20
# And this long through the turns of the other ways.
_SPIN_BATCHES_US = 5_000_000
# A way whose batches take longer than this has one only: its figure needs no median.
_SLOW_US = 1e6
_NUMBERS_A_CELL = 10**7
# The receiver's log tells which transport NCCL takes.
_NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,P2P"}


@dataclass(frozen=True)
class Plan:
    """What to measure: (page bytes, pages) for each pair of memory kinds.

    A cell stops early, after at least three rounds, when it has taken `cell_s` seconds. `latency`: also single pages.
    `awake`: also small batches while our progress threads spin.
    """

    cells: dict[str, tuple[tuple[int, int], ...]]
    ways: tuple[str, ...]
    rounds: int
    cell_s: float = math.inf
    latency: bool = True
    awake: bool = True


@dataclass
class _Run:
    plan: Plan
    say: Callable[[str], object]
    folder: Path
    receiver: Receiver
    nccl_port: int = 0
    told: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def open(self, memory: str, ways: tuple[str, ...], page_bytes: int, pages: int, spin_us: int) -> Session:
        """A session, with what it lacks said once."""
        if memory == "host->host":
            session: Session = HostSession(self.receiver, ways, page_bytes, pages, spin_us, self.folder)
        else:
            # Only this needs torch.
            from kvrail.frontend.bench_gpu_session import GpuSession, kinds_of

            session = GpuSession(
                self.receiver, ways, kinds_of(memory), page_bytes, pages, spin_us, self.nccl_port
            )
        for way, reason in session.missing.items():
            line = f"{memory} {way}: not measured: {reason}"
            if line not in self.told:
                self.told.add(line)
                self.say(line)
        return session

    def cell(self, memory: str, page_bytes: int, pages: int) -> Iterator[Record]:
        """All ways by turns: as a rank waits, and, in small batches in host memory, also with ours awake."""
        yield from self._batches(memory, page_bytes, pages, self._ways(memory), spin_us=None)
        awake = tuple(way for way in self._ways(memory) if way in _NATIVE_WAYS or way in _POLLING_WAYS)
        small = page_bytes * pages <= _AWAKE_BYTES
        if self.plan.awake and memory == "host->host" and small and set(awake) & set(_NATIVE_WAYS):
            yield from self._batches(memory, page_bytes, pages, awake, spin_us=_SPIN_US)

    def _batches(
        self, memory: str, page_bytes: int, pages: int, ways: tuple[str, ...], spin_us: int | None
    ) -> Iterator[Record]:
        """One session of turns. `spin_us`: of our progress threads (None: what suits the machine)."""
        # NCCL and NIXL wait for GPUs without sleeping; where there are cores for it, so do our lanes.
        cores = os.cpu_count() or 1
        awake = memory != "host->host" and cores >= _CORES_TO_SPIN
        in_turn = spin_us is not None
        if spin_us is None:
            spin_us = _SPIN_BATCHES_US if awake else 0
        polling = awake or (in_turn and cores > 2)
        with contextlib.closing(self.open(memory, ways, page_bytes, pages, spin_us)) as session:
            if polling:
                for way in session.facts:
                    if way in _NATIVE_WAYS:
                        session.poll(way, True)
            rng = np.random.default_rng(2)
            times: dict[str, list[float]] = {way: [] for way in session.facts}
            good = dict.fromkeys(session.facts, True)
            number, until = 0, time.monotonic() + self.plan.cell_s
            for turn in range(self.plan.rounds + 1):
                if turn > 3 and time.monotonic() > until:
                    break
                for way in list(session.facts):
                    if any(us > _SLOW_US for us in times[way]):
                        continue
                    number += 2
                    try:
                        if in_turn:
                            # Nobody spins beside this way but its own threads, which its first page wakes up.
                            time.sleep(_SPUN_OUT_S)
                            session.batch(way, number - 1, 1, rng)
                        us, verified = session.batch(way, number, pages, rng)
                    except OtherGone:
                        raise
                    except TransferError as error:
                        # Told as a failure of the run; the other ways go on.
                        self.failures.append(f"{memory} {way}, {page_bytes} x {pages}: {error}")
                        del session.facts[way]
                        continue
                    good[way] &= verified
                    # The first round warms up: page tables, socket buffers, caches of keys.
                    if turn or us > _SLOW_US:
                        times[way].append(us)
            for way, facts in session.facts.items():
                yield Record.of(
                    way,
                    self._transport(way, facts),
                    memory,
                    (page_bytes, pages),
                    times[way],
                    good[way],
                    session.backing,
                    _threads(way, session, polling),
                    mode="awake" if spin_us else "asleep",
                    clock_us=session.clock_us if session.far else None,
                )

    def latency(self, memory: str) -> Iterator[Record]:
        """One page at a time, each way alone: the spinning threads of several would share the cores."""
        rounds = max(self.plan.rounds, 50)
        for spin_us in (0, _SPIN_US):
            for way in self._ways(memory):
                native = way in _NATIVE_WAYS
                if way.startswith("memcpy") or (spin_us and not native):
                    continue
                # As many pages as are sent in one tight loop.
                with contextlib.closing(self.open(memory, (way,), LATENCY_PAGE, rounds, spin_us)) as session:
                    if way not in session.facts:
                        continue
                    polls = (False, True) if spin_us and (os.cpu_count() or 1) > 2 else (False,)
                    for polling in polls:
                        if native:
                            session.poll(way, polling)
                        yield from self._one_page(session, memory, way, rounds, polling)

    def _one_page(
        self, session: Session, memory: str, way: str, rounds: int, polling: bool
    ) -> Iterator[Record]:
        rng = np.random.default_rng(3)
        threads = _threads(way, session, polling)
        start = _NUMBERS_A_CELL * (1 + polling)
        single = [session.batch(way, start + turn, 1, rng) for turn in range(rounds + 3)][3:]
        tight, same = session.tight(way, start + 2 * rounds, rounds, rng)
        for pace, times, good in (
            ("paused", [us for us, _ in single], all(verified for _, verified in single)),
            ("tight", tight[3:], same),
        ):
            transport = self._transport(way, session.facts[way])
            mode = "awake" if session.threads == "spin" else "asleep"
            shape = (LATENCY_PAGE, 1)
            clock_us = session.clock_us if session.far else None
            yield Record.of(
                way, transport, memory, shape, times, good, session.backing, threads, pace, mode, clock_us
            )

    def _ways(self, memory: str) -> tuple[str, ...]:
        there = NETWORK_WAYS if self.receiver.far else HOST_WAYS if memory == "host->host" else GPU_WAYS
        return tuple(way for way in self.plan.ways if way in there)

    def _transport(self, way: str, facts: dict[str, str]) -> str:
        """Of NCCL, what its log says by now."""
        if way != "nccl":
            return facts["transport"]
        logs = [log.read_text(errors="replace").splitlines() for log in self.folder.glob("nccl.*")]
        return parse_log(line for lines in logs for line in lines).transport or "nccl"


def _threads(way: str, session: Session, polling: bool) -> str:
    """How a way waits (see Record)."""
    if way in _POLLING_WAYS:
        return "poll"
    if way not in _NATIVE_WAYS:
        return "sleep"
    return "poll" if polling else session.threads


def measure(
    plan: Plan,
    say: Callable[[str], object] = print,
    failures: list[str] | None = None,
    far: Receiver | None = None,
) -> Iterator[Record]:
    """Every way at each (page bytes, pages), then, if wanted, the latency of one 64 KiB page.

    A way that fails in the middle leaves the run, and a line in `failures`. `far`: the receiver, on another host, which
    ends with this (None: a process here). Raises OtherGone when the receiver has ended.
    """
    with tempfile.TemporaryDirectory(prefix="kvrail-bench-") as name:  # mode 0700
        folder = Path(name)
        environment = child_environment(NCCL_NVLS_ENABLE="0") | _NCCL_LOG
        environment["NCCL_DEBUG_FILE"] = str(folder / "nccl.%p")
        with contextlib.closing(far or LocalReceiver(environment)) as receiver:
            run = _Run(plan, say, folder, receiver, failures=[] if failures is None else failures)
            with socket.create_server(("127.0.0.1", 0)) as probe:
                run.nccl_port = probe.getsockname()[1]
            for memory, cells in plan.cells.items():
                for page_bytes, pages in cells:
                    yield from run.cell(memory, page_bytes, pages)
                if plan.latency and cells:
                    yield from run.latency(memory)
            if any(memory != "host->host" for memory in plan.cells):
                from kvrail.frontend.bench_gpu_nccl import leave_nccl

                receiver.tell(do="leave")
                leave_nccl()
                receiver.answer()
            receiver.say_all_is_measured()
