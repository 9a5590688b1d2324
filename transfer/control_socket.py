# SPDX-License-Identifier: Apache-2.0
"""Sockets of the control stream: listeners, frames, passed file descriptors, and who is at the other end.

A frame is a little-endian uint32 length and that many bytes. Nothing is read beyond the frame asked for, because
after the last one the socket goes to the native thread. All sockets are non-blocking.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvrail.transfer.errors import LinkLost, LinkRefused, TransferError
from kvrail.transfer.interfaces import ipv4_of
from kvrail.transfer.memory import SEALS

__all__ = [
    "FIRST_LIMIT",
    "FRAME_LIMIT",
    "ControlStream",
    "Frame",
    "PeerBusy",
    "PeerProcess",
    "check_memfd",
    "dial_tcp",
    "dial_unix",
    "listen_tcp",
    "listen_unix",
    "peer_process",
    "private_directory",
    "tune_tcp",
]

# Largest frame from a peer that has not proved that it holds the token, and from one that has.
FIRST_LIMIT = 4096
FRAME_LIMIT = 1 << 20
_MAX_FDS = 8
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module.
_LENGTH = struct.Struct("<I")
_BACKLOG = 64


class PeerBusy(LinkLost):
    """The peer is there, and has no room for one more caller at the moment."""


class Frame(NamedTuple):
    payload: bytes
    fds: tuple[int, ...]


@dataclass(frozen=True)
class PeerProcess:
    """The process at the other end of a Unix socket. `pidfd` turns readable when it is gone; -1: none, for `reason`."""

    pid: int
    pidfd: int
    reason: str = ""


class ControlStream:
    """One connected (or connecting) socket with frames on it. Owns the socket until `detach`."""

    def __init__(self, sock: socket.socket, *, connecting: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._connecting = connecting
        self._out = bytearray()
        self._out_fds: list[int] = []
        self._in = bytearray()
        self._in_fds: list[int] = []
        self.limit = FIRST_LIMIT
        self.is_unix = sock.family == socket.AF_UNIX

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return self._connecting or bool(self._out)

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue one frame (the fds are duplicated by the kernel when it goes out) and send what goes now."""
        assert not self._out_fds, "one frame with file descriptors at a time"
        self._out += _LENGTH.pack(len(payload)) + payload
        self._out_fds = list(fds)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises LinkLost."""
        try:
            if self._connecting:
                failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, os.strerror(failed))
                self._socket.getpeername()  # ENOTCONN while the connect is still running.
                self._connecting = False
            while self._out:
                rights = array.array("i", self._out_fds)
                extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
                sent = self._socket.sendmsg([self._out], extra, socket.MSG_NOSIGNAL)
                self._out_fds.clear()  # They went with the first byte.
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            if not (self._connecting and error.errno == errno.ENOTCONN):
                raise LinkLost(f"control stream: {error.strerror or error}") from error

    def receive(self) -> Frame | None:
        """The next whole frame, or None for now. Raises LinkLost at the end, LinkRefused for an oversized frame."""
        self._fill(_LENGTH.size)
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        if length > self.limit:
            raise LinkRefused(f"frame of {length} bytes on the control stream (at most {self.limit})")
        self._fill(_LENGTH.size + length)
        if len(self._in) < _LENGTH.size + length:
            return None
        frame = Frame(bytes(self._in[_LENGTH.size :]), tuple(self._in_fds))
        self._in.clear()
        self._in_fds = []
        return frame

    def _fill(self, size: int) -> None:
        """Read until `size` bytes of the current frame are here, and not one byte more."""
        rights = array.array("i")
        try:
            while len(self._in) < size:
                room = socket.CMSG_SPACE(_MAX_FDS * rights.itemsize) if self.is_unix else 0
                data, extra, _, _ = self._socket.recvmsg(size - len(self._in), room, socket.MSG_CMSG_CLOEXEC)
                for level, kind, content in extra:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        rights = array.array("i")
                        rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
                        self._in_fds += rights
                if not data:
                    raise LinkLost("control stream: the peer closed it")
                self._in += data
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLost(f"control stream: {error.strerror or error}") from error

    def detach(self) -> int:
        """Give the socket away as a file descriptor (to the native thread)."""
        self._drop_fds()
        return self._socket.detach()

    def close(self) -> None:
        self._drop_fds()
        self._socket.close()

    def _drop_fds(self) -> None:
        for fd in self._in_fds:
            os.close(fd)
        self._in_fds = []


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Listen on `port` (0: a free one) of exactly `host`: an address, a name, or a network interface of this host."""
    try:
        found = socket.getaddrinfo(_address_of(host), port, type=socket.SOCK_STREAM)
        sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        # An engine that is started again finds its port free, although connections of the last one linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise TransferError(f"--kv-host {host}: {error.strerror or error}") from error
    try:
        sock.bind(found[0][4])
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise TransferError(
            f"cannot listen on {host} port {port}: {error.strerror or error} (see --kv-host)"
        ) from error
    sock.setblocking(False)
    return sock


