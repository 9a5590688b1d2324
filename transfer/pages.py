# SPDX-License-Identifier: Apache-2.0
"""Who owns each page of a pool: free, one writing owner, quarantine, or shared and immutable.

    free ──allocate──▶ owned ──share──▶ shared (read by n owners) ──last reader gone──▶ cached (LRU)
      ▲                 │  ▲                                          ◀──match──            │
      │◀────release─────┤  └──rename: owned by another name                                │
      │◀─release_quarantined── quarantined ◀──quarantine──┘(owned)                         │
      └◀──────────────────────evicted by allocate or flush_cache───────────────────────────┘

A page that `fork` shares between the answers to one prompt has no key, and is freed with its last reader.

A page has one writing owner at any time (design I1); every change of state is checked against the state that the
page must be in, so a double free or a page in two hands raises at once instead of corrupting somebody's KV.
Pure and single-threaded: the ticket ledgers and the engine of one rank share one pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.transfer.errors import NoPages
from kvrail.transfer.page_runs import choose_pages

__all__ = ["PagePool"]

_FREE, _OWNED, _QUARANTINED, _SHARED = range(4)
_NAMES = ("free", "owned", "quarantined", "shared")


class _Holding:
    """What one owner holds: pages it may write (in allocation order), pages it reads, a state slot or -1."""

    __slots__ = ("pages", "reads", "state_slot")

    def __init__(self) -> None:
        self.pages: dict[int, None] = {}
        self.reads: list[int] = []
        self.state_slot = -1

    def __bool__(self) -> bool:
        return bool(self.pages or self.reads or self.state_slot >= 0)


class PagePool:
    """The pages and state slots of one rank.

    `growth_reserve`: pages that `allocate(..., keep_reserve=True)` leaves available, so that running sequences
    can grow however many tickets are asked for.
    """

    def __init__(self, pages: int, state_slots: int = 0, *, growth_reserve: int = 0) -> None:
        self.pages = pages
        self.state_slots = state_slots
        self.growth_reserve = growth_reserve
        self._state = np.full(pages, _FREE, dtype=np.uint8)
        self._counts = [pages, 0, 0, 0]
        self._free_states = list(range(state_slots - 1, -1, -1))
        self._held: dict[str, _Holding] = {}
        self._quarantine: dict[str, _Holding] = {}
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        self._readers: dict[int, int] = {}
        # Shared pages without readers, the first to be evicted first.
        self._unread: dict[int, None] = {}

    # --- writing owners ---------------------------------------------------------------------------------------

    def allocate(self, owner: str, count: int, *, keep_reserve: bool = False) -> list[int]:
        """`count` pages for `owner` to write, in as few and as long ascending runs as there are.

        Directly behind the owner's last page if that is free, else the shortest free run that is long enough,
        else the longest runs. Cached pages are evicted, oldest first, only when free ones do not suffice.
        Raises NoPages, with nothing changed, when there are not enough.
        """
        available = self.available - (self.growth_reserve if keep_reserve else 0)
        if count > available:
            kept = f" ({self.growth_reserve} kept for running sequences)" if keep_reserve else ""
            raise NoPages(f"{count} pages asked for, {max(0, available)} of {self.pages} available{kept}")
        if count <= 0:
            return []
        self._evict(count - self.free)
        holding = self._held.setdefault(owner, _Holding())
        last = next(reversed(holding.pages), holding.reads[-1] if holding.reads else -1)
        taken = choose_pages(self._state == _FREE, count, last + 1)
        self._move(taken, _FREE, _OWNED)
        pages: list[int] = taken.tolist()
        holding.pages.update(dict.fromkeys(pages))
        return pages

    def allocate_state(self, owner: str) -> int:
        """A state slot for `owner`: -1 when the pool has none at all; NoPages when all are taken."""
        if self.state_slots == 0:
            return -1
        if not self._free_states:
            raise NoPages(f"all {self.state_slots} state slots are taken")
        holding = self._held.setdefault(owner, _Holding())
        if holding.state_slot >= 0:
            raise ValueError(f"{owner} holds state slot {holding.state_slot} already")
        holding.state_slot = self._free_states.pop()
        return holding.state_slot

    def rename(self, owner: str, new_owner: str) -> None:
        """Give all that `owner` holds to `new_owner`, behind what that one holds already."""
        holding = self._held.get(owner)
        if holding is None or owner == new_owner:
            return
        target = self._held.setdefault(new_owner, _Holding())
        if holding.state_slot >= 0:
            if target.state_slot >= 0:
                raise ValueError(f"{owner} and {new_owner} hold a state slot each")
            target.state_slot = holding.state_slot
        target.pages.update(holding.pages)
        target.reads.extend(holding.reads)
        del self._held[owner]

    def release(self, owner: str) -> None:
        """Free the pages and the state slot that `owner` writes, and drop its reader pins. Idempotent."""
        holding = self._held.pop(owner, None)
        if holding is None:
            return
        self._unpin(holding.reads)
        self._free(holding, _OWNED)

    def release_pages(self, owner: str, pages: Iterable[int]) -> None:
        """Give back some of the pages that `owner` writes or reads; ValueError for one that it does not hold."""
        holding = self._held.get(owner) or _Holding()
        written: list[int] = []
        for page in pages:
            if page in holding.pages:
                del holding.pages[page]
                written.append(page)
            elif page in holding.reads:
                holding.reads.remove(page)
                self._unpin([page])
            else:
                raise ValueError(f"{owner} does not hold page {page}")
        self._move(_indices(written), _OWNED, _FREE)
        if not holding:
            self._held.pop(owner, None)

    def pages_of(self, owner: str) -> list[int]:
        """The pages that `owner` may write, in allocation order (shared ones are no longer among them)."""
        holding = self._held.get(owner)
        return list(holding.pages) if holding is not None else []

    def reads_of(self, owner: str) -> list[int]:
        """The shared pages that `owner` reads, in the order in which it matched or shared them."""
        holding = self._held.get(owner)
        return list(holding.reads) if holding is not None else []

    def state_slot_of(self, owner: str) -> int:
        """The state slot of `owner`, or -1."""
        holding = self._held.get(owner)
        return holding.state_slot if holding is not None else -1

    def owners(self) -> list[str]:
        """Everyone who holds a page, a pin or a state slot (quarantine not counted)."""
        return [owner for owner, holding in self._held.items() if holding]

    # --- quarantine -------------------------------------------------------------------------------------------

    def quarantine(self, owner: str) -> None:
        """Nobody may use what `owner` writes until `release_quarantined`: a remote writer may still be at it.

        Its reader pins are dropped: no remote writer writes shared pages. A no-op when it holds nothing;
        ValueError when it has pages in quarantine already (owners of quarantined pages are never used again).
        """
        holding = self._held.get(owner)
        if holding is None:
            return
        if owner in self._quarantine:
            raise ValueError(f"{owner} is in quarantine already")
        del self._held[owner]
        self._unpin(holding.reads)
        holding.reads = []
        if not holding:
            return
        self._move(_indices(holding.pages), _OWNED, _QUARANTINED)
        self._quarantine[owner] = holding

    def release_quarantined(self, owner: str) -> None:
        """The writer of `owner`'s pages is proven quiet: free them. Idempotent."""
        holding = self._quarantine.pop(owner, None)
        if holding is not None:
            self._free(holding, _QUARANTINED)

    def quarantined_of(self, owner: str) -> list[int]:
        """The pages that `owner` has in quarantine."""
        holding = self._quarantine.get(owner)
        return list(holding.pages) if holding is not None else []

    def quarantined_state_of(self, owner: str) -> int:
        """The state slot that `owner` has in quarantine, or -1."""
        holding = self._quarantine.get(owner)
        return holding.state_slot if holding is not None else -1

    # --- shared prefix pages ----------------------------------------------------------------------------------

    def share(self, owner: str, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """These pages of `owner` are full and will never be written again: others may read each under its key.

        The owner becomes their first reader. When another page stands under a key already (two sequences computed
        the same prefix side by side) nothing changes for it: the page stays private to its owner, who may be pushing
        from it just now, and is freed with it. So a page table never changes under a running sequence. ValueError, with
        nothing changed, for a page that `owner` does not write.
        """
        holding = self._held.get(owner) or _Holding()
        if missing := [page for page in pages if page not in holding.pages]:
            raise ValueError(f"{owner} does not write page {missing[0]}, so it cannot share it")
        fresh: dict[bytes, int] = {}
        for page, key in zip(pages, keys, strict=True):
            if key not in self._page_of_key:
                fresh.setdefault(key, page)
        self._move(_indices(fresh.values()), _OWNED, _SHARED)
        for key, page in fresh.items():
            del holding.pages[page]
            self._key_of_page[page] = key
            self._readers[page] = 1
        self._page_of_key.update(fresh)
        holding.reads.extend(fresh.values())

    def fork(self, owner: str, reader: str, pages: Sequence[int]) -> None:
        """`reader` reads these full pages of `owner` from now on, and neither writes them again.

        A page that stands under a key stays in the cache behind its last reader; one that does not is freed with
        them. ValueError, with nothing changed, for a page that `owner` does not hold.
        """
        holding = self._held.get(owner) or _Holding()
        written = [page for page in pages if page in holding.pages]
        if missing := set(pages) - holding.pages.keys() - set(holding.reads):
            raise ValueError(f"{owner} does not hold page {min(missing)}, so it cannot be forked")
        self._move(_indices(written), _OWNED, _SHARED)
        for page in written:
            del holding.pages[page]
            holding.reads.append(page)
            self._readers[page] = 1
        if pages:
            self._held.setdefault(reader, _Holding()).reads.extend(pages)
            for page in pages:
                self._readers[page] += 1

    def match(self, owner: str, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of `keys` that is present, pinned for `owner` until it releases them."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None:
                break
            pages.append(page)
        if pages:
            self._held.setdefault(owner, _Holding()).reads.extend(pages)
            for page in pages:
                self._unread.pop(page, None)
                self._readers[page] = self._readers.get(page, 0) + 1
        return pages

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are present. Pins nothing, so it may be less a moment later."""
        return sum(1 for _ in itertools.takewhile(self._page_of_key.__contains__, keys))

    def flush_cache(self) -> int:
        """Free every cached page that nobody reads; returns how many."""
        count = len(self._unread)
        self._evict(count)
        return count

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self._counts[_FREE]

    @property
    def cached(self) -> int:
        """Shared pages that nobody reads: kept for a later match, evicted when needed."""
        return len(self._unread)

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free and cached ones."""
        return self.free + self.cached

    @property
    def owned(self) -> int:
        """Pages with a writing owner."""
        return self._counts[_OWNED]

    @property
    def quarantined(self) -> int:
        """Pages whose ticket died before its writer was proven quiet."""
        return self._counts[_QUARANTINED]

    @property
    def shared(self) -> int:
        """Immutable pages with at least one reader."""
        return self._counts[_SHARED] - len(self._unread)

    @property
    def free_states(self) -> int:
        """State slots that nobody holds."""
        return len(self._free_states)

    def check(self) -> None:
        """Raise AssertionError unless every page and state slot is in exactly one place and all counts agree."""
        found = np.full(self.pages, _FREE, dtype=np.uint8)
        states = list(self._free_states)
        reads: dict[int, int] = {}
        for holdings, state in ((self._held, _OWNED), (self._quarantine, _QUARANTINED)):
            for owner, holding in holdings.items():
                index = _indices(holding.pages)
                _require(not found[index].any(), f"a page of {owner} is in two hands")
                found[index] = state
                if holding.state_slot >= 0:
                    states.append(holding.state_slot)
                for page in holding.reads:
                    reads[page] = reads.get(page, 0) + 1
        index = _indices(self._key_of_page.keys() | reads.keys())
        _require(not found[index].any(), "a shared page has a writing owner")
        found[index] = _SHARED
        _require(bool((found == self._state).all()), "the page states differ from what the owners hold")
        counts = np.bincount(found, minlength=len(_NAMES)).tolist()
        _require(counts == self._counts, f"counts are {self._counts}, pages say {counts}")
        _require(sorted(states) == list(range(self.state_slots)), "a state slot is lost or in two hands")
        _require(reads == self._readers, "the reader counts differ from the pins")
        _require(
            set(self._unread) == set(self._key_of_page) - set(reads), "cached pages are not the unread ones"
        )
        keys = {page: key for key, page in self._page_of_key.items()}
        _require(keys == self._key_of_page and len(keys) == len(self._page_of_key), "keys and pages differ")

    # --- inside -----------------------------------------------------------------------------------------------

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        pages = [page for page, _ in zip(self._unread, range(count), strict=False)]
        for page in pages:
            del self._unread[page]
            del self._page_of_key[self._key_of_page.pop(page)]
        self._move(_indices(pages), _SHARED, _FREE)

    def _unpin(self, pages: Iterable[int]) -> None:
        freed: list[int] = []
        # The end of a prefix first, so that it is evicted before the start, without which it is useless.
        for page in reversed(list(pages)):
            readers = self._readers[page] - 1
            if readers:
                self._readers[page] = readers
                continue
            del self._readers[page]
            if page in self._key_of_page:
                self._unread[page] = None
            else:
                freed.append(page)
        if freed:
            self._move(_indices(freed), _SHARED, _FREE)

    def _free(self, holding: _Holding, state: int) -> None:
        self._move(_indices(holding.pages), state, _FREE)
        if holding.state_slot >= 0:
            self._free_states.append(holding.state_slot)

    def _move(self, pages: npt.NDArray[np.intp], old: int, new: int) -> None:
        if (self._state[pages] != old).any():
            wrong = pages[self._state[pages] != old][:4].tolist()
            raise AssertionError(f"pages {wrong} are not {_NAMES[old]}, so they cannot become {_NAMES[new]}")
        self._state[pages] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)


def _indices(pages: Iterable[int]) -> npt.NDArray[np.intp]:
    return np.fromiter(pages, dtype=np.intp)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
