# SPDX-License-Identifier: Apache-2.0
"""The rig of tests/engine over GPU memory, its tiny models loaded on a GPU, and a pinned host cache beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.conftest import Models, Rig
from kvrail.runtime.cuda_copier import CudaCopier
from kvrail.runtime.device import Compute
from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache, States
from kvrail.runtime.host_cache_index import HostCacheIndex
from kvrail.runtime.model import PagedModel, pool_tensor
from kvrail.transfer import ucx
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.cuda import open_device
from kvrail.transfer.pages import PagePool

__all__ = ["CudaModels", "CudaRig", "PinnedCache"]


class PinnedCache:
    """A host cache of pinned memory for an engine over torch's memory on GPU 0. To be closed after the engine."""

    def __init__(
        self,
        model: PagedModel,
        pool: PagePool,
        memory: torch.Tensor,
        state: torch.Tensor | None,
        compute: Compute,
        *,
        pages: int,
        states: int = 8,
        interval: int = 1,
        chunk_pages: int = 3,
        kernel_cache: Path | None = None,
    ) -> None:
        layout = model.layout
        assert compute.stream is not None
        device = open_device(0, kernel_cache)
        self._context = ucx.open_context("tcp", "127.0.0.1")
        self._pools: list[ChunkedPool] = []

        def chunks(units: int, unit_bytes: int) -> ChunkedPool:
            self._pools.append(
                ChunkedPool(
                    self._context,
                    units=units,
                    unit_bytes=unit_bytes,
                    name="host cache",
                    chunk_bytes=chunk_pages * unit_bytes,
                    pin=device,
                    collapse=False,
                )
            )
            return self._pools[-1]

        kept = None
        if state is not None:
            kept = States(
                chunks(states, layout.state_bytes),
                EngineMemory(state.data_ptr(), layout.state_bytes),
                interval,
            )
        self.cache = HostPrefixCache(
            pool=pool,
            memory=EngineMemory(memory.data_ptr(), layout.page_bytes),
            slots=chunks(pages, layout.page_bytes) if layout.layers else None,
            index=HostCacheIndex(pages, states if kept else 0),
            copier=CudaCopier(device, compute.stream, state_bytes=layout.state_bytes if kept else 0),
            page_tokens=layout.page_tokens,
            states=kept,
        )

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self._context.close()


class CudaRig(Rig):
    """A rig whose pool is GPU memory, full of NaN to begin with."""

    def __init__(
        self,
        model: PagedModel,
        pages: int,
        slots: int = 8,
        *,
        host_pages: int = 0,
        host_states: int = 8,
        state_interval: int = 1,
        kernel_cache: Path | None = None,
        **options: Any,
    ) -> None:
        from kvrail.runtime.embedded import EmbeddedEngine

        self.model = model
        layout = model.layout
        slots = slots if layout.state_bytes else 0
        self.pool = PagePool(pages if layout.layers else 0, slots)
        self.memory = _poison(self.pool.pages * layout.page_bytes)
        self.state = _poison(slots * layout.state_bytes)
        self.host = self.pinned = None
        compute = Compute(model.device)
        state = self.state if slots else None
        if host_pages:
            self.pinned = PinnedCache(
                model, self.pool, self.memory, state, compute, pages=host_pages, states=host_states,
                interval=state_interval, kernel_cache=kernel_cache,
            )  # fmt: skip
            self.host = self.pinned.cache
        self.engine = EmbeddedEngine(
            model,
            self.pool,
            self.memory,
            state_memory=state,
            host_cache=self.host,
            compute=compute,
            **options,
        )
        self.tokens, self.finished, self.steps = {}, {}, []

    @property
    def tensor(self) -> torch.Tensor:
        return pool_tensor(self.memory, self.pool.pages, self.model.layout)

    def poison_free_pages(self) -> None:
        """What nobody owns and no prefix needs may hold anything."""
        torch.cuda.synchronize()
        layout = self.model.layout
        for memory, unit, free in (
            (self.memory, layout.page_bytes, [n for n in range(self.pool.pages) if self.pool._state[n] == 0]),
            (self.state, layout.state_bytes, self.pool._free_states),
        ):
            if free:
                memory.view(-1, unit)[free] = 255
        torch.cuda.synchronize()

    def close(self) -> None:
        self.engine.close()
        if self.pinned is not None:
            self.pinned.close()


def _poison(size: int) -> torch.Tensor:
    # 0xFF… is NaN in every float type.
    return torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda")


class CudaModels(Models):
    device = "cuda"

    def __init__(self, root: Path, kernel_cache: Path) -> None:
        super().__init__(root)
        self._kernel_cache = kernel_cache

    def _load(
        self, kind: str, page_tokens: int = 16, dtype: str = "float32", attention: str = "auto"
    ) -> PagedModel:
        return PagedModel.load(
            self.checkpoint(kind), dtype, page_tokens, device=self.device, attention=attention
        )

    def rig(
        self, kind: str = "llama", page_tokens: int = 16, pages: int = 96, dtype: str = "float32", **more
    ) -> CudaRig:
        attention = more.pop("attention", "auto")
        return CudaRig(
            self.load(kind, page_tokens, dtype, attention), pages, kernel_cache=self._kernel_cache, **more
        )
