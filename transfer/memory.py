# SPDX-License-Identifier: Apache-2.0
"""Host pools: shared, prefaulted, registered memory of pages, state slots or probe units, and how it may go away.

A pool is a memfd, so that a peer on the same host can map it (lane shm), sealed so that no one can shrink it
under a writer. Nothing has a name in /dev/shm, so nothing can be left there.

Close order (a peer may write until it is proven quiet): first the links, then the pools, then the UCX context.
`HostPool.close` refuses while a link lives or a tensor still views the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import TransferError
from kvrail.transfer.registration import Registration

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = [
    "PAGE_POOL",
    "PROBE_POOL",
    "SEALS",
    "STATE_POOL",
    "HostPool",
    "OutOfMemory",
    "Pools",
    "available_bytes",
    "free_hugetlb_bytes",
]

# Pool ids on every link.
PAGE_POOL, STATE_POOL, PROBE_POOL = 0, 1, 2

# What an importer insists on: with these the file can never become shorter than what it mapped.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Backing = Literal["hugetlb", "thp", "4k"]

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
# Collapsing copies (two seconds a GiB); beyond this the administrator had better set shmem_enabled to advise.
_COLLAPSE_LIMIT = 4 << 30
_HUGE = 2 << 20
_PROBE_UNIT = 4096
_PROBE_UNITS = 2048
_SIGNATURES: Final = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
}


class OutOfMemory(TransferError):
    """The host cannot give the memory that a pool needs; the text says how much, and what there is."""


class HostPool:
    """`units` units of `unit_bytes` bytes each, zero-filled, every page already there, registered with UCX.

    `address` is that of unit 0, `nbytes` = units * unit_bytes; `mapped_bytes` (what the file holds) may be larger.
    `buffer` is a writable memoryview of the nbytes bytes. With `pin` the memory is page-locked, so that GPUs can copy
    from it and to it. Without `collapse` huge pages are taken only where the kernel gives them at once: for memory that
    no CPU copies.
    """

    def __init__(
        self,
        context: _ucx.Context,
        *,
        units: int,
        unit_bytes: int,
        name: str = "pages",
        pin: _ucx.CudaDevice | None = None,
        collapse: bool = True,
    ) -> None:
        if units < 1 or unit_bytes < 1:
            raise ValueError(f"pool {name}: {units} units of {unit_bytes} bytes")
        self.name = name
        self.units = units
        self.unit_bytes = unit_bytes
        self.nbytes = units * unit_bytes
        self.memory: Final = "host"
        self.fd, self.address, self.mapped_bytes, hugetlb = _allocate(self.nbytes, name, collapse)
        self._hugetlb = hugetlb
        self._pinned: _ucx.PinnedMemory | None = None
        try:
            if pin is not None:
                self._pinned = pin.pin(self.address, self.mapped_bytes)
            self._registered = Registration(context, self.address, self.nbytes, self.memory, name)
        except BaseException:
            self._unpin()
            _unmap(self.address, self.mapped_bytes)
            os.close(self.fd)
            raise
        # A class of its own, because only such ctypes arrays can be weakly referenced.
        kind: Any = type("PoolBytes", (ctypes.c_ubyte * self.nbytes,), {})
        array = kind.from_address(self.address)
        # Every view of the memory (a tensor, an array, a slice) keeps this object alive; see close.
        self._viewed = weakref.ref(array)
        self.buffer: memoryview | None = memoryview(array).cast("B")

    @functools.cached_property
    def backing(self) -> Backing:
        """Which pages the kernel gave. To be asked while the pool is open; the answer costs a walk over all memory."""
        return "hugetlb" if self._hugetlb else _backing(self.address, self.mapped_bytes)

    def packed_key(self) -> bytes:
        """The remote key that a peer needs for UCX puts into this pool."""
        return self._registered.packed_key()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the pool, as they are now."""
        return bytes(self._open()[offset : offset + nbytes])

    def write(self, offset: int, content: bytes) -> None:
        """Put bytes into the pool."""
        self._open()[offset : offset + len(content)] = content

    def close(self) -> None:
        """Unregister and unmap. Raises TransferError while a link lives, or while something still views `buffer`.

        Only to be called when no peer can still write (`Links.close` says so): over cma a late write would land in
        whatever is mapped here next. When that is unproven, leave the pool open; the end of the process closes it.
        """
        self._registered.close()
        self.buffer = None
        if self._viewed() is not None:
            raise TransferError(f"pool {self.name} is still viewed: drop its tensors first")
        if self.fd >= 0:
            self._unpin()
            _unmap(self.address, self.mapped_bytes)
            os.close(self.fd)
            self.fd = -1

    def _open(self) -> memoryview:
        if self.buffer is None:
            raise TransferError(f"pool {self.name} is closed")
        return self.buffer

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None


