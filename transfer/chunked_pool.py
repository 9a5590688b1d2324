# SPDX-License-Identifier: Apache-2.0
"""A host pool of any size in chunks: allocated and registered one by one, with progress; nobody imports it.

One call for tens of GiB blocks for seconds without a word, and registration has limits of its own. Whoever copies
or pushes asks `spans` which chunk a unit lies in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.memory import HostPool, OutOfMemory, available_bytes

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["ChunkedPool", "Span"]

_CHUNK_BYTES = 1 << 30
# One thread gets a GiB of small pages in a second.
_MOST_THREADS = 8
_U32 = npt.NDArray[np.uint32]


class Span(NamedTuple):
    """Units of one chunk: its `address`, `units` counted from there, and `where` they stood in the question."""

    address: int
    units: _U32
    where: npt.NDArray[np.intp]


class ChunkedPool:
    """`units` units of `unit_bytes` bytes each, zero-filled and registered with UCX.

    With `pin` they are page-locked, so that GPUs can copy from them and to them. `shortage`: why there are fewer units
    than were asked for, or "".
    """

    def __init__(
        self,
        context: _ucx.Context,
        *,
        units: int,
        unit_bytes: int,
        name: str,
        progress: Callable[[float], None] | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        pin: _ucx.CudaDevice | None = None,
        collapse: bool = True,
        fewer: bool = False,
        threads: int | None = None,
    ) -> None:
        """`progress` hears the share that is done; `collapse` as for HostPool; `threads` allocate (default by cores).

        Raises OutOfMemory or (pinning) CudaFailed, with nothing kept: with `fewer` only when it is the first chunk that
        cannot be had.
        """
        self.unit_bytes = unit_bytes
        self.shortage = ""
        self._per_chunk = max(1, chunk_bytes // unit_bytes)
        self._chunks: list[HostPool] = []
        # Said before gigabytes have been taken from everybody else.
        if units * unit_bytes > available_bytes() and not fewer:
            raise OutOfMemory(
                f"pool {name} needs {units * unit_bytes >> 20} MiB of memory and the host has "
                f"{available_bytes() >> 20} MiB available"
            )

        def chunk(first: int) -> HostPool:
            count = min(self._per_chunk, units - first)
            return HostPool(
                context, units=count, unit_bytes=unit_bytes, name=name, pin=pin, collapse=collapse
            )

        firsts = range(0, units, self._per_chunk)
        threads = threads or max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        with ThreadPoolExecutor(threads, thread_name_prefix="allocation") as crew:
            coming = [crew.submit(chunk, first) for first in firsts]
            try:
                for number, future in enumerate(coming, 1):
                    self._chunks.append(future.result())
                    if progress is not None:
                        progress(number / len(coming))
            except (OutOfMemory, CudaFailed) as error:
                # In order: units have no gaps.
                _undo(coming[len(self._chunks) :])
                if not (fewer and self._chunks):
                    self.close()
                    raise
                self.shortage = str(error)
            except BaseException:
                _undo(coming[len(self._chunks) :])
                self.close()
                raise
        self.units = sum(chunk.units for chunk in self._chunks)
        self.nbytes = self.units * unit_bytes
        self._addresses = np.array([chunk.address for chunk in self._chunks], dtype=np.uint64)

    @property
    def backing(self) -> str:
        """Which pages the kernel gave for the first chunk."""
        return self._chunks[0].backing

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(address, bytes) of each chunk, for whoever must pin them for a device."""
        return [(chunk.address, chunk.nbytes) for chunk in self._chunks]

    def addresses(self, units: _U32) -> npt.NDArray[np.uint64]:
        """Where each unit begins."""
        chunk, rest = np.divmod(units.astype(np.int64), self._per_chunk)
        found: npt.NDArray[np.uint64] = self._addresses[chunk] + (rest * self.unit_bytes).astype(np.uint64)
        return found

    def spans(self, units: _U32) -> Iterator[Span]:
        """`units` by chunk, in the order of the chunks; within one in the order of the question."""
        chunk, rest = np.divmod(units, np.uint32(self._per_chunk))
        for number in np.unique(chunk):
            where = np.flatnonzero(chunk == number)
            yield Span(self._chunks[int(number)].address, rest[where], where)

    def close(self) -> None:
        """Unregister and unmap all chunks; the rules of HostPool.close hold."""
        for chunk in self._chunks:
            chunk.close()


def _undo(coming: list[Future[HostPool]]) -> None:
    """Keep nothing of these."""
    for future in coming:
        future.cancel()
    for future in coming:
        if not future.cancelled() and future.exception() is None:
            future.result().close()
