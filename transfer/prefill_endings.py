# SPDX-License-Identifier: Apache-2.0
"""How a ticket of the prefill engine ends: once, with one last message, after its writer is quiet (I4, I7).

fail (stop the writer) ──▶ answer (the last message) ──▶ end (give everything back, answer the call)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvrail.transfer.prefill_ticket import PrefillTicket
from kvrail.transfer.ticket_memory import TicketMemory
from kvrail.transfer.tickets import AbortPrefill, LinkKey, PeState, ReleaseSource, Send, SenderEffect
from kvrail.transfer.wire import Cancel, Quiesced
from kvrail.transfer.writer_book import WriterBook

__all__ = ["PrefillEndings"]


class PrefillEndings:
    """Ends the tickets in `tickets`, the sender's; `emit` takes what is to be done. `stop_s`: see Sender."""

    def __init__(
        self,
        tickets: dict[bytes, PrefillTicket],
        memory: TicketMemory,
        writers: WriterBook,
        emit: Callable[[SenderEffect], None],
        counters: Counter[str],
        *,
        stop_s: float,
    ) -> None:
        self._tickets = tickets
        self._memory = memory
        self._writers = writers
        self._emit = emit
        self._counters = counters
        self._stop_s = stop_s
        # Sources of doorbells that may still be going out on links that are over.
        self._kept: dict[tuple[LinkKey, int], list[SenderEffect]] = {}

    def proven(self, link: LinkKey, epoch: int) -> None:
        """No doorbell of that epoch is going out any more."""
        for effect in self._kept.pop((link, epoch), []):
            self._emit(effect)

    def fail(self, now: float, ticket: PrefillTicket, reason: str, status: int) -> None:
        """No good doorbell from here on (one that is under way may still go out): stop, then say so."""
        if ticket.state is PeState.STOPPING:
            return
        ticket.reason, ticket.status = reason, status
        if ticket.state is PeState.PREFILLING and ticket.request_id is not None:
            ticket.holds_source = False
            self._emit(AbortPrefill(ticket.request_id, ticket.id))
        if self._writers.stop(ticket):
            ticket.move(PeState.STOPPING)
            ticket.deadline = now + self._stop_s
        else:
            self.answer(ticket, True, "")

    def answer(self, ticket: PrefillTicket, quiet: bool, doubt: str) -> None:
        """The ticket's last message, now that its writer is quiet or must be taken for not."""
        if ticket.link is not None:
            self._emit(Send(ticket.link, ticket.last_message(quiet, doubt)))
        end = PeState.QUIESCED if ticket.answer_cancel else PeState.FAILED
        self.end(ticket, end if quiet else PeState.UNPROVEN, reason=ticket.reason, status=ticket.status)

    def quiesce_unstarted(self, link: LinkKey, cancel: Cancel, reason: str) -> None:
        self._memory.bury(cancel.ticket, link)
        answer = Quiesced(ticket=cancel.ticket, epoch=cancel.epoch, proven=True, reason=reason)
        self._emit(Send(link, answer))

    def end(self, ticket: PrefillTicket, state: PeState, *, reason: str = "", status: int = 200) -> None:
        """The ticket is over: give back what it holds, answer its call, remember it."""
        computing = ticket.state is PeState.PREFILLING
        ticket.move(state)
        self._counters[f"ended_{state.value}"] += 1
        del self._tickets[ticket.id]
        self._memory.remember(ticket.id, "answered" if ticket.grant is not None else "refused")
        self._writers.drop(ticket)
        if ticket.request_id is None:
            return
        source: SenderEffect = ReleaseSource(ticket.request_id, ticket.id)
        if ticket.holds_source and computing:
            source = AbortPrefill(ticket.request_id, ticket.id)
        if ticket.holds_source and state is PeState.GONE and not computing:
            # Its doorbell may be in the native thread's hands and still go out: see `proven`.
            self._kept.setdefault((ticket.told[0], ticket.told[1].epoch), []).append(source)
        elif ticket.holds_source:
            self._emit(source)
        self._emit(ticket.answer_to_call(reason, status))
