# SPDX-License-Identifier: Apache-2.0
"""Pages over one TCP socket of loopback, as a tuned native program moves them: writev and recvmsg of 1024 pages a call.

The vectors are built by numpy and the C library is called directly: a page costs Python nothing. A C++ program that
makes the same calls is about a tenth faster (doc/numbers.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrail.frontend.bench_lines import notice_a_cut
from kvrail.frontend.bench_rank import Indices
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import HostPool

__all__ = ["SocketWay", "close_socket", "congestion_control", "receive_exactly"]

_IOV_MAX = 1024
_VECTOR = np.dtype([("base", np.uint64), ("length", np.uint64)])


class _Message(ctypes.Structure):
    """struct msghdr"""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class SocketWay:
    """An index list, then the pages. Complete when the last byte is in the receiver's page."""

    def __init__(self, pool: HostPool, sock: socket.socket) -> None:
        self._sock = sock
        self._address, self._size = pool.address, pool.unit_bytes
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_a_cut(sock)
        libc = ctypes.CDLL(None, use_errno=True)
        self._writev: Any = libc.writev
        self._recvmsg: Any = libc.recvmsg
        self._writev.restype = self._recvmsg.restype = ctypes.c_ssize_t

    def push(self, number: int, source: Indices, target: Indices) -> None:
        try:
            self._sock.sendall(np.concatenate(([np.uint32(len(target))], target)).tobytes())
        except OSError as error:
            raise TransferError(f"the socket ended before a batch: {error.strerror or error}") from None
        self.send(source)

    def await_batch(self, number: int, target: Indices) -> int:
        head = bytearray(4)
        receive_exactly(self._sock, memoryview(head))
        listed = bytearray(4 * int.from_bytes(head, "little"))
        receive_exactly(self._sock, memoryview(listed))
        self.receive(np.frombuffer(listed, np.uint32))
        return time.monotonic_ns()

    def send(self, pages: Indices) -> None:
        """These pages' bytes, one after the other."""
        fd = self._sock.fileno()
        self._all(pages, lambda at, count: self._writev(fd, ctypes.c_void_p(at), count))

    def receive(self, pages: Indices) -> None:
        """As many bytes as these pages have, into them."""
        fd, message = self._sock.fileno(), _Message()

        def receive(at: int, count: int) -> int:
            message.vectors, message.count = at, count
            return int(self._recvmsg(fd, ctypes.byref(message), socket.MSG_WAITALL))

        self._all(pages, receive)

    def _all(self, pages: Indices, move: Any) -> None:
        """Call `move(address of vectors, how many)` until every byte of the pages has moved."""
        vectors: npt.NDArray[Any] = np.empty(len(pages), _VECTOR)
        vectors["base"] = self._address + pages.astype(np.uint64) * np.uint64(self._size)
        vectors["length"] = self._size
        at = 0
        while at < len(pages):
            moved = move(vectors.ctypes.data + at * _VECTOR.itemsize, min(_IOV_MAX, len(pages) - at))
            if moved <= 0:
                if moved and ctypes.get_errno() == 4:  # interrupted by a signal
                    continue
                why = os.strerror(ctypes.get_errno()) if moved else "the other end is closed"
                raise TransferError(f"the socket ended within a batch: {why}")
            first = int(vectors["length"][at])
            if moved >= first:
                whole, moved = divmod(moved - first, self._size)
                at += 1 + whole
            if moved:
                vectors["base"][at] += np.uint64(moved)
                vectors["length"][at] -= np.uint64(moved)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        close_socket(self._sock)


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises TransferError when the other end closes first."""
    while into:
        got = sock.recv_into(into, 0, socket.MSG_WAITALL)
        if not got:
            raise TransferError("the socket ended within a batch")
        into = into[got:]


def close_socket(sock: socket.socket) -> None:
    """Both directions, then the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def congestion_control() -> str:
    """What decides how fast a TCP connection of this host sends ("bbr", "cubic", …), unless it asks for another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
