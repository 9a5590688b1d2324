# SPDX-License-Identifier: Apache-2.0
"""How a ticket of the completion engine ends without a good doorbell: its pages are free only after proof (I2).

lose (the request) ── stop (cancel, quarantine) ──┐
                   └─ doubt (no answer will come) ┴──▶ free (the writer is proven quiet)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvrail.transfer.granted_ticket import PeerLink, Ticket
from kvrail.transfer.link_share import TicketPool
from kvrail.transfer.tickets import CeState, Fence, LinkKey, Lost, ReceiverEffect, Send
from kvrail.transfer.wire import Cancel

__all__ = ["TicketEndings"]


class TicketEndings:
    """Ends the tickets in `links`, the receiver's; `emit` takes what is to be done. Times: see Receiver."""

    def __init__(
        self,
        pool: TicketPool,
        links: dict[LinkKey, PeerLink],
        emit: Callable[[ReceiverEffect], None],
        counters: Counter[str],
        *,
        answer_s: float,
        busy_s: float,
    ) -> None:
        self._pool = pool
        self._links = links
        self._emit = emit
        self._counters = counters
        self._answer_s = answer_s
        self._busy_s = busy_s

    def find(self, ticket_id: bytes) -> Ticket | None:
        """The ticket of that id, whatever its link."""
        for known in self._links.values():
            ticket = known.tickets.get(ticket_id)
            if ticket is not None:
                return ticket
        return None

    def lose(self, ticket: Ticket, reason: str) -> None:
        """Its request has no ticket any more; what becomes of the pages is another question."""
        self._counters["lost"] += 1
        self._emit(Lost(ticket.request_id, ticket.id, reason, ticket.hand_off))

    def stop(self, now: float, ticket: Ticket, reason: str) -> None:
        """Cancel: its pages are in quarantine until the PE has answered, or something else has proven it quiet."""
        ticket.move(CeState.STOPPING)
        self._pool.quarantine(ticket.owner)
        beating = self._links[ticket.link].state == "up"
        ticket.deadline = now + self._answer_s + (self._busy_s if beating else 0)
        self._emit(Send(ticket.link, Cancel(ticket=ticket.id, epoch=ticket.epoch, reason=reason)))

    def doubt(self, ticket: Ticket, reason: str) -> None:
        """Only a fence, the end of the PE's process, or a late answer can free this ticket's pages now."""
        if not len(ticket.pages) and ticket.state_slot < 0:
            self.free(ticket)
            return
        if ticket.live:
            self._pool.quarantine(ticket.owner)
        ticket.move(CeState.UNPROVEN)
        ticket.deadline = None
        known = self._links[ticket.link]
        # Where a fence proves nothing, breaking the link would only cut off the late answers that do.
        if ticket.fence == "worker" and known.epoch == ticket.epoch and known.state in ("up", "suspect"):
            known.state = "fencing"
            self._emit(Fence(ticket.link, ticket.epoch, reason))
            self.strand(known, f"the link was fenced: {reason}")

    def strand(self, known: PeerLink, reason: str) -> None:
        """No answer will come for the tickets of this link's epoch: lose the live ones, doubt them all."""
        for ticket in list(known.tickets.values()):
            if ticket.epoch != known.epoch or ticket.state is CeState.UNPROVEN:
                continue
            if ticket.live:
                self.lose(ticket, reason)
            self.doubt(ticket, reason)

    def free(self, ticket: Ticket) -> None:
        """The writer is proven quiet."""
        owner = ticket.owner
        if ticket.live:
            self._pool.release(owner)
        else:
            self._pool.release_quarantined(owner)
        ticket.move(CeState.FREED)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It is over, and its pages count against its link no more."""
        known = self._links[ticket.link]
        del known.tickets[ticket.id]
        known.held -= len(ticket.pages)
        known.held_slots -= ticket.state_slot >= 0
        self.forget_if_idle(ticket.link)

    def forget_if_idle(self, link: LinkKey) -> None:
        """A link that is over is remembered as long as tickets of it are."""
        known = self._links.get(link)
        if known is not None and known.state == "down" and not known.tickets:
            del self._links[link]
