# SPDX-License-Identifier: Apache-2.0
"""Pools in chunks whose memory a GPU is to read: every chunk is pinned, and none stays so."""

from __future__ import annotations

from typing import Any

import pytest

from kvrail.transfer import ucx
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.errors import CudaFailed

PAGE = 4096


class Pinning:
    """Takes note of what is pinned, as a CudaDevice would pin it; refuses from `most` ranges on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ranges: list[tuple[int, int]] = []

    def pin(self, address: int, nbytes: int) -> Any:
        if len(self.ranges) == self.most:
            raise CudaFailed("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", "pinning stopped")
        self.ranges.append((address, nbytes))
        return Pinned(self, (address, nbytes))


class Pinned:
    def __init__(self, device: Pinning, range_of: tuple[int, int]) -> None:
        self.device, self.range = device, range_of

    def close(self) -> None:
        self.device.ranges.remove(self.range)


def test_every_unit_lies_in_a_pinned_range_until_the_pool_is_closed() -> None:
    context, device = ucx.open_context("tcp", "127.0.0.1"), Pinning(9)
    pool = ChunkedPool(
        context, units=5, unit_bytes=PAGE, name="t", chunk_bytes=2 * PAGE, pin=device, threads=1
    )  # type: ignore[arg-type]
    for address, nbytes in pool.chunks:
        assert any(first <= address and address + nbytes <= first + size for first, size in device.ranges)
    assert len(pool.chunks) == len(device.ranges) == 3
    pool.close()
    assert device.ranges == []
    context.close()


def test_nothing_stays_pinned_when_a_chunk_cannot_be() -> None:
    context, device = ucx.open_context("tcp", "127.0.0.1"), Pinning(2)
    with pytest.raises(CudaFailed, match="pinning stopped"):
        ChunkedPool(context, units=5, unit_bytes=PAGE, name="t", chunk_bytes=2 * PAGE, pin=device, threads=1)  # type: ignore[arg-type]
    assert device.ranges == []
    context.close()


def test_fewer_units_than_asked_for_where_they_will_do() -> None:
    context, device = ucx.open_context("tcp", "127.0.0.1"), Pinning(2)
    pool = ChunkedPool(
        context, units=7, unit_bytes=PAGE, name="t", chunk_bytes=2 * PAGE, pin=device, fewer=True, threads=1  # type: ignore[arg-type]
    )  # fmt: skip
    assert (pool.units, pool.nbytes, len(pool.chunks)) == (4, 4 * PAGE, 2)
    assert "pinning stopped" in pool.shortage
    pool.close()
    with pytest.raises(CudaFailed, match="pinning stopped"):
        ChunkedPool(context, units=7, unit_bytes=PAGE, name="t", pin=Pinning(0), fewer=True)  # type: ignore[arg-type]
    assert device.ranges == []
    context.close()


@pytest.mark.parametrize("most", [0, 3, 9])
def test_threads_leave_nothing_behind(most: int) -> None:
    context, device = ucx.open_context("tcp", "127.0.0.1"), Pinning(most)
    told: list[float] = []
    if most < 8:
        with pytest.raises(CudaFailed, match="pinning stopped"):
            ChunkedPool(context, units=8, unit_bytes=PAGE, name="t", chunk_bytes=PAGE, pin=device, threads=4)  # type: ignore[arg-type]
    else:
        pool = ChunkedPool(
            context, units=8, unit_bytes=PAGE, name="t", chunk_bytes=PAGE, pin=device, threads=4, progress=told.append  # type: ignore[arg-type]
        )  # fmt: skip
        assert told == [n / 8 for n in range(1, 9)]
        assert len(device.ranges) == 8
        pool.close()
    assert device.ranges == []
    context.close()
