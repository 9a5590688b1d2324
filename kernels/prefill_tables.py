# SPDX-License-Identifier: Apache-2.0
"""What a short step with chunks of prompts tells the GPU, in memory that stays where it is, for a CUDA graph to read.

A step has up to PREFILL_SEQUENCES sequences of any number of tokens. What is missing up to a round number of rows is
one more sequence, which has no place to store its KV and sees no token. It is the last, and there also when it has
no row: so every step has as many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.fixed_tables import FixedTables, Tables
from kvrail.kernels.step_parts import Slice

__all__ = ["PREFILL_SEQUENCES", "PrefillTables"]

PREFILL_SEQUENCES = 16


class PrefillTables:
    """Room for `rows` tokens of sequences with, together, `pages` pages. See FixedTables."""

    causal = True

    def __init__(self, device: torch.device, rows: int, pages: int) -> None:
        self._tables = FixedTables(device, rows, PREFILL_SEQUENCES + 1, pages)

    def host(self, rows: int) -> Tables:
        """The host's side for a step filled up to `rows`."""
        return self._tables.host(rows, PREFILL_SEQUENCES + 1)

    def device(self, rows: int) -> Tables:
        """The device's side: always the same memory."""
        return self._tables.device(rows, PREFILL_SEQUENCES + 1)

    def fill(
        self,
        pool_shape: torch.Size,
        tokens: npt.NDArray[np.int64],
        slices: list[Slice],
        wanted: Sequence[int],
        rows: int,
    ) -> bool:
        """Tables of `slices` with `tokens`, of which the logits of `wanted` are read, filled up to `rows`.

        False when there are more sequences, wanted tokens or pages than there is room for.
        """
        _, layers, _, page_tokens = pool_shape[:4]
        count, real = len(slices), len(tokens)
        if count > PREFILL_SEQUENCES or len(wanted) > PREFILL_SEQUENCES:
            return False
        starts = np.array([part.start for part in slices], np.int64)
        lengths = np.array([part.length for part in slices], np.int64)
        pages = -(-(starts + lengths) // page_tokens)
        first = np.concatenate(([0], np.cumsum(pages)))
        total = int(first[-1])
        if total > self._tables.pages:
            return False
        there = self._tables.arrays
        there.indptr[: count + 1] = first
        there.indptr[count + 1 :] = total
        there.queries[0] = 0
        np.cumsum(lengths, out=there.queries[1 : count + 1])
        there.queries[count + 1 : -1] = real
        there.queries[-1] = rows
        there.lengths[:count] = starts + lengths
        there.lengths[count:] = 0
        there.last[:count] = starts + lengths - (pages - 1) * page_tokens
        there.last[count:] = 0
        for part, begin, end in zip(slices, first[:-1].tolist(), first[1:].tolist(), strict=True):
            there.indices[begin:end] = part.pages[: end - begin]
        of = np.repeat(np.arange(count), lengths)
        positions = np.arange(real) - there.queries[of] + starts[of]
        written = there.indices[first[of] + positions // page_tokens].astype(np.int64)
        there.tokens[:real] = tokens
        there.tokens[real:rows] = 0
        there.positions[:real] = positions
        there.positions[real:rows] = 0
        there.places[:real] = written * (layers * 2 * page_tokens) + positions % page_tokens
        there.places[real:rows] = -1
        there.read[: len(wanted)] = wanted
        there.read[len(wanted) :] = 0
        self._tables.send(total)
        return True