@dataclass(frozen=True)
class Pools:
    """The pools of one rank. The probe pool is written by lane tests only and holds nothing of worth.

    With `cuda` all of them are in that GPU's memory.
    """

    pages: HostPool | DevicePool
    state: HostPool | DevicePool | None
    probe: HostPool | DevicePool
    cuda: _ucx.CudaDevice | None = None

    @classmethod
    def allocate(
        cls,
        context: _ucx.Context,
        *,
        pages: int,
        page_bytes: int,
        state_slots: int = 0,
        state_bytes: int = 0,
        cuda: _ucx.CudaDevice | None = None,
        pin: _ucx.CudaDevice | None = None,
    ) -> Pools:
        """All pools of a rank: pages, state slots (none when `state_bytes` is 0), and a probe area of 8 MiB.

        In the memory of `cuda`, else of the host, where `pin` has them page-locked for that GPU to read. Raises
        OutOfMemory or CudaFailed when one of them cannot be had.
        """
        made: list[HostPool | DevicePool] = []

        def pool(name: str, units: int, unit_bytes: int) -> HostPool | DevicePool:
            if cuda is None:
                made.append(HostPool(context, units=units, unit_bytes=unit_bytes, name=name, pin=pin))
            else:
                made.append(DevicePool(context, cuda, units=units, unit_bytes=unit_bytes, name=name))
            return made[-1]

        try:
            # The largest last: when it does not fit, nothing had to be zeroed for it.
            probe = cls.probe_area(context, cuda, pin)
            made.append(probe)
            state = pool("state", state_slots, state_bytes) if state_bytes and state_slots else None
            return cls(pool("pages", pages, page_bytes), state, probe, cuda)
        except BaseException:
            for each in made:
                each.close()
            raise

    @staticmethod
    def probe_area(
        context: _ucx.Context, cuda: _ucx.CudaDevice | None, pin: _ucx.CudaDevice | None = None
    ) -> HostPool | DevicePool:
        """A probe pool of 8 MiB, in the memory of `cuda` or the host's; the host's page-locked where the pages are."""
        if cuda is None:
            return HostPool(context, units=_PROBE_UNITS, unit_bytes=_PROBE_UNIT, name="probe", pin=pin)
        return DevicePool(context, cuda, units=_PROBE_UNITS, unit_bytes=_PROBE_UNIT, name="probe")

    @property
    def memory(self) -> Literal["host", "cuda"]:
        """Where they lie."""
        return self.pages.memory

    def fence(self, stream: int | None) -> _ucx.CudaFence | None:
        """Behind all that is on this CUDA stream (its address) by now; None when pages are written by the CPU."""
        if self.cuda is None or stream is None:
            return None
        return self.cuda.record(stream)

    def by_id(self) -> Iterator[tuple[int, HostPool | DevicePool]]:
        """(pool id on the link, pool), without those that do not exist."""
        yield PAGE_POOL, self.pages
        if self.state is not None:
            yield STATE_POOL, self.state
        yield PROBE_POOL, self.probe

    def leave_open(self) -> None:
        """Close none of them, ever: peers may still write into them. They go with this process."""
        for _, pool in self.by_id():
            if isinstance(pool, DevicePool):
                pool.leave_open()

    def close(self) -> None:
        """Close all of them (see HostPool.close, DevicePool.close)."""
        for _, pool in self.by_id():
            pool.close()


