# SPDX-License-Identifier: Apache-2.0
"""A host prefix cache over plain arrays, and copiers that copy only when they are told to: by a thread, by streams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache, States
from kvrail.runtime.host_cache_index import HostCacheIndex
from kvrail.runtime.page_copier import PageCopier, ThreadCopier
from kvrail.transfer.chunked_pool import Span
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool

__all__ = ["ArraySlots", "SlowCopier", "StreamCopier", "host_cache_over"]


class ArraySlots:
    """`units` units in one array."""

    def __init__(self, units: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.array = np.zeros((units, unit_bytes), dtype=np.uint8)
        self._memory = EngineMemory(self.array.ctypes.data, unit_bytes)

    def addresses(self, units: Any) -> Any:
        return self._memory.addresses(units)

    def spans(self, units: Any) -> Iterator[Span]:
        yield Span(self._memory.address, units, np.arange(len(units)))


class _Copy:
    def __init__(self, source: Any, target: Any, nbytes: int) -> None:
        self.units = list(zip(source.tolist(), target.tolist(), strict=True))
        self.nbytes = nbytes
        self.usable = self.done = False
        self.error = ""
        self.seconds = 0.001

    def precede(self) -> None:
        assert self.usable

    def wait(self, timeout_s: float) -> None:
        pass

    def run(self) -> None:
        for source, target in self.units:
            ctypes.memmove(target, source, self.nbytes)
        self.usable = self.done = True


class SlowCopier:
    """Implements PageCopier; `run` carries out what has been asked for."""

    in_stream_order = False

    def __init__(self) -> None:
        self.asked: list[_Copy] = []

    def save(self, source: Any, target: Any, nbytes: int) -> _Copy:
        self.asked.append(_Copy(source, target, nbytes))
        return self.asked[-1]

    load = save

    def snapshot(self, source: Any, target: Any, nbytes: int) -> _Copy:
        copy = _Copy(source, target, nbytes)
        copy.run()
        return copy

    def behind_loads(self) -> None:
        return None

    def run(self, count: int = 1000, *, error: str = "") -> None:
        for copy in self.asked[:count]:
            copy.error = error
            copy.run()
        del self.asked[:count]

    def close(self) -> None:
        self.run()


class _StreamCopy(_Copy):
    def __init__(self, source: Any, target: Any, nbytes: int, copier: StreamCopier) -> None:
        super().__init__(source, target, nbytes)
        self.copier = copier
        self.usable, self.carried_out = True, False

    def precede(self) -> None:
        self.copier.catch_up(self)

    def carry_out(self) -> None:
        if not self.carried_out:
            super().run()
            self.carried_out, self.done = True, False

    def run(self) -> None:
        self.carry_out()
        # On a GPU a copy that fails takes everything with it: no load fails alone.
        self.done, self.error = True, ""


class StreamCopier(SlowCopier):
    """Implements PageCopier as streams of a GPU do, for an engine whose work is done as soon as it is queued.

    A load can be used at once. Its bytes come when work is queued behind it, or with `run`, which is also when the
    host learns of it. A snapshot is taken at once and delivered by `run`.
    """

    in_stream_order = True

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[_StreamCopy] = []

    def load(self, source: Any, target: Any, nbytes: int) -> _StreamCopy:
        copy = _StreamCopy(source, target, nbytes, self)
        self.asked.append(copy)
        self.loads.append(copy)
        return copy

    def snapshot(self, source: Any, target: Any, nbytes: int) -> _Copy:
        staging = np.zeros(len(source) * nbytes, dtype=np.uint8)
        staged = staging.ctypes.data + np.arange(len(source), dtype=np.uint64) * np.uint64(nbytes)
        _Copy(source, staged, nbytes).run()
        copy = self.save(staged, target, nbytes)
        copy.staging = staging  # type: ignore[attr-defined]
        return copy

    def catch_up(self, copy: _StreamCopy) -> None:
        """Carry out the loads up to this one: they stand on one stream."""
        for one in self.loads[: self.loads.index(copy) + 1]:
            one.carry_out()

    def behind_loads(self) -> Any:
        loads = list(self.loads)
        return SimpleNamespace(done=lambda: all(load.carried_out for load in loads))


def host_cache_over(
    memory: bytearray,
    layout: PageLayout,
    pool: PagePool,
    pages: int,
    copier: PageCopier | None = None,
    *,
    state: bytearray | None = None,
    host_states: int = 8,
    state_interval: int = 1,
) -> HostPrefixCache:
    """A cache of `pages` pages, and of `host_states` states if there are any, for an engine over `memory`."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if memory else 0
    states = None
    if state is not None:
        rings = EngineMemory(ctypes.addressof(ctypes.c_ubyte.from_buffer(state)), layout.state_bytes)
        states = States(ArraySlots(host_states, layout.state_bytes), rings, state_interval)
    return HostPrefixCache(
        pool=pool,
        memory=EngineMemory(address, layout.page_bytes),
        slots=ArraySlots(pages, layout.page_bytes) if memory else None,
        index=HostCacheIndex(pages, host_states if states else 0),
        copier=copier or ThreadCopier(),
        page_tokens=layout.page_tokens,
        states=states,
    )
