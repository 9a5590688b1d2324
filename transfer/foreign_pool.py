# SPDX-License-Identifier: Apache-2.0
"""Memory of another engine, registered as it lies, with the face of our own pools.

The engine allocated it and frees it: nothing here does either. It stays mapped as long as the engine's process lives,
so a late write can only hit what the engine has there, and the engine gives a block away again only when the ledger has
let it go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.memory import PAGE_POOL, PROBE_POOL, HostPool, Pools
from kvrail.transfer.registration import Registration

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["ForeignPool", "ForeignPools"]

_log = logging.getLogger(__name__)

# Ids of the second and later ranges on a link.
_FIRST_MORE = 16


class ForeignPool:
    """`units` units of `unit_bytes` bytes each from `address` on, of the caller's memory, registered with UCX.

    `owner` keeps the memory alive (a tensor). `cuda`: the device whose memory it is; None for host memory.
    """

    def __init__(
        self,
        context: _ucx.Context,
        *,
        address: int,
        units: int,
        unit_bytes: int,
        owner: object,
        cuda: _ucx.CudaDevice | None = None,
        name: str = "pages",
    ) -> None:
        if units < 1 or unit_bytes < 1:
            raise ValueError(f"pool {name}: {units} units of {unit_bytes} bytes")
        self.name = name
        self.units = units
        self.unit_bytes = unit_bytes
        self.nbytes = units * unit_bytes
        self.address = address
        self.memory: Literal["host", "cuda"] = "host" if cuda is None else "cuda"
        self.backing = "the engine's"
        self._owner = owner
        self._cuda = cuda
        self._exported: tuple[bytes, int] | None = None
        if cuda is not None:
            # UCX finds out what kind of memory it is through the context of the calling thread.
            cuda.make_current()
        self._registered = Registration(context, address, self.nbytes, self.memory, name)

    def packed_key(self) -> bytes:
        """The remote key that a peer needs for UCX puts into this pool."""
        return self._registered.packed_key()

    def ipc_handle(self) -> bytes:
        """64 bytes with which a process of this host maps the allocation that the pool lies in.

        b"" when the memory cannot be exported (an allocator with expandable segments): then lane peer is not taken.
        """
        return self._export()[0]

    @property
    def ipc_offset(self) -> int:
        """Where the pool begins in what the handle maps."""
        return self._export()[1]

    def close(self) -> None:
        """Unregister. Raises TransferError while a link lives."""
        self._registered.close()

    def _export(self) -> tuple[bytes, int]:
        if self._exported is None:
            self._exported = b"", 0
            if self._cuda is not None:
                try:
                    self._exported = self._cuda.export_memory(self.address)
                except CudaFailed as error:
                    _log.warning(
                        "pool %s: other processes cannot map this memory (%s): no lane peer", self.name, error
                    )
        return self._exported


@dataclass(frozen=True)
class ForeignPools:
    """Pages of another engine in one range of memory or more, all of one kind, and a probe area of ours."""

    ranges: tuple[ForeignPool, ...]
    probe: HostPool | DevicePool
    cuda: _ucx.CudaDevice | None = None

    @classmethod
    def over(
        cls, context: _ucx.Context, ranges: list[ForeignPool], cuda: _ucx.CudaDevice | None = None
    ) -> ForeignPools:
        """With a new probe area, in the same kind of memory."""
        return cls(tuple(ranges), Pools.probe_area(context, cuda), cuda)

    @property
    def memory(self) -> Literal["host", "cuda"]:
        """Where the pages lie."""
        return self.ranges[0].memory

    def by_id(self) -> Iterator[tuple[int, HostPool | DevicePool | ForeignPool]]:
        """(pool id on the link, pool)."""
        yield PAGE_POOL, self.ranges[0]
        yield PROBE_POOL, self.probe
        yield from enumerate(self.ranges[1:], _FIRST_MORE)

    def page_pools(self) -> list[tuple[int, ForeignPool]]:
        """(pool id on the link, range) of the pages."""
        return [(PAGE_POOL, self.ranges[0]), *enumerate(self.ranges[1:], _FIRST_MORE)]

    def close(self) -> None:
        """Unregister the ranges and free the probe area; the links must be closed."""
        for pool in (*self.ranges, self.probe):
            pool.close()
