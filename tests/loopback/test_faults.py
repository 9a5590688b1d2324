# SPDX-License-Identifier: Apache-2.0
"""Fences, killed and frozen peers, broken control streams: every writer hears of it, nothing lands afterwards."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrail.transfer.ucx import EventKind

PUT, SHM, STREAM = 0, 1, 2
CANCELED = -16
MIB = 1 << 20
Make = Callable[..., Any]


def indices(values: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.asarray(values, dtype=np.uint32)


def keep_pushing(end: Any, writer: Any, lane: int, times: int = 200) -> None:
    """Far more than will be done: 64 pages each time, none of them contiguous."""
    pages = indices(range(64))
    for _ in range(times):
        writer.push(lane, end.base, pages, pages[::-1].copy())


@pytest.mark.parametrize(("lane", "rails"), [(PUT, 1), (PUT, 4), (STREAM, 1)])
def test_nothing_lands_after_a_fence_over_tcp(make_remote: Make, lane: int, rails: int) -> None:
    here, remote = make_remote("tcp", pages=64, page_bytes=MIB, rails=rails, reads_here=True)
    remote.do("fill", word=1)
    before = remote.do("stats")["rail_puts"]
    remote.do("push", lane=lane, pages=list(range(63, -1, -1)), key=1, times=100)
    deadline = time.monotonic() + 20
    while not here.data.any():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    here.link.fence()
    here.take(EventKind.FENCED)
    here.data[:] = 7
    time.sleep(0.5)
    assert (here.data == 7).all()
    # The other end sees it, and its writer fails.
    while EventKind.FAILED not in remote.do("kinds"):
        assert time.monotonic() < deadline + 20
        time.sleep(0.02)
    assert (remote.do("stats")["rail_puts"] > before) == (rails > 1)


@pytest.mark.parametrize(("transport", "lane"), [("cma", PUT), ("tcp", PUT), ("tcp", SHM), ("tcp", STREAM)])
def test_a_fence_here_fails_our_writers_and_stops_our_writes(
    make_pair: Make, transport: str, lane: int
) -> None:
    here, there = make_pair(transport, pages=64, page_bytes=MIB)
    here.data[:] = 1
    busy, idle, stopped = (here.link.writer(key, ttl_s=60.0) for key in (1, 2, 3))
    keep_pushing(here, busy, lane)
    keep_pushing(here, stopped, lane)
    time.sleep(0.02)
    stopped.stop()
    here.link.fence()
    here.take(EventKind.FENCED)
    assert {event[2] for event in here.take(EventKind.FAILED, 2)} == {1, 2}
    quiet = here.take(EventKind.QUIET)[0]
    assert quiet[2] == 3
    # Proven only if it was quiet before the fence came.
    assert quiet[3] != 0 or stopped.posted == stopped.done
    for writer in (busy, idle):
        writer.stop()
    assert {(event[2], event[3] != 0) for event in here.take(EventKind.QUIET, 2)} == {(1, True), (2, True)}
    assert busy.posted == busy.done + busy.failed
    if transport == "cma" or lane == SHM:  # over tcp, what the kernel has buffered still lands
        there.data[:] = 7
        time.sleep(0.2)
        assert (there.data == 7).all()
    here.link.fence()  # again: said again
    here.take(EventKind.FENCED)
    late = here.link.writer(4, ttl_s=60.0)
    assert here.take(EventKind.FAILED)[0][2] == 4
    late.push(lane, here.base, indices([0]), indices([0]))
    assert here.none(EventKind.PROGRESS, 0.1)


def test_a_fence_hurts_no_other_link(make_pair: Make) -> None:
    here, there = make_pair("tcp", pages=64, page_bytes=65536)
    here.data[:] = np.arange(1, 65, dtype=np.uint64)[:, None]
    ours, theirs = (end.reactor.open_link(epoch=1, cookie=77) for end in (here, there))
    ours.connect(theirs.address())
    theirs.connect(ours.address())
    ours.import_put(
        PUT, base=there.base, nbytes=there.data.nbytes, unit_bytes=65536, key=there.region.packed_key()
    )
    writer = ours.writer(1, ttl_s=60.0)
    for _ in range(20):
        keep_pushing(here, writer, PUT, times=1)
    there.link.fence()
    there.take(EventKind.FENCED)
    keep_pushing(here, writer, PUT, times=1)
    writer.ring(b"through")
    assert there.messages() == [b"through"]
    assert (there.data == here.data[::-1]).all()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("transport", "lane"), [("cma", PUT), ("tcp", PUT), ("tcp", SHM), ("tcp", STREAM)])
def test_a_killed_receiver_fails_the_writers(make_remote: Make, transport: str, lane: int) -> None:
    here, remote = make_remote(transport, pages=64, page_bytes=MIB)
    writer = here.link.writer(1, ttl_s=60.0)
    waiting = here.link.writer(2, ttl_s=60.0)
    keep_pushing(here, writer, lane)
    time.sleep(0.05)
    remote.signal(signal.SIGKILL)
    assert here.take(EventKind.LINK_ERROR, timeout=30)[0][3] != 0
    assert {event[2] for event in here.take(EventKind.FAILED, 2)} == {1, 2}
    for one in (writer, waiting):
        one.stop()
    assert all(event[3] != 0 for event in here.take(EventKind.QUIET, 2))
    assert writer.posted == writer.done + writer.failed
    here.link.send(b"into the void")
    here.link.flush(8)
    assert here.take(EventKind.FLUSHED)[0][3] != 0


@pytest.mark.parametrize(("transport", "lane"), [("cma", PUT), ("tcp", PUT), ("tcp", STREAM)])
def test_a_killed_sender_is_noticed(make_remote: Make, transport: str, lane: int) -> None:
    here, remote = make_remote(transport, pages=64, page_bytes=MIB, reads_here=True)
    remote.do("push", lane=lane, pages=list(range(63, -1, -1)), key=1, times=50)
    time.sleep(0.05)
    remote.signal(signal.SIGKILL)
    here.take(EventKind.LINK_ERROR, timeout=30)


@pytest.mark.parametrize("lane", [PUT, STREAM])
def test_a_sender_frozen_within_a_page_is_fenced(make_remote: Make, lane: int) -> None:
    here, remote = make_remote("tcp", pages=4, page_bytes=64 * MIB, reads_here=True)
    remote.do("fill", word=1)
    remote.do("push", lane=lane, pages=[2, 0], key=1, times=100)
    until(lambda: bool(here.data[2, -1]), 20)
    remote.signal(signal.SIGSTOP)
    began = time.monotonic()
    here.link.fence()
    here.take(EventKind.FENCED)
    assert time.monotonic() - began < 5
    here.data[:] = 7
    remote.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (here.data == 7).all()


@pytest.mark.parametrize("lane", [PUT, STREAM])
def test_a_frozen_receiver_keeps_quiet_unproven_until_the_fence(make_remote: Make, lane: int) -> None:
    here, remote = make_remote("tcp", pages=64, page_bytes=MIB)
    remote.signal(signal.SIGSTOP)
    writer = here.link.writer(1, ttl_s=0.3)
    keep_pushing(here, writer, lane)
    # Units that wait for room are refused when the time is over.
    assert here.take(EventKind.FAILED, timeout=10)[0][2] == 1
    writer.stop()
    assert here.none(EventKind.QUIET, 0.3)
    began = time.monotonic()
    here.link.fence()
    here.take(EventKind.FENCED)
    assert here.take(EventKind.QUIET)[0][3] != 0
    assert time.monotonic() - began < 5
    remote.signal(signal.SIGCONT)


def test_closing_while_pushing_is_clean(make_pair: Make) -> None:
    for transport, lane in (("cma", PUT), ("tcp", PUT), ("tcp", SHM), ("tcp", STREAM)):
        here, _ = make_pair(transport, pages=64, page_bytes=MIB)
        writer = here.link.writer(1, ttl_s=60.0)
        keep_pushing(here, writer, lane, times=20)
        time.sleep(0.01)
        here.link.close()
        here.link.close()
        assert here.take(EventKind.FAILED)[0][2:4] == (1, CANCELED)
        here.region.close()  # waits for the link
        writer.stop()
        assert here.take(EventKind.QUIET)[0][3] != 0
        began = time.monotonic()
        here.reactor.close()
        assert time.monotonic() - began < 5


def test_links_that_were_never_connected_end_like_others(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    lonely = [here.reactor.open_link(epoch=1, cookie=5) for _ in range(3)]
    lonely[0].close()
    lonely[1].fence()
    here.take(EventKind.FENCED)
    lonely[2].send(b"to whom?")
    lonely[2].flush(4)
    assert here.take(EventKind.FLUSHED)[0][3] != 0
    # Nobody is at that address any more.
    there.link.fence()
    there.take(EventKind.FENCED)
    lonely[2].connect(there.link.address())
    lonely[2].send(b"anybody?")
    here.take(EventKind.LINK_ERROR)
    for link in lonely:
        link.close()


def test_the_last_message_goes_out_before_the_link_closes(make_remote: Make) -> None:
    here, remote = make_remote("tcp")
    here.link.send(b"farewell" * 10000)
    here.link.close()
    assert [bytes.fromhex(message) for message in remote.do("messages", count=1)] == [b"farewell" * 10000]


def streams(here: Any, there: Any, interval_ms: int = 20) -> None:
    one, other = socket.socketpair()
    here.link.attach_control(one.detach(), interval_ms)
    there.link.attach_control(other.detach(), interval_ms)


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_heartbeats_carry_the_latest_payload(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    assert there.link.peer_beat() == (float("inf"), b"", False)
    streams(here, there)
    until(lambda: there.link.peer_beat()[0] < 0.02)
    assert there.link.peer_beat()[1] == b""
    for payload in (b"one", b"t" * 300_000, b"three"):  # the second does not fit into the socket at once
        here.link.set_beat(payload)
        until(lambda payload=payload: there.link.peer_beat()[1] == payload)
    assert here.link.peer_beat()[1] == b""
    with pytest.raises(ValueError, match="too long"):
        here.link.set_beat(b"x" * (MIB + 1))


def test_heartbeats_go_on_while_pages_are_pushed_and_after_a_fence(make_pair: Make) -> None:
    here, there = make_pair("tcp", pages=64, page_bytes=MIB)
    streams(here, there)
    writer = here.link.writer(1, ttl_s=60.0)
    keep_pushing(here, writer, PUT, times=30)
    oldest = 0.0
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        oldest = max(oldest, there.link.peer_beat()[0])
        time.sleep(0.005)
    assert oldest < 0.3
    there.link.fence()
    there.take(EventKind.FENCED)
    until(lambda: there.link.peer_beat()[0] < 0.02)
    assert there.none(EventKind.CONTROL, 0.1)


def test_the_end_of_a_control_stream_is_told(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    streams(here, there)
    here.link.close()
    # A reset, when a heartbeat of ours was still unread; a broken pipe, when the next one was due before we looked.
    assert there.take(EventKind.CONTROL)[0][3] in (0, errno.ECONNRESET, errno.EPIPE)
    age = there.link.peer_beat()[0]
    time.sleep(0.05)
    assert there.link.peer_beat()[0] >= age + 0.05


def test_a_peer_that_sends_nonsense_or_nothing_does_no_harm(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    (ours, raw), (theirs, mute) = socket.socketpair(), socket.socketpair()
    here.link.attach_control(ours.detach(), 10)
    raw.sendall(b"\xff\xff\xff\xff")
    assert b"too long" in here.take(EventKind.CONTROL)[0][4]
    # A peer that never reads: beats are skipped, not queued, and the reactor lives.
    there.link.set_beat(os.urandom(MIB))
    there.link.attach_control(theirs.detach(), 10)
    time.sleep(0.3)
    here.link.send(b"alive")
    assert there.messages() == [b"alive"]
    assert there.link.peer_beat()[0] >= 0.29
    raw.close()
    mute.close()
    there.take(EventKind.CONTROL)