def _address_of(host: str) -> str:
    """The IPv4 address of the interface `host`, or `host` when no interface has that name."""
    if host not in (name for _, name in socket.if_nameindex()):
        return host
    return ipv4_of(host)


def listen_unix(path: Path) -> socket.socket:
    """Listen on a new Unix socket; its folder must be private to this user (it is made if absent)."""
    private_directory(path.parent, create=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        text = error.strerror or str(error)
        raise TransferError(f"cannot listen on {path}: {text} (a shorter --runtime-dir may help)") from error
    sock.setblocking(False)
    return sock


def dial_tcp(host: str, port: int) -> ControlStream:
    """Start to connect; the first `flush` after the socket turns writable says whether it worked."""
    try:
        # Numeric only: a name server must not hold up the step loop. Listeners tell numeric addresses.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError as error:
        raise LinkLost(f"{host}:{port} is not a numeric address: {error}") from error
    family, kind, _, _, address = found[0]
    sock = socket.socket(family, kind)
    sock.setblocking(False)
    tune_tcp(sock)
    result = sock.connect_ex(address)
    if result not in (0, errno.EINPROGRESS):
        sock.close()
        raise LinkLost(f"cannot reach {host}:{port}: {os.strerror(result)}")
    return ControlStream(sock, connecting=True)


def tune_tcp(sock: socket.socket) -> None:
    """Send heartbeats at once, and notice a cut cable: the control stream must break then too, not only UCX."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def dial_unix(path: Path) -> ControlStream:
    """Connect to a Unix socket in a private folder of this user. Raises TransferError (PeerBusy: not now)."""
    private_directory(path.parent, create=False)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(str(path))
    except BlockingIOError as error:
        sock.close()
        raise PeerBusy(f"{path} has a long queue") from error
    except OSError as error:
        sock.close()
        raise LinkLost(f"cannot connect to {path}: {error.strerror or error}") from error
    return ControlStream(sock)


def private_directory(path: Path, *, create: bool) -> None:
    """Raise unless `path` is a folder of this user that nobody else may enter (mode 0700)."""
    if create:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
    try:
        found = os.lstat(path)
    except OSError as error:
        raise TransferError(f"socket folder {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TransferError(
            f"socket folder {path} must be a folder of this user with mode 0700 "
            f"(it has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o})"
        )


def peer_process(sock: socket.socket, *, use_peer_pidfd: bool = True) -> PeerProcess:
    """Who is at the other end of a Unix socket. Raises LinkRefused when it is another user."""
    pid, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if uid != os.getuid():
        raise LinkRefused(f"the process at the other end of the Unix socket belongs to user {uid}, not to us")
    if use_peer_pidfd:
        with contextlib.suppress(OSError):
            return PeerProcess(pid, sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    # Between the peer's connect (or listen) and this call the pid may have been given to another process. The
    # recheck is the handshake itself: the peer answers our challenge after this line, so it still lives, so the pid
    # is still its own.
    try:
        return PeerProcess(pid, os.pidfd_open(pid))
    except OSError as error:
        return PeerProcess(pid, -1, f"no pidfd of the peer process: {error.strerror}")


def check_memfd(fd: int, nbytes: int) -> None:
    """Raise LinkRefused unless `fd` is a memfd of at least `nbytes` that can neither shrink nor grow."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise LinkRefused("the peer passed a file descriptor that is no memfd") from None
    if seals & SEALS != SEALS:
        raise LinkRefused("the peer passed a memfd that is not sealed against shrinking and growing")
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise LinkRefused(f"the peer passed a memfd of {size} bytes for a pool of {nbytes}")