def _allocate(nbytes: int, name: str, collapse: bool) -> tuple[int, int, int, bool]:
    """(sealed memfd, address and length of its mapping with every page present, whether it is hugetlb)."""
    size = -(-nbytes // _HUGE) * _HUGE
    if free_hugetlb_bytes() >= size:
        try:
            return *_map(size, name, os.MFD_HUGETLB, collapse), True
        except OSError:
            pass  # Another process took the reserved pages in between.
    if nbytes < _HUGE:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    available = available_bytes()
    if size > available:
        raise OutOfMemory(_short(name, size, available))
    try:
        return *_map(size, name, 0, collapse), False
    except OSError as error:
        raise OutOfMemory(f"{_short(name, size, available)} ({error})") from error


def _map(size: int, name: str, flags: int, collapse: bool) -> tuple[int, int, int]:
    fd = os.memfd_create(f"kvrail-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        # F_SEAL_SEAL: a peer that holds the fd must not be able to seal it against our own writing either.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        address = _map_aligned(fd, size)
    except BaseException:
        os.close(fd)
        raise
    try:
        if not flags and size >= _HUGE and _thp_for_shared_memory():
            _call("madvise", address, size, mmap.MADV_HUGEPAGE)
        # Faulted in here, a page that the host does not have is an error; later it would be a SIGBUS.
        _call("madvise", address, size, _MADV_POPULATE_WRITE)
    except BaseException:
        _unmap(address, size)
        os.close(fd)
        raise
    collapse = collapse and not flags and _HUGE <= size <= _COLLAPSE_LIMIT
    if collapse and not _thp_for_shared_memory():
        # The kernel's setting is against huge pages on demand, but it still collapses on request.
        with contextlib.suppress(OSError):
            _call("madvise", address, size, _MADV_COLLAPSE)
    return fd, address, size


def _map_aligned(fd: int, size: int) -> int:
    """Map `fd` at a multiple of 2 MiB: elsewhere the kernel cannot use huge pages. (Python's mmap cannot do it.)"""
    room = _call("mmap", None, size + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-room // _HUGE) * _HUGE
    if address > room:
        _unmap(room, address - room)
    _unmap(address + size, room + _HUGE - address)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        return _call("mmap", address, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    except OSError:
        _unmap(address, size)
        raise


def _unmap(address: int, size: int) -> None:
    if size:
        _call("munmap", address, size)


def _call(name: str, *values: int | None) -> int:
    """One of the three memory calls of libc; raises OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_ssize_t
    result = int(function(*values))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _short(name: str, size: int, available: int) -> str:
    return (
        f"pool {name} needs {size >> 20} MiB of memory and the host has {available >> 20} MiB available: "
        "take fewer pages (--kv-pages or --kv-memory-gb) or state slots (--state-slots)"
    )


def _thp_for_shared_memory() -> bool:
    """Whether the kernel gives huge pages to a memfd that asks for them (or to every one)."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{word}]" in setting for word in ("advise", "within_size", "always", "force"))


def free_hugetlb_bytes() -> int:
    """Bytes of reserved 2 MiB pages that nobody has taken or been promised."""
    found = _meminfo("HugePages_Free:", "HugePages_Rsvd:", "Hugepagesize:")
    free, reserved, page_kib = (
        found.get(key, 0) for key in ("HugePages_Free:", "HugePages_Rsvd:", "Hugepagesize:")
    )
    return max(0, free - reserved) * _HUGE if page_kib == _HUGE >> 10 else 0


def available_bytes() -> int:
    """What the host, and the control group that we are in, can still give."""
    available = _meminfo("MemAvailable:").get("MemAvailable:", 1 << 50) << 10
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = int((folder / "memory.max").read_text())  # "max" raises ValueError: no limit.
        taken = int((folder / "memory.current").read_text())
        # Files that were read and are not in use count as taken, as a checkpoint's do; whoever asks gets that memory.
        idle = _numbers(folder / "memory.stat", "inactive_file").get("inactive_file", 0)
        available = min(available, limit - taken + idle)
    except (OSError, ValueError):
        pass
    return max(0, available)


def _meminfo(*keys: str) -> dict[str, int]:
    return _numbers(Path("/proc/meminfo"), *keys)


def _numbers(file: Path, *keys: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in file.read_text().splitlines():
        key, value, *_ = line.split()
        if key in keys:
            found[key] = int(value)
    return found


def _backing(address: int, mapped_bytes: int) -> Backing:
    """What the kernel gave: "thp" when at least nine tenths of the mapping are huge pages."""
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            # The kernel may have merged neighbours; a memfd of its own never merges, so the start is exact.
            ours = int(start, 16) <= address < int(end, 16)
        elif ours and first == "ShmemPmdMapped:":
            return "thp" if int(rest[0]) << 10 >= mapped_bytes * 9 // 10 else "4k"
    return "4k"
