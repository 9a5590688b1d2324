# SPDX-License-Identifier: Apache-2.0
"""Lane stream from its reader's side: whoever has no secret gets in nowhere, and no frame reaches out of its pool."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.flood import flooding
from kit.remote import Remote
from kvrail.transfer.errors import UcxFailed
from kvrail.transfer.stream_socket import dial_stream
from kvrail.transfer.ucx import EventKind

STREAM = 2
PAGE, PAGES = 4096, 16
POISON = 0xA5A5A5A5A5A5A5A5
MAGIC = 0x0153564B
INVALID_PARAM, CONNECTION_RESET = -5, -25
Make = Callable[..., Any]


def indices(values: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.asarray(values, dtype=np.uint32)


def frame(*runs: tuple[int, int], number: int = 1, payload: bytes | None = None, **changes: int) -> bytes:
    """A frame for these runs (offset, bytes), of which single fields may be wrong."""
    fields = {
        "magic": MAGIC,
        "pool": STREAM,
        "number": number,
        "unit": PAGE,
        "nbytes": sum(nbytes for _, nbytes in runs),
        "runs": len(runs),
        "zero": 0,
    } | changes
    listed = b"".join(struct.pack("<QQ", *run) for run in runs)
    body = b"\x11" * min(fields["nbytes"], 1 << 20) if payload is None else payload
    return struct.pack("<IIQQQII", *fields.values()) + listed + body


class Reader:
    """A link that reads, and raw connections to it."""

    def __init__(self, end: Any, secret: bytes, stack: ExitStack) -> None:
        self.end, self.secret, self._stack = end, secret, stack
        self.address = end.listening.getsockname()
        end.data[:] = POISON
        end.read_stream()

    def dial(self, said: bytes = b"") -> socket.socket:
        sock = self._stack.enter_context(socket.create_connection(self.address, timeout=10))
        # It may hang up before it has heard all.
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(said)
        return sock

    @property
    def untouched(self) -> bool:
        return bool((self.end.data == POISON).all())

    def strangers(self) -> int:
        return int(self.end.reactor.stats()["stream_strangers"])


@pytest.fixture
def reader(peers: Any) -> Iterator[Reader]:
    with ExitStack() as stack:
        end = peers.Peer("tcp", pages=PAGES, page_bytes=PAGE, reads=True)
        stack.callback(end.close)
        yield Reader(end, peers.SECRET, stack)


def closed(sock: socket.socket) -> bool:
    """Whether the other end closes this within ten seconds."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_frame_is_written_and_answered_with_its_number(reader: Reader) -> None:
    sock = reader.dial(reader.secret)
    # Whole units that are neighbours, one unit, a piece of one.
    runs = [(3 * PAGE, 2 * PAGE), (0, PAGE), (9 * PAGE + 512, 1024)]
    content = os.urandom(sum(nbytes for _, nbytes in runs))
    whole = frame(*runs, payload=content)
    for part in (whole[:7], whole[7:60], whole[60:5000], whole[5000:]):
        sock.sendall(part)
        time.sleep(0.02)
    assert struct.unpack("<Q", sock.recv(8)) == (1,)
    expected = np.full((PAGES, PAGE), 0xA5, np.uint8)
    expected[3:5] = np.frombuffer(content[: 2 * PAGE], np.uint8).reshape(2, PAGE)
    expected[0] = np.frombuffer(content[2 * PAGE : 3 * PAGE], np.uint8)
    expected[9, 512:1536] = np.frombuffer(content[3 * PAGE :], np.uint8)
    assert (reader.end.data.view(np.uint8) == expected).all()
    sock.sendall(frame((0, PAGE), number=2))
    assert struct.unpack("<Q", sock.recv(8)) == (2,)


