# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine remembers of tickets that are over, so that what comes late for them is refused."""

from __future__ import annotations

from typing import Literal

from kvrail.transfer.tickets import LinkKey, PrefillEnded

__all__ = ["Fate", "TicketMemory", "refused_call"]

# answered: its last message went out (doorbell or quiesced). full: likewise, because the queue was full.
# tombstone: a cancel came for a ticket that had no grant here. refused: its prefill call ended before any grant came,
# so the CE has had no message yet.
Fate = Literal["answered", "full", "tombstone", "refused"]


class TicketMemory:
    """Fates of finished tickets. Tombstones last as long as their link; of the others the newest `limit` are kept.

    Forgetting is safe: a ticket writes only when its grant and its prefill call are both there, and whichever comes
    alone is refused after a deadline.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._fates: dict[bytes, Fate] = {}
        self._tombstones: dict[LinkKey, set[bytes]] = {}

    def remember(self, ticket: bytes, fate: Fate) -> None:
        """This ticket is over."""
        self._fates[ticket] = fate
        if len(self._fates) > self._limit:
            del self._fates[next(iter(self._fates))]

    def bury(self, ticket: bytes, link: LinkKey) -> None:
        """A cancel overtook this ticket: nothing of it may start as long as that link lives."""
        self._tombstones.setdefault(link, set()).add(ticket)

    def fate(self, ticket: bytes) -> Fate | None:
        """What became of a ticket, or None when it is not remembered."""
        if any(ticket in buried for buried in self._tombstones.values()):
            return "tombstone"
        return self._fates.get(ticket)

    def answered(self, ticket: bytes) -> bool:
        """Whether the CE has had this ticket's last message, so that nothing more may be said of it."""
        return self.fate(ticket) in ("answered", "full", "tombstone")

    def link_gone(self, link: LinkKey) -> None:
        """Nothing of that link's life can come any more."""
        self._tombstones.pop(link, None)


def refused_call(request_id: str, reason: str, status: int) -> PrefillEnded:
    """The answer to a prefill call that will not be taken up."""
    return PrefillEnded(
        request_id, False, reason=reason, status=status, retry_after_s=1.0 if status == 429 else None
    )
