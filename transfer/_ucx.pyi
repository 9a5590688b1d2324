# SPDX-License-Identifier: Apache-2.0
"""Typed stub of the native module (transfer/csrc). Import it through kvrail.transfer.ucx, which picks the library."""

from typing import final

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

class UcxError(Exception):
    """args = (call: str, status: int, text: str)."""

def library_version() -> tuple[int, int, int]: ...
def checksum_pages(base: int, page_bytes: int, pages: U32) -> npt.NDArray[np.uint64]:
    """64-bit checksum of each page (GIL released). See csrc/checksum.h for the definition."""

@final
class Context:
    """One ucp_context (features RMA, AM, WAKEUP). An unknown or refused setting raises UcxError."""
    def __init__(self, settings: dict[str, str]) -> None: ...
    def register(self, address: int, nbytes: int, memory: str = "host") -> Region: ...
    def transports(self) -> list[str]: ...
    def describe(self) -> str: ...
    def close(self) -> None: ...

@final
class Region:
    """Registered memory (ucp_mem_map). Refuses memory that UCX classifies as another kind than `memory`."""

    address: int
    nbytes: int
    memory: str
    def packed_key(self) -> bytes: ...
    def close(self) -> None:
        """Raises while any link lives (I7)."""

@final
class Reactor:
    """The one progress thread. Owns every worker, endpoint, key and request; told by a queue, tells by an eventfd."""
    def __init__(self, context: Context, *, spin_us: int = 0, copy_threads: int = 1) -> None: ...
    @property
    def event_fd(self) -> int: ...
    def open_link(self, *, epoch: int, cookie: int) -> Link: ...
    def drain(self) -> list[tuple[int, int, int, int, bytes]]:
        """Pending events: (kind, link id, writer key or token, status, payload). Kinds are the EVENT_* constants."""
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

EVENT_MESSAGE: int  # payload = one link message, in the order sent
EVENT_CONTROL: int  # the control stream closed or broke: payload = reason
EVENT_LINK_ERROR: int  # the UCX endpoint failed: status, payload = text
EVENT_FENCED: int  # the link's worker is destroyed; no tcp/rdma write can land any more
EVENT_FLUSHED: int  # key = the token given to Link.flush; status
EVENT_PROGRESS: int  # key = writer key; every unit submitted so far is locally complete
EVENT_RUNG: int  # key = writer key; the doorbell given to Writer.ring has been sent
EVENT_QUIET: (
    int  # key = writer key; status 0: stopped, all callbacks OK, flush OK, endpoint healthy; else unproven
)
EVENT_FAILED: int  # key = writer key; a put failed, or was refused (bounds, deadline, link): payload = reason

@final
class Link:
    """One peer: own worker, endpoint, imported pools. All calls return at once; results are events."""

    id: int
    epoch: int
    def address(self, *, network_only: bool = False) -> bytes:
        """This side's worker address; `network_only` leaves out the transports that stay within one host."""
    def connect(self, peer_address: bytes) -> None: ...
    def transports(self) -> list[str]:
        """Transports of the endpoint's lanes, as UCX reports them (after connect)."""
    def import_put(self, pool: int, *, base: int, nbytes: int, unit_bytes: int, key: bytes) -> None: ...
    def import_shm(self, pool: int, *, fd: int, offset: int, nbytes: int, unit_bytes: int) -> None:
        """Map the peer's memfd (the fd stays the caller's)."""
    def attach_control(self, fd: int, interval_ms: int) -> None:
        """Hand over the connected control socket: from now on heartbeats only. Takes ownership of the fd."""
    def set_beat(self, payload: bytes) -> None: ...
    def peer_beat(self) -> tuple[float, bytes]:
        """(seconds since the last heartbeat arrived, its payload); payload empty before the first one."""
    def send(self, message: bytes) -> None: ...
    def flush(self, token: int) -> None: ...
    def writer(self, key: int, *, ttl_s: float) -> Writer: ...
    def fence(self) -> None:
        """Destroy the worker. Every writer of this link fails; EVENT_FENCED follows."""
    def close(self) -> None: ...

@final
class Writer:
    """All writes of one ticket. Counts units; refuses after stop, fence or deadline (I3)."""

    key: int
    posted: int
    done: int
    failed: int
    def push(self, pool: int, source: int, source_units: U32, target_units: U32) -> None:
        """Copy units of `unit_bytes` from `source` (address of unit 0) to the peer's pool. Coalesces runs."""
    def renew(self, ttl_s: float) -> None: ...
    def ring(self, message: bytes) -> None:
        """After every unit so far is OK: flush, then send `message` in order. EVENT_RUNG, or EVENT_FAILED."""
    def stop(self) -> None:
        """Post nothing more; when all callbacks have run, flush. EVENT_QUIET follows, exactly once."""
