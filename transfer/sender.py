# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's ticket ledger: pushes pages as they are computed, and ends every ticket exactly once.

Sans-IO. The caller feeds facts with the time (`now`, monotonic seconds) and carries out `take_effects()` in order.
A ticket needs two things that come on two ways, in any order: its grant (on the link) and its prefill call (HTTP).
It ends in exactly one of: doorbell landed, doorbell failed, quiesced (proven or not), link gone. Its prefill call
ends in exactly one PrefillEnded. Late, duplicate and stale facts are counted in `counters` and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrail.transfer.layout import TicketLayout
from kvrail.transfer.prefill_endings import PrefillEndings
from kvrail.transfer.prefill_ticket import CachedPages, PrefillTicket, ticket_gauges
from kvrail.transfer.ticket_memory import Fate, TicketMemory, refused_call
from kvrail.transfer.tickets import (
    LinkKey,
    PeState,
    Send,
    SenderEffect,
    StartPrefill,
)
from kvrail.transfer.wire import (
    Beat,
    Cancel,
    Doorbell,
    FirstToken,
    Grant,
    HandOff,
    LinkMessage,
    TicketBeat,
)
from kvrail.transfer.writer_book import WriterBook

__all__ = ["Sender"]

_AT_WORK = frozenset({PeState.PREFILLING, PeState.RINGING})
_FULL, _OVER = "the prefill queue is full", "this ticket is over"
_NOT_RENEWED = "the completion engine did not renew the ticket"
_TOO_LATE = {
    PeState.CALLED: "its grant did not come in time",
    PeState.GRANTED: "its prefill call did not come in time",
}


