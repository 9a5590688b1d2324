# SPDX-License-Identifier: Apache-2.0
"""Frames, passed descriptors and peer checks on real sockets of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrail.transfer import control_socket
from kvrail.transfer.control_socket import ControlStream, Frame, PeerBusy
from kvrail.transfer.errors import LinkLost, LinkRefused, TransferError
from kvrail.transfer.memory import SEALS


@pytest.fixture
def pair() -> Iterator[tuple[ControlStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = ControlStream(ours)
    yield stream, theirs
    stream.close()
    theirs.close()


def memfd(size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_frame_in_single_bytes(pair: tuple[ControlStream, socket.socket]) -> None:
    stream, theirs = pair
    for byte in struct.pack("<I", 3) + b"abc":
        assert stream.receive() is None
        theirs.send(bytes([byte]))
    assert stream.receive() == Frame(b"abc", ())


def test_nothing_is_read_beyond_a_frame(pair: tuple[ControlStream, socket.socket]) -> None:
    """What follows the last frame belongs to the native thread."""
    stream, theirs = pair
    theirs.send(struct.pack("<I", 2) + b"hi" + b"heartbeat")
    assert stream.receive() == Frame(b"hi", ())
    left = socket.socket(fileno=stream.detach())
    assert left.recv(100) == b"heartbeat"
    left.close()


def test_oversized_frame_is_refused_before_it_is_read(pair: tuple[ControlStream, socket.socket]) -> None:
    stream, theirs = pair
    theirs.send(struct.pack("<I", control_socket.FIRST_LIMIT + 1))
    with pytest.raises(LinkRefused, match="at most"):
        stream.receive()


@pytest.mark.parametrize("said", [b"", b"\x05", struct.pack("<I", 9) + b"cut"])
def test_end_of_stream(pair: tuple[ControlStream, socket.socket], said: bytes) -> None:
    stream, theirs = pair
    theirs.send(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkLost, match="closed"):
        stream.receive()


def test_large_frame_goes_in_pieces(pair: tuple[ControlStream, socket.socket]) -> None:
    stream, theirs = pair
    receiver = ControlStream(theirs)
    receiver.limit = control_socket.FRAME_LIMIT
    payload = os.urandom(control_socket.FRAME_LIMIT)
    stream.send(payload)
    assert stream.wants_write
    frame = None
    for _ in range(1000):
        stream.flush()
        frame = receiver.receive()
        if frame:
            break
    assert frame is not None
    assert frame.payload == payload


def test_descriptors_arrive_with_their_frame(pair: tuple[ControlStream, socket.socket]) -> None:
    stream, theirs = pair
    receiver = ControlStream(theirs)
    first, second = memfd(4096), memfd(8192)
    stream.send(b"pools", (first, second))
    stream.send(b"next")
    frame = receiver.receive()
    assert frame is not None
    assert [os.fstat(fd).st_size for fd in frame.fds] == [4096, 8192]
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in frame.fds)
    assert receiver.receive() == Frame(b"next", ())
    for fd in (first, second, *frame.fds):
        os.close(fd)


def test_unclaimed_descriptors_are_closed(pair: tuple[ControlStream, socket.socket]) -> None:
    stream, theirs = pair
    fd = memfd(4096)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(theirs, [struct.pack("<I", 50) + b"cut"], [fd])
    assert stream.receive() is None
    assert len(os.listdir("/proc/self/fd")) == before + 1
    stream.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    os.close(fd)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memfd_must_be_sealed(seals: int) -> None:
    fd = memfd(4096, seals)
    with pytest.raises(LinkRefused, match="not sealed"):
        control_socket.check_memfd(fd, 4096)
    os.close(fd)


def test_memfd_must_be_as_large_as_said_and_a_memfd(tmp_path: Path) -> None:
    fd = memfd(4096)
    control_socket.check_memfd(fd, 4096)
    with pytest.raises(LinkRefused, match="4096 bytes for a pool of 4097"):
        control_socket.check_memfd(fd, 4097)
    os.close(fd)
    with (tmp_path / "file").open("wb") as file, pytest.raises(LinkRefused, match="no memfd"):
        control_socket.check_memfd(file.fileno(), 0)


@pytest.mark.parametrize("use_peer_pidfd", [True, False])
def test_peer_process(pair: tuple[ControlStream, socket.socket], use_peer_pidfd: bool) -> None:
    stream, _ = pair
    peer = control_socket.peer_process(stream.socket, use_peer_pidfd=use_peer_pidfd)
    assert peer.pid == os.getpid()
    assert f"Pid:\t{os.getpid()}" in Path(f"/proc/self/fdinfo/{peer.pidfd}").read_text()
    os.close(peer.pidfd)


def test_socket_folder_must_be_private(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    listener = control_socket.listen_unix(folder / "a.sock")
    assert folder.stat().st_mode & 0o777 == 0o700
    stream = control_socket.dial_unix(folder / "a.sock")
    stream.close()
    listener.close()
    folder.chmod(0o750)
    for use in (control_socket.listen_unix, control_socket.dial_unix):
        with pytest.raises(TransferError, match="mode 0700"):
            use(folder / "b.sock")
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(TransferError, match="must be a folder"):
        control_socket.listen_unix(link / "c.sock")


def test_dial_tcp_to_nobody_is_lost() -> None:
    listener = control_socket.listen_tcp("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()

    def reach() -> None:
        stream = control_socket.dial_tcp("127.0.0.1", port)
        try:
            stream.send(b"hello")
            for _ in range(100):
                stream.flush()
        finally:
            stream.close()

    with pytest.raises(LinkLost):
        reach()
    with pytest.raises(LinkLost, match="not a numeric address"):
        control_socket.dial_tcp("kvrail.invalid", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "lo"])
def test_listens_on_address_name_or_interface(host: str) -> None:
    listener = control_socket.listen_tcp(host)
    assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    listener.close()


def test_host_that_is_not_ours_is_a_clear_error() -> None:
    with pytest.raises(TransferError, match="--kv-host"):
        control_socket.listen_tcp("203.0.113.9")


def test_a_full_queue_at_the_peer_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run" / "link.sock"
    listener = control_socket.listen_unix(path)
    streams = []
    with contextlib.suppress(PeerBusy):
        for _ in range(200):
            streams.append(control_socket.dial_unix(path))
    assert 0 < len(streams) < 200
    for stream in streams:
        stream.close()
    listener.close()
