# SPDX-License-Identifier: Apache-2.0
"""Who is told, while a step is queued, of its layers: so that pages can leave in parts, layers before layers.

A step's work is queued long before it is done, and so are its pushes, each behind the layers that it carries. What is
left to push when the step is done is the last part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kvrail.kernels.attention import AttentionPlan

__all__ = ["Stored", "StoredPlan"]


class Stored(NamedTuple):
    """`tell` is called on the host when the work is queued that stores K and V of the first n full layers.

    n: each of `ends`, rising.
    """

    ends: Sequence[int]
    tell: Callable[[int], None]


class StoredPlan:
    """The attention plan of a step, telling when K and V of its layers are as good as stored.

    (Of the last layer it says nothing: there some rows may be stored twice, see last_layer.py.)
    """

    def __init__(self, plan: AttentionPlan, stored: Stored) -> None:
        self.positions = plan.positions
        self._plan = plan
        self._stored = stored

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, *, sliding_window: int | None = None
    ) -> None:
        """See AttentionPlan."""
        self._plan.store(layer, key, value, sliding_window=sliding_window)
        self._tell(layer, sliding_window)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        *,
        sliding_window: int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """See AttentionPlan."""
        out = self._plan.attend(layer, query, key, value, scaling, sliding_window=sliding_window, **more)
        self._tell(layer, sliding_window)
        return out

    def _tell(self, layer: int, sliding_window: int | None) -> None:
        # Rings are no part of a page, and their layers are counted by themselves.
        if sliding_window is None and layer + 1 in self._stored.ends:
            self._stored.tell(layer + 1)
