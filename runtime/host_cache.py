# SPDX-License-Identifier: Apache-2.0
"""The host prefix cache of an engine: prefixes that its own pool has no room for, kept in host memory.

Written through: pages go to the host as soon as they are full, so that evicting them from the pool loses nothing.
What a copy reads or writes stays pinned until the copy is done, whatever becomes of the sequence meanwhile: a page
of the pool that a cancelled load still writes into is free only after that (it waits under a name of ours).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrail.runtime.host_cache_index import Fill, Hit, HostCacheIndex
from kvrail.runtime.page_copier import Copy, PageCopier, Place
from kvrail.transfer.chunked_pool import Span
from kvrail.transfer.pages import PagePool
from kvrail.transfer.prefill_ticket import CachedPages

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["EngineMemory", "HostPrefixCache", "Slots", "States"]

_log = logging.getLogger(__name__)
_U32 = npt.NDArray[np.uint32]
_COUNTED = (
    "lookups",
    "hits",
    "hit_tokens",
    "loaded_pages",
    "load_bytes",
    "load_seconds",
    "stored_pages",
    "stored_states",
    "save_bytes",
    "save_seconds",
)


class EngineMemory:
    """Equal units from `address` on: an engine's page pool, or its state slots."""

    def __init__(self, address: int, unit_bytes: int) -> None:
        self.address = address
        self.unit_bytes = unit_bytes

    def addresses(self, units: _U32) -> npt.NDArray[np.uint64]:
        """Where each unit begins."""
        found: npt.NDArray[np.uint64] = np.uint64(self.address) + units.astype(np.uint64) * np.uint64(
            self.unit_bytes
        )
        return found


class Slots(Place, Protocol):
    """The host's memory; it may be in chunks."""

    def spans(self, units: _U32) -> Iterator[Span]:
        """`units` by chunk."""


class States(NamedTuple):
    """Where states lie in the host cache and in the engine, and after how many pages of a prompt one is stored."""

    slots: Place
    memory: Place
    interval: int = 1


@dataclass(eq=False)
class _Load:
    """What a sequence got from the cache; `owner` holds its pages in the pool until the copies are done."""

    owner: str
    hit: Hit
    pages: CachedPages
    copies: list[Copy] = field(default_factory=list)
    measured: bool = False

    @property
    def usable(self) -> bool:
        return all(copy.usable for copy in self.copies)

    @property
    def done(self) -> bool:
        return all(copy.done for copy in self.copies)


class _Save(NamedTuple):
    owner: str
    fill: Fill
    copies: list[Copy]
    nbytes: int


