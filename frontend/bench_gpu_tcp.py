# SPDX-License-Identifier: Apache-2.0
"""Pages from GPU to GPU through host memory and one TCP socket: what a split without one-sided writes does.

Pages are gathered on the GPU, copied into pinned memory, sent, received into pinned memory, copied up and scattered.
Two buffers on each side: copying one piece overlaps with sending the other. A side whose pages lie in host memory sends
them from there, or receives them there.
"""

from __future__ import annotations

import socket
import time

import torch

from kvrail.frontend.bench_gpu_memory import GpuMemory
from kvrail.frontend.bench_rank import Indices
from kvrail.frontend.bench_socket import SocketWay, close_socket, receive_exactly
from kvrail.transfer.memory import HostPool

__all__ = ["StagedTcp"]

_PIECE_BYTES = 8 << 20


class StagedTcp:
    """One end."""

    def __init__(self, memory: GpuMemory, sock: socket.socket) -> None:
        self._memory, self._sock = memory, sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pool = memory.pool
        self._direct = SocketWay(pool, sock) if isinstance(pool, HostPool) else None
        if self._direct is not None:
            return
        size = pool.unit_bytes
        self._pages = max(1, _PIECE_BYTES // size)
        shape = (self._pages, size)
        self._host = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stage = [torch.empty(shape, dtype=torch.uint8, device=memory.rows.device) for _ in range(2)]
        self._views = [host.numpy().data.cast("B") for host in self._host]
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def push(self, number: int, source: Indices, target: Indices) -> None:
        if self._direct is not None:
            self._direct.send(source)
            return
        pieces = self._pieces(source)
        self._down(0, pieces[0])
        for turn, piece in enumerate(pieces):
            if turn + 1 < len(pieces):
                self._down((turn + 1) % 2, pieces[turn + 1])
            self._events[turn % 2].synchronize()
            self._sock.sendall(self._views[turn % 2][: len(piece) * self._memory.pool.unit_bytes])

    def _pieces(self, pages: Indices) -> list[torch.Tensor]:
        index = self._memory.index(pages)
        return [index[at : at + self._pages] for at in range(0, len(index), self._pages)]

    def _down(self, slot: int, piece: torch.Tensor) -> None:
        count = len(piece)
        torch.index_select(self._memory.rows, 0, piece, out=self._stage[slot][:count])
        self._host[slot][:count].copy_(self._stage[slot][:count], non_blocking=True)
        self._events[slot].record()

    def await_batch(self, number: int, target: Indices) -> int:
        if self._direct is not None:
            self._direct.receive(target)
            return time.monotonic_ns()
        for turn, piece in enumerate(self._pieces(target)):
            slot, count = turn % 2, len(piece)
            self._events[slot].synchronize()  # the copy before last has left this buffer
            receive_exactly(self._sock, self._views[slot][: count * self._memory.pool.unit_bytes])
            self._stage[slot][:count].copy_(self._host[slot][:count], non_blocking=True)
            self._memory.rows.index_copy_(0, piece, self._stage[slot][:count])
            self._events[slot].record()
        self._memory.wait()
        return time.monotonic_ns()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        close_socket(self._sock)
