# SPDX-License-Identifier: Apache-2.0
"""The parts in which the pages of a step leave a GPU: some layers of each, while the layers behind them are computed.

A step's work is queued long before it is done, and so are its pushes, each behind the layers that it carries. What is
left to push when the step is done is its last part, however long the chunk was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvrail.kernels.attention import AttentionPlan

__all__ = ["Stored", "StoredPlan", "part_ends"]

# A part costs the host the queueing of a push, and the GPU some microseconds: it should be worth milliseconds of
# computing.
_PART_TOKENS = 512
# Eight leave an eighth of a chunk to be pushed behind it. Smaller pieces of a page are slower to copy.
_MOST_PARTS = 8


def part_ends(layers: int, tokens: int) -> list[int]:
    """After how many of its `layers` full layers a step of `tokens` tokens has another part ready, but for the last.

    >>> part_ends(32, 2048)
    [8, 16, 24]
    """
    parts = min(_MOST_PARTS, layers, tokens // _PART_TOKENS)
    return [layers * part // parts for part in range(1, parts)]


class Stored(NamedTuple):
    """Who wants to know, on the host, that the work is queued which stores K and V of the first so many full layers."""

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
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionPlan."""
        out = self._plan.attend(
            layer, query, key, value, scaling, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux
        )
        self._tell(layer, sliding_window)
        return out

    def _tell(self, layer: int, sliding_window: int | None) -> None:
        # Rings are no part of a page, and their layers are counted by themselves.
        if sliding_window is None and layer + 1 in self._stored.ends:
            self._stored.tell(layer + 1)
