# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: one launch by the host in place of one for every kernel of every layer.

There are graphs for decoding, by the number of sequences, and for short steps with chunks of prompts (of a few
sequences, some of which may decode), by the number of tokens. A step takes the next larger one, whose rows too many
store nothing and read nothing (kernels/decode_tables.py, prefill_tables.py). Choosing tokens is not part of it.
Whatever cannot be captured is computed as before, launch by launch, and the log says once why.
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
from kvrail.kernels.decode_tables import DecodeTables
from kvrail.kernels.flashinfer_attention import FlashInferAttention
from kvrail.kernels.flashinfer_fixed import FixedAttention, NotFixed, StepTables
from kvrail.kernels.prefill_tables import PREFILL_SEQUENCES, PrefillTables
from kvrail.kernels.upload import upload

__all__ = ["StepGraphs", "batch_sizes"]

_log = logging.getLogger(__name__)
# A decoding step reads all weights whatever the batch: up to half as many rows again cost little.
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Tokens of a step with chunks of prompts. With more of them it computes for longer than launching it takes.
_CHUNKS = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# Their kernel computes as much for a single token as for a tile of a chunk, which costs time behind long contexts.
_CHUNK_CONTEXT = 65536
_NONE: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)

# Token ids [rows], the plan of their attention, the rows to give logits of (None: all) → logits, float32 or narrower
# [rows, vocabulary], all on the current stream.
Compute = Callable[[torch.Tensor, AttentionPlan, torch.Tensor | None], torch.Tensor]


def batch_sizes(sequences: int) -> list[int]:
    """The batch sizes that are captured for up to `sequences` sequences: little padding, and not many of them."""
    return list(_BATCHES[: bisect.bisect_left(_BATCHES, sequences) + 1])


class _Kind:
    """The graphs of one kind of step, by the number of rows."""

    def __init__(self, fixed: FixedAttention, *, reads: int | None) -> None:
        self.fixed = fixed
        # How many rows have logits; None: all.
        self.reads = reads
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[int]]] = {}

    @property
    def sizes(self) -> list[int]:
        return sorted(self.graphs)


