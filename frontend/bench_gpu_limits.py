# SPDX-License-Identifier: Apache-2.0
"""What the driver's own copies reach in one process: one block in one call (the limit), and a page list in one call.

No second process and no notice to anybody: nothing that moves pages between processes can be expected to be faster.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch

from kvrail.frontend.bench_gpu_memory import GpuMemory, Kind
from kvrail.frontend.bench_rank import POISON, Indices
from kvrail.transfer.errors import TransferError

__all__ = ["DriverCopies"]

_ORDERED_LIKE_THE_STREAM = 1


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


class DriverCopies:
    """`target` has as many pages as the pool, in memory of the receiver's kind."""

    def __init__(self, memory: GpuMemory, kind: Kind, device: int) -> None:
        self._memory = memory
        shape, where = tuple(memory.rows.shape), torch.device("cuda", device)
        if kind == "gpu":
            self._target = torch.empty(shape, dtype=torch.uint8, device=where)
        else:
            self._target = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        # torch copies from the host on a stream of the target's device.
        block = where if kind == "gpu" and memory.kind == "host" else memory.device
        self._block_stream = torch.cuda.Stream(block)  # type: ignore[no-untyped-call]
        # Also lets the two GPUs address one another.
        self._target[:1].copy_(memory.rows[:1])
        self.batch_refusal = ""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._call: Any = driver.cuMemcpyBatchAsync_v2
        except (OSError, AttributeError):
            self.batch_refusal = "the driver has no cuMemcpyBatchAsync_v2 (CUDA 13)"

    def block(self, pages: int) -> tuple[float, bool]:
        """(µs, whether it arrived) of one copy as large as the batch."""
        into, out_of = self._target[:pages], self._memory.rows[:pages]
        into.fill_(POISON)
        self._wait()
        begun = time.monotonic_ns()
        with torch.cuda.stream(self._block_stream):
            into.copy_(out_of, non_blocking=True)
        self._block_stream.synchronize()
        ended = time.monotonic_ns()
        return (ended - begun) / 1000, self._same(into, out_of)

    def batch(self, source: Indices, target: Indices) -> tuple[float, bool]:
        """(µs, whether it arrived) of all pages, in one call of cudaMemcpyBatchAsync's driver function."""
        count, size = len(source), self._memory.pool.unit_bytes
        index = torch.from_numpy(target.astype(np.int64)).to(self._target.device)
        if index.is_cuda:
            self._target.index_fill_(0, index, POISON)
        else:
            self._target.numpy()[target] = POISON
        self._wait()
        attributes = _Attributes(source_order=_ORDERED_LIKE_THE_STREAM)
        first = ctypes.c_size_t(0)
        begun = time.monotonic_ns()
        into = self._target.data_ptr() + target.astype(np.uint64) * np.uint64(size)
        out_of = self._memory.pool.address + source.astype(np.uint64) * np.uint64(size)
        sizes = np.full(count, size, dtype=np.uint64)
        status = self._call(
            ctypes.c_void_p(into.ctypes.data),
            ctypes.c_void_p(out_of.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        if status:
            raise TransferError(f"cuMemcpyBatchAsync: CUDA error {status}")
        self._stream.synchronize()
        ended = time.monotonic_ns()
        return (ended - begun) / 1000, self._same_pages(source, index)

    def _wait(self) -> None:
        if self._target.is_cuda:
            torch.cuda.synchronize(self._target.device)
        self._memory.wait()

    @staticmethod
    def _same(into: torch.Tensor, out_of: torch.Tensor) -> bool:
        return torch.equal(into, out_of.to(into.device))

    def _same_pages(self, source: Indices, target: torch.Tensor) -> bool:
        return self._same(self._target[target], self._memory.rows[self._memory.index(source)])

    def close(self) -> None:
        del self._target
