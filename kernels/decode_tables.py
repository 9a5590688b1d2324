# SPDX-License-Identifier: Apache-2.0
"""What a decoding step tells the GPU, in memory that stays where it is, so that a CUDA graph can read it.

A batch is filled up to a round number of rows. A row too many has no place to store its KV, sees no token, and
nobody looks at its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.fixed_tables import FixedTables, Tables
from kvrail.kernels.step_parts import Slice

__all__ = ["DecodeTables"]


class DecodeTables:
    """Room for `rows` sequences of one new token each and, together, `pages` pages. See FixedTables."""

    causal = False  # A single token sees all of its pages.

    def __init__(self, device: torch.device, rows: int, pages: int) -> None:
        self._tables = FixedTables(device, rows, rows, pages)
        # One query token in each row, whatever the batch.
        for side in self._tables.sides:
            side.queries.copy_(torch.arange(rows + 1))

    def host(self, rows: int) -> Tables:
        """The host's side for a batch filled up to `rows`."""
        return self._tables.host(rows, rows)

    def device(self, rows: int) -> Tables:
        """The device's side: always the same memory."""
        return self._tables.device(rows, rows)

    def fill(
        self,
        pool_shape: torch.Size,
        tokens: npt.NDArray[np.int64],
        slices: list[Slice],
        wanted: Sequence[int],
        rows: int,
    ) -> bool:
        """Tables of `slices`, one token each, filled up to `rows`, for a pool of this shape; on the current stream.

        False when they have more pages in all than there is room for. All rows are read, whichever are wanted.
        """
        _, layers, _, page_tokens = pool_shape[:4]
        real = len(slices)
        ends = np.fromiter((part.start for part in slices), np.int32, real) + np.int32(1)
        counts = (ends + (page_tokens - 1)) // page_tokens
        total = int(counts.sum())
        if total > self._tables.pages:
            return False
        there = self._tables.arrays
        there.tokens[:real] = tokens
        there.tokens[real:rows] = 0
        there.positions[:real] = ends - 1
        there.positions[real:rows] = 0
        there.lengths[:real] = ends
        there.lengths[real:rows] = 0
        there.indptr[0] = 0
        np.cumsum(counts, out=there.indptr[1 : real + 1])
        there.indptr[real + 1 : rows + 1] = total
        there.last[:real] = ends - (counts - 1) * page_tokens
        there.last[real:rows] = 0
        tables = (
            part.pages if len(part.pages) == count else part.pages[:count]
            for part, count in zip(slices, counts.tolist(), strict=True)
        )
        there.indices[:total] = np.fromiter(chain.from_iterable(tables), np.int32, total)
        written = there.indices[there.indptr[1 : real + 1] - 1].astype(np.int64)
        there.places[:real] = written * (layers * 2 * page_tokens) + (there.last[:real] - 1)
        there.places[real:rows] = -1
        self._tables.send(total)
        return True