class HostPrefixCache:
    """Belongs to the engine's thread. `pool` and `memory` are the engine's, `slots` the host's (None: no pages).

    With `states`, a hit ends where a state was stored.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        memory: Place,
        slots: Slots | None,
        index: HostCacheIndex,
        copier: PageCopier,
        page_tokens: int,
        states: States | None = None,
    ) -> None:
        self.stateful = states is not None
        self.state_interval = states.interval if states is not None else 1
        # Then what is loaded can be used, and pushed, behind its copies: `pages_of` names pages of the pool.
        self.in_stream_order = copier.in_stream_order
        self._pool = pool
        self._memory = memory
        self._slots = slots
        self.index = index
        self._copier = copier
        self._page_tokens = page_tokens
        self._states = states
        self._loads: dict[str, _Load] = {}
        self._orphans: list[_Load] = []
        self._saves: list[_Save] = []
        self._names = 0
        self._counters: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)

    # --- reading ----------------------------------------------------------------------------------------------

    def match(self, sequence_id: str, keys: Sequence[bytes], have: int) -> int:
        """How many pages of `keys` the sequence has with our help; it holds `have` of them in the pool itself.

        What we have is pinned for `sequence_id` from here to `let_go`. Of a model with state it may be less than
        `have`, or nothing: there is no state at the end of more.
        """
        self._counters["lookups"] += 1
        hit = self.index.match(keys, with_state=self.stateful)
        if hit is None:
            return 0 if self.stateful else have
        count = len(hit.slots)
        if self.stateful:
            have = min(have, count)
        elif count <= have:
            self.index.release(hit)
            return have
        slots = np.array(hit.slots[have:] if self._slots is not None else [], dtype=np.uint32)
        self._loads[sequence_id] = _Load(sequence_id, hit, CachedPages(have, slots))
        return count

    def load(self, sequence_id: str, pages: Sequence[int], state_slot: int = -1) -> None:
        """Copy what `match` found, if anything: to `pages` of the pool, which the sequence owns, and its state slot."""
        load = self._loads.get(sequence_id)
        if load is None:
            return
        target = np.array(pages, dtype=np.uint32)
        if self._slots is not None and len(target):
            load.copies.append(self._load(self._slots, load.pages.slots, self._memory, target))
            if self.in_stream_order:
                load.pages = CachedPages(load.pages.first, target)
        if self._states is not None and load.hit.state >= 0:
            slots, memory, _ = self._states
            load.copies.append(self._load(slots, _one(load.hit.state), memory, _one(state_slot)))
        self._counters["hits"] += 1
        self._counters["loaded_pages"] += len(target)
        self._counters["hit_tokens"] += (
            len(load.hit.slots) if self.stateful else len(target)
        ) * self._page_tokens

    @property
    def loads(self) -> bool:
        """Whether anything that `match` gave out has not been let go."""
        return bool(self._loads)

    def loading(self, sequence_id: str) -> bool:
        """Whether the sequence must not run yet, because its pages are being copied."""
        load = self._loads.get(sequence_id)
        return load is not None and not load.usable

    def loaded(self, sequence_id: str) -> bool:
        """Whether nothing is being copied for the sequence."""
        load = self._loads.get(sequence_id)
        return load is None or load.done

    def use(self, sequence_id: str) -> None:
        """The engine's work that is queued from now on finds the pages of a sequence that is not loading."""
        load = self._loads.get(sequence_id)
        for copy in load.copies if load is not None else ():
            copy.precede()

    def fault(self, sequence_id: str) -> str:
        """Why the pages of a sequence that is not loading are no good, or ""."""
        load = self._loads.get(sequence_id)
        return next((copy.error for copy in load.copies if copy.error), "") if load is not None else ""

    def spans(self, slots: _U32) -> Iterator[Span]:
        """Where `slots` lie, for whoever reads them without a copy."""
        assert self._slots is not None
        return self._slots.spans(slots)

    def pages_of(self, sequence_id: str) -> CachedPages | None:
        """What of the sequence can be read before it runs; pinned until `let_go`.

        Slots of ours (see `spans`); or pages of the pool, by whoever comes behind `behind_loads`.
        """
        load = self._loads.get(sequence_id)
        return load.pages if load is not None else None

    def behind_loads(self) -> _ucx.CudaFence | None:
        """Behind all that has been copied into the pool so far; None unless `in_stream_order`."""
        return self._copier.behind_loads()

    def inherit(self, sequence_id: str, heir: str) -> None:
        """`heir` takes over the pages of the sequence, which is no more: copies may still be at work on them."""
        load = self._loads.pop(sequence_id, None)
        if load is not None and load.done:
            self._settle(load)
        elif load is not None:
            load.owner = heir
            self._loads[heir] = load

    def let_go(self, sequence_id: str) -> None:
        """The sequence gives its pages back. Must come before the pool frees them: copies may be at work on them."""
        load = self._loads.pop(sequence_id, None)
        if load is None:
            return
        if load.done:
            self._settle(load)
            return
        load.owner = self._name("load")
        self._pool.rename(sequence_id, load.owner)
        self._orphans.append(load)

    # --- writing ----------------------------------------------------------------------------------------------

    def save(self, keys: Sequence[bytes], *, state: tuple[int, int] | None = None) -> None:
        """Write through what the host lacks of `keys`, whose pages the pool holds under these keys.

        `state`: (page number, state slot): the state at the end of that page. It may change when this returns.
        """
        fill = self.index.reserve(keys, state_place=state[0] if state is not None else -1)
        if fill is None:
            return
        owner = self._name("save")
        wanted = [keys[place] for place in fill.places] if self._slots is not None else []
        pages = self._pool.match(owner, wanted)
        if len(pages) < len(wanted):
            # Its pages are not in the pool (any more), so nothing behind them is of use either.
            self._pool.release(owner)
            self.index.abandon(fill)
            return
        copies: list[Copy] = []
        nbytes = 0
        if self._states is not None and state is not None and fill.state >= 0:
            slots, memory, _ = self._states
            source, target = memory.addresses(_one(state[1])), slots.addresses(_one(fill.state))
            copies.append(self._copier.snapshot(source, target, slots.unit_bytes))
            nbytes += slots.unit_bytes
            self._counters["stored_states"] += 1
        if self._slots is not None and pages:
            source = self._memory.addresses(np.array(pages, dtype=np.uint32))
            target = self._slots.addresses(np.array(fill.slots, dtype=np.uint32))
            copies.append(self._copier.save(source, target, self._slots.unit_bytes))
            nbytes += len(pages) * self._slots.unit_bytes
        self._saves.append(_Save(owner, fill, copies, nbytes))

    # --- the step loop ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `poll` is still wanted."""
        return bool(self._saves or self._orphans) or any(not load.done for load in self._loads.values())

    def poll(self) -> None:
        """Settle the copies that are done."""
        while self._saves and all(copy.done for copy in self._saves[0].copies):
            self._saved(self._saves.pop(0))
        for load in [load for load in self._orphans if load.done]:
            self._orphans.remove(load)
            self._pool.release(load.owner)
            self._settle(load)
        for load in self._loads.values():
            if load.copies and load.done:
                self._measure(load)

    def wait(self, timeout_s: float) -> None:
        """Return when some copy may be done: there is nothing else to do."""
        copies = [copy for load in (*self._loads.values(), *self._orphans) for copy in load.copies]
        copies += [copy for save in self._saves[:1] for copy in save.copies]
        for copy in copies:
            if not copy.done:
                copy.wait(timeout_s)
                return

    def flush(self) -> int:
        """Forget every page that nobody uses just now; returns how many."""
        return self.index.flush()

    def close(self) -> None:
        """Finish the copies, so that their memory may go away."""
        self._copier.close()
        self.poll()

    # --- what others see --------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """As doc/metrics.md names them."""
        index = self.index
        return {
            "hicache_pages": index.pages,
            "hicache_pages_used": index.used,
            "hicache_pages_pinned": index.pinned,
            "hicache_states": index.state_slots,
            "hicache_states_used": index.used_states,
            "hicache_copies": len(self._saves) + len(self._orphans) + len(self._loads),
        }

    def counters(self) -> dict[str, float]:
        """As doc/metrics.md names them."""
        evicted = {"evicted_pages": self.index.evicted_pages, "evicted_states": self.index.evicted_states}
        return {f"hicache_{name}": value for name, value in (self._counters | evicted).items()}

    # --- inside -----------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        self._names += 1
        return f"hicache {what} {self._names}"

    def _load(self, place: Place, source: _U32, target_place: Place, target: _U32) -> Copy:
        copy = self._copier.load(
            place.addresses(source), target_place.addresses(target), target_place.unit_bytes
        )
        self._counters["load_bytes"] += len(target) * target_place.unit_bytes
        return copy

    def _saved(self, save: _Save) -> None:
        self._pool.release(save.owner)
        fault = next((copy.error for copy in save.copies if copy.error), "")
        if fault:
            _log.error("pages could not be copied to the host cache: %s", fault)
            self.index.abandon(save.fill)
            return
        self.index.commit(save.fill)
        self._counters["stored_pages"] += len(save.fill.places)
        self._counters["save_bytes"] += save.nbytes
        self._counters["save_seconds"] += sum(copy.seconds for copy in save.copies)

    def _settle(self, load: _Load) -> None:
        self._measure(load)
        self.index.release(load.hit)

    def _measure(self, load: _Load) -> None:
        if not load.measured:
            load.measured = True
            self._counters["load_seconds"] += sum(copy.seconds for copy in load.copies)


def _one(unit: int) -> _U32:
    return np.array([unit], dtype=np.uint32)
