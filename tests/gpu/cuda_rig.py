# SPDX-License-Identifier: Apache-2.0
"""The rig of tests/engine over GPU memory, and its tiny models loaded on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from engine.conftest import Models, Rig
from kvrail.runtime.model import PagedModel, pool_tensor
from kvrail.transfer.pages import PagePool

__all__ = ["CudaModels", "CudaRig"]


class CudaRig(Rig):
    """A rig whose pool is GPU memory, full of NaN to begin with."""

    def __init__(self, model: PagedModel, pages: int, slots: int = 8, **options: Any) -> None:
        from kvrail.runtime.embedded import EmbeddedEngine

        self.model = model
        layout = model.layout
        slots = slots if layout.state_bytes else 0
        self.pool = PagePool(pages if layout.layers else 0, slots)
        self.memory = _poison(self.pool.pages * layout.page_bytes)
        self.state = _poison(slots * layout.state_bytes)
        self.host = None
        self.engine = EmbeddedEngine(
            model, self.pool, self.memory, state_memory=self.state if slots else None, **options
        )
        self.tokens, self.finished, self.steps = {}, {}, []

    @property
    def tensor(self) -> torch.Tensor:
        return pool_tensor(self.memory, self.pool.pages, self.model.layout)

    def poison_free_pages(self) -> None:
        """What nobody owns and no prefix needs may hold anything."""
        torch.cuda.synchronize()
        free = self.pool.allocate("probe", self.pool.free)
        self.tensor[free] = torch.nan
        self.pool.release("probe")


def _poison(size: int) -> torch.Tensor:
    # 0xFF… is NaN in every float type.
    return torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda")


class CudaModels(Models):
    device = "cuda"

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
        return CudaRig(self.load(kind, page_tokens, dtype, attention), pages, **more)
