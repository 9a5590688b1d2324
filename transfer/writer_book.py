# SPDX-License-Identifier: Apache-2.0
"""Which native writer belongs to which ticket, and the effects that drive it: open, push, ring, renew, stop, drop."""

from __future__ import annotations

from collections.abc import Callable

from kvrail.transfer.layout import TicketLayout
from kvrail.transfer.prefill_ticket import Batch, PrefillTicket
from kvrail.transfer.tickets import (
    DropWriter,
    LinkKey,
    OpenWriter,
    PeState,
    Push,
    RenewWriter,
    Ring,
    Send,
    SenderEffect,
    StopWriter,
)
from kvrail.transfer.wire import Quiesced

__all__ = ["WriterBook"]


class WriterBook:
    """Writers of one PE rank; keys are never used twice. `emit` takes the effects."""

    def __init__(self, emit: Callable[[SenderEffect], None]) -> None:
        self._emit = emit
        self._tickets: dict[int, PrefillTicket] = {}
        # Writers that were not quiet in time: their proof may still come, and frees pages that nothing else can.
        self._doubted: dict[int, PrefillTicket] = {}
        self._last = 0

    def ticket(self, writer: int) -> PrefillTicket | None:
        """Whose writer this is, or None when that ticket is over."""
        return self._tickets.get(writer)

    def push(self, now: float, ticket: PrefillTicket, batch: Batch) -> None:
        """Post units of a pool; the first time also opens the writer."""
        writer = self._open(now, ticket)
        self._emit(Push(ticket.told[0], writer, batch.pool, batch.source, batch.target, batch.cached))

    def ring(self, now: float, ticket: PrefillTicket, layout: TicketLayout) -> None:
        """The good doorbell behind everything that was pushed."""
        link, grant = ticket.told
        writer = self._open(now, ticket)
        pages, slot = (ticket.pushed_pages(), ticket.state_source) if grant.verify else (None, -1)
        self._emit(Ring(link, writer, ticket.landed_bell(layout), pages, slot))

    def renew(self, ticket: PrefillTicket) -> None:
        """The CE still wants this ticket."""
        if ticket.writer:
            link, grant = ticket.told
            self._emit(RenewWriter(link, ticket.writer, grant.ttl_s))

    def stop(self, ticket: PrefillTicket) -> bool:
        """Ask for the proof that the writer is quiet; False when there is none, so nothing was ever posted."""
        if ticket.writer:
            self._emit(StopWriter(ticket.told[0], ticket.writer))
        return ticket.writer > 0

    def drop(self, ticket: PrefillTicket) -> None:
        """The ticket is over; a writer whose proof is still out is kept for `late_quiet`."""
        if ticket.writer:
            del self._tickets[ticket.writer]
            if ticket.state is PeState.UNPROVEN and not ticket.quiet_told:
                self._doubted[ticket.writer] = ticket
            else:
                self._emit(DropWriter(ticket.told[0], ticket.writer))

    def late_quiet(self, writer: int, ok: bool) -> bool:
        """Whether this was the late proof of a doubted writer; if it is good, the CE hears of it."""
        ticket = self._doubted.pop(writer, None)
        if ticket is None:
            return False
        link, grant = ticket.told
        if ok:
            proof = Quiesced(ticket=ticket.id, epoch=grant.epoch, proven=True, reason=ticket.reason)
            self._emit(Send(link, proof))
        self._emit(DropWriter(link, writer))
        return True

    def link_gone(self, link: LinkKey) -> None:
        """No proof of that link's doubted writers can be told any more."""
        for writer in [w for w, ticket in self._doubted.items() if ticket.link == link]:
            del self._doubted[writer]
            self._emit(DropWriter(link, writer))

    def _open(self, now: float, ticket: PrefillTicket) -> int:
        if not ticket.writer:
            self._last += 1
            ticket.writer = self._last
            self._tickets[ticket.writer] = ticket
            left = max(0.0, ticket.deadline - now)
            self._emit(OpenWriter(ticket.told[0], ticket.writer, left, ticket.id))
        return ticket.writer
