# SPDX-License-Identifier: Apache-2.0
"""The completion engine's ticket ledger: grants pages, and lets them go only to a sequence or after proof (I2).

Sans-IO. The caller feeds facts with the time (`now`, monotonic seconds) and carries out `take_effects()` in order.
Late, duplicate and foreign messages are counted in `counters` and change nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvrail.transfer.errors import LinkLost, LinkSilent, NoPages
from kvrail.transfer.granted_ticket import PeerLink, Ticket, ticket_gauges
from kvrail.transfer.layout import TicketLayout
from kvrail.transfer.link_share import LinkShare, TicketPool
from kvrail.transfer.ticket_endings import TicketEndings
from kvrail.transfer.tickets import (
    CeState,
    Fence,
    FenceMode,
    FirstTokenReady,
    Landed,
    LinkKey,
    Proof,
    ReceiverEffect,
    Send,
    owner_of,
)
from kvrail.transfer.wire import (
    Beat,
    Doorbell,
    FirstToken,
    HandOff,
    LinkMessage,
    Quiesced,
    TicketBeat,
)

__all__ = ["Receiver"]


class Receiver:
    """Tickets of one CE rank.

    `link_share`: the part of the pool that one link may hold in tickets plus quarantine (I8). `ttl_s`: a ticket
    without progress for so long is given up. `answer_s`: how long a cancel may stay unanswered before the link is
    fenced; `busy_s` more as long as the peer's heart beats, for it answers between two steps only. `random(n)` gives
    n random bytes.
    """

    def __init__(
        self,
        pool: TicketPool,
        layout: TicketLayout,
        *,
        incarnation: bytes,
        rank: int,
        link_share: float = 0.25,
        ttl_s: float = 30.0,
        answer_s: float = 5.0,
        busy_s: float = 0.0,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._self = (incarnation, rank)
        self._link_share = LinkShare(pool, link_share)
        self._ttl_s = ttl_s
        self._answer_s = answer_s
        self._random = random
        self._links: dict[LinkKey, PeerLink] = {}
        self._effects: list[ReceiverEffect] = []
        self.counters: Counter[str] = Counter()
        self._endings = TicketEndings(
            pool, self._links, self._emit, self.counters, answer_s=answer_s, busy_s=busy_s
        )

    def take_effects(self) -> list[ReceiverEffect]:
        """What to do now, in order; the list is emptied."""
        effects, self._effects = self._effects, []
        return effects

    # --- links ------------------------------------------------------------------------------------------------

    def link_up(self, now: float, link: LinkKey, epoch: int, fence: FenceMode) -> None:
        """A link works. `epoch` must be above all earlier ones of this peer rank."""
        known = self._links.get(link)
        if known is None:
            self._links[link] = PeerLink(epoch, fence)
            return
        if epoch <= known.epoch:
            raise ValueError(f"link epoch {epoch} does not rise above {known.epoch}")
        if known.state != "down":
            self.link_down(now, link, known.epoch, "replaced by a newer connection")
        known = self._links.setdefault(link, known)
        known.epoch, known.fence, known.state = epoch, fence, "up"

    def link_suspect(self, now: float, link: LinkKey) -> None:
        """Heartbeats are missing: no grants; the tickets of requests that have another way are lost and cancelled."""
        known = self._links.get(link)
        if known is None or known.state != "up":
            return
        known.state = "suspect"
        for ticket in known.tickets.values():
            if ticket.live and not ticket.patient:
                self._endings.lose(ticket, "the prefill engine does not answer")
                self._endings.stop(now, ticket, "suspect")
            elif not ticket.live and ticket.deadline is not None:
                # Cancelled when it was only busy.
                ticket.deadline = min(ticket.deadline, now + self._answer_s)

    def link_recovered(self, link: LinkKey) -> None:
        """Heartbeats are back: grants are given again. Cancelled tickets still wait for their answers."""
        known = self._links.get(link)
        if known is not None and known.state == "suspect":
            known.state = "up"

    def link_down(
        self, now: float, link: LinkKey, epoch: int, reason: str, proof: Proof | None = None
    ) -> None:
        """That epoch of the link is over. Its pages stay in quarantine until `proven` (or `proof`, told at once)."""
        known = self._links.get(link)
        if known is not None and known.epoch == epoch and known.state != "down":
            asked = known.state == "fencing"
            known.state = "down"
            self._endings.strand(known, reason)
            if known.fence == "worker" and proof != "worker" and not asked and known.tickets:
                self._emit(Fence(link, epoch, reason))
        else:
            self.counters["stale_link_events"] += 1
        if proof is not None:
            self.proven(now, link, epoch, proof)
        self._endings.forget_if_idle(link)

    def proven(self, now: float, link: LinkKey, epoch: int, proof: Proof) -> None:
        """Nothing can be written any more through that epoch's "worker", or by the peer's "process" in any epoch.

        Each frees only the tickets whose lane it covers: bytes of a dead process may still sit in the worker's
        sockets, and a process may write past a destroyed worker. What is not covered is counted and stays.
        """
        known = self._links.get(link)
        if known is None:
            return
        if (proof == "process" or known.epoch == epoch) and known.state != "down":
            self.link_down(now, link, known.epoch, "the link's writers are gone")
        for ticket in list(known.tickets.values()):
            if ticket.fence == proof and (proof == "process" or ticket.epoch == epoch):
                self._endings.free(ticket)
            elif ticket.epoch == epoch:
                self.counters["proofs_refused"] += 1
        self._endings.forget_if_idle(link)

    # --- requests ---------------------------------------------------------------------------------------------

    def reserve_id(self) -> bytes:
        """The id of a ticket that may be granted later: a prefill can be called for with it ahead of its grant."""
        return self._random(16)

    def grant(
        self,
        now: float,
        request_id: str,
        link: LinkKey,
        tokens: int,
        *,
        keys: Sequence[bytes] = (),
        verify: bool = False,
        patient: bool = False,
        ticket_id: bytes = b"",
        token_start: int = 0,
    ) -> Ticket:
        """Reserve what the pool lacks of a prompt of `tokens` tokens, and send the grant. Zero pages are legal.

        `keys` name the prompt's full pages: those that the pool has already are not asked for. They are pinned for
        the ticket from here to its end, and go with its other pages to the sequence (before them, in token order).
        Without keys, tokens from `token_start` (a page boundary) on are asked for. `ticket_id`: one of `reserve_id`, or
        one that both sides were told; ValueError when it is in use. Without it the ticket gets a new one.
        `patient`: see Ticket. Raises NoPages (pool or state slots), ShareUsed (the link's share), LinkSilent, and
        LinkLost: the link is not up, or its share is too small, be it for want of what it holds unproven.
        """
        known = self._links.get(link)
        if known is None or known.state != "up":
            lost = LinkSilent if known is not None and known.state == "suspect" else LinkLost
            raise lost(f"the link to rank {link[1]} of {link[0].hex()[:8]} is not up")
        if len(keys) * self._layout.page_tokens > tokens:
            raise ValueError(f"{tokens} tokens do not fill {len(keys)} pages")
        if ticket_id and self._endings.find(ticket_id) is not None:
            raise ValueError(f"ticket {ticket_id.hex()} is in use")
        ticket_id = ticket_id or self._random(16)
        owner = owner_of(ticket_id)
        # Before anything is allocated, which may evict what nobody has pinned.
        start = len(self._pool.match(owner, keys)) * self._layout.page_tokens if keys else token_start
        try:
            pages, slot = self._link_share.reserve(known, owner, self._layout.pages_for(tokens - start))
        except (NoPages, LinkLost):
            self._pool.release(owner)
            raise
        ticket = Ticket(
            id=ticket_id,
            request_id=request_id,
            link=link,
            epoch=known.epoch,
            fence=known.fence,
            token_start=start,
            token_end=tokens,
            pages=np.array(pages, dtype=np.uint32),
            state_slot=slot,
            verify=verify,
            patient=patient,
            deadline=now + self._ttl_s,
        )
        known.tickets[ticket_id] = ticket
        known.held += len(pages)
        known.held_slots += slot >= 0
        self._emit(Send(link, ticket.grant(self._self, self._ttl_s)))
        self.counters["granted"] += 1
        if start:
            self.counters["matched_tokens"] += start
        return ticket

    def cancel(self, now: float, ticket_id: bytes, reason: str) -> bool:
        """The request ended here (client gone, finished): cancel its ticket, with no further effect for it.

        False when the ticket is over already; then its Landed or Lost is out, and the caller has the pages.
        """
        ticket = self._endings.find(ticket_id)
        if ticket is None or not ticket.live:
            return False
        self._endings.stop(now, ticket, reason)
        return True

    def give_up(self, now: float, ticket_id: bytes, reason: str) -> None:
        """The prefill will not succeed (its call failed): Lost, and the ticket is cancelled. No-op when it is over."""
        ticket = self._endings.find(ticket_id)
        if ticket is not None and ticket.live:
            self._endings.lose(ticket, reason)
            self._endings.stop(now, ticket, reason)

    # --- what the PE says -------------------------------------------------------------------------------------

    def on_message(self, now: float, link: LinkKey, message: LinkMessage) -> None:
        """A link message from that peer. Anything that does not fit is a counted no-op."""
        if not isinstance(message, FirstToken | Doorbell | Quiesced):
            self.counters["unexpected_messages"] += 1
            return
        known = self._links.get(link)
        ticket = known.tickets.get(message.ticket) if known is not None else None
        if ticket is None:
            self.counters["unknown_tickets"] += 1
        elif ticket.epoch != message.epoch:
            self.counters["stale_epochs"] += 1
        elif isinstance(message, FirstToken):
            self._on_first_token(now, ticket, message.hand_off)
        elif isinstance(message, Doorbell):
            self._on_doorbell(ticket, message)
        else:
            self._on_quiesced(ticket, message)

    def on_beat(self, now: float, link: LinkKey, beat: Beat) -> None:
        """Renew the tickets of this link that got nearer to their doorbells."""
        known = self._links.get(link)
        if known is None:
            return
        for item in beat.tickets:
            ticket = known.tickets.get(item.ticket)
            if ticket is not None and ticket.live and item.progress > ticket.progress:
                ticket.progress = item.progress
                ticket.deadline = now + self._ttl_s

    def beat_tickets(self, link: LinkKey) -> list[TicketBeat]:
        """The tickets of this link that are still wanted, for our heartbeat: it renews them at the PE."""
        known = self._links.get(link)
        return [TicketBeat(ticket.id, 0) for ticket in known.live()] if known is not None else []

    # --- time -------------------------------------------------------------------------------------------------

    def reap(self, now: float) -> None:
        """Start the proofs that are due: cancel what makes no progress, fence what does not answer. Frees nothing."""
        for known in list(self._links.values()):
            for ticket in list(known.tickets.values()):
                if ticket.deadline is None or ticket.deadline > now:
                    continue
                if ticket.live:
                    self.counters["expired"] += 1
                    self._endings.lose(ticket, f"no progress for {self._ttl_s:g} s")
                    self._endings.stop(now, ticket, "expired")
                else:
                    self.counters["unanswered_cancels"] += 1
                    self._endings.doubt(ticket, "a cancel was not answered in time")

    def next_deadline(self) -> float | None:
        """When `reap` has something to do next."""
        due = [t.deadline for k in self._links.values() for t in k.tickets.values() if t.deadline is not None]
        return min(due, default=None)

    def gauges(self) -> dict[str, int]:
        """Tickets and pages that are not proven, for metrics: all zero when idle."""
        return ticket_gauges([t for known in self._links.values() for t in known.tickets.values()])

    def held(self, link: LinkKey) -> int:
        """Pages in tickets and quarantine of this link (I8)."""
        known = self._links.get(link)
        return known.held if known is not None else 0

    # --- inside -----------------------------------------------------------------------------------------------

    def _emit(self, effect: ReceiverEffect) -> None:
        self._effects.append(effect)

    def _on_first_token(self, now: float, ticket: Ticket, hand_off: HandOff) -> None:
        if ticket.state is not CeState.GRANTED:
            self.counters["late_first_tokens"] += 1
            return
        ticket.move(CeState.HANDED)
        ticket.hand_off = hand_off
        ticket.deadline = now + self._ttl_s
        self._emit(FirstTokenReady(ticket.request_id, ticket.id, hand_off))
        if hand_off.ended:
            # Nothing will be decoded, so the doorbell that is on its way counts as proof only.
            self._endings.stop(now, ticket, "finished")

    def _on_doorbell(self, ticket: Ticket, bell: Doorbell) -> None:
        if not ticket.live:
            self.counters["late_doorbells"] += 1
            self._endings.free(ticket)
            return
        hand_off = ticket.hand_off or bell.hand_off
        fault = ticket.fault_of(bell)
        if fault or hand_off is None:
            self.counters["failed_doorbells"] += 1
            self._endings.lose(ticket, fault)
            self._endings.free(ticket)
            return
        self.counters["landed"] += 1
        ticket.move(CeState.LANDED)
        self._endings.remove(ticket)
        landed = Landed(
            ticket.request_id, ticket.id, ticket.owner, hand_off, ticket.pages, ticket.state_slot, bell
        )
        self._emit(landed)

    def _on_quiesced(self, ticket: Ticket, message: Quiesced) -> None:
        if ticket.live:
            self._endings.lose(ticket, message.reason or "the prefill engine stopped")
        if message.proven:
            self._endings.free(ticket)
        elif ticket.state is not CeState.UNPROVEN:
            self.counters["unproven_answers"] += 1
            self._endings.doubt(
                ticket, message.reason or "the prefill engine cannot prove that its writes have ended"
            )
