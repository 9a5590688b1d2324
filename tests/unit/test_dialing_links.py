# SPDX-License-Identifier: Apache-2.0
"""The CE's links against a scripted PE on a real socket, with a pretended native side."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.transfer import control_socket, handshake, wire
from kvrail.transfer.control_socket import ControlStream
from kvrail.transfer.conversation import Conversation
from kvrail.transfer.handshake import Accept
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LinkKey, LinkOptions, LinkRefusal, PeerAddress
from kvrail.transfer.links import Links
from kvrail.transfer.memory import Pools
from kvrail.transfer.ucx import EventKind, load_library
from kvrail.transfer.wire import SelfTest, SelfTestResult

TOKEN = b"t" * 32
CE, PE = LinkKey(b"c" * 16, 0), LinkKey(b"p" * 16, 0)
LAYOUT = PageLayout(model_id="m", layers=2, kv_heads=2, head_dim=32, dtype="float32", page_tokens=64)


class NativeLink:
    def __init__(self, number: int) -> None:
        self.id = number
        self.sent: list[bytes] = []
        self.control = -1

    def address(self, *, network_only: bool = False) -> bytes:
        return b"address"

    def connect(self, peer_address: bytes) -> None:
        assert self.control < 0

    def attach_control(self, fd: int, interval_ms: int) -> None:
        self.control = fd

    def peer_beat(self) -> tuple[float, bytes, bool]:
        return 0.0, b"", False

    def send(self, message: bytes) -> None:
        assert self.control >= 0, "nothing can be sent before the link is connected"
        self.sent.append(message)

    def fence(self) -> None:
        pass

    def close(self) -> None:
        if self.control >= 0:
            os.close(self.control)
            self.control = -1


class Reactor:
    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.links: list[NativeLink] = []
        self.events: list[tuple[int, int, int, int, bytes]] = []

    def open_link(self, *, epoch: int, cookie: int) -> NativeLink:
        self.links.append(NativeLink(len(self.links) + 7))
        return self.links[-1]

    def drain(self) -> list[tuple[int, int, int, int, bytes]]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    os.close(made.event_fd)


@pytest.fixture
def links(reactor: Reactor, tmp_path: Path) -> Iterator[Links]:
    load_library()
    memory = memoryview(bytearray(4096 * 2048))
    probe: Any = SimpleNamespace(
        address=1,
        nbytes=len(memory),
        unit_bytes=4096,
        memory="host",
        packed_key=bytes,
        read=lambda offset, nbytes: bytes(memory[offset : offset + nbytes]),
    )
    made = Links(
        reactor=reactor,  # type: ignore[arg-type]
        identity=CE,
        token=TOKEN,
        layout=LAYOUT,
        pools=Pools(probe, None, probe),
        options=LinkOptions(socket_dir=tmp_path / "run", lane="put"),
        accept=False,
    )
    yield made
    made.close()


def test_what_the_peer_says_before_its_accept_is_read_is_not_lost(
    links: Links, reactor: Reactor, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "pe.sock"
    listener = control_socket.listen_unix(path)
    links.connect(PeerAddress(*PE, "127.0.0.1", 1, str(path)))
    links.poll(time.monotonic())
    stream = ControlStream(listener.accept()[0])
    judged: list[int] = []

    def judge(key: LinkKey, offer: handshake.Offer, fds: tuple[int, ...], secret: bytes) -> Accept:
        judged.append(offer.epoch)
        # The PE's self-test is here, and our loop reads its news, before it reads the answer to its offer.
        test = SelfTest(epoch=offer.epoch, offset=0, nbytes=0, checksum=1)
        reactor.events.append((EventKind.MESSAGE, reactor.links[0].id, 0, 0, wire.encode(test)))
        reactor.events.append((EventKind.MESSAGE, 999, 0, 0, b"of a link that nobody knows"))
        links.poll(time.monotonic())
        return Accept(scope="all", address=b"address")

    pe = Conversation(stream, handshake.accepting(TOKEN, PE, os.urandom(32), judge), time.monotonic() + 10)
    while pe.advance(time.monotonic()) is None:
        links.poll(time.monotonic())
    links.poll(time.monotonic())
    (answer,) = reactor.links[0].sent
    assert judged == [1]
    assert isinstance(wire.decode(answer), SelfTestResult)
    stream.close()
    listener.close()


def test_a_path_that_is_none_is_a_refusal(links: Links) -> None:
    links.connect(PeerAddress(*PE, "127.0.0.1", 1, "/\0"))
    (refusal,) = links.poll(time.monotonic())
    assert isinstance(refusal, LinkRefusal)
