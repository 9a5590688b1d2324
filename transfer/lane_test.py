# SPDX-License-Identifier: Apache-2.0
"""Does a lane really carry bytes, and how fast: the self-test and the speed probes that decide a link's lane.

The PE puts random units in a shuffled order into its slice of the CE's probe pool, and rings `SelfTest`. The CE sums
what is there and answers. A lane that passes is then timed at three sizes, whose content nobody reads.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import CudaFailed, LaneUnavailable, UcxFailed
from kvrail.transfer.handshake import Offer, PoolOffer
from kvrail.transfer.lanes import Plan, Wishes, check_required, fence_class, has_local, put_carrier
from kvrail.transfer.link_events import LaneInfo, Probe
from kvrail.transfer.memory import PROBE_POOL, HostPool
from kvrail.transfer.wire import SelfTest, SelfTestResult, encode

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["FIRST_TEST_WRITER", "News", "TestSlices", "check_self_test", "lane_test"]

# Writer keys of lane tests; the rank's own keys count up from 1 and never get here.
FIRST_TEST_WRITER = 1 << 48
# The probe pool as an shm import has another id, so that a failed import of one kind cannot serve the other.
_PROBE_SHM = 3
_TEST_UNITS = 4
_TEST_SLICES = 64
# (bytes, how often): the median is kept. About 13 MiB in all.
_PROBES = ((4 << 10, 9), (256 << 10, 5), (4 << 20, 3))
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
) -> Generator[None, News, LaneInfo]:
    """Try the plan's lanes in order; returns the first that works and is allowed. Raises LaneUnavailable with why
    (LaneUnwanted: the last one worked, and is not allowed).

    `pool`: our probe pool; `source_unit`: our slice of it. Imports all pools of the offer for the lane it returns.
    """
    why = [plan.reason] if plan.reason else []
    kind = LaneUnavailable
    (probe,) = (entry for entry in offer.pools if entry.pool == PROBE_POOL)
    for lane in plan.lanes:
        try:
            pool_id = PROBE_POOL if lane == "put" else _PROBE_SHM
            _import(link, lane, probe, fds, pool_id)
            yield from _self_test(link, offer, pool_id, pool, source_unit, writer_keys)
            with _native_errors():
                transports = link.transports()
            if plan.scope == "network" and has_local(transports):
                raise LaneUnavailable(
                    f"UCX uses {', '.join(transports)}, although only network lanes were offered"
                )
            carrier = "memcpy" if lane == "shm" else put_carrier(transports)
            info = LaneInfo(
                lane,
                carrier,
                probe.memory,
                fence_class(lane, transports),
                reason="; ".join(why),
                same_host=not offer.distance,
            )
            check_required(info.label, *wishes)
            for entry in offer.pools:
                if entry.pool != PROBE_POOL:
                    _import(link, lane, entry, fds, entry.pool)
        except LaneUnavailable as error:
            why.append(f"{lane}: {error}")
            kind = type(error)
            continue
        probes = []
        for nbytes, times in _PROBES:
            probes.append((yield from _speed(link, offer, pool_id, pool, nbytes, times, writer_keys)))
        return LaneInfo(
            *(info.name, info.transport, info.memory, info.fence), tuple(probes), info.reason, info.same_host
        )
    raise kind("no lane works: " + "; ".join(why))


def _import(
    link: _ucx.Link, lane: Literal["shm", "put"], entry: PoolOffer, fds: tuple[int, ...], pool_id: int
) -> None:
    with _native_errors():
        if lane == "shm":
            link.import_shm(
                pool_id, fd=fds[entry.fd], offset=0, nbytes=entry.nbytes, unit_bytes=entry.unit_bytes
            )
        else:
            link.import_put(
                pool_id, base=entry.base, nbytes=entry.nbytes, unit_bytes=entry.unit_bytes, key=entry.key
            )


def _self_test(
    link: _ucx.Link,
    offer: Offer,
    pool_id: int,
    pool: HostPool | DevicePool,
    source_unit: int,
    keys: Iterator[int],
) -> Generator[None, News, None]:
    unit = pool.unit_bytes
    order = list(range(_TEST_UNITS))
    random.shuffle(order)
    content = os.urandom(_TEST_UNITS * unit)
    pool.write(source_unit * unit, content)
    landed = b"".join(content[order.index(i) * unit :][:unit] for i in range(_TEST_UNITS))
    with _native_errors():
        writer = link.writer(next(keys), ttl_s=_TTL_S)
        source = np.arange(source_unit, source_unit + _TEST_UNITS, dtype=np.uint32)
        target = np.array([offer.probe_unit + i for i in order], dtype=np.uint32)
        writer.push(pool_id, pool.address, source, target)
        test = SelfTest(
            epoch=offer.epoch, offset=offer.probe_unit * unit, nbytes=len(landed), checksum=_sum(landed)
        )
        writer.ring(encode(test))
    while True:
        news = yield
        if news.kind == "failed":
            # UCX cancels a put that it could only emulate; the cause is in its own log line on stderr.
            raise LaneUnavailable(f"self-test put failed: {news.reason} (UCX has no fast, permitted way)")
        if news.kind == "verdict":
            if not news.ok:
                raise LaneUnavailable(f"self-test: {news.reason}")
            return


def _speed(
    link: _ucx.Link,
    offer: Offer,
    pool_id: int,
    pool: HostPool | DevicePool,
    nbytes: int,
    times: int,
    keys: Iterator[int],
) -> Generator[None, News, Probe]:
    """Time up to `times` puts of `nbytes` in one run, each until it is complete at the peer; keeps the median."""
    first = _TEST_SLICES * _TEST_UNITS
    units = np.arange(first, first + nbytes // pool.unit_bytes, dtype=np.uint32)
    bell = encode(SelfTest(epoch=offer.epoch, offset=0, nbytes=0, checksum=_sum(b"")))
    seconds = []
    for _ in range(times):
        with _native_errors():
            writer = link.writer(next(keys), ttl_s=_TTL_S)
            begun = time.monotonic()
            writer.push(pool_id, pool.address, units, units)
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
    return Probe(nbytes, nbytes / median / 1e9, median * 1e6)


def check_self_test(test: SelfTest, pool: HostPool | DevicePool) -> SelfTestResult:
    """The CE's verdict on what lies in its probe pool."""
    end = test.offset + test.nbytes
    if not (0 <= test.offset <= end <= pool.nbytes):
        return SelfTestResult(epoch=test.epoch, ok=False, reason="outside the probe pool")
    ok = _sum(pool.read(test.offset, test.nbytes)) == test.checksum
    return SelfTestResult(epoch=test.epoch, ok=ok, reason="" if ok else "the bytes did not arrive")


def _sum(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")


@contextmanager
def _native_errors() -> Iterator[None]:
    """An import or a put that the native module refuses means that the lane does not work."""
    try:
        yield
    except (UcxFailed, CudaFailed, RuntimeError, ValueError, OSError) as error:
        raise LaneUnavailable(str(error)) from error
