# SPDX-License-Identifier: Apache-2.0
"""Does a lane really carry bytes, and how fast: the self-test and the speed probes that decide a link's lane.

The PE puts random units in a shuffled order into its slice of the CE's probe pool, and rings `SelfTest`. The CE sums
what is there and answers. A lane that passes is then timed at three sizes, whose content nobody reads; one that has
several ways (the page-copy kernel, the copy engine) is tested and timed by each of them, and with scattered units,
too: the planner chooses by these figures. So are lanes of which the faster is to be found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import LaneUnavailable, TransferError
from kvrail.transfer.gpu import Offered, shortfall
from kvrail.transfer.handshake import Offer, PoolOffer
from kvrail.transfer.interfaces import with_our_scope
from kvrail.transfer.lanes import (
    RIVALS,
    Plan,
    Wishes,
    check_required,
    fence_class,
    has_local,
    put_carrier,
    rails_for,
)
from kvrail.transfer.link_events import Lane, LaneInfo, Probe, Way
from kvrail.transfer.memory import PROBE_POOL, HostPool
from kvrail.transfer.planner import Planner, count_runs
from kvrail.transfer.stream_socket import dial_stream
from kvrail.transfer.wire import SelfTest, SelfTestResult, encode

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["FIRST_TEST_WRITER", "News", "TestSlices", "check_self_test", "lane_test"]

# Writer keys of lane tests; the rank's own keys count up from 1 and never get here.
FIRST_TEST_WRITER = 1 << 48
# The probe pool has an id for each lane, so that a failed import of one kind cannot serve the other. (The reader of
# lane stream knows it by its own; a push says which way it goes.)
_PROBE_IDS: dict[Lane, int] = {"put": PROBE_POOL, "shm": 3, "peer": 4, "stream": PROBE_POOL}
_WAYS: dict[Lane, tuple[Way, ...]] = {
    "put": ("put",),
    "shm": ("shm",),
    "peer": ("kernel", "engine"),
    "stream": ("stream",),
}
_TEST_UNITS = 4
_TEST_SLICES = 64


class _Size(NamedTuple):
    """One speed probe: `units` of the probe pool that are neighbours, or each on its own, so often over in one batch;
    the median of several `times` is kept.
    """

    units: int
    times: int
    scattered: bool = False
    over: int = 1


# 4 KiB, 256 KiB, 4 MiB: about 13 MiB in all.
_SIZES = (_Size(1, 9), _Size(64, 5), _Size(1024, 3))
# A GPU's link carries 4 MiB before the doorbell is out: only 256 MiB, less than a millisecond of NVLink, say how fast
# it is.
_GPU_SIZES = (_Size(1, 9), _Size(64, 5), _Size(1024, 3, over=64))
# What tells the cost of a run from that of a batch and of its bytes.
_SCATTERED = _Size(64, 5, scattered=True)
_TTL_S = 10.0
# One probe of a size is enough when the step loop comes by so much later: twenty long steps are too long a wait.
_LATE_S = 0.05


class News(NamedTuple):
    """What a lane test waits for: an event of one of its writers, or the peer's verdict.

    `at` (of "rung"): when the progress thread sent the doorbell, time.monotonic(). Our own turn may come much later.
    """

    kind: Literal["progress", "rung", "quiet", "failed", "verdict"]
    ok: bool
    reason: str
    at: float = 0.0


class TestSlices:
    """Hands out slices of a probe pool in turn, so that lane tests of several links do not overwrite each other."""

    def __init__(self) -> None:
        self._next = random.randrange(_TEST_SLICES)

    def take(self) -> int:
        """First unit of the next slice."""
        self._next = (self._next + 1) % _TEST_SLICES
        return self._next * _TEST_UNITS


def lane_test(
    link: _ucx.Link,
    offer: Offer,
    plan: Plan,
    wishes: tuple[Wishes, Wishes],
    fds: tuple[int, ...],
    pool: HostPool | DevicePool,
    source_unit: int,
    writer_keys: Iterator[int],
    hardware: Offered | None = None,
    rails: int = 0,
    secret: bytes = b"",
    kv_host: str = "127.0.0.1",
) -> Generator[None, News, LaneInfo]:
    """Try the plan's lanes in order; returns the first that works and is allowed, and of rivals (`lanes.RIVALS`) the
    faster. Raises LaneUnavailable with why (LaneUnwanted: the last one worked, and is not allowed).

    `pool`: our probe pool; `source_unit`: our slice of it. Imports all pools of the offer for the lane it returns.
    `hardware`: what lies between the two memories, when that is known: a lane far under it is called slow. `rails`: how
    many threads are to put on lane put, if its transport gains by several (0: as many as pay). `secret`: with which the
    CE lets us in on lane stream, dialed from `kv_host`.
    """
    why = [plan.reason] if plan.reason else []
    kind = LaneUnavailable
    test = _Test(link, offer, pool, writer_keys)
    rivals = set(plan.lanes) >= RIVALS
    found: list[LaneInfo] = []
    for lane in plan.lanes:
        try:
            if lane == "stream":
                _join_stream(link, offer, secret, kv_host)
            found.append(
                (yield from _try_lane(test, lane, plan, wishes, fds, source_unit, why, rails, rivals))
            )
        except LaneUnavailable as error:
            why.append(f"{lane}: {error}")
            kind = type(error)
            continue
        if not (rivals and lane in RIVALS):
            break
    for info in sorted(found, key=_slowness):
        try:
            for entry in offer.pools:
                if entry.pool != PROBE_POOL:
                    _import(link, info.name, entry, fds, entry.pool)
        except LaneUnavailable as error:
            why.append(f"{info.name}: {error}")
            continue
        if "stream" in plan.lanes:
            link.settle_stream(info.name == "stream")
        slow = "" if plan.scope == "network" else shortfall(Planner.of(info.probes).gb_per_s, hardware)
        return dataclasses.replace(info, reason="; ".join(why), slow=slow)
    raise kind("no lane works: " + "; ".join(why))


def _slowness(lane: LaneInfo) -> float:
    """What its probes took, each size counting as much as any other."""
    return sum(math.log(max(probe.us, 1.0)) for probe in lane.probes)


def _try_lane(
    test: _Test,
    lane: Lane,
    plan: Plan,
    wishes: tuple[Wishes, Wishes],
    fds: tuple[int, ...],
    source_unit: int,
    why: list[str],
    rails: int,
    rivals: bool,
) -> Generator[None, News, LaneInfo]:
    """Test the lane's content, then its speed. Raises LaneUnavailable."""
    pool_id = _PROBE_IDS[lane]
    (probe,) = (entry for entry in test.offer.pools if entry.pool == PROBE_POOL)
    _import(test.link, lane, probe, fds, pool_id)
    ways = yield from _working_ways(test, lane, pool_id, source_unit, why)
    with _native_errors():
        transports = test.link.transports()
    if plan.scope == "network" and has_local(transports):
        raise LaneUnavailable(f"UCX uses {', '.join(transports)}, although only network lanes were offered")
    memory = "cuda" if "cuda" in (test.pool.memory, probe.memory) else "host"
    carriers = {"shm": "memcpy", "peer": "cuda_ipc", "stream": "tcp", "put": put_carrier(transports, memory)}
    info = LaneInfo(
        lane,
        carriers[lane],
        probe.memory,
        fence_class(lane, transports),
        same_host=not test.offer.distance,
    )
    check_required(info.label, *wishes)
    if lane == "put" and memory == "host":
        count = yield from _open_rails(test, rails_for(info.transport, rails), pool_id, source_unit, why)
        info = dataclasses.replace(info, rails=count)
    sizes = _GPU_SIZES if memory == "cuda" else _SIZES
    probes = []
    for way in ways:
        for size in (*sizes, _SCATTERED) if len(ways) > 1 or rivals else sizes:
            probes.append((yield from test.speed(pool_id, way, size)))
    return dataclasses.replace(info, probes=tuple(probes))


