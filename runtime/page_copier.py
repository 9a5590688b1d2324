# SPDX-License-Identifier: Apache-2.0
"""Copies between an engine's pages and the host cache's, beside the step loop: the narrow face, and plain memory's.

Ordering is the copier's business. What a `save` reads must not change before its copy is done; what a `load` writes
may be used as soon as the copy is `usable`, which on a GPU is long before it is done: by work that it is made to
`precede` in the order of a stream (cuda_copier.py).
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Copy", "PageCopier", "Place", "ThreadCopier"]

_Addresses = npt.NDArray[np.uint64]


class Copy(Protocol):
    """One copy under way. All of it may be asked at any time, from one thread."""

    @property
    def usable(self) -> bool:
        """Whether work of the engine that the copy is made to `precede` finds the bytes in their place."""

    @property
    def done(self) -> bool:
        """Whether neither side is touched any more, be it that the copy failed."""

    @property
    def error(self) -> str:
        """Why a copy that is done is no good one, or ""."""

    @property
    def seconds(self) -> float:
        """How long the bytes took, once it is done."""

    def precede(self) -> None:
        """The engine's work that is queued from now on comes behind it. Only for a copy that is usable."""

    def wait(self, timeout_s: float) -> None:
        """Return when it is done, or after `timeout_s`."""


class Place(Protocol):
    """Memory of equal units: what an address is depends on the copier."""

    unit_bytes: int

    def addresses(self, units: npt.NDArray[np.uint32]) -> _Addresses:
        """Where each unit begins."""


class PageCopier(Protocol):
    """Carries out copies of single units; those of one kind in the order in which they were asked for.

    `in_stream_order`: loads are usable before they are done (see Copy.precede), and `behind_loads` gives a fence.
    """

    in_stream_order: bool

    def save(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """Copy units of `nbytes` from the engine's memory to the host cache."""

    def snapshot(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """As `save`, but the source may change when this returns: by the CPU, or by work that is queued from now on."""

    def load(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """Copy units of `nbytes` from the host cache to the engine's memory."""

    def behind_loads(self) -> _ucx.CudaFence | None:
        """Behind every load so far; None unless `in_stream_order`."""

    def close(self) -> None:
        """Finish what was asked for."""


class _ThreadCopy:
    """A copy that a thread of ours carries out."""

    def __init__(self, runs: list[tuple[int, int, int]]) -> None:
        self.runs = runs
        self.seconds = 0.0
        self.error = ""
        self._ended = threading.Event()

    @property
    def usable(self) -> bool:
        return self._ended.is_set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def precede(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)

    def run(self) -> None:
        began = time.perf_counter()
        try:
            for source, target, nbytes in self.runs:
                # Without the GIL: the step loop goes on meanwhile.
                ctypes.memmove(target, source, nbytes)
        except Exception as error:  # Whoever waits must hear of it: nothing may wait for ever.
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - began
        self._ended.set()


class ThreadCopier:
    """Plain copies by one thread, so that a step never waits for one. Implements PageCopier for host memory.

    Loads go before saves: a request waits for a load, nobody for a save.
    """

    in_stream_order = False

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, _ThreadCopy | None]] = queue.PriorityQueue()
        self._asked = 0
        self._thread = threading.Thread(target=self._work, name="page copies", daemon=True)
        self._thread.start()

    def save(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """See PageCopier."""
        return self._ask(1, source, target, nbytes)

    def snapshot(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """See PageCopier. Done by the caller, who would otherwise wait for the thread, and for pages ahead in it."""
        copy = _ThreadCopy(list(_runs(source, target, nbytes)))
        copy.run()
        return copy

    def load(self, source: _Addresses, target: _Addresses, nbytes: int) -> Copy:
        """See PageCopier."""
        return self._ask(0, source, target, nbytes)

    def behind_loads(self) -> None:
        """See PageCopier."""
        return None

    def close(self) -> None:
        """Finish what was asked for, and end the thread."""
        self._queue.put((2, self._asked, None))
        self._thread.join()

    def _ask(self, urgency: int, source: _Addresses, target: _Addresses, nbytes: int) -> _ThreadCopy:
        copy = _ThreadCopy(list(_runs(source, target, nbytes)))
        self._asked += 1
        self._queue.put((urgency, self._asked, copy))
        return copy

    def _work(self) -> None:
        while (copy := self._queue.get()[2]) is not None:
            copy.run()


def _runs(source: _Addresses, target: _Addresses, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) with neighbours that are neighbours on both sides made one."""
    if not len(source):
        return
    gap = (np.diff(source) != nbytes) | (np.diff(target) != nbytes)
    starts = np.concatenate([[0], np.flatnonzero(gap) + 1, [len(source)]])
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield int(source[first]), int(target[first]), (end - first) * nbytes
