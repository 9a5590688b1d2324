# SPDX-License-Identifier: Apache-2.0
"""kvrail's own ways between GPU pools: the page-copy kernel, the copy engine, and UCX puts; each on its own link."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Literal

from kvrail.frontend.bench_gpu_memory import GpuMemory
from kvrail.frontend.bench_rank import Indices
from kvrail.transfer.errors import TransferError
from kvrail.transfer.ucx import EventKind, open_reactor

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["GPU_LANES", "GpuLane"]

# What the native writer calls each of them.
GPU_LANES: dict[str, Literal["kernel", "engine", "put"]] = {
    "peer/kernel": "kernel",
    "peer/engine": "engine",
    "put/gpu": "put",
}
_POOL = 0
_BATCH_S = 60.0


class GpuLane:
    """One end of a native link. The sender's imports the receiver's pool; the doorbell is the batch's number."""

    def __init__(self, memory: GpuMemory, lane: str, *, spin_us: int) -> None:
        self._memory = memory
        self._way = GPU_LANES[lane]
        self.polling = False
        self._reactor = open_reactor(memory.context, spin_us=spin_us, copy_threads=1, cuda=memory.cuda)
        self._link = self._reactor.open_link(epoch=1, cookie=7)
        self._poller = select.poll()
        self._poller.register(self._reactor.event_fd, select.POLLIN)
        self._writer: _ucx.Writer | None = None
        self._early: list[int] = []

    def card(self) -> dict[str, Any]:
        """What the other end needs: our worker's address and, from a receiver, the way into its pool."""
        pool = self._memory.pool
        card: dict[str, Any] = {
            "address": self._link.address().hex(),
            "key": pool.packed_key().hex(),
            "shape": [pool.address, pool.nbytes, pool.unit_bytes],
        }
        if self._memory.kind == "gpu":
            card["handle"] = self._memory.pool.ipc_handle().hex()  # type: ignore[union-attr]
        return card

    def connect(self, card: dict[str, Any], *, into: bool) -> None:
        """Join the other end; with `into`, its pool becomes ours to write. Raises TransferError when it cannot be."""
        self._link.connect(bytes.fromhex(card["address"]))
        if not into:
            return
        base, nbytes, unit_bytes = card["shape"]
        if self._way == "put":
            self._link.import_put(
                _POOL, base=base, nbytes=nbytes, unit_bytes=unit_bytes, key=bytes.fromhex(card["key"])
            )
        elif "handle" not in card:
            raise TransferError("there is no such lane into another process's host memory")
        else:
            self._link.import_peer(
                _POOL, handle=bytes.fromhex(card["handle"]), offset=0, nbytes=nbytes, unit_bytes=unit_bytes
            )

    @property
    def transport(self) -> str:
        """What carries the pages, as far as is known."""
        if self._way != "put":
            return self._way
        found = {name.partition("/")[0] for name in self._link.transports()}
        return "cuda_ipc" if "cuda_ipc" in found else "+".join(sorted(found - {"self"}))

    def push(self, number: int, source: Indices, target: Indices) -> None:
        self._writer = self._link.writer(number, ttl_s=_BATCH_S)
        self._writer.push(_POOL, self._memory.pool.address, source, target, way=self._way)
        self._writer.ring(number.to_bytes(8, "little"))

    def await_batch(self, number: int, target: Indices) -> int:
        deadline = time.monotonic() + _BATCH_S
        while time.monotonic() < deadline:
            for kind, payload in self._events():
                if kind == EventKind.MESSAGE:
                    seen = time.monotonic_ns()
                    assert int.from_bytes(payload, "little") == number
                    return seen
        raise TransferError(f"batch {number} did not arrive within {_BATCH_S:g} s")

    def settle(self) -> None:
        deadline = time.monotonic() + _BATCH_S
        while self._writer is not None:
            if any(kind == EventKind.RUNG for kind, _ in self._events()):
                self._writer = None
            elif time.monotonic() > deadline:
                raise TransferError("the writer did not end")

    def release(self, number: int) -> None:
        """After a push that failed: let the receiver stop waiting for it."""
        self._writer = None
        self._link.send(number.to_bytes(8, "little"))

    def _events(self) -> list[tuple[int, bytes]]:
        self._poller.poll(0 if self.polling else 1000)
        events = self._reactor.drain()
        for kind, _, _, status, payload in events:
            if kind in (EventKind.FAILED, EventKind.LINK_ERROR):
                raise TransferError(f"{payload.decode(errors='replace')} (status {status})")
        return [(kind, payload) for kind, _, _, _, payload in events]

    def close(self) -> None:
        self._writer = None
        self._link.close()
        self._reactor.close()
