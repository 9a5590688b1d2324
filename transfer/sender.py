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

import numpy as np
import numpy.typing as npt

from kvrail.transfer.layout import PageLayout
from kvrail.transfer.prefill_ticket import PrefillTicket
from kvrail.transfer.ticket_memory import Fate, TicketMemory
from kvrail.transfer.tickets import (
    PAGE_POOL,
    STATE_POOL,
    AbortPrefill,
    DropWriter,
    LinkKey,
    OpenWriter,
    PeState,
    PrefillEnded,
    Push,
    ReleaseSource,
    RenewWriter,
    Ring,
    Send,
    SenderEffect,
    StartPrefill,
    StopWriter,
)
from kvrail.transfer.wire import (
    Beat,
    Cancel,
    Doorbell,
    FirstToken,
    Grant,
    HandOff,
    LinkMessage,
    Quiesced,
    TicketBeat,
)

__all__ = ["Sender"]

_U32 = npt.NDArray[np.uint32]
_AT_WORK = frozenset({PeState.PREFILLING, PeState.RINGING})


class Sender:
    """Tickets of one PE rank.

    `max_tickets`: more (grants and calls together) are refused, for nothing could start them soon. `meet_s`: how
    long a grant waits for its prefill call, or a call for its grant. `stop_s`: how long a stopped writer may take to
    prove that it is quiet.
    """

    def __init__(
        self,
        layout: PageLayout,
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
        self._by_writer: dict[int, PrefillTicket] = {}
        self._memory = TicketMemory()
        self._writers = 0
        # Rises with all work of this rank: a waiting ticket gets nearer to its turn when others get on.
        self._work = 0
        self._effects: list[SenderEffect] = []
        self.counters: Counter[str] = Counter()

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
            self._end(ticket, PeState.GONE, reason=reason, status=503)
        self._memory.link_gone(link)

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
            if ticket is None or ticket.grant is None or ticket.link != link or ticket.state not in _AT_WORK:
                continue
            ticket.deadline = now + ticket.grant.ttl_s
            if ticket.writer:
                self._effects.append(RenewWriter(link, ticket.writer, ticket.grant.ttl_s))

    def beat_tickets(self, link: LinkKey) -> list[TicketBeat]:
        """This link's tickets with their progress, for our heartbeat: rising progress renews them at the CE."""
        return [
            TicketBeat(ticket.id, ticket.progress if ticket.computed else self._work)
            for ticket in self._tickets.values()
            if ticket.link == link and ticket.state in _AT_WORK
        ]

    # --- prefill calls ----------------------------------------------------------------------------------------

    def prefill(self, now: float, request_id: str, ticket_id: bytes) -> None:
        """A prefill call came in, before or after its grant."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.request_id is not None:
            self.counters["duplicate_calls"] += 1
            if ticket.request_id != request_id:
                self._refuse_call(request_id, "this ticket is in use", 409)
        elif self._memory.fate(ticket_id) == "full":
            self._refuse_call(request_id, "the prefill queue is full", 429, retry_after_s=1.0)
        elif self._memory.fate(ticket_id) is not None:
            self.counters["late_calls"] += 1
            self._refuse_call(request_id, "this ticket is over", 409)
        elif ticket is not None:
            self._start(now, ticket, request_id)
        elif len(self._tickets) >= self._max_tickets:
            self.counters["refused_calls"] += 1
            self._memory.remember(ticket_id, "refused")
            self._refuse_call(request_id, "the prefill queue is full", 429, retry_after_s=1.0)
        else:
            self._tickets[ticket_id] = PrefillTicket(
                ticket_id, PeState.CALLED, now + self._meet_s, request_id=request_id
            )

    def abort(self, now: float, request_id: str, reason: str) -> None:
        """The caller of a prefill went away. Unknown requests are ignored."""
        for ticket in self._tickets.values():
            if ticket.request_id == request_id:
                self._fail(now, ticket, reason, 499)
                return

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
        self._fail(now, ticket, reason, status)

    def computed(
        self, now: float, ticket_id: bytes, tokens_done: int, pages: Sequence[int], *, state_slot: int = -1
    ) -> None:
        """KV of `tokens_done` prompt tokens stands in the page table `pages` (from token 0); push what is final.

        `state_slot`: where the sequence's state lies here, given at the latest with the last token.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not PeState.PREFILLING:
            self.counters["late_engine_results"] += 1
            return
        try:
            source, target = ticket.next_pages(tokens_done, pages, self._layout)
        except ValueError as error:
            self._fail(now, ticket, str(error), 500)
            return
        self._advance(ticket)
        if len(target):
            self._push(now, ticket, PAGE_POOL, source, target)
        if ticket.wants_state and ticket.computed_all:
            if state_slot < 0:
                self._fail(now, ticket, "the engine gave no state to push", 500)
                return
            ticket.state_pushed, ticket.state_source = True, state_slot
            slots = (np.array([slot], dtype=np.uint32) for slot in (state_slot, ticket.told[1].state_slot))
            self._push(now, ticket, STATE_POOL, *slots)
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
        first = FirstToken(ticket=ticket.id, epoch=grant.epoch, hand_off=hand_off)
        self._effects.append(Send(link, first))
        if hand_off.finish_reason is not None:
            self._fail(now, ticket, "finished", 200)
        else:
            self._ring_if_complete(now, ticket)

    # --- native writers ---------------------------------------------------------------------------------------

    def on_progress(self, now: float, writer: int) -> None:
        """Everything submitted so far is locally complete."""
        ticket = self._by_writer.get(writer)
        if ticket is not None:
            self._advance(ticket)

    def on_rung(self, now: float, writer: int) -> None:
        """The doorbell went out, behind every put."""
        ticket = self._by_writer.get(writer)
        if ticket is None or ticket.state not in (PeState.RINGING, PeState.STOPPING):
            self.counters["late_writer_events"] += 1
            return
        self._end(ticket, PeState.LANDED)

    def on_quiet(self, now: float, writer: int, ok: bool, reason: str = "") -> None:
        """A stopped writer posts nothing more. `ok`: every put's callback and the flush after them were OK."""
        ticket = self._by_writer.get(writer)
        if ticket is None or ticket.state is not PeState.STOPPING:
            self.counters["late_writer_events"] += 1
            return
        self._answer(ticket, ok, reason)

    def on_failed(self, now: float, writer: int, reason: str) -> None:
        """A put or the doorbell failed, or was refused. Whether the writer is quiet is another question: stop it."""
        ticket = self._by_writer.get(writer)
        if ticket is None or ticket.state not in _AT_WORK:
            self.counters["late_writer_events"] += 1
            return
        self.counters["failed_pushes"] += 1
        self._fail(now, ticket, f"the push failed: {reason}", 502)

    # --- time -------------------------------------------------------------------------------------------------

    def reap(self, now: float) -> None:
        """End what has waited too long."""
        for ticket in [t for t in self._tickets.values() if t.deadline <= now]:
            self.counters["expired"] += 1
            if ticket.state is PeState.CALLED:
                self._fail(now, ticket, f"no grant came within {self._meet_s:g} s", 504)
            elif ticket.state is PeState.GRANTED:
                self._fail(now, ticket, f"no prefill call came within {self._meet_s:g} s", 504)
            elif ticket.state is PeState.STOPPING:
                self._answer(ticket, False, f"the writer was not quiet within {self._stop_s:g} s")
            else:
                self._fail(now, ticket, "the completion engine did not renew the ticket", 504)

    def next_deadline(self) -> float | None:
        """When `reap` has something to do next."""
        return min((ticket.deadline for ticket in self._tickets.values()), default=None)

    def gauges(self) -> dict[str, int]:
        """Tickets by what they wait for, for metrics: all zero when idle."""
        states = Counter(ticket.state for ticket in self._tickets.values())
        return {
            "tickets": len(self._tickets),
            "tickets_waiting": states[PeState.CALLED] + states[PeState.GRANTED],
            "tickets_stopping": states[PeState.STOPPING],
            "target_pages": sum(len(ticket.targets) for ticket in self._tickets.values()),
        }

    # --- inside -----------------------------------------------------------------------------------------------

    def _on_grant(self, now: float, link: LinkKey, grant: Grant) -> None:
        ticket = self._tickets.get(grant.ticket)
        fate = self._memory.fate(grant.ticket)
        if (ticket is not None and ticket.grant is not None) or fate in ("answered", "full", "tombstone"):
            self.counters["duplicate_grants"] += 1
            return
        if ticket is None and fate is None and len(self._tickets) >= self._max_tickets:
            self.counters["refused_grants"] += 1
            self._refuse_grant(link, grant, "full", "the prefill queue is full")
            return
        if ticket is None and fate == "refused":
            self._refuse_grant(link, grant, "answered", "its prefill call was refused")
            return
        ticket = ticket or PrefillTicket(grant.ticket, PeState.GRANTED, now + self._meet_s)
        fault = ticket.take_grant(link, grant, self._layout)
        if (grant.pe, grant.pe_rank) != self._self or (grant.ce, grant.ce_rank) != link:
            fault = "the grant names other ranks than this link's"
        self._tickets[grant.ticket] = ticket
        if fault:
            self._fail(now, ticket, fault, 400)
        elif ticket.request_id is not None:
            self._start(now, ticket, ticket.request_id)

    def _refuse_grant(self, link: LinkKey, grant: Grant, fate: Fate, reason: str) -> None:
        self._memory.remember(grant.ticket, fate)
        bell = Doorbell(ticket=grant.ticket, epoch=grant.epoch, status="failed", reason=reason)
        self._effects.append(Send(link, bell))

    def _refuse_call(
        self, request_id: str, reason: str, status: int, retry_after_s: float | None = None
    ) -> None:
        self._effects.append(
            PrefillEnded(request_id, False, reason=reason, status=status, retry_after_s=retry_after_s)
        )

    def _on_cancel(self, now: float, link: LinkKey, cancel: Cancel) -> None:
        ticket = self._tickets.get(cancel.ticket)
        if ticket is None:
            if self._memory.fate(cancel.ticket) in ("answered", "full", "tombstone"):
                # Its last message is ahead of any answer that could be given now.
                self.counters["late_cancels"] += 1
                return
            self._quiesce_unstarted(link, cancel, "the ticket is not known")
        elif ticket.grant is None:
            # The call is here, the cancel overtook the grant.
            self._end(ticket, PeState.QUIESCED, reason=cancel.reason, status=499)
            self._quiesce_unstarted(link, cancel, cancel.reason)
        elif ticket.link != link:
            self.counters["foreign_cancels"] += 1
        elif ticket.state is PeState.STOPPING:
            # It is ending with a failed doorbell or an earlier cancel's answer: that answers this one, too.
            self.counters["late_cancels"] += 1
        else:
            ticket.answer_cancel = True
            self._fail(now, ticket, cancel.reason, 499)

    def _start(self, now: float, ticket: PrefillTicket, request_id: str) -> None:
        _, grant = ticket.told
        ticket.request_id = request_id
        ticket.move(PeState.PREFILLING)
        ticket.deadline = now + grant.ttl_s
        ticket.holds_source = True
        self._effects.append(StartPrefill(request_id, ticket.id, grant.token_start, grant.token_end))

    def _advance(self, ticket: PrefillTicket) -> None:
        self._work += 1
        ticket.progress = self._work

    def _writer(self, now: float, ticket: PrefillTicket) -> int:
        if not ticket.writer:
            link, _ = ticket.told
            self._writers += 1
            ticket.writer = self._writers
            self._by_writer[ticket.writer] = ticket
            self._effects.append(OpenWriter(link, ticket.writer, max(0.0, ticket.deadline - now)))
        return ticket.writer

    def _push(self, now: float, ticket: PrefillTicket, pool: int, source: _U32, target: _U32) -> None:
        link, _ = ticket.told
        self._effects.append(Push(link, self._writer(now, ticket), pool, source, target))

    def _ring_if_complete(self, now: float, ticket: PrefillTicket) -> None:
        if not ticket.complete:
            return
        link, grant = ticket.told
        ticket.move(PeState.RINGING)
        pages, slot = (ticket.pushed_pages(), ticket.state_source) if grant.verify else (None, -1)
        ring = Ring(link, self._writer(now, ticket), ticket.landed_bell(self._layout), pages, slot)
        self._effects.append(ring)

    def _fail(self, now: float, ticket: PrefillTicket, reason: str, status: int) -> None:
        """No good doorbell from here on (one that is under way may still go out): stop, then say so."""
        if ticket.state is PeState.STOPPING:
            return
        ticket.reason, ticket.status = reason, status
        if ticket.state is PeState.PREFILLING and ticket.request_id is not None:
            ticket.holds_source = False
            self._effects.append(AbortPrefill(ticket.request_id, ticket.id))
        if ticket.writer:
            ticket.move(PeState.STOPPING)
            ticket.deadline = now + self._stop_s
            self._effects.append(StopWriter(ticket.told[0], ticket.writer))
        else:
            self._answer(ticket, True, "")

    def _answer(self, ticket: PrefillTicket, quiet: bool, doubt: str) -> None:
        """The ticket's last message, now that its writer is quiet or must be taken for not."""
        if ticket.link is not None:
            self._effects.append(Send(ticket.link, ticket.last_message(quiet, doubt)))
        end = PeState.QUIESCED if ticket.answer_cancel else PeState.FAILED
        self._end(ticket, end if quiet else PeState.UNPROVEN, reason=ticket.reason, status=ticket.status)

    def _quiesce_unstarted(self, link: LinkKey, cancel: Cancel, reason: str) -> None:
        self._memory.bury(cancel.ticket, link)
        answer = Quiesced(ticket=cancel.ticket, epoch=cancel.epoch, proven=True, reason=reason)
        self._effects.append(Send(link, answer))

    def _end(self, ticket: PrefillTicket, state: PeState, *, reason: str = "", status: int = 200) -> None:
        """The ticket is over: give back what it holds, answer its call, remember it."""
        computing = ticket.state is PeState.PREFILLING
        ticket.move(state)
        self.counters[f"ended_{state.value}"] += 1
        del self._tickets[ticket.id]
        self._memory.remember(ticket.id, "answered" if ticket.grant is not None else "refused")
        if ticket.writer:
            del self._by_writer[ticket.writer]
            self._effects.append(DropWriter(ticket.told[0], ticket.writer))
        if ticket.request_id is None:
            return
        if ticket.holds_source:
            release = AbortPrefill if computing else ReleaseSource
            self._effects.append(release(ticket.request_id, ticket.id))
        cached = ticket.hand_off.cached_tokens if ticket.hand_off is not None else 0
        self._effects.append(
            PrefillEnded(
                ticket.request_id,
                status == 200,
                reason=reason,
                status=status,
                cached_tokens=cached,
                retry_after_s=ticket.retry_after_s,
            )
        )
