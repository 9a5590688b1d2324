# SPDX-License-Identifier: Apache-2.0
"""64-bit checksums of units of a pool, computed where the bytes are, and their form in a doorbell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.ucx import checksum_pages

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaFence
    from kvrail.transfer.memory import HostPool

__all__ = ["pack_checksums", "page_checksums", "unpack_checksums"]


def page_checksums(
    pool: HostPool | DevicePool, units: npt.NDArray[np.uint32], after: CudaFence | None = None
) -> npt.NDArray[np.uint64]:
    """The checksum of each unit, in order (uint64 [len(units)]). The GIL is released meanwhile.

    Computed where the pool is; for one in GPU memory not before `after`. Raises IndexError for a unit outside.
    """
    if len(units) and int(units.max()) >= pool.units:
        raise IndexError(f"unit {int(units.max())} is outside pool {pool.name} of {pool.units} units")
    if isinstance(pool, DevicePool):
        return pool.cuda.checksum_pages(pool.address, pool.unit_bytes, units, after)
    if after is not None:
        after.wait()
    return checksum_pages(pool.address, pool.unit_bytes, units)


def pack_checksums(sums: npt.NDArray[np.uint64]) -> bytes:
    """Checksums as little-endian uint64 bytes."""
    return sums.astype("<u8", copy=False).tobytes()


def unpack_checksums(data: bytes) -> npt.NDArray[np.uint64]:
    """The inverse of `pack_checksums`."""
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
