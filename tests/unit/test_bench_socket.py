# SPDX-License-Identifier: Apache-2.0
"""The socket of transfer-bench, when the other host is gone."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrail.frontend import bench_session
from kvrail.frontend.bench_lines import Lines, OtherGone
from kvrail.frontend.bench_peer import FarReceiver
from kvrail.frontend.bench_session import HostSession
from kvrail.frontend.bench_socket import SocketWay
from kvrail.transfer.errors import TransferError

PAGE = 4096


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = stack.enter_context(socket.create_connection(listener.getsockname()))
        yield ours, stack.enter_context(listener.accept()[0])


def test_a_cut_cable_ends_it(ends: tuple[socket.socket, socket.socket]) -> None:
    """As the kernel is told; without that a receiver would wait for ever, and a sender for a quarter of an hour."""
    pool: Any = SimpleNamespace(address=0, unit_bytes=PAGE)
    for end in ends:
        SocketWay(pool, end)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silent = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        silent += end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * 3
        assert silent <= 30
        assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_a_batch_for_a_receiver_that_has_died(ends: tuple[socket.socket, socket.socket]) -> None:
    rows = np.zeros((1, PAGE), np.uint8)
    pool: Any = SimpleNamespace(address=rows.ctypes.data, unit_bytes=PAGE)
    ours, theirs = ends
    way, one = SocketWay(pool, ours), np.zeros(1, np.uint32)
    # A reset, as of a host that was started again.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    for _ in range(2):
        with pytest.raises(TransferError, match="the socket ended"):
            way.push(1, one, one)


def test_a_receiver_that_is_stuck_while_it_opens(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Alive to the kernel, and silent."""
    monkeypatch.setattr(bench_session, "_OPEN_S", 0.2)
    receiver = FarReceiver(Lines(ends[0], "rank 1", 0.5), "127.0.0.1")
    with pytest.raises(OtherGone, match="rank 1 has said nothing"):
        HostSession(receiver, ("socket",), PAGE, 4, 0, tmp_path)
