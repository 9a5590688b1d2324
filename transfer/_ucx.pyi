# SPDX-License-Identifier: Apache-2.0
"""Typed stub of the native module (transfer/csrc). Use it through kvrail.transfer.ucx, which picks the library.

Calls return at once; what becomes of them is told by events. Objects keep their parents alive. An object that is
dropped is closed; close() may be called twice.
"""

from typing import Literal, final

import numpy as np
import numpy.typing as npt

from kvrail.transfer.errors import CudaFailed, UcxFailed

UcxError = UcxFailed  # the very classes that are raised
CudaError = CudaFailed
U32 = npt.NDArray[np.uint32]  # one dimension, contiguous; anything else is a TypeError, never a silent copy
U64 = npt.NDArray[np.uint64]  # the same

def library_version() -> tuple[int, int, int]: ...
def copy_kind() -> str:
    """How lane shm copies here: "avx512", "avx", "sse2" or "memcpy"."""

def interfaces() -> list[tuple[str, str]]:
    """(name, address) of every network interface."""

def checksum_pages(base: int, page_bytes: int, pages: U32) -> npt.NDArray[np.uint64]:
    """64-bit checksum of each page (GIL released). See csrc/checksum.h for the definition.

    ValueError unless page_bytes is a multiple of 8.
    """

@final
class Context:
    """One ucp_context (features RMA, AM, WAKEUP). An unknown or refused setting raises UcxError."""
    def __init__(self, settings: dict[str, str]) -> None: ...
    def register(self, address: int, nbytes: int, memory: str = "host") -> Region:
        """Register caller's memory, which must outlive the region. `memory`: host, cuda, cuda-managed, rocm."""
    def transports(self) -> list[str]: ...
    def describe(self) -> str: ...
    def close(self) -> None:
        """Unmaps every region. Raises while a link lives."""

@final
class Region:
    """Registered memory (ucp_mem_map). Refuses memory that UCX classifies as another kind than `memory`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> str: ...
    def packed_key(self) -> bytes: ...
    def close(self) -> None:
        """Raises while any link lives (I7); waits up to 5 s, without the GIL, for links that are closing."""

@final
class CudaDevice:
    """One CUDA device, through the driver alone (libcuda.so.1); its primary context, which torch uses as well.

    Its methods raise CudaFailed. They make the device's context current only while they run.
    """

    def __init__(self, ordinal: int) -> None:
        """Raises CudaFailed naming what is missing: the driver, or that device."""
    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> bytes:
        """16 bytes, the same in every process."""
    @property
    def name(self) -> str: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def shared_by_mps(self) -> bool:
        """Whether MPS shares it, as far as the driver can tell."""
    def flush_remote_writes(self) -> None:
        """After a network card has written into its memory, before its kernels read: nothing on devices that keep
        the order by themselves."""
    def make_current(self) -> None:
        """Make its context the calling thread's: UCX looks there when it registers GPU memory."""
    def allocate(self, nbytes: int) -> DeviceMemory:
        """A plain allocation, zeroed, that a peer process can map. CudaFailed says what is needed and what is free."""
    def pin(self, address: int, nbytes: int) -> PinnedMemory:
        """Page-lock the caller's host memory, which must outlive the pinning, for every GPU of this process."""
    def export_memory(self, address: int) -> tuple[bytes, int]:
        """(64 bytes with which a process of this host maps the allocation that `address` lies in, where in it).

        CudaFailed for memory that cannot be exported: of an allocator with expandable segments, say.
        """
    def record(self, stream: int) -> CudaFence:
        """A fence behind all that is on that CUDA stream of this device by now (0: the default stream)."""
    def hold(self, stream: int, fence: CudaFence) -> None:
        """What is put on that stream of this device from now on runs behind the fence."""
    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Within this GPU's memory, in the order of the stream."""
    def load_kernels(self, cubin: bytes) -> None:
        """The code of kernels/csrc/page_copy.cu for this device; once, later calls do nothing."""
    def checksum_pages(
        self, base: int, page_bytes: int, pages: U32, after: CudaFence | None = None
    ) -> npt.NDArray[np.uint64]:
        """As the function of that name, for pages in this GPU's memory. Waits (GIL released); after `after`.

        `page_bytes` is a multiple of 16. A page outside the memory breaks the CUDA context for good.
        """