FORBIDDEN = {
    "garbage": (b"GET / HTTP/1.1\r\nHost: of this many bytes\r\n\r\n" * 4, "it is none"),
    "another version": (frame((0, PAGE), magic=MAGIC + (1 << 24)), "it is none"),
    "padding": (frame((0, PAGE), zero=1), "it is none"),
    "unknown pool": (frame((0, PAGE), pool=7), "there is no pool 7"),
    "other units": (frame((0, PAGE), unit=2 * PAGE), "another size"),
    "no runs": (frame(), "has 0 runs"),
    "too many runs": (frame(*[(0, PAGE)] * 1024), "has 1024 runs"),
    "beyond the pool": (frame((0, PAGE), (PAGES * PAGE, PAGE)), "outside pool"),
    "over the end": (frame((0, PAGE), ((PAGES - 1) * PAGE, 2 * PAGE)), "outside pool"),
    "wraps around": (frame(((1 << 64) - PAGE, 2 * PAGE)), "outside pool"),
    "huge": (frame((0, (1 << 64) - PAGE)), "outside pool"),
    "empty run": (frame((0, PAGE), (PAGE, 0)), "neither whole units"),
    "across units": (frame((PAGE // 2, PAGE)), "neither whole units"),
    "not whole units": (frame((0, PAGE + 8)), "neither whole units"),
    "shorter than said": (frame((0, PAGE), nbytes=2 * PAGE), "shorter than it"),
    "longer than said": (frame((0, PAGE), (PAGE, PAGE), nbytes=PAGE), "longer than it"),
    "not the next": (frame((0, PAGE), number=2), "not the next one"),
}


@pytest.mark.parametrize(("said", "word"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_forbidden_frame_ends_the_link_and_writes_nothing(reader: Reader, said: bytes, word: str) -> None:
    sock = reader.dial(reader.secret + said)
    _kind, _, _, status, reason = reader.end.take(EventKind.LINK_ERROR)[0]
    assert status == INVALID_PARAM
    assert reason.startswith(b"lane stream: the peer sent a frame that is not allowed")
    assert word.encode() in reason
    assert closed(sock)
    assert reader.untouched


def test_a_frame_that_ends_early_is_never_answered(reader: Reader) -> None:
    reader.end.link.settle_stream(True)
    sock = reader.dial(reader.secret + frame((0, PAGE), (PAGE, PAGE))[: -PAGE // 2])
    time.sleep(0.1)
    assert not select.select([sock], [], [], 0)[0]
    sock.shutdown(socket.SHUT_WR)
    assert reader.end.take(EventKind.LINK_ERROR)[0][3] == CONNECTION_RESET
    assert sock.recv(8) == b""
    # What came is in its own pages, and nowhere else.
    assert (reader.end.data[2:] == POISON).all()


@pytest.mark.parametrize("place", [0, 15, 31])
def test_a_wrong_secret_is_sent_away(reader: Reader, place: int) -> None:
    wrong = bytearray(reader.secret)
    wrong[place] ^= 1
    sock = reader.dial(bytes(wrong) + frame((0, PAGE)))
    assert closed(sock)
    assert reader.strangers() == 1
    assert reader.untouched
    assert reader.end.none(EventKind.LINK_ERROR, 0.05)
    good = reader.dial(reader.secret + frame((0, PAGE)))
    assert struct.unpack("<Q", good.recv(8)) == (1,)


def test_a_crowd_that_says_nothing_keeps_nobody_out(reader: Reader) -> None:
    crowd = [reader.dial(said) for said in [b"", reader.secret[:-1]] * 40]
    good = reader.dial(reader.secret + frame((0, PAGE)))
    assert struct.unpack("<Q", good.recv(8)) == (1,)
    assert all(map(closed, crowd))


@pytest.mark.parametrize("count", [100, 400])
def test_a_flood_pushes_nobody_out_who_speaks_within_a_moment(reader: Reader, count: int) -> None:
    """Strangers before and behind the writer, from another process, in the milliseconds before he says the secret."""
    with flooding(count, "at", *reader.address) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline().startswith("flood")
        good = reader.dial(reader.secret[:5])
        assert flood.stdout.readline().startswith("done")
        begun = time.monotonic()
        time.sleep(0.1)
        good.sendall(reader.secret[5:] + frame((0, PAGE)))
        assert struct.unpack("<Q", good.recv(8)) == (1,)
        # The crowd that came first, a hundred in each moment of 0.2 s.
        assert time.monotonic() - begun < 3


def test_behind_a_flood_the_writer_gets_in_within_a_bounded_time(reader: Reader) -> None:
    with flooding(400, "at", *reader.address) as flood:
        assert flood.stdout is not None
        assert [flood.stdout.readline().split()[0] for _ in range(2)] == ["flood", "done"]
        begun = time.monotonic()
        good = reader.dial(reader.secret + frame((0, PAGE)))
        assert struct.unpack("<Q", good.recv(8)) == (1,)
        assert time.monotonic() - begun < 3


def test_a_real_writer_comes_in_and_pushes_amid_floods(peers: Any) -> None:
    """It dials in the middle of one; the next comes while its pages do."""
    with ExitStack() as stack:
        remote = Remote(Path(peers.__file__))
        stack.callback(remote.end)
        theirs = remote.do("open", transport="tcp")
        here = peers.Peer("tcp", reads=True)
        stack.callback(here.close)
        card, address = here.card(), here.listening.getsockname()
        here.join(theirs)
        remote.do("fill", word=7)
        flood = stack.enter_context(flooding(400, "at", *address))
        assert flood.stdout is not None
        assert flood.stdout.readline().startswith("flood")
        begun = time.monotonic()
        remote.do("join", card=card)
        remote.do("push", lane=STREAM, pages=list(range(len(here.data))), key=1, times=2000)
        while not here.reactor.stats()["stream_frames_received"]:
            assert time.monotonic() - begun < 5
            time.sleep(0.001)
        again = stack.enter_context(flooding(400, "at", *address))
        assert again.stdout is not None
        assert [again.stdout.readline().split()[0] for _ in range(2)] == ["flood", "done"]
        while here.reactor.stats()["stream_frames_received"] < 2000:
            assert time.monotonic() - begun < 30
            time.sleep(0.01)
        assert (here.data == 7).all()
        assert here.none(EventKind.LINK_ERROR, 0.05)


def test_a_crowd_takes_a_bounded_number_of_descriptors(reader: Reader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with flooding(400, "at", *reader.address) as flood:
        assert flood.stdout is not None
        most = 0
        for _ in range(50):
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
            time.sleep(0.01)
        assert 100 < most < 150


def test_when_the_writer_is_in_nobody_is_listening(reader: Reader) -> None:
    good = reader.dial(reader.secret + frame((0, PAGE)))
    good.recv(8)
    with pytest.raises(ConnectionRefusedError):
        reader.dial()


def test_the_fence_joins_a_reader_that_waits_anywhere(peers: Any) -> None:
    for said in (None, b"", b"half", peers.SECRET, peers.SECRET + frame((0, PAGE))[:-9]):
        with ExitStack() as stack:
            end = peers.Peer("tcp", pages=PAGES, page_bytes=PAGE, reads=True)
            stack.callback(end.close)
            reader = Reader(end, peers.SECRET, stack)
            sock = None if said is None else reader.dial(said)
            time.sleep(0.05)
            end.link.fence()
            end.take(EventKind.FENCED, timeout=5)
            assert "kvrail-stream\n" not in threads()
            end.data[:] = 7
            if sock is not None:
                with suppress(ConnectionResetError, BrokenPipeError):
                    for _ in range(20):
                        sock.sendall(b"\x22" * 4096)
                        time.sleep(0.002)
            assert (end.data == 7).all()


def threads() -> list[str]:
    return [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]


def test_memory_that_is_not_registered_is_no_target(peers: Any) -> None:
    end = peers.Peer("tcp", pages=PAGES, page_bytes=PAGE, reads=True)
    try:
        beyond = [(STREAM, end.base, end.data.nbytes + PAGE, PAGE)]
        with pytest.raises(UcxFailed, match="not in registered host memory"):
            end.link.read_stream(os.dup(end.listening.fileno()), secret=bytes(32), pools=beyond)
        with pytest.raises(ValueError, match="32 bytes"):
            end.link.read_stream(os.dup(end.listening.fileno()), secret=b"short", pools=[])
    finally:
        end.close()


def test_a_writer_without_a_connection_is_told(make_pair: Make) -> None:
    here, there = make_pair("tcp")
    there.link.import_stream(STREAM, nbytes=here.data.nbytes, unit_bytes=here.page_bytes)
    writer = there.link.writer(1, ttl_s=30.0)
    writer.push(STREAM, there.base, indices([0]), indices([0]))
    assert b"no connection for lane stream" in there.take(EventKind.FAILED)[0][4]


def test_a_push_behind_the_end_of_the_stream_is_told_as_well(make_pair: Make) -> None:
    """At once, and again when the stream's thread is gone: none may wait there for ever."""
    here, _there = make_pair("tcp")
    here.link.settle_stream(False)
    for key in range(1, 200):
        writer = here.link.writer(key, ttl_s=30.0)
        writer.push(STREAM, here.base, indices([0]), indices([0]), way="stream")
        assert b"no connection for lane stream" in here.take(EventKind.FAILED)[0][4]
        writer.stop()
        assert here.take(EventKind.QUIET)[0][2:4] == (key, 0)


@pytest.mark.parametrize("used", [False, True])
def test_before_it_is_chosen_a_lost_connection_fails_its_pushes_only(peers: Any, used: bool) -> None:
    with ExitStack() as stack:
        here, there = (peers.Peer("tcp") for _ in range(2))
        for end in (here, there):
            stack.callback(end.close)
        here.join(there.card())
        there.join(here.card())
        nobody = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        link = here.reactor.open_link(epoch=2, cookie=9)
        stack.callback(link.close)
        link.write_stream(dial_stream(*nobody.getsockname()).detach(), secret=peers.SECRET)
        link.import_stream(STREAM, nbytes=here.data.nbytes, unit_bytes=here.page_bytes)
        link.settle_stream(True) if used else None
        writer = link.writer(5, ttl_s=30.0)
        writer.push(STREAM, here.base, indices([0]), indices([0]))
        nobody.accept()[0].close()
        _kind, _, key, status, reason = here.take(EventKind.FAILED)[0]
        assert (key, status) == (5, CONNECTION_RESET)
        assert b"reset" in reason.lower() or b"broken pipe" in reason.lower()
        assert here.none(EventKind.LINK_ERROR, 0.1) != used


def test_an_answer_to_what_was_not_sent_ends_the_link(peers: Any) -> None:
    with ExitStack() as stack:
        here = peers.Peer("tcp", pages=PAGES, page_bytes=PAGE)
        stack.callback(here.close)
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here.link.write_stream(dial_stream(*other.getsockname()).detach(), secret=peers.SECRET)
        here.link.import_stream(STREAM, nbytes=here.data.nbytes, unit_bytes=PAGE)
        here.link.settle_stream(True)
        writer = here.link.writer(1, ttl_s=30.0)
        writer.push(STREAM, here.base, indices([0, 4]), indices([2, 1]))
        sock = stack.enter_context(other.accept()[0])
        sock.settimeout(10)
        said = b""
        while len(said) < 32 + 40 + 32 + 2 * PAGE:
            said += sock.recv(65536)
        assert said[:32] == peers.SECRET
        assert said[32 : 32 + 72] == frame((2 * PAGE, PAGE), (PAGE, PAGE))[:72]
        sock.sendall(struct.pack("<Q", 2))
        assert b"answered a frame" in here.take(EventKind.LINK_ERROR)[0][4]
        writer.stop()
        assert here.take(EventKind.QUIET)[0][3] != 0
        assert (writer.posted, writer.done, writer.failed) == (2, 0, 2)
