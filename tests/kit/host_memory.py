# SPDX-License-Identifier: Apache-2.0
"""A host prefix cache over plain arrays, and a copier that copies only when it is told to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache, States
from kvrail.runtime.host_cache_index import HostCacheIndex
from kvrail.runtime.page_copier import PageCopier, ThreadCopier
from kvrail.transfer.chunked_pool import Span
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool

__all__ = ["ArraySlots", "SlowCopier", "host_cache_over"]


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
