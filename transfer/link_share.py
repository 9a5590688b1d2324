# SPDX-License-Identifier: Apache-2.0
"""What one link may hold of a completion engine's pool, in tickets and quarantine together (I8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrail.transfer.errors import LinkLost, ShareUsed
from kvrail.transfer.granted_ticket import PeerLink

__all__ = ["LinkShare", "TicketPool"]


class TicketPool(Protocol):
    """What the ledger asks of whoever owns the pages: `pages.PagePool`, or another engine's allocator."""

    pages: int
    state_slots: int

    def match(self, owner: str, keys: Sequence[bytes]) -> list[int]: ...
    def allocate(self, owner: str, count: int, *, keep_reserve: bool = False) -> list[int]: ...
    def allocate_state(self, owner: str) -> int: ...
    def release(self, owner: str) -> None: ...
    def quarantine(self, owner: str) -> None: ...
    def release_quarantined(self, owner: str) -> None: ...


class LinkShare:
    """Reserves from `pool` so that no link holds more than the part `share` of it."""

    def __init__(self, pool: TicketPool, share: float) -> None:
        self._pool = pool
        self._share = share

    def reserve(self, known: PeerLink, owner: str, count: int) -> tuple[list[int], int]:
        """`count` pages and a state slot (-1: the pool has none) for `owner`.

        Raises LinkLost when the share is too small, be it for want of what is unproven, ShareUsed when that will
        change, NoPages when the pool has no room.
        """
        share = int(self._share * self._pool.pages)
        if count > share:
            # What was cached of the prompt when it was admitted may have been evicted since.
            raise LinkLost(f"{count} pages asked for, the link may hold {share}")
        if known.unproven + count > share:
            # Waiting does not help: these pages come back with the end of the peer, if ever.
            raise LinkLost(f"{known.unproven} of the link's {share} pages are in quarantine, unproven")
        if known.held + count > share:
            raise ShareUsed(f"{count} pages asked for, the link holds {known.held} of at most {share}")
        slots = self._pool.state_slots
        slot_share = max(1, int(self._share * slots))
        if slots and known.unproven_slots >= slot_share:
            raise LinkLost(f"all {slot_share} state slots of the link's share are in quarantine, unproven")
        if slots and known.held_slots >= slot_share:
            raise ShareUsed(f"the link holds {known.held_slots} of {slots} state slots, its share")
        pages = self._pool.allocate(owner, count, keep_reserve=True)
        return pages, self._pool.allocate_state(owner)
