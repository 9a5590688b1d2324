# SPDX-License-Identifier: Apache-2.0
"""Pages that vLLM's scheduler has allocated already, for the ticket ledger that expects a pool to allocate from."""

from __future__ import annotations

from collections.abc import Sequence

from kvrail.transfer.errors import NoPages

__all__ = ["GivenBlocks"]


class GivenBlocks:
    """Gives each owner exactly the pages that were put down for it, and tells whose pages are free of writers again.

    vLLM decides how much of its memory waits for others, so the ledger's share of a link is no bound here.
    """

    pages = 1 << 40
    state_slots = 0

    def __init__(self) -> None:
        self._given: list[int] | None = None
        self._held: set[str] = set()
        self._quarantined: set[str] = set()
        self._free: list[str] = []

    def give(self, pages: list[int]) -> None:
        """The next `allocate` returns these."""
        self._given = pages

    def take_free(self) -> list[str]:
        """Owners whose pages no peer can write any more; each is told once."""
        free, self._free = self._free, []
        return free

    def landed(self, owner: str) -> None:
        """Its pages hold what was wanted, and are vLLM's to use."""
        self._held.remove(owner)

    @property
    def holding(self) -> int:
        """Owners whose pages may still be written."""
        return len(self._held) + len(self._quarantined)

    # --- what the ledger asks (receiver.TicketPool) -----------------------------------------------------------

    def match(self, owner: str, keys: Sequence[bytes]) -> list[int]:
        """vLLM matches prefixes by itself."""
        return []

    def allocate(self, owner: str, count: int, *, keep_reserve: bool = False) -> list[int]:
        given, self._given = self._given, None
        if given is None or len(given) != count:
            raise NoPages(f"vLLM allocated {len(given or ())} blocks where {count} are needed")
        self._held.add(owner)
        return given

    def allocate_state(self, owner: str) -> int:
        return -1

    def release(self, owner: str) -> None:
        if owner in self._held:
            self._held.remove(owner)
            self._free.append(owner)

    def quarantine(self, owner: str) -> None:
        if owner in self._held:
            self._held.remove(owner)
            self._quarantined.add(owner)

    def release_quarantined(self, owner: str) -> None:
        if owner in self._quarantined:
            self._quarantined.remove(owner)
            self._free.append(owner)