def _join_stream(link: _ucx.Link, offer: Offer, secret: bytes, kv_host: str) -> None:
    """Connect to where the CE listens for lane stream."""
    if offer.stream is None:
        raise LaneUnavailable("the completion engine does not listen for it")
    host, port = offer.stream
    with _native_errors():
        link.write_stream(dial_stream(with_our_scope(host, kv_host), port).detach(), secret=secret)


def _working_ways(
    test: _Test, lane: Lane, pool_id: int, source_unit: int, why: list[str]
) -> Generator[None, News, list[Way]]:
    """The ways of the lane that pass the self-test; `why` hears of the others. Raises LaneUnavailable without any."""
    working: list[Way] = []
    failed: list[str] = []
    ways = _WAYS[lane]
    for way in ways:
        try:
            yield from test.content(pool_id, way, source_unit)
        except LaneUnavailable as error:
            failed.append(f"{way}: {error}" if len(ways) > 1 else str(error))
        else:
            working.append(way)
    if not working:
        raise LaneUnavailable("; ".join(failed))
    why += [f"{lane} without {each}" for each in failed]
    return working


def _open_rails(
    test: _Test, count: int, pool_id: int, source_unit: int, why: list[str]
) -> Generator[None, News, int]:
    """Have `count` threads put. Each is tested alone, and only then gets pages; `why` hears of those that fail."""
    if count == 1:
        return 1
    with _native_errors():
        test.link.open_rails(count)
    working = 1
    for rail in range(1, count):
        try:
            yield from test.content(pool_id, "put", source_unit, rail)
        except LaneUnavailable as error:
            why.append(f"put without rail {rail}: {error}")
        else:
            working += 1
    return working


def _import(link: _ucx.Link, lane: Lane, entry: PoolOffer, fds: tuple[int, ...], pool_id: int) -> None:
    size = {"nbytes": entry.nbytes, "unit_bytes": entry.unit_bytes}
    with _native_errors():
        if lane == "shm":
            link.import_shm(pool_id, fd=fds[entry.fd], offset=0, **size)
        elif lane == "peer":
            if not entry.handle:
                raise LaneUnavailable("the completion engine gave no handle of its GPU memory")
            link.import_peer(pool_id, handle=entry.handle, offset=entry.handle_offset, **size)
        elif lane == "stream":
            link.import_stream(pool_id, **size)
        else:
            link.import_put(pool_id, base=entry.base, key=entry.key, **size)


