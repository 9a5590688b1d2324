# SPDX-License-Identifier: Apache-2.0
"""Decoding steps as CUDA graphs: one launch by the host in place of one for every kernel of every layer.

A graph is captured for each of a few batch sizes; a batch takes the next larger one, whose rows too many store
nothing and read nothing (kernels/decode_tables.py). Choosing tokens is not part of it. Whatever cannot be captured is
computed as before, launch by launch, and the log says once why.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrail.kernels.attention import AttentionPlan, Slice
from kvrail.kernels.compiled import KernelsUnavailable
from kvrail.kernels.flashinfer_attention import FlashInferAttention
from kvrail.kernels.flashinfer_decode import FixedDecode, NotFixed
from kvrail.kernels.upload import upload

__all__ = ["DecodeGraphs", "batch_sizes"]

_log = logging.getLogger(__name__)
# A decoding step reads all weights whatever the batch: up to half as many rows again cost little.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_NONE: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)

# Token ids [rows] and the plan of their attention → logits [rows, vocabulary], all on the current stream.
Compute = Callable[[torch.Tensor, AttentionPlan], torch.Tensor]


def batch_sizes(sequences: int) -> list[int]:
    """The batch sizes that are captured for up to `sequences` sequences: little padding, and not many of them."""
    return list(_SIZES[: bisect.bisect_left(_SIZES, sequences) + 1])


class DecodeGraphs:
    """The graphs of one model over one pool. Replays follow each other on one stream."""

    def __init__(
        self, attention: FlashInferAttention, compute: Compute, vocabulary: int, cache: Path | None
    ) -> None:
        self._attention, self._compute = attention, compute
        self._vocabulary, self._cache = vocabulary, cache
        self._pool: tuple[object, ...] = ()
        self._fixed: FixedDecode | None = None
        # By batch size: the graph, and the plan that it was captured with.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[int]]] = {}
        self._sizes: list[int] = []
        self._logits = torch.empty(0)
        self._told = ""

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that have a graph."""
        return list(self._sizes)

    def prepare(self, pool: torch.Tensor, sequences: int, sequence_pages: int) -> None:
        """Capture steps of up to `sequences` sequences of at most `sequence_pages` pages each over `pool`.

        Waits for the device. Forgets the graphs of another pool; the same one again costs nothing. Never raises: what
        cannot be captured has no graph.
        """
        wanted = (*_identity(pool), sequences, sequence_pages)
        if wanted == self._pool:
            return
        torch.cuda.synchronize(pool.device)
        self._forget()
        self._pool = wanted
        torch.cuda.empty_cache()
        began, (free, _) = time.perf_counter(), torch.cuda.mem_get_info(pool.device)
        try:
            why = self._capture_all(pool, batch_sizes(sequences), sequence_pages)
        # Torch has no class of its own for work that cannot be captured; the others are what calls that another version
        # of FlashInfer has changed, and strides that the kernels cannot do, end with.
        except (RuntimeError, TypeError, ValueError, AttributeError, KernelsUnavailable) as error:
            self._forget()
            why = str(error).partition("\n")[0]
        torch.cuda.synchronize(pool.device)
        torch.cuda.empty_cache()
        if why and why != self._told:
            self._told = why
            _log.warning("decoding %s CUDA graphs: %s", "lacks some" if self._sizes else "is without", why)
        if self._sizes:
            taken = (free - torch.cuda.mem_get_info(pool.device)[0]) >> 20
            spent = time.perf_counter() - began
            _log.info("CUDA graphs for batches of %s: %.1f s, %d MiB", self._sizes, spent, taken)

    def run(
        self, pool: torch.Tensor, tokens: np.ndarray[Any, Any], slices: list[Slice], wanted: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits as PagedModel.forward gives them, until the next call; None for steps without a graph."""
        count = len(slices)
        place = bisect.bisect_left(self._sizes, count)
        # As many tokens as slices: each has one.
        if place == len(self._sizes) or len(tokens) != count or self._pool[:3] != _identity(pool):
            return None
        assert self._fixed is not None, "there are graphs"
        rows = self._sizes[place]
        graph, shape = self._graphs[rows]
        made = self._fixed.begin(tokens, slices, rows)
        if made is None:
            return None
        assert made == shape, f"FlashInfer plans {rows} sequences as {made}, and has done it as {shape}"
        graph.replay()
        logits = self._logits[:count]
        if list(wanted) == list(range(count)):
            return logits
        (index,) = upload(pool.device, (np.asarray(wanted, dtype=np.int64),))
        return logits[index]

    def _forget(self) -> None:
        self._graphs, self._sizes, self._fixed = {}, [], None
        self._pool, self._logits = (), torch.empty(0)

    def _capture_all(self, pool: torch.Tensor, sizes: list[int], sequence_pages: int) -> str:
        """Capture `sizes`; returns why some are missing."""
        rows, missing = sizes[-1], ""
        fixed = FixedDecode(self._attention, pool, rows, rows * sequence_pages, self._cache)
        self._logits = torch.empty(rows, self._vocabulary, dtype=torch.float32, device=pool.device)
        stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        shared = torch.cuda.graph_pool_handle()
        _log.info("capturing decoding steps as CUDA graphs for batches of up to %d", rows)
        # The largest first: the others then find room in its memory.
        for size in reversed(sizes):
            try:
                with torch.cuda.stream(stream):
                    self._graphs[size] = self._capture(fixed, pool, size, stream, shared)
            except NotFixed as error:
                missing = str(error)
        self._sizes = sorted(self._graphs)
        self._fixed = fixed
        return missing

    def _capture(
        self, fixed: FixedDecode, pool: torch.Tensor, size: int, stream: torch.cuda.Stream, shared: Any
    ) -> tuple[torch.cuda.CUDAGraph, list[int]]:
        """A graph of `size` rows. All of them are rows too many here, so nothing of the pool is read or written."""
        shape = fixed.begin(_NONE, [], size)
        assert shape is not None, "no pages are always few enough"
        plan = fixed.plan(pool, size, shape)

        def step() -> None:
            self._logits[:size].copy_(self._compute(plan.tokens, plan))

        # Once without capturing, so that nothing is loaded or chosen during it. What waits for the device is found
        # here: a capture that fails in the middle leaves torch's allocator in a bad state.
        with _no_waiting():
            step()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with CUDA meanwhile.
        with torch.cuda.graph(graph, pool=shared, stream=stream, capture_error_mode="thread_local"):
            step()
        # The first launch of a graph takes longer.
        graph.replay()
        stream.synchronize()
        return graph, shape


def _identity(pool: torch.Tensor) -> tuple[object, ...]:
    return pool.data_ptr(), tuple(pool.shape), pool.dtype


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """What makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That this mode does not know everything that waits.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
