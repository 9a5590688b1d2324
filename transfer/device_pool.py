# SPDX-License-Identifier: Apache-2.0
"""Pools in GPU memory: plain driver allocations that peers can map, registered with UCX, and how they may go away.

Not from torch's allocator: its blocks are shared with other tensors, and its expandable segments cannot be exported.

Close order: first the links of **both** sides that reach the pool, then the pool. A peer that has mapped it (lane peer)
unmaps it when its own link is fenced or closed; that it has is proven by its last message, or by the end of its
process. Memory that is freed while a peer still has it mapped is undefined behaviour of CUDA: without proof the pool
stays open, and the end of the process frees it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from kvrail.transfer.errors import CudaFailed, TransferError, UcxFailed
from kvrail.transfer.registration import Registration

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["DeviceBytes", "DevicePool"]

# The page kernels move 16 bytes at a time.
_ALIGNMENT = 16


class DeviceBytes:
    """All bytes of a pool for others: `torch.as_tensor(pool.buffer, device="cuda:N")` views them without a copy.

    The view keeps this object, and so the pool's memory.
    """

    def __init__(self, memory: _ucx.DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._memory.address, False),
            "strides": None,
            "version": 3,
        }


class DevicePool:
    """`units` units of `unit_bytes` bytes (a multiple of 16) in one GPU's memory, zero-filled, registered with UCX.

    The same face as HostPool. `buffer` has `__cuda_array_interface__` (uint8 [nbytes]). Raises CudaFailed when the GPU
    cannot give the memory, or UCX cannot use it.
    """

    def __init__(
        self,
        context: _ucx.Context,
        cuda: _ucx.CudaDevice,
        *,
        units: int,
        unit_bytes: int,
        name: str = "pages",
    ) -> None:
        if units < 1 or unit_bytes < 1 or unit_bytes % _ALIGNMENT:
            raise ValueError(
                f"pool {name}: {units} units of {unit_bytes} bytes (on a GPU a multiple of {_ALIGNMENT})"
            )
        self.name = name
        self.units = units
        self.unit_bytes = unit_bytes
        self.nbytes = units * unit_bytes
        self.memory: Final = "cuda"
        self.backing = "cuda"
        self.cuda = cuda
        try:
            self._memory: _ucx.DeviceMemory | None = cuda.allocate(self.nbytes)
        except CudaFailed as error:
            raise CudaFailed(
                f"pool {name}", error.status, f"{error}: take fewer pages (--kv-pages or --kv-memory-gb)"
            ) from error
        self.address = self._memory.address
        try:
            # UCX finds out what kind of memory it is through the context of the calling thread.
            cuda.make_current()
            self._registered = Registration(context, self.address, self.nbytes, self.memory, name)
        except UcxFailed as error:
            self._memory.close()
            raise CudaFailed(
                f"pool {name}",
                "UCX_WITHOUT_CUDA",
                f"UCX cannot use GPU memory ({error}): it needs its CUDA transports (cuda_copy, cuda_ipc), which the "
                "wheels libucx-cu12 and libucx-cu13 have, and which UCX_TLS must not leave out",
            ) from error
        except BaseException:
            self._memory.close()
            raise
        self.buffer: DeviceBytes | None = DeviceBytes(self._memory, self.nbytes)
        # Every tensor over the memory keeps this object alive; see close.
        self._viewed = weakref.ref(self.buffer)

    def packed_key(self) -> bytes:
        """The remote key that a peer needs for UCX puts into this pool."""
        return self._registered.packed_key()

    @property
    def ipc_offset(self) -> int:
        """Where the pool begins in what the handle maps."""
        return 0

    def ipc_handle(self) -> bytes:
        """64 bytes with which a process of this host maps the pool (Link.import_peer)."""
        return self._open().ipc_handle()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the pool, as they are now: not ordered with the engine's streams."""
        return self._open().read(offset, nbytes)

    def write(self, offset: int, content: bytes) -> None:
        """Put bytes into the pool; not ordered with the engine's streams."""
        self._open().write(offset, content)

    def close(self) -> None:
        """Unregister and free. Raises TransferError while a link lives, or while a tensor still views `buffer`.

        Only to be called when no peer can still write, and none has the memory mapped (see the module's text).
        """
        self._registered.close()
        self.buffer = None
        if self._viewed() is not None:
            raise TransferError(f"pool {self.name} is still viewed: drop its tensors first")
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def leave_open(self) -> None:
        """Give the pool up without freeing it: the peer that has it mapped lives, and only our own end is safe."""
        if self._memory is not None:
            self._memory.leave_open()
            self._memory = None

    def _open(self) -> _ucx.DeviceMemory:
        if self._memory is None:
            raise TransferError(f"pool {self.name} is closed")
        return self._memory
