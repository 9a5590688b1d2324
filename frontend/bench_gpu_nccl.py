# SPDX-License-Identifier: Apache-2.0
"""NCCL as a way of transfer-bench: one send and one receive a page, batched, as an NCCL connector moves a page list."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from kvrail.frontend.bench_gpu_memory import GpuMemory
from kvrail.frontend.bench_rank import Indices
from kvrail.transfer.errors import TransferError
from kvrail.transfer.nccl_probe import page_operations

__all__ = ["NcclWay", "leave_nccl"]

_WITHIN = timedelta(seconds=60)


class NcclWay:
    """Both processes must make theirs at the same time: the first of them joins the two, later ones share that."""

    def __init__(self, memory: GpuMemory, rank: int, port: int) -> None:
        self._memory, self._rank = memory, rank
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=2,
                timeout=_WITHIN,
                device_id=memory.device,
            )
            # Of send/recv only the sender's log tells the transport; of this, the receiver's does as well.
            dist.all_reduce(torch.zeros(1, device=memory.device))

    def push(self, number: int, source: Indices, target: Indices) -> None:
        self._move(source)

    def await_batch(self, number: int, target: Indices) -> int:
        self._move(target)
        self._memory.wait()
        return time.monotonic_ns()

    def _move(self, pages: Indices) -> None:
        send = self._rank == 0
        for group in page_operations(self._memory.rows, pages.tolist(), send=send, peer=1 - self._rank):
            for work in dist.batch_isend_irecv(group):
                if not work.wait():
                    raise TransferError("NCCL did not finish")

    def settle(self) -> None:
        self._memory.wait()

    def close(self) -> None:
        pass


def leave_nccl() -> None:
    """End what the first NcclWay began."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
