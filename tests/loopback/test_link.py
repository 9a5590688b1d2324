# SPDX-License-Identifier: Apache-2.0
"""A link between two processes: doorbells never overtake data, messages keep their order, strangers are ignored."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrail.transfer import ucx
from kvrail.transfer.errors import TransferError, UcxFailed
from kvrail.transfer.ucx import EventKind

PUT, SHM, STREAM = 0, 1, 2
Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("transport", "lane"),
    [("cma", PUT), ("tcp", PUT), ("cma", SHM), ("tcp", SHM), ("cma", STREAM), ("tcp", STREAM)],
    ids=[
        "put-cma",
        "put-tcp",
        "shm-message-by-memory",
        "shm-message-by-tcp",
        "stream-message-by-memory",
        "stream-message-by-tcp",
    ],
)
def test_no_doorbell_overtakes_its_data(make_remote: Make, transport: str, lane: int) -> None:
    here, remote = make_remote(transport, pages=64, page_bytes=65536)
    rounds = 150 if transport == "cma" else 60
    # Each round writes 16 scattered pages, in another place than the round before, and is checked when its bell comes.
    starts = [0, 16, 32, 48]
    remote.begin("acknowledge", rounds=rounds, pages=starts, each=16)
    random = np.random.default_rng(3)
    for number in range(1, rounds + 1):
        start = starts[(number - 1) % 4]
        here.data[:16] = number
        order = random.permutation(16).astype(np.uint32)
        writer = here.link.writer(number, ttl_s=60.0)
        writer.push(lane, here.base, order, order[::-1] + np.uint32(start))
        writer.ring(number.to_bytes(8, "little"))
        assert here.messages() == [number.to_bytes(8, "little")]
    assert remote.result() == 0


def test_messages_of_any_size_keep_their_order(make_remote: Make) -> None:
    here, remote = make_remote("cma")
    random = np.random.default_rng(4)
    sizes = [int(size) for size in random.choice([0, 1, 100, 4000, 9000, 70_000, 600_000], 120)]
    sent = [bytes([number]) * size + number.to_bytes(2, "little") for number, size in enumerate(sizes)]
    for message in sent:
        here.link.send(message)
    assert [bytes.fromhex(message) for message in remote.do("messages", count=len(sent))] == sent
    remote.do("send", messages=[message.hex() for message in sent[:40]])
    assert here.messages(40) == sent[:40]


def test_a_message_of_another_link_is_dropped(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    stranger = here.reactor.open_link(epoch=1, cookie=666)
    stranger.connect(there.link.address())
    stranger.send(b"let me in")
    stranger.flush(9)
    here.take(EventKind.FLUSHED)
    here.link.send(b"mine")
    assert there.messages() == [b"mine"]
    deadline = time.monotonic() + 10
    while there.reactor.stats()["messages_wrong_link"] == 0:
        assert time.monotonic() < deadline
        there.poll(0.05)
    assert there.none(EventKind.MESSAGE, 0.05)
    stranger.close()


@pytest.mark.parametrize(
    ("transport", "wanted"), [("cma", "cma/memory"), ("tcp", "tcp/lo"), ("auto", "cma/memory")]
)
def test_the_transport_is_the_one_asked_for(make_remote: Make, transport: str, wanted: str) -> None:
    here, _ = make_remote(transport)
    here.link.flush(1)
    assert here.take(EventKind.FLUSHED)[0][2:4] == (1, 0)
    lanes = here.link.transports()
    assert wanted in lanes
    if transport == "tcp":
        assert set(lanes) == {"tcp/lo"}
    assert wanted.split("/")[0] in here.link.describe()
    assert wanted in here.context.transports()


def test_ucx_listens_on_loopback_only(make_remote: Make) -> None:
    here, remote = make_remote("auto")
    here.link.send(b"connected")
    remote.do("messages", count=1)
    listening = remote.do("listening")
    # 127.0.0.1 and ::1 as /proc/net/tcp and tcp6 write them.
    assert listening
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}


def test_the_event_fd_wakes_epoll_and_rests(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    epoll = select.epoll()
    epoll.register(there.reactor.event_fd, select.EPOLLIN)
    there.poll(0.2)
    assert epoll.poll(0.05) == []
    here.link.send(b"wake")
    assert epoll.poll(10.0) == [(there.reactor.event_fd, select.EPOLLIN)]
    assert [event[4] for event in there.reactor.drain()] == [b"wake"]
    assert epoll.poll(0.05) == []
    epoll.close()


def test_the_idle_reactor_sleeps(make_pair: Make) -> None:
    here, _ = make_pair("cma", spin_us=50)
    here.link.flush(1)
    here.take(EventKind.FLUSHED)
    time.sleep(0.1)
    before = here.reactor.stats()
    time.sleep(0.5)
    after = here.reactor.stats()
    # A wake-up each 100 ms; a busy loop would take a hundred thousand turns.
    assert after["turns"] - before["turns"] < 20_000
    assert 2 <= after["sleeps"] - before["sleeps"] < 100


def test_memory_stays_registered_while_a_link_lives() -> None:
    context = ucx.open_context("tcp", "127.0.0.1")
    reactor = ucx.open_reactor(context, spin_us=0, copy_threads=1)
    memory = np.zeros(8192, dtype=np.uint8)
    region = context.register(memory.ctypes.data, memory.nbytes)
    link = reactor.open_link(epoch=1, cookie=1)
    with pytest.raises(UcxFailed, match="link"):
        region.close()
    with pytest.raises(UcxFailed, match="link"):
        context.close()
    link.close()
    region.close()
    region.close()
    with pytest.raises(UcxFailed, match="closed"):
        region.packed_key()
    reactor.close()
    reactor.close()
    with pytest.raises(UcxFailed, match="closed"):
        reactor.open_link(epoch=2, cookie=1)
    context.close()
    context.close()


def test_settings_that_ucx_does_not_know_or_take_are_refused() -> None:
    for overrides in (
        {"NO_SUCH_SETTING": "1"},
        {"UCX_KEEPALIVE_INTERVAL": "soon"},
        {"TLS": "no_such_transport"},
    ):
        with pytest.raises(UcxFailed) as failed:
            ucx.open_context("tcp", "127.0.0.1", overrides=overrides)
        assert failed.value.status < 0
        assert failed.value.call.startswith("ucp_")
    with pytest.raises(TransferError, match="no network interface"):
        ucx.open_context("tcp", "203.0.113.7")


def test_device_memory_is_not_taken_for_host_memory() -> None:
    context = ucx.open_context("tcp", "127.0.0.1")
    memory = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(UcxFailed, match="host memory where cuda"):
        context.register(memory.ctypes.data, memory.nbytes, memory="cuda")
    with pytest.raises(UcxFailed, match="unknown kind"):
        context.register(memory.ctypes.data, memory.nbytes, memory="wood")
    context.close()