class StepGraphs:
    """The graphs of one model over one pool. Replays follow each other on one stream.

    `decodes`: whether there are decoding steps at all.
    """

    def __init__(
        self,
        attention: FlashInferAttention,
        compute: Compute,
        vocabulary: int,
        cache: Path | None,
        *,
        decodes: bool = True,
    ) -> None:
        self._attention, self._compute, self._decodes = attention, compute, decodes
        self._vocabulary, self._cache = vocabulary, cache
        self._pool: tuple[object, ...] = ()
        self._decoding: _Kind | None = None
        self._reading: _Kind | None = None
        # Both sorted: the sizes that have a graph.
        self.batches: list[int] = []
        self.chunks: list[int] = []
        self._logits = torch.empty(0)
        self._told = ""

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
            why = self._capture_all(pool, batch_sizes(sequences) if self._decodes else [], sequence_pages)
        # Torch has no class of its own for work that cannot be captured; the others are what calls that another version
        # of FlashInfer has changed, and strides that the kernels cannot do, end with.
        except (RuntimeError, TypeError, ValueError, AttributeError, KernelsUnavailable) as error:
            self._forget()
            why = str(error).partition("\n")[0]
        torch.cuda.synchronize(pool.device)
        torch.cuda.empty_cache()
        captured = bool(self.batches or self.chunks)
        if why and why != self._told:
            self._told = why
            _log.warning("the engine %s CUDA graphs: %s", "lacks some" if captured else "is without", why)
        if captured:
            taken = (free - torch.cuda.mem_get_info(pool.device)[0]) >> 20
            spent = time.perf_counter() - began
            _log.info(
                "CUDA graphs for batches of %s and prompts of %s tokens: %.1f s, %d MiB",
                self.batches,
                self.chunks,
                spent,
                taken,
            )

    def run(
        self, pool: torch.Tensor, tokens: np.ndarray[Any, Any], slices: list[Slice], wanted: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits as PagedModel.forward gives them, until the next call; None for steps without a graph."""
        if self._pool[:3] != _identity(pool):
            return None
        # As many tokens as slices: each has one.
        if len(tokens) == len(slices) and self.batches:
            logits = self._replay(self._decoding, self.batches, tokens, slices, wanted)
            if logits is None or list(wanted) == list(range(len(slices))):
                return logits
            (index,) = upload(pool.device, (np.asarray(wanted, dtype=np.int64),))
            return logits[index]
        return self._replay(self._reading, self.chunks, tokens, slices, wanted)

    def _replay(
        self,
        kind: _Kind | None,
        sizes: list[int],
        tokens: np.ndarray[Any, Any],
        slices: list[Slice],
        wanted: Sequence[int],
    ) -> torch.Tensor | None:
        """Logits of all tokens, or of those that are wanted."""
        place = bisect.bisect_left(sizes, len(tokens))
        if kind is None or place == len(sizes):
            return None
        rows = sizes[place]
        graph, shape = kind.graphs[rows]
        made = kind.fixed.begin(tokens, slices, wanted, rows)
        if made is None:
            return None
        assert made == shape, f"FlashInfer plans {rows} rows as {made}, and has done it as {shape}"
        graph.replay()
        return self._logits[: len(tokens) if kind.reads is None else len(wanted)]

    def _forget(self) -> None:
        self._decoding = self._reading = None
        self.batches, self.chunks = [], []
        self._pool, self._logits = (), torch.empty(0)

    def _capture_all(self, pool: torch.Tensor, batches: list[int], sequence_pages: int) -> str:
        """Capture steps of both kinds; returns why some are missing."""
        device, missing = pool.device, ""
        most = max([PREFILL_SEQUENCES, *batches])
        self._logits = torch.empty(most, self._vocabulary, dtype=torch.float32, device=device)
        context = _CHUNK_CONTEXT // pool.shape[3] + PREFILL_SEQUENCES
        pages = min(PREFILL_SEQUENCES * sequence_pages, context)
        reading = self._kind(pool, PrefillTables(device, _CHUNKS[-1], pages), reads=PREFILL_SEQUENCES)
        wanted = [(size, reading) for size in _CHUNKS]
        decoding = None
        if batches:
            tables = DecodeTables(device, batches[-1], batches[-1] * sequence_pages)
            decoding = self._kind(pool, tables, reads=None)
            wanted += [(size, decoding) for size in batches]
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        shared = torch.cuda.graph_pool_handle()
        _log.info("capturing CUDA graphs of %d steps", len(wanted))
        # The largest first: the others then find room in its memory.
        for size, kind in sorted(wanted, key=lambda one: -one[0]):
            try:
                with torch.cuda.stream(stream):
                    kind.graphs[size] = self._capture(kind, pool, size, stream, shared)
            except NotFixed as error:
                missing = str(error)
        self._decoding, self._reading = decoding, reading
        self.batches, self.chunks = decoding.sizes if decoding else [], reading.sizes
        return missing

    def _kind(self, pool: torch.Tensor, tables: StepTables, *, reads: int | None) -> _Kind:
        return _Kind(FixedAttention(self._attention, pool, tables, self._cache), reads=reads)

    def _capture(
        self, kind: _Kind, pool: torch.Tensor, size: int, stream: torch.cuda.Stream, shared: Any
    ) -> tuple[torch.cuda.CUDAGraph, list[int]]:
        """A graph of `size` rows. All of them are rows too many here, so nothing of the pool is read or written."""
        step, shape = self._step(kind, pool, size)
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

    def _step(self, kind: _Kind, pool: torch.Tensor, size: int) -> tuple[Callable[[], None], list[int]]:
        """What a graph of `size` rows does, with tables of nobody's rows, and what its plan looks like."""
        shape = kind.fixed.begin(_NONE, [], [], size)
        assert shape is not None, "nothing is always small enough"
        plan = kind.fixed.plan(pool, size, shape)
        read = None if kind.reads is None else plan.read[: kind.reads]
        target = self._logits[: size if kind.reads is None else kind.reads]

        def step() -> None:
            target.copy_(self._compute(plan.tokens, plan, read))

        return step, shape


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
