# SPDX-License-Identifier: Apache-2.0
"""One side of transfer-bench: pools, and for each measured way of moving pages an object that moves or awaits them.

The sender plays a prefill engine, the receiver a completion engine; both go through the same links as real ones.
"""

from __future__ import annotations

import hashlib
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvrail.runtime.config import environment, ucx_overrides
from kvrail.transfer.errors import TransferError
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkKey,
    LinkOptions,
    LinkRefusal,
    LinkUp,
    PeerAddress,
    Received,
    WriterEvent,
)
from kvrail.transfer.links import Links
from kvrail.transfer.memory import PAGE_POOL, HostPool, Pools
from kvrail.transfer.ucx import checksum_pages, open_context, open_reactor
from kvrail.transfer.wire import Doorbell, encode

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["OPTIONS", "POISON", "Indices", "LinkWay", "Memory", "Pages", "Way", "layout_of"]

Indices = npt.NDArray[np.uint32]

# What each lane is asked for with.
OPTIONS: dict[str, dict[str, Any]] = {
    "shm": {"lane": "shm"},
    "put/cma": {"lane": "put", "put_transport": "cma"},
    "put/tcp": {"lane": "put", "put_transport": "tcp"},
    # By whichever way UCX picks: between two hosts.
    "put": {"lane": "put"},
    "stream": {"lane": "stream"},
}
POISON = 0xA5
_BATCH_S = 60.0


def layout_of(page_bytes: int) -> PageLayout:
    """A layout whose page has exactly that many bytes (a multiple of 256)."""
    return PageLayout(
        model_id="transfer-bench",
        layers=1,
        kv_heads=1,
        head_dim=page_bytes // 64,
        dtype="bfloat16",
        page_tokens=16,
    )


class Pages(Protocol):
    """What is measured over: one process's pool, wherever it lies."""

    def poison(self, pages: Indices) -> None:
        """Overwrite these pages."""

    def digest(self, pages: Indices) -> str:
        """One value for the contents of these pages, in this order."""

    def close(self) -> None: ...


class Memory:
    """The context and pools of one process, shared by all ways. `host`: where it listens (as --kv-host)."""

    def __init__(self, page_bytes: int, pages: int, host: str) -> None:
        self.host = host
        self.layout = layout_of(page_bytes)
        self.context = open_context(
            "auto", host, library=environment("KVRAIL_UCX"), overrides=ucx_overrides()
        )
        try:
            self.pools = Pools.allocate(self.context, pages=pages, page_bytes=page_bytes)
        except BaseException:
            self.context.close()
            raise
        assert isinstance(self.pools.pages, HostPool)
        self.pool = self.pools.pages
        assert self.pool.buffer is not None
        self.rows = np.frombuffer(self.pool.buffer, np.uint8).reshape(pages, page_bytes)

    def poison(self, pages: Indices) -> None:
        self.rows[pages] = POISON

    def digest(self, pages: Indices) -> str:
        sums = checksum_pages(self.pool.address, self.pool.unit_bytes, pages)
        return hashlib.sha256(sums.tobytes()).hexdigest()

    def close(self) -> None:
        self.rows = np.zeros((0, 0), np.uint8)
        self.pools.close()
        self.context.close()


class Way(Protocol):
    """One way of moving pages from the sender's pool to the receiver's."""

    def push(self, number: int, source: Indices, target: Indices) -> None:
        """Sender: start moving; may return before it is done."""

    def await_batch(self, number: int, target: Indices) -> int:
        """Receiver: wait until the batch is known to be complete; time.monotonic_ns() of that moment."""

    def settle(self) -> None:
        """Sender, after the batch: what is left to do, outside of the measured time."""

    def close(self) -> None: ...


class LinkWay:
    """Pages over a kvrail link; complete when the receiver's Python holds the doorbell."""

    def __init__(
        self, memory: Memory, lane: str, folder: Path, token: bytes, *, accept: bool, spin_us: int
    ) -> None:
        self._memory = memory
        self._reactor = open_reactor(memory.context, spin_us=spin_us, copy_threads=1)
        options = LinkOptions(socket_dir=folder, kv_host=memory.host, heartbeat_s=1.0, **OPTIONS[lane])
        self._links = Links(
            reactor=self._reactor,
            identity=(np.random.bytes(16), 0),
            token=token,
            layout=memory.layout,
            pools=memory.pools,
            options=options,
            accept=accept,
        )
        self._poller = select.poll()
        self._poller.register(self._links.fileno(), select.POLLIN)
        # Whether Python itself waits without sleeping.
        self.polling = False
        self.info: LaneInfo | None = None
        self.refusal = ""
        self._key: LinkKey | None = None
        self._epoch = 0
        self._writer: _ucx.Writer | None = None

    def address(self, *, far: bool) -> list[Any]:
        """For `dial`; from far away there is no Unix socket."""
        address = self._links.address
        return [address.incarnation.hex(), *address[1:4], "" if far else address.unix_path]

    def dial(self, address: list[Any]) -> None:
        self._links.connect(PeerAddress(bytes.fromhex(address[0]), *address[1:]))

    def turn(self, timeout_ms: int = 0) -> list[object]:
        """Sleep until something happens, and take it. Notes the link's coming up or refusal; its end is an error."""
        self._poller.poll(timeout_ms)
        events: list[object] = list(self._links.poll(time.monotonic()))
        for event in events:
            if isinstance(event, LinkUp):
                self.info, self._key, self._epoch = event.lane, event.key, event.epoch
            elif isinstance(event, LinkRefusal):
                self.refusal = event.reason
            elif isinstance(event, LinkDown):
                raise TransferError(f"the link has ended: {event.reason}")
        return events

    @property
    def decided(self) -> bool:
        return self.info is not None or bool(self.refusal)

    def push(self, number: int, source: Indices, target: Indices) -> None:
        assert self._key is not None
        self._writer = self._links.writer(self._key, number, _BATCH_S)
        self._writer.push(PAGE_POOL, self._memory.pool.address, source, target)
        bell = Doorbell(ticket=number.to_bytes(16, "little"), epoch=self._epoch, status="landed")
        self._writer.ring(encode(bell))

    def await_batch(self, number: int, target: Indices) -> int:
        deadline = time.monotonic() + _BATCH_S
        while time.monotonic() < deadline:
            for event in self.turn(0 if self.polling else 1000):
                if isinstance(event, Received) and isinstance(event.message, Doorbell):
                    seen = time.monotonic_ns()
                    assert int.from_bytes(event.message.ticket, "little") == number
                    return seen
        raise TransferError(f"batch {number} did not arrive within {_BATCH_S} s")

    def settle(self) -> None:
        deadline = time.monotonic() + _BATCH_S
        while self._writer is not None:
            for event in self.turn(1000):
                if isinstance(event, WriterEvent) and event.kind == "rung":
                    self._writer = None
                elif isinstance(event, WriterEvent) and event.kind == "failed":
                    raise TransferError(event.reason)
            if time.monotonic() > deadline:
                raise TransferError("the writer did not end")

    def close(self) -> None:
        self._writer = None
        self._links.close()
        self._reactor.close()