@final
class DeviceMemory:
    """GPU memory of its own. To be closed only when no peer has it mapped any more."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def ipc_handle(self) -> bytes:
        """64 bytes with which a process of this host can map it (Link.import_peer)."""
    def read(self, offset: int, nbytes: int) -> bytes:
        """Waits for the copy alone: what other streams write meanwhile is there or not."""
    def write(self, offset: int, content: bytes) -> None: ...
    def close(self) -> None:
        """Free it; so does dropping the last reference."""
    def leave_open(self) -> None:
        """Never free it: a living peer may have it mapped. The end of the process does."""

@final
class PinnedMemory:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None:
        """Unpin. Nothing on a GPU may still use the memory."""

@final
class CudaFence:
    """A point on a CUDA stream."""
    def done(self) -> bool:
        """Raises CudaFailed when work before it failed."""
    def wait(self) -> None:
        """With the GIL released."""

@final
class HostCopy:
    """One call of HostCopies.copy."""
    @property
    def fence(self) -> CudaFence:
        """Behind the copy."""
    def done(self) -> bool:
        """Raises CudaFailed when it, or work before it, failed."""
    def seconds(self) -> float:
        """What it took on the GPU, once it is done."""

@final
class HostCopies:
    """Copies between a GPU's memory and pinned host memory, one way, in order, on a stream of its own.

    `to_host`: sources are on the GPU, and copies come after all other work; else they come first. One thread at a
    time. Dropping it waits for its copies.
    """
    def __init__(self, device: CudaDevice, *, to_host: bool) -> None:
        """`load_kernels` comes first."""
    def copy(
        self,
        sources: U64,
        targets: U64,
        nbytes: int,
        *,
        after: CudaFence | None = None,
        way: Literal["", "kernel", "engine"] = "",
    ) -> HostCopy:
        """Queue the copy of `nbytes` bytes from each source address to its target, behind `after`.

        The arrays are copied before it returns. `way`: "" takes the copy engine for long runs, else the kernel.
        ValueError, with nothing queued, when the host's side is not pinned or anything is no multiple of 16 bytes.
        An address outside the GPU's memory breaks the CUDA context for good.
        """
    def record(self) -> CudaFence:
        """A fence behind every copy so far."""
    def wait(self) -> None:
        """Until every copy is done (GIL released)."""

@final
class Reactor:
    """The one progress thread. Owns every worker, endpoint, key and request; told by a queue, tells by an eventfd.

    `spin_us`: how long it spins after the last work before it sleeps, yielding its core to whoever wants it. While it
    sleeps, a call that orders something small (a message, a doorbell, a push of up to 64 KiB in 4 units, or one for the
    copy threads) does it itself, for at most some 20 us. `copy_threads`: threads for lane shm; with 0
    the progress thread copies, a slice at a time. `cuda`: the GPU that copies for ways kernel and engine, and whose
    context UCX works in; without it GPU memory can be neither pushed nor imported.
    """
    def __init__(
        self, context: Context, *, spin_us: int = 0, copy_threads: int = 1, cuda: CudaDevice | None = None
    ) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable while drain() may have something; for epoll."""
    def open_link(self, *, epoch: int, cookie: int) -> Link:
        """A link with its own worker. Both sides give the same `cookie` (64 bits): messages with another one are
        counted and dropped."""
    def drain(self) -> list[tuple[int, int, int, int, bytes]]:
        """Pending events: (kind, link id, writer key or token, status, payload). Kinds are the EVENT_* constants."""
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None:
        """Close every link and end the threads, within about a second. Events stay to be drained."""