class _Test:
    """What both kinds of test need: our end of a link, the peer's offer, our probe pool, keys of writers."""

    def __init__(
        self, link: _ucx.Link, offer: Offer, pool: HostPool | DevicePool, keys: Iterator[int]
    ) -> None:
        self.link = link
        self.offer = offer
        self.pool = pool
        self._keys = keys

    def content(self, pool_id: int, way: Way, source_unit: int, rail: int = 0) -> Generator[None, News, None]:
        """Do shuffled random units arrive (by that rail)? Raises LaneUnavailable."""
        unit = self.pool.unit_bytes
        order = list(range(_TEST_UNITS))
        random.shuffle(order)
        content = os.urandom(_TEST_UNITS * unit)
        landed = b"".join(content[order.index(i) * unit :][:unit] for i in range(_TEST_UNITS))
        source = np.arange(source_unit, source_unit + _TEST_UNITS, dtype=np.uint32)
        target = np.array([self.offer.probe_unit + i for i in order], dtype=np.uint32)
        test = SelfTest(
            epoch=self.offer.epoch,
            offset=self.offer.probe_unit * unit,
            nbytes=len(landed),
            checksum=_sum(landed),
        )
        with _native_errors():
            self.pool.write(source_unit * unit, content)
            writer = self.link.writer(next(self._keys), ttl_s=_TTL_S)
            writer.push(pool_id, self.pool.address, source, target, way=way, rail=rail)
            writer.ring(encode(test))
        while True:
            news = yield
            if news.kind == "failed":
                raise LaneUnavailable(f"self-test put failed: {news.reason}{self._advice(way)}")
            if news.kind == "verdict":
                if not news.ok:
                    raise LaneUnavailable(f"self-test: {news.reason}")
                return

    def _advice(self, way: Way) -> str:
        if way != "put":
            return ""
        ours, theirs = self.pool.memory, self.offer.pools[0].memory
        if ours == theirs:
            # UCX cancels a put that it could only emulate; the cause is in its own log line on stderr.
            return " (UCX has no fast, permitted way)"
        words = {"host": "host memory", "cuda": "GPU memory"}
        return (
            f" (UCX has no fast way from {words[ours]} to {words[theirs]} here: run both engines on GPUs, or both on "
            "CPUs" + ("" if ours == "cuda" else ", or use lane peer") + ")"
        )

    def speed(self, pool_id: int, way: Way, size: _Size) -> Generator[None, News, Probe]:
        """Time up to `size.times` batches, each until it is complete at the peer; keeps the median."""
        first = _TEST_SLICES * _TEST_UNITS
        step = 2 if size.scattered else 1
        units = np.tile(np.arange(first, first + step * size.units, step, dtype=np.uint32), size.over)
        nbytes, runs = len(units) * self.pool.unit_bytes, count_runs(units, units)
        bell = encode(SelfTest(epoch=self.offer.epoch, offset=0, nbytes=0, checksum=_sum(b"")))
        seconds = []
        for _ in range(size.times):
            with _native_errors():
                writer = self.link.writer(next(self._keys), ttl_s=_TTL_S)
                begun = time.monotonic()
                writer.push(pool_id, self.pool.address, units, units, way=way)
                # The doorbell goes out after a flush: the bytes have landed, and not only left.
                writer.ring(bell)
            while True:
                news = yield
                if news.kind == "failed":
                    raise LaneUnavailable(f"speed probe of {nbytes} bytes failed: {news.reason}")
                if news.kind == "rung":
                    seconds.append(news.at - begun)
                    break
            if time.monotonic() - news.at > _LATE_S:
                break
        median = sorted(seconds)[len(seconds) // 2]
        return Probe(nbytes, nbytes / median / 1e9, median * 1e6, runs, way)


def check_self_test(test: SelfTest, pool: HostPool | DevicePool) -> SelfTestResult:
    """The CE's verdict on what lies in its probe pool."""
    end = test.offset + test.nbytes
    if not (0 <= test.offset <= end <= pool.nbytes):
        return SelfTestResult(epoch=test.epoch, ok=False, reason="outside the probe pool")
    try:
        ok = _sum(pool.read(test.offset, test.nbytes)) == test.checksum
    except TransferError as error:
        return SelfTestResult(epoch=test.epoch, ok=False, reason=f"the probe pool cannot be read: {error}")
    return SelfTestResult(epoch=test.epoch, ok=ok, reason="" if ok else "the bytes did not arrive")


def _sum(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")


@contextmanager
def _native_errors() -> Iterator[None]:
    """An import or a put that the native module refuses means that the lane does not work."""
    try:
        yield
    except LaneUnavailable:
        raise
    except (TransferError, RuntimeError, ValueError, OSError) as error:
        raise LaneUnavailable(str(error)) from error