class Sender:
    """Tickets of one PE rank.

    `max_tickets`: more (grants and calls together) are refused, for nothing could start them soon. `meet_s`: how
    long a grant waits for its prefill call, or a call for its grant. `stop_s`: how long a stopped writer may take to
    prove that it is quiet.
    """

    def __init__(
        self,
        layout: TicketLayout,
        *,
        incarnation: bytes,
        rank: int,
        max_tickets: int = 256,
        meet_s: float = 15.0,
        stop_s: float = 15.0,
    ) -> None:
        self._layout = layout
        self._self = (incarnation, rank)
        self._max_tickets = max_tickets
        self._meet_s = meet_s
        self._stop_s = stop_s
        self._epochs: dict[LinkKey, int] = {}
        self._tickets: dict[bytes, PrefillTicket] = {}
        self._memory = TicketMemory()
        self._writers = WriterBook(self._emit)
        # Rises with all work of this rank: a waiting ticket gets nearer to its turn when others get on.
        self._work = 0
        self._effects: list[SenderEffect] = []
        self.counters: Counter[str] = Counter()
        self._endings = PrefillEndings(
            self._tickets, self._memory, self._writers, self._emit, self.counters, stop_s=stop_s
        )

    def take_effects(self) -> list[SenderEffect]:
        """What to do now, in order; the list is emptied."""
        effects, self._effects = self._effects, []
        return effects

    # --- links ------------------------------------------------------------------------------------------------

    def link_up(self, now: float, link: LinkKey, epoch: int) -> None:
        """A link works; an older epoch of it is over."""
        if link in self._epochs:
            self.link_down(now, link, self._epochs[link], "replaced by a newer connection")
        self._epochs[link] = epoch

    def link_down(self, now: float, link: LinkKey, epoch: int, reason: str) -> None:
        """That epoch of the link is over, and with it every ticket that came over it."""
        if self._epochs.get(link) != epoch:
            self.counters["stale_link_events"] += 1
            return
        del self._epochs[link]
        for ticket in [t for t in self._tickets.values() if t.link == link]:
            self._endings.end(ticket, PeState.GONE, reason=reason, status=503)
        self._memory.link_gone(link)
        self._writers.link_gone(link)

    def proven(self, link: LinkKey, epoch: int) -> None:
        """Nothing of that epoch is being written or rung any more by this side: sources of its doorbells are free.

        Must follow each `link_down`: a doorbell under way when the link broke may still reach the CE and be good,
        so until then its pages may not change (I7).
        """
        self._endings.proven(link, epoch)

    def on_message(self, now: float, link: LinkKey, message: LinkMessage) -> None:
        """A link message from that CE rank."""
        if not isinstance(message, Grant | Cancel):
            self.counters["unexpected_messages"] += 1
        elif self._epochs.get(link) != message.epoch:
            self.counters["stale_epochs"] += 1
        elif isinstance(message, Grant):
            self._on_grant(now, link, message)
        else:
            self._on_cancel(now, link, message)

    def on_beat(self, now: float, link: LinkKey, beat: Beat) -> None:
        """Renew the tickets that the CE still wants."""
        for item in beat.tickets:
            ticket = self._tickets.get(item.ticket)
            if ticket is not None and ticket.link == link and ticket.state in _AT_WORK:
                ticket.deadline = now + ticket.told[1].ttl_s
                self._writers.renew(ticket)

    def beat_tickets(self, link: LinkKey) -> list[TicketBeat]:
        """This link's tickets with their progress, for our heartbeat: rising progress renews them at the CE."""
        return [
            TicketBeat(ticket.id, ticket.progress if ticket.computed else self._work)
            for ticket in self._tickets.values()
            if ticket.link == link and ticket.state in _AT_WORK
        ]

    # --- prefill calls ----------------------------------------------------------------------------------------

    def prefill(self, now: float, request_id: str, ticket_id: bytes, *, meet_s: float | None = None) -> None:
        """A prefill call came in, before or after its grant, for which it waits `meet_s` (default: the ledger's)."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.request_id is not None:
            self.counters["duplicate_calls"] += 1
            if ticket.request_id != request_id:
                self._emit(refused_call(request_id, "this ticket is in use", 409))
        elif self._memory.fate(ticket_id) is not None:
            self.counters["late_calls"] += 1
            full = self._memory.fate(ticket_id) == "full"
            self._emit(refused_call(request_id, _FULL, 429) if full else refused_call(request_id, _OVER, 409))
        elif ticket is not None:
            self._start(now, ticket, request_id)
        elif len(self._tickets) >= self._max_tickets:
            self.counters["refused_calls"] += 1
            self._memory.remember(ticket_id, "refused")
            self._emit(refused_call(request_id, _FULL, 429))
        else:
            deadline = now + (self._meet_s if meet_s is None else meet_s)
            self._tickets[ticket_id] = PrefillTicket(ticket_id, PeState.CALLED, deadline, request_id)

    def hurry(self, now: float, ticket_id: bytes) -> None:
        """The prefill is done: if its grant is not here yet, it must come within the ledger's time."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.state is PeState.CALLED:
            ticket.deadline = min(ticket.deadline, now + self._meet_s)

    def abort(self, now: float, request_id: str, reason: str) -> None:
        """The caller of a prefill went away. Unknown requests are ignored."""
        ticket = next((t for t in self._tickets.values() if t.request_id == request_id), None)
        if ticket is not None:
            self._endings.fail(now, ticket, reason, 499)

    # --- the engine -------------------------------------------------------------------------------------------

    def prefill_failed(
        self,
        now: float,
        ticket_id: bytes,
        reason: str,
        *,
        status: int = 500,
        retry_after_s: float | None = None,
    ) -> None:
        """The engine refused or failed this prefill."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not PeState.PREFILLING:
            self.counters["late_engine_results"] += 1
            return
        ticket.retry_after_s = retry_after_s
        self._endings.fail(now, ticket, reason, status)

    def computed(
        self,
        now: float,
        ticket_id: bytes,
        tokens_done: int,
        pages: Sequence[int],
        *,
        state_slot: int = -1,
        cached: CachedPages | None = None,
    ) -> None:
        """KV of `tokens_done` prompt tokens stands in the page table `pages` (from token 0); push what is final.

        `cached`: pages that stand in the host cache, pinned there as the others are here, and go out from there.
        `state_slot`: where the sequence's state lies here, given at the latest with the last token.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not PeState.PREFILLING:
            self.counters["late_engine_results"] += 1
            return
        try:
            batches = ticket.next_batches(tokens_done, pages, state_slot, self._layout, cached)
        except ValueError as error:
            self._endings.fail(now, ticket, str(error), 500)
            return
        self._advance(ticket)
        for batch in batches:
            self._writers.push(now, ticket, batch)
        self._ring_if_complete(now, ticket)

    def first_token(self, now: float, ticket_id: bytes, hand_off: HandOff) -> None:
        """The first token, final, goes ahead. With a finish reason nothing is left to decode: the rest is dropped.

        Such a request ends here with `failed("finished")`, which the CE, having the token, takes as proof only.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not PeState.PREFILLING or ticket.hand_off is not None:
            self.counters["late_engine_results"] += 1
            return
        link, grant = ticket.told
        ticket.hand_off = hand_off
        self._advance(ticket)
        self._emit(Send(link, FirstToken(ticket=ticket.id, epoch=grant.epoch, hand_off=hand_off)))
        if hand_off.ended:
            self._endings.fail(now, ticket, "finished", 200)
        else:
            self._ring_if_complete(now, ticket)

    # --- native writers ---------------------------------------------------------------------------------------

    def on_progress(self, now: float, writer: int) -> None:
        """Everything submitted so far is locally complete."""
        ticket = self._writers.ticket(writer)
        if ticket is not None:
            self._advance(ticket)

    def on_rung(self, now: float, writer: int) -> None:
        """The doorbell went out, behind every put."""
        ticket = self._of(writer, PeState.RINGING, PeState.STOPPING)
        if ticket is not None:
            self._endings.end(ticket, PeState.LANDED)

    def on_quiet(self, now: float, writer: int, ok: bool, reason: str = "") -> None:
        """A stopped writer posts nothing more. `ok`: every put's callback and the flush after them were OK."""
        late = self._writers.late_quiet(writer, ok)
        ticket = None if late else self._of(writer, PeState.STOPPING)
        if ticket is not None:
            ticket.quiet_told = True
            self._endings.answer(ticket, ok, reason)

    def on_failed(self, now: float, writer: int, reason: str) -> None:
        """A put or the doorbell failed, or was refused. Whether the writer is quiet is another question: stop it."""
        ticket = self._of(writer, *_AT_WORK)
        if ticket is not None:
            self.counters["failed_pushes"] += 1
            self._endings.fail(now, ticket, f"the push failed: {reason}", 502)

    # --- time -------------------------------------------------------------------------------------------------

    def reap(self, now: float) -> None:
        """End what has waited too long."""
        for ticket in [t for t in self._tickets.values() if t.deadline <= now]:
            self.counters["expired"] += 1
            if ticket.state is PeState.STOPPING:
                self._endings.answer(ticket, False, f"the writer was not quiet within {self._stop_s:g} s")
            else:
                self._endings.fail(now, ticket, _TOO_LATE.get(ticket.state, _NOT_RENEWED), 504)

    def link_of(self, ticket_id: bytes) -> LinkKey | None:
        """Where the pages of an open ticket go to, once that is known."""
        ticket = self._tickets.get(ticket_id)
        return None if ticket is None else ticket.link

    def time_left(self, now: float, ticket_id: bytes) -> float:
        """How many seconds a ticket lives, unless it is renewed; 0 for one that is over."""
        ticket = self._tickets.get(ticket_id)
        return 0.0 if ticket is None else max(0.0, ticket.deadline - now)

    def next_deadline(self) -> float | None:
        """When `reap` has something to do next."""
        return min((ticket.deadline for ticket in self._tickets.values()), default=None)

    def gauges(self) -> dict[str, int]:
        """Tickets by what they wait for, for metrics: all zero when idle."""
        return ticket_gauges(self._tickets.values())

    # --- inside -----------------------------------------------------------------------------------------------

    def _emit(self, effect: SenderEffect) -> None:
        self._effects.append(effect)

    def _of(self, writer: int, *states: PeState) -> PrefillTicket | None:
        ticket = self._writers.ticket(writer)
        if ticket is not None and ticket.state in states:
            return ticket
        self.counters["late_writer_events"] += 1
        return None

    def _on_grant(self, now: float, link: LinkKey, grant: Grant) -> None:
        ticket = self._tickets.get(grant.ticket)
        refused = self._memory.fate(grant.ticket) == "refused"
        if (ticket is not None and ticket.grant is not None) or self._memory.answered(grant.ticket):
            self.counters["duplicate_grants"] += 1
            return
        if ticket is None and not refused and len(self._tickets) >= self._max_tickets:
            self.counters["refused_grants"] += 1
            self._refuse_grant(link, grant, "full", _FULL)
            return
        if ticket is None and refused:
            self._refuse_grant(link, grant, "answered", "its prefill call was refused")
            return
        ticket = ticket or PrefillTicket(grant.ticket, PeState.GRANTED, now + self._meet_s)
        fault = ticket.take_grant(link, grant, self._layout)
        if (grant.pe, grant.pe_rank) != self._self or (grant.ce, grant.ce_rank) != link:
            fault = "the grant names other ranks than this link's"
        self._tickets[grant.ticket] = ticket
        if fault:
            self._endings.fail(now, ticket, fault, 400)
        elif ticket.request_id is not None:
            self._start(now, ticket, ticket.request_id)

    def _refuse_grant(self, link: LinkKey, grant: Grant, fate: Fate, reason: str) -> None:
        self._memory.remember(grant.ticket, fate)
        bell = Doorbell(ticket=grant.ticket, epoch=grant.epoch, status="failed", reason=reason)
        self._emit(Send(link, bell))

    def _on_cancel(self, now: float, link: LinkKey, cancel: Cancel) -> None:
        ticket = self._tickets.get(cancel.ticket)
        if ticket is None:
            if self._memory.answered(cancel.ticket):
                # Its last message is ahead of any answer that could be given now.
                self.counters["late_cancels"] += 1
                return
            self._endings.quiesce_unstarted(link, cancel, "the ticket is not known")
        elif ticket.grant is None:
            # The call is here, the cancel overtook the grant.
            self._endings.end(ticket, PeState.QUIESCED, reason=cancel.reason, status=499)
            self._endings.quiesce_unstarted(link, cancel, cancel.reason)
        elif ticket.link != link:
            self.counters["foreign_cancels"] += 1
        elif ticket.state is PeState.STOPPING:
            # It is ending with a failed doorbell or an earlier cancel's answer: that answers this one, too.
            self.counters["late_cancels"] += 1
        else:
            ticket.answer_cancel = True
            self._endings.fail(now, ticket, cancel.reason, 499)

    def _start(self, now: float, ticket: PrefillTicket, request_id: str) -> None:
        _, grant = ticket.told
        ticket.request_id = request_id
        ticket.move(PeState.PREFILLING)
        ticket.deadline = now + grant.ttl_s
        ticket.holds_source = True
        self._emit(StartPrefill(request_id, ticket.id, grant.token_start, grant.token_end))

    def _advance(self, ticket: PrefillTicket) -> None:
        self._work += 1
        ticket.progress = self._work

    def _ring_if_complete(self, now: float, ticket: PrefillTicket) -> None:
        if ticket.complete:
            ticket.move(PeState.RINGING)
            self._writers.ring(now, ticket, self._layout)