EVENT_MESSAGE: int  # payload = one link message, in the order sent
EVENT_CONTROL: int  # the control stream ended: status = errno (0: the peer closed it), payload = reason
EVENT_LINK_ERROR: (
    int  # the UCX endpoint failed: status, payload = text. Once a link; its writers fail with it
)
# The link's worker is destroyed, and the thread of lane stream is joined. On the side that is written to: nothing of
# lane stream and no tcp or rdma write of the peer can land any more (cma and shm need the peer's process to be gone).
# On the side that writes: none of our threads writes any more.
EVENT_FENCED: int
EVENT_FLUSHED: int  # key = the token given to Link.flush; status
EVENT_PROGRESS: (
    int  # key = writer key; every unit submitted so far is locally complete (not told before a RUNG)
)
# How a writer ends: RUNG or FAILED at most once, and never both; QUIET exactly once, if and only if stop() is called.
# stop() before RUNG or FAILED: only QUIET comes. After them: QUIET comes as well. Nothing follows QUIET.
EVENT_RUNG: int  # key = writer key; every unit landed, the flush was OK, the doorbell has been sent
# (payload: when that was, time.monotonic_ns() in decimal)
# key = writer key; status 0: nothing of this writer is under way or will ever be: every *posted* put was OK, then a
# flush, on an endpoint that never failed. Also 0 after a FAILED that only refused (bounds, time to live). Else
# unproven. Waits for what is under way as long as the link lives: a frozen peer is the caller's to fence.
EVENT_QUIET: int
# key = writer key; a put or a copy failed (status), or units were refused: bounds (UCS_ERR_INVALID_ADDR), time to live
# over (UCS_ERR_TIMED_OUT), link lost, fenced or closed; payload = reason. Nothing more is posted, no doorbell goes out.
EVENT_FAILED: int

