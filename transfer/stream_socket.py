# SPDX-License-Identifier: Apache-2.0
"""The sockets of lane stream, until the native threads get them: made and tuned here, on both sides."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from kvrail.transfer import control_socket
from kvrail.transfer.errors import LinkLost

__all__ = ["dial_stream", "listen_stream"]

# As UCX is told to (ucx.context_settings): a cut cable is noticed within seconds.
_TIMEOUT_MS = 3000
# The kernel keeps a crowd waiting, and not the writer, who would have to knock again a second later.
_BACKLOG = 512
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


def listen_stream(host: str) -> socket.socket:
    """Listen on a free port of exactly `host`, for one writer. Raises TransferError."""
    sock = control_socket.listen_tcp(host)
    sock.listen(_BACKLOG)
    # What is accepted inherits this.
    _tune(sock)
    return sock


def dial_stream(host: str, port: int) -> socket.socket:
    """A socket that connects, or has connected, to a numeric `host`. Raises LinkLost."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise LinkLost(f"{host}:{port}: {error}") from error
    sock.setblocking(False)
    try:
        _tune(sock)
        failed = sock.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            raise OSError(failed, os.strerror(failed))
        if sock.getsockname()[0] == address[0]:
            # Within one host there is no path to be measured: an algorithm that paces what it sends (BBR) only waits
            # for its timer, which halves what loopback carries. Elsewhere the system's choice stands.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except OSError as error:
        sock.close()
        raise LinkLost(f"cannot reach {host}:{port}: {error.strerror or error}") from error
    return sock


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
