# SPDX-License-Identifier: Apache-2.0
"""Which prefixes stand in the host cache: a tree of pages under chained keys, with pins and least-recently-used order.

    (absent) ──reserve──▶ filling (pinned) ──commit──▶ ready ──match──▶ pinned by its readers
        ▲                     └──abandon──▶ (absent)     │  ▲──release──┘
        └──────────────────evicted, leaf first───────────┘

Every pin holds a whole chain from its first page on, and what is let go enters the order deepest page first. So a
page always stands behind its children in the order, and the first of the order is a leaf: no parent is ever evicted
before its child. A state (what a model keeps beside pages) hangs on the page at whose end it was taken.
Pure and single-threaded; it moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Fill", "Hit", "HostCacheIndex"]


class _Page:
    """A page of the tree. `dead`: taken out of the tree while pinned; its slot is free with its last pin."""

    __slots__ = (
        "children",
        "dead",
        "key",
        "parent",
        "pins",
        "ready",
        "slot",
        "state",
        "state_pins",
        "state_ready",
    )

    def __init__(self, key: bytes, slot: int, parent: _Page | None) -> None:
        self.key = key
        self.slot = slot
        self.parent = parent
        self.children: dict[bytes, _Page] = {}
        self.pins = 0
        self.ready = self.dead = False
        self.state = -1
        self.state_pins = 0
        self.state_ready = False


@dataclass(frozen=True, eq=False)
class Hit:
    """A pinned prefix: `slots` in token order, `state` the state slot at its end (-1: none). Release it once."""

    slots: list[int]
    state: int
    chain: list[_Page]


@dataclass(frozen=True, eq=False)
class Fill:
    """Slots to be written: page number `places[i]` of the prompt goes to `slots[i]`, its state to `state`.

    `state_place`: the page at whose end the state is to be taken. Commit or abandon it once.
    """

    places: list[int]
    slots: list[int]
    state_place: int
    state: int
    chain: list[_Page]


class HostCacheIndex:
    """The index of `pages` page slots and `state_slots` state slots.

    When all slots are taken the least recently used page (or state) that nobody has pinned makes room; when
    everything is pinned, less is stored. Nothing here ever fails for lack of room.
    """

    def __init__(self, pages: int, state_slots: int = 0) -> None:
        self.pages = pages
        self.state_slots = state_slots
        self.evicted_pages = 0
        self.evicted_states = 0
        self._free = list(range(pages - 1, -1, -1))
        self._free_states = list(range(state_slots - 1, -1, -1))
        self._table: dict[bytes, _Page] = {}
        # Pages and states without pins, the first to be evicted first.
        self._idle: dict[_Page, None] = {}
        self._idle_states: dict[_Page, None] = {}
        self._dead: set[_Page] = set()

    # --- reading ----------------------------------------------------------------------------------------------

    def known(self, keys: Sequence[bytes]) -> int:
        """How many pages of `keys`, from the first on, are ready. Pins nothing."""
        count = 0
        for key in keys:
            page = self._table.get(key)
            if page is None or not page.ready:
                break
            count += 1
        return count

    def match(self, keys: Sequence[bytes], *, with_state: bool = False) -> Hit | None:
        """Pin the longest ready prefix of `keys`; None when there is none.

        `with_state`: it must end where a state stands, so it is cut down to the last such page.
        """
        chain: list[_Page] = []
        for key in keys:
            page = self._table.get(key)
            if page is None or not page.ready:
                break
            chain.append(page)
        while with_state and chain and not chain[-1].state_ready:
            chain.pop()
        if not chain:
            return None
        self._pin(chain)
        last = chain[-1]
        if with_state:
            self._idle_states.pop(last, None)
            last.state_pins += 1
        return Hit([page.slot for page in chain], last.state if with_state else -1, chain)

    def release(self, hit: Hit) -> None:
        """The pages of a match have been read for the last time."""
        if hit.state >= 0:
            self._unpin_state(hit.chain[-1])
        self._unpin(hit.chain)

    # --- writing ----------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes], *, state_place: int = -1) -> Fill | None:
        """Slots for what is missing of `keys`, pinned with all before it; None when nothing is to be written.

        What stands there already, or is being written by someone else, is not reserved twice. `state_place`: page
        at whose end a state is at hand (-1: none).
        """
        chain: list[_Page] = []
        places: list[int] = []
        for place, key in enumerate(keys):
            page = self._table.get(key)
            if page is None:
                slot = self._free.pop() if self._free else self._evict()
                if slot < 0:
                    break
                parent = chain[-1] if chain else None
                page = self._table[key] = _Page(key, slot, parent)
                if parent is not None:
                    parent.children[key] = page
                places.append(place)
            # One by one: the next eviction must not take what this chain stands on.
            self._pin([page])
            chain.append(page)
        state = -1
        if 0 <= state_place < len(chain) and chain[state_place].state < 0:
            state = self._free_states.pop() if self._free_states else self._evict_state()
        if state >= 0:
            holder = chain[state_place]
            holder.state, holder.state_pins = state, 1
        elif not places:
            self._unpin(chain)
            return None
        slots = [chain[place].slot for place in places]
        return Fill(places, slots, state_place if state >= 0 else -1, state, chain)

    def commit(self, fill: Fill) -> None:
        """Everything of `fill` is written: others may read it."""
        for place in fill.places:
            fill.chain[place].ready = True
        if fill.state >= 0:
            fill.chain[fill.state_place].state_ready = True
            self._unpin_state(fill.chain[fill.state_place])
        self._unpin(fill.chain)

    def abandon(self, fill: Fill) -> None:
        """`fill` was not written: it goes, and with it what stands on it."""
        if fill.state >= 0:
            holder = fill.chain[fill.state_place]
            holder.state, holder.state_pins = -1, 0
            self._free_states.append(fill.state)
        for place in fill.places:
            self._kill(fill.chain[place])
        self._unpin(fill.chain)

    def flush(self) -> int:
        """Evict every page that nobody has pinned; returns how many."""
        count = len(self._idle)
        for _ in range(count):
            self._free.append(self._evict())
        return count

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Page slots that hold something."""
        return self.pages - len(self._free)

    @property
    def used_states(self) -> int:
        """State slots that hold something."""
        return self.state_slots - len(self._free_states)

    @property
    def pinned(self) -> int:
        """Pages that are being written or read."""
        return self.used - len(self._idle)

    def check(self) -> None:
        """Raise AssertionError unless every slot is in one place and the order is sound."""
        nodes = [*self._table.values(), *self._dead]
        slots = sorted([*self._free, *(page.slot for page in nodes)])
        _require(slots == list(range(self.pages)), "a page slot is lost or in two hands")
        states = sorted([*self._free_states, *(page.state for page in nodes if page.state >= 0)])
        _require(states == list(range(self.state_slots)), "a state slot is lost or in two hands")
        rank = {page: n for n, page in enumerate(self._idle)}
        for page in self._table.values():
            _require(
                page.pins >= 0 and (page.pins == 0) == (page in rank), "idle pages are not the unpinned ones"
            )
            _require(page.ready or page.pins > 0, "a page is being written, but not pinned")
            for child in page.children.values():
                _require(child.parent is page and self._table.get(child.key) is child, "a child is lost")
                _require(page.pins > 0 or rank[child] < rank[page], "a parent would go before its child")
            parent = page.parent
            _require(parent is None or parent.children.get(page.key) is page, "a page has lost its parent")
        holders = {page for page in self._table.values() if page.state >= 0 and not page.state_pins}
        _require(holders == set(self._idle_states), "idle states are not the unpinned ones")
        _require(all(page.pins > 0 for page in self._dead), "a dead page holds its slot for nobody")

    # --- inside -----------------------------------------------------------------------------------------------

    def _pin(self, pages: Iterable[_Page]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            page.pins += 1

    def _unpin(self, chain: Sequence[_Page]) -> None:
        for page in reversed(chain):
            page.pins -= 1
            if page.pins:
                continue
            if page.dead:
                self._dead.remove(page)
                self._free.append(page.slot)
                self._drop_state(page)
            else:
                self._idle[page] = None

    def _unpin_state(self, page: _Page) -> None:
        page.state_pins -= 1
        if not page.state_pins and not page.dead:
            self._idle_states[page] = None

    def _evict(self) -> int:
        """The slot of the least recently used page, which leaves the tree; -1 when all are pinned."""
        page = next(iter(self._idle), None)
        if page is None:
            return -1
        _require(not page.children, "the oldest page has children")
        del self._idle[page]
        self._unlink(page)
        self._drop_state(page)
        self.evicted_pages += 1
        return page.slot

    def _evict_state(self) -> int:
        page = next(iter(self._idle_states), None)
        if page is None:
            return -1
        del self._idle_states[page]
        state, page.state, page.state_ready = page.state, -1, False
        self.evicted_states += 1
        return state

    def _drop_state(self, page: _Page) -> None:
        if page.state >= 0:
            self._idle_states.pop(page, None)
            self._free_states.append(page.state)
            page.state, page.state_ready = -1, False

    def _kill(self, page: _Page) -> None:
        """Take a page and all behind it out of the tree; slots that are pinned stay taken until they are let go."""
        if page.dead:
            return
        doomed = [page]
        self._unlink(page)
        while doomed:
            one = doomed.pop()
            doomed += one.children.values()
            one.children.clear()
            self._table.pop(one.key, None)
            one.dead = True
            self._idle_states.pop(one, None)
            if one in self._idle:
                del self._idle[one]
                self._free.append(one.slot)
                self._drop_state(one)
            else:
                self._dead.add(one)

    def _unlink(self, page: _Page) -> None:
        del self._table[page.key]
        if page.parent is not None:
            page.parent.children.pop(page.key, None)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
