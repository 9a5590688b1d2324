# SPDX-License-Identifier: Apache-2.0
"""The tables of a step that is replayed as a CUDA graph: on both sides in memory that stays where it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["FixedTables", "HostArrays", "Tables"]


class Tables(NamedTuple):
    """Tables of one step, on one side: `rows` tokens of `sequences` sequences (n of them).

    Rows of sequence s: queries[s] … queries[s + 1] - 1; its pages: indices[indptr[s]] … indices[indptr[s + 1] - 1].
    """

    tokens: torch.Tensor  # int64 [rows]
    places: torch.Tensor  # int64 [rows] row of the pool (see reference.store_tokens); -1: nowhere
    read: (
        torch.Tensor
    )  # int64 [n] rows whose logits may be wanted, for steps that do not give those of all rows
    positions: torch.Tensor  # int32 [rows]
    queries: torch.Tensor  # int32 [n + 1]
    indptr: torch.Tensor  # int32 [n + 1]
    last: torch.Tensor  # int32 [n] tokens in the last page, new ones included; 0: nobody's rows
    lengths: torch.Tensor  # int32 [n] tokens that the last row sees; 0: nobody's rows
    indices: torch.Tensor  # int32 [pages]


class HostArrays(NamedTuple):
    """The host's side as numpy has it: the fields of Tables, all the way."""

    tokens: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    read: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    queries: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]


class FixedTables:
    """Room for `rows` rows of `sequences` sequences with, together, `pages` pages.

    What is written to `arrays` goes to the device with `send`. The next step writes where that copy is read from, so
    whoever fills them waits for it first.
    """

    def __init__(self, device: torch.device, rows: int, sequences: int, pages: int) -> None:
        self.pages = pages
        long, short = (torch.int64, 8), (torch.int32, 4)
        counts = (rows, rows, sequences, rows, sequences + 1, sequences + 1, sequences, sequences, pages)
        kinds = (*(long,) * 3, *(short,) * 6)
        ends = np.cumsum([size * count for (_, size), count in zip(kinds, counts, strict=True)]).tolist()
        self._before_pages = int(ends[-2])
        pinned = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._memory = (pinned, torch.zeros(ends[-1], dtype=torch.uint8, device=device))
        parts = list(zip([0, *ends[:-1]], ends, kinds, strict=True))
        # Host and device.
        self.sides = [
            Tables(*(side[first:end].view(dtype) for first, end, (dtype, _) in parts))
            for side in self._memory
        ]
        arrays: list[Any] = [one.numpy() for one in self.sides[0]]
        self.arrays = HostArrays(*arrays)

    def host(self, rows: int, sequences: int) -> Tables:
        """The host's side for a step of this size."""
        return _first(self.sides[0], rows, sequences)

    def device(self, rows: int, sequences: int) -> Tables:
        """The device's side: always the same memory."""
        return _first(self.sides[1], rows, sequences)

    def send(self, pages: int) -> None:
        """One copy to the device, in the order of the current stream, with `pages` entries of `indices`."""
        size = self._before_pages + pages * self.arrays.indices.itemsize
        source, target = self._memory
        target[:size].copy_(source[:size], non_blocking=True)


def _first(tables: Tables, rows: int, sequences: int) -> Tables:
    return Tables(
        tables.tokens[:rows],
        tables.places[:rows],
        tables.read[:sequences],
        tables.positions[:rows],
        tables.queries[: sequences + 1],
        tables.indptr[: sequences + 1],
        tables.last[:sequences],
        tables.lengths[:sequences],
        tables.indices,
    )
