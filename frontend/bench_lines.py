# SPDX-License-Identifier: Apache-2.0
"""What the two processes of transfer-bench say to each other: JSON objects, one a line, over one connected socket."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

from kvrail.transfer.errors import TransferError

__all__ = ["Lines", "OtherGone", "notice_a_cut"]

_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 20_000


def notice_a_cut(sock: socket.socket) -> None:
    """A cable that is cut, or a host that is gone, ends this TCP connection within half a minute, and not never."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class OtherGone(TransferError):
    """The other process has ended, or says nothing any more: nothing else can be measured."""


class Lines:
    """One end; `other` is what errors call the other one. Owns the socket."""

    def __init__(self, sock: socket.socket, other: str, within_s: float | None = None) -> None:
        self.socket = sock
        self.other = other
        self._left = b""
        self.allow(within_s)

    def allow(self, within_s: float | None) -> None:
        """How long a line may take from now on (None: for ever)."""
        self._within_s = within_s
        self.socket.settimeout(within_s)

    def tell(self, **said: object) -> None:
        """Raises OtherGone."""
        try:
            self.socket.sendall(json.dumps(said).encode() + b"\n")
        except OSError as error:
            raise self._gone(error) from None

    def waiting(self) -> bool:
        """Whether `hear` would not sleep (it may, for the rest of a line)."""
        return b"\n" in self._left or bool(select.select([self.socket], [], [], 0)[0])

    def hear(self, most_bytes: int | None = None) -> dict[str, Any] | None:
        """Sleeps until the next line is here; None when the other has closed its end between two lines.

        Raises OtherGone, or ValueError for what is no such line, or is longer than `most_bytes`.
        """
        until = None if self._within_s is None else time.monotonic() + self._within_s
        while b"\n" not in self._left:
            if most_bytes is not None and len(self._left) > most_bytes:
                raise ValueError(f"more than {most_bytes} bytes without an end of line")
            try:
                if until is not None:
                    self.socket.settimeout(max(0.001, until - time.monotonic()))
                data = self.socket.recv(1 << 20)
            except OSError as error:
                raise self._gone(error) from None
            finally:
                with contextlib.suppress(OSError):
                    self.socket.settimeout(self._within_s)
            if not data:
                if self._left:
                    raise OtherGone(f"{self.other} has ended in the middle of a line")
                return None
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        if most_bytes is not None and len(line) > most_bytes:
            raise ValueError(f"a line of {len(line)} bytes")
        try:
            found = json.loads(line)
        except RecursionError:
            raise ValueError("too many brackets") from None
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found

    def _gone(self, error: OSError) -> OtherGone:
        if isinstance(error, TimeoutError) and error.errno is None:
            return OtherGone(f"{self.other} has said nothing for {self._within_s:g} s")
        return OtherGone(f"{self.other} cannot be reached any more: {error.strerror or error}")

    def close(self) -> None:
        self.socket.close()