@final
class Link:
    """One peer: own worker, endpoint, imported pools. All calls return at once; results are events."""

    @property
    def id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def address(self, *, network_only: bool = False) -> bytes:
        """This side's worker address; `network_only` leaves out the transports that stay within one host."""
    def connect(self, peer_address: bytes) -> None:
        """Make the endpoint. Before it, nothing can be sent, flushed or imported for put."""
    def open_rails(self, count: int) -> None:
        """Have so many threads put, each with a worker and an endpoint of its own (1 to 16; once, after connect).

        The progress thread is one of them; the others are rails 1, 2, … Pushes of 1 MiB and more by way put are dealt
        out to all rails that have carried a push alone. When one of these fails, that is a link error; one that cannot
        be opened, or would take other transports than the link, fails the push that it is to carry. ValueError beside
        a CUDA device.
        """
    def transports(self) -> list[str]:
        """Transports of the endpoint's lanes, as UCX reports them (after connect)."""
    def describe(self) -> str:
        """UCX's own text about the endpoint: its lanes and what each is used for."""
    def import_put(self, pool: int, *, base: int, nbytes: int, unit_bytes: int, key: bytes) -> None:
        """The peer's pool, to be written by puts.

        Of every kind of import: importing an id again adds a way to write the pool, or replaces that way, for the
        pushes that follow; with another shape (nbytes, unit_bytes) it replaces the pool.
        """
    def import_shm(self, pool: int, *, fd: int, offset: int, nbytes: int, unit_bytes: int) -> None:
        """Map the peer's memfd (the fd stays the caller's). ValueError unless it is large enough and sealed
        against shrinking; OSError when it cannot be mapped."""
    def import_peer(self, pool: int, *, handle: bytes, offset: int, nbytes: int, unit_bytes: int) -> None:
        """Map the peer's DeviceMemory on the reactor's GPU, to be written by ways kernel and engine.

        CudaFailed when it cannot be mapped, ValueError when it is smaller than announced. Unmapped when the link is
        fenced or closed and its copies are over; only then may the peer free the memory.
        """
    def import_stream(self, pool: int, *, nbytes: int, unit_bytes: int) -> None:
        """The peer's pool, to be written over the connection of write_stream."""
    def read_stream(self, fd: int, *, secret: bytes, pools: list[tuple[int, int, int, int]]) -> None:
        """Take the listening socket `fd`, let in whoever says the secret (32 bytes; then the socket is closed), and
        write what comes into these pools: (id, address, bytes, bytes of a unit). A thread does that until the link is
        fenced or closed. Once a link. UcxError unless the pools are registered host memory.

        A frame that reaches out of its pool, or is none, is a link error, and nothing of it is written.
        """
    def write_stream(self, fd: int, *, secret: bytes) -> None:
        """Take the socket `fd`, which is connected or connecting to where the peer called read_stream, and does not
        block: for way stream. Once a link.
        """
    def settle_stream(self, used: bool) -> None:
        """Whether lane stream is used: if so, the end of its connection is a link error from now on, else our end of
        it is given back. Until this is said, a connection that breaks fails only the pushes that it carries.
        """
    def attach_control(self, fd: int, interval_ms: int) -> None:
        """Hand over the connected control socket: from now on heartbeats only. Takes ownership of the fd.

        Nothing but heartbeat frames (uint32 LE length, payload) may be under way in either direction. A fence leaves
        it running, close() ends it.
        """
    def set_beat(self, payload: bytes) -> None:
        """What the next heartbeats carry, at most 1 MiB; before the first call they are empty."""
    def peer_beat(self) -> tuple[float, bytes, bool]:
        """(seconds since the last heartbeat was read, its payload, whether more has come that is not read yet).

        Before the first one seconds count from attach_control, and its payload is empty; infinite without a stream.
        """
    def send(self, message: bytes) -> None: ...
    def flush(self, token: int) -> None:
        """EVENT_FLUSHED when what the link's own worker has put by now has landed (rails flush for themselves)."""
    def writer(self, key: int, *, ttl_s: float) -> Writer: ...
    def fence(self) -> None:
        """Destroy the worker. Every writer of this link fails; EVENT_FENCED follows."""
    def close(self) -> None:
        """Let the last messages out (0.3 s at most), then give everything back. Proves nothing about the peer."""

@final
class Writer:
    """All writes of one ticket. Counts units; refuses after stop, fence or deadline (I3).

    Keep it until its last event: a writer that is dropped before ring() stops without an answer.
    """

    @property
    def key(self) -> int: ...
    @property
    def posted(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def failed(self) -> int: ...
    def push(
        self,
        pool: int,
        source: int,
        source_units: U32,
        target_units: U32,
        *,
        after: CudaFence | None = None,
        way: Literal["", "kernel", "engine", "shm", "stream", "put"] = "",
        rail: int = 0,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Copy units of `unit_bytes` from `source` (address of unit 0) to the peer's pool. Coalesces runs.

        `part`: (offset, bytes) of each unit to copy, and nothing else of it; units count once for each such push.

        Bounds are checked before anything is written, in a list of more than 32768 units for each so many.

        The indices are copied before it returns. Source units must lie in one registered region, whatever the way; for
        kernel and engine in GPU memory or in pinned host memory. Nothing is copied before `after` is done; until then
        the batch, and those pushed after it, can still be stopped. `way`: "" takes the best that was imported (kernel,
        engine, else what was imported last). `rail`: by way put, the rail (from 1 on) that alone carries it; 0 deals a
        large one out to all. ValueError after ring() or when the lengths differ; silently nothing
        after stop().
        """
    def renew(self, ttl_s: float) -> None: ...
    def ring(self, message: bytes) -> None:
        """After every unit so far is OK: flush, then send `message` in order. EVENT_RUNG, or EVENT_FAILED."""
    def stop(self) -> None:
        """Post nothing more; when all callbacks have run, flush. EVENT_QUIET follows, exactly once."""
