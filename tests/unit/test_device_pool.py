# SPDX-License-Identifier: Apache-2.0
"""Who frees a pool in GPU memory: its owner, or nobody while a living peer may have it mapped. The driver is played."""

from __future__ import annotations

from typing import Any

import pytest

from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import CudaFailed, TransferError
from kvrail.transfer.memory import Pools


class Gpu:
    """Allocates numbers, and is its own memory, region and context: what happened is in `told`."""

    address = 1 << 30

    def __init__(self, room: int = 1 << 40) -> None:
        self.told: list[str] = []
        self.room = room

    def allocate(self, nbytes: int) -> Gpu:
        if nbytes > self.room:
            raise CudaFailed("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self.told.append(f"allocate {nbytes}")
        return self

    def make_current(self) -> None:
        self.told.append("current")

    def register(self, address: int, nbytes: int, memory: str) -> Gpu:
        self.told.append(f"register {memory}")
        return self

    def close(self) -> None:
        self.told.append("close")

    def leave_open(self) -> None:
        self.told.append("leave open")


def pool_of(gpu: Any, **shape: int) -> DevicePool:
    return DevicePool(gpu, gpu, **({"units": 4, "unit_bytes": 64} | shape))


def test_a_pool_is_registered_behind_its_allocation_and_freed_behind_its_region() -> None:
    gpu = Gpu()
    pool = pool_of(gpu)
    pool.close()
    pool.close()
    assert gpu.told == ["allocate 256", "current", "register cuda", "close", "close"]


def test_what_a_living_peer_may_have_mapped_is_never_freed() -> None:
    gpu = Gpu()
    pool = pool_of(gpu)
    Pools(pool, None, pool).leave_open()
    assert gpu.told[3:] == ["leave open"]
    with pytest.raises(TransferError, match="is closed"):
        pool.read(0, 1)


def test_a_viewed_pool_is_not_freed_under_its_tensor() -> None:
    gpu = Gpu()
    pool = pool_of(gpu)
    view = pool.buffer
    with pytest.raises(TransferError, match="drop its tensors first"):
        pool.close()
    assert view is not None
    assert view.__cuda_array_interface__["data"] == (gpu.address, False)
    del view
    pool.close()


def test_a_pool_that_does_not_fit_names_the_flags() -> None:
    with pytest.raises(CudaFailed, match=r"--kv-pages or --kv-memory-gb") as refusal:
        pool_of(Gpu(room=100))
    assert refusal.value.status == "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(ValueError, match="a multiple of 16"):
        pool_of(Gpu(), unit_bytes=24)
