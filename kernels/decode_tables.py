# SPDX-License-Identifier: Apache-2.0
"""What a decoding step tells the GPU, in memory that stays where it is, so that a CUDA graph can read it.

A batch is filled up to a round number of rows. A row too many has no place to store its KV, sees no token, and
nobody looks at its logits.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.step_parts import Slice

__all__ = ["DecodeTables", "Tables"]


class Tables(NamedTuple):
    """Tables of one step, on one side; for `rows` rows. Pages of row r: indices[indptr[r] : indptr[r + 1]]."""

    tokens: torch.Tensor  # int64 [rows]
    places: torch.Tensor  # int64 [rows] row of the pool (see reference.store_tokens); -1: nowhere
    positions: torch.Tensor  # int32 [rows]
    indptr: torch.Tensor  # int32 [rows + 1]
    last: torch.Tensor  # int32 [rows] tokens in the last page, the new one included; 0: a row too many
    lengths: torch.Tensor  # int32 [rows] tokens that the row sees; 0: a row too many
    indices: torch.Tensor  # int32 [pages]


class DecodeTables:
    """Room for `rows` rows and, together, `pages` pages. One copy takes a step's tables to the device.

    `fill` writes where the copy of the step before was read from, so the caller waits for that copy first.
    """

    def __init__(self, device: torch.device, rows: int, pages: int) -> None:
        self.rows, self.pages = rows, pages
        long, short = (torch.int64, 8), (torch.int32, 4)
        kinds = (long, long, short, short, short, short, short)
        counts = (rows, rows, rows, rows + 1, rows, rows, pages)
        ends = np.cumsum([size * count for (_, size), count in zip(kinds, counts, strict=True)]).tolist()
        self._fixed = int(ends[-2])
        pinned = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._sides = (pinned, torch.zeros(ends[-1], dtype=torch.uint8, device=device))
        parts = list(zip([0, *ends[:-1]], ends, kinds, strict=True))
        views = [
            Tables(*(side[first:end].view(dtype) for first, end, (dtype, _) in parts)) for side in self._sides
        ]
        self._host, self._device = views
        self._numpy = [one.numpy() for one in self._host]

    def host(self, rows: int) -> Tables:
        """The host's side for a batch filled up to `rows`."""
        return _first(self._host, rows)

    def device(self, rows: int) -> Tables:
        """The device's side: always the same memory."""
        return _first(self._device, rows)

    def fill(
        self,
        pool_shape: torch.Size,
        tokens: npt.NDArray[np.int64],
        slices: list[Slice],
        rows: int,
    ) -> bool:
        """Tables of `slices`, one token each, filled up to `rows`, for a pool of this shape; on the current stream.

        False when they have more pages in all than there is room for.
        """
        _, layers, _, page_tokens = pool_shape[:4]
        real = len(slices)
        ends = np.fromiter((part.start for part in slices), np.int32, real) + np.int32(1)
        counts = (ends + (page_tokens - 1)) // page_tokens
        total = int(counts.sum())
        if total > self.pages:
            return False
        ids, places, positions, indptr, last, lengths, indices = self._numpy
        ids[:real] = tokens
        ids[real:rows] = 0
        positions[:real] = ends - 1
        positions[real:rows] = 0
        lengths[:real] = ends
        lengths[real:rows] = 0
        indptr[0] = 0
        np.cumsum(counts, out=indptr[1 : real + 1])
        indptr[real + 1 : rows + 1] = total
        last[:real] = ends - (counts - 1) * page_tokens
        last[real:rows] = 0
        tables = (
            part.pages if len(part.pages) == count else part.pages[:count]
            for part, count in zip(slices, counts.tolist(), strict=True)
        )
        indices[:total] = np.fromiter(chain.from_iterable(tables), np.int32, total)
        written = indices[indptr[1 : real + 1] - 1].astype(np.int64)
        places[:real] = written * (layers * 2 * page_tokens) + (last[:real] - 1)
        places[real:rows] = -1
        size = self._fixed + total * indices.itemsize
        source, target = self._sides
        target[:size].copy_(source[:size], non_blocking=True)
        return True


def _first(tables: Tables, rows: int) -> Tables:
    return Tables(
        tables.tokens[:rows],
        tables.places[:rows],
        tables.positions[:rows],
        tables.indptr[: rows + 1],
        tables.last[:rows],
        tables.lengths[:rows],
        tables.indices,
    )
