# SPDX-License-Identifier: Apache-2.0
"""One side's pages when GPUs are measured: in its GPU's memory, or in pinned host memory that its GPU reaches."""

from __future__ import annotations

import gc
import hashlib
import time
from typing import Any, Literal

import numpy as np
import torch

from kvrail.frontend.bench_rank import POISON, Indices
from kvrail.runtime.checkpoint import cache_dir
from kvrail.transfer.cuda import open_device
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import HostPool
from kvrail.transfer.ucx import open_context

__all__ = ["GpuMemory", "Kind", "digest_of_sums"]

Kind = Literal["gpu", "host"]
# Pages are summed in pieces of this size, so that sums need little memory of their own.
_PIECE_BYTES = 64 << 20
_VIEWS_S = 5.0


class GpuMemory:
    """`rows`: the pages as a tensor [pages, page bytes] of bytes, on the GPU or on the host. UCX knows the pool."""

    def __init__(self, kind: Kind, device: int, page_bytes: int, pages: int) -> None:
        self.kind = kind
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.cuda = open_device(device, cache_dir() / "kernels")
        self.context = open_context("auto", "127.0.0.1", cuda=True)
        self.pool: DevicePool | HostPool
        try:
            buffer: Any
            if kind == "gpu":
                self.pool = DevicePool(self.context, self.cuda, units=pages, unit_bytes=page_bytes)
                self.rows = torch.as_tensor(self.pool.buffer, device=self.device).view(pages, page_bytes)
            else:
                self.pool = HostPool(self.context, units=pages, unit_bytes=page_bytes, pin=self.cuda)
                buffer = self.pool.buffer
                self.rows = torch.frombuffer(buffer, dtype=torch.uint8).view(pages, page_bytes)
        except BaseException:
            self.context.close()
            raise
        generator = torch.Generator().manual_seed(page_bytes)
        # Odd, so that no bit of a word is lost in the sum.
        weights = torch.randint(-(2**62), 2**62, (page_bytes // 8,), generator=generator) * 2 + 1
        self._weights = weights.to(self.device)

    @property
    def backing(self) -> str:
        """What the memory is made of."""
        return self.pool.backing

    def index(self, pages: Indices) -> torch.Tensor:
        """Page numbers where the rows are."""
        return torch.from_numpy(pages.astype(np.int64)).to(self.rows.device)

    def fill(self) -> None:
        """Random contents."""
        generator = torch.Generator(self.device).manual_seed(1)
        step = max(1, _PIECE_BYTES // self.pool.unit_bytes)
        for at in range(0, self.pool.units, step):
            some = self.rows[at : at + step]
            words = torch.empty(some.numel() // 8, dtype=torch.int64, device=self.device)
            some.copy_(words.random_(generator=generator).view(torch.uint8).view(some.shape))
        self.wait()

    def poison(self, pages: Indices) -> None:
        """Overwrite these pages."""
        if self.kind == "host":
            self.rows.numpy()[pages] = POISON
        else:
            self.rows.index_fill_(0, self.index(pages), POISON)
            self.wait()

    def sums(self, pages: Indices) -> torch.Tensor:
        """A 64-bit sum of each page [n], on the CPU; the same wherever the page lies."""
        words, index = self.rows.view(torch.int64), self.index(pages)
        step = max(1, _PIECE_BYTES // self.pool.unit_bytes)
        pieces = (index[at : at + step] for at in range(0, len(index), step))
        # Pages of the host are summed on the GPU as well.
        parts = [(words[some].to(self.device) * self._weights).sum(1) for some in pieces]
        return torch.cat(parts).cpu()

    def digest(self, pages: Indices) -> str:
        """One value for the contents of these pages, in this order."""
        return digest_of_sums(self.sums(pages))

    def wait(self) -> None:
        """Until the GPU has done what was asked of it."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """After every way that uses the pool."""
        self.rows = torch.zeros((0, 8), dtype=torch.uint8)
        deadline = time.monotonic() + _VIEWS_S
        while True:
            gc.collect()
            try:
                self.pool.close()
                break
            except TransferError:
                # NCCL's own thread lets go of the last tensors some time after they arrived.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.context.close()


def digest_of_sums(sums: torch.Tensor) -> str:
    """As `GpuMemory.digest` for pages with these sums."""
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()
