# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a ticket: in which order they get theirs, and what becomes of those that wait in vain.

The call to the prefill engine need not wait for the grant: the front may have the id of one ticket in advance. Whoever
is called for with it has its grant at once or is deferred, so that no call stands in a prefill engine's queue for long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvrail.runtime.decoding import Decoding
from kvrail.runtime.messages import Deferred, Granted, ToFront
from kvrail.runtime.moving import Moving
from kvrail.runtime.requests import Request, Requests
from kvrail.transfer.errors import LinkLost, LinkSilent, NoPages, ShareUsed
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.receiver import Receiver

__all__ = ["Waiting", "grant_in_turn"]

# A request that finds no room for its ticket in this time is refused: something else holds the pool.
_ROOM_WITHIN_S = 30.0
# A call that has waited for longer (this rank was in a long step) may be given up by its prefill engine before it
# hears of the grant.
_CALL_GOOD_FOR_S = 5.0


class Waiting:
    """The queue for tickets. `carry_out` puts the ledger's messages on the links, `send` tells the front.

    `seats`: choices that may hold a ticket or run together. `largest_ticket`: pages that one link may hold.
    """

    def __init__(
        self,
        *,
        receiver: Receiver,
        requests: Requests,
        decoding: Decoding,
        moving: Moving,
        carry_out: Callable[[float], None],
        send: Callable[[ToFront], None],
        verify_share: float,
        seats: int,
        largest_ticket: int,
    ) -> None:
        self._receiver = receiver
        self._requests = requests
        self._decoding = decoding
        self._moving = moving
        self._carry_out = carry_out
        self._send = send
        self._verify_share = verify_share
        self._seats = seats
        self._largest_ticket = largest_ticket
        self._queue: list[Request] = []
        # The id that the front may use for one call ahead of a grant; b"" when it has none.
        self._reserved = b""

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, now: float, request: Request, lacking: int) -> None:
        """It needs a ticket for the `lacking` pages that the pool does not have yet."""
        if request.submit.called is not None and len(request.asked) == 1:
            ticket_id, called_at = request.submit.called
            request.called = ticket_id
            if ticket_id != self._reserved or now - called_at > _CALL_GOOD_FOR_S:
                self._defer(request)
            # Once is enough, granted or not.
            self._reserved = b""
        if lacking <= self._largest_ticket:
            request.deadline = now + _ROOM_WITHIN_S
            self._queue.append(request)
            return
        self._defer(request)
        most = f"{self._largest_ticket}: --link-share"
        reason = f"its {lacking} pages are more than one link may hold ({most})"
        if request.submit.fallback:
            self._decoding.fall_back(request, reason)
        else:  # Trying again would help nobody.
            reason = f"the prompt is too long to be prefilled elsewhere: {reason}"
            self._requests.fail(request, 400, reason, None)

    def grant(self, now: float) -> None:
        """Tickets for those who wait, in turn, as long as there is room."""
        if self._queue:
            waiting = [r for r in self._queue if r in self._requests and r.phase == "waiting"]
            self._queue = waiting
            self._queue = grant_in_turn(waiting, lambda request: self._grant(now, request))
            for request in waiting:
                if request.phase != "granted":
                    self._defer(request)

    def call_failed(self, now: float, request: Request, ticket_id: bytes, reason: str) -> None:
        """It was called for ahead of its grant, and the prefill engine did not take the call."""
        if request.called == ticket_id and request in self._queue:
            self._queue.remove(request)
            self._moving.strand(now, request, reason)

    def _defer(self, request: Request) -> None:
        """Nothing will come of the call that was made ahead, if one was."""
        if request.called:
            request.called = b""
            self._send(Deferred(request_id=request.id))

    def _grant(self, now: float, request: Request) -> NoPages | LinkSilent | None:
        """None: the request has a ticket, or has gone another way. Else what it has to wait for."""
        # Whoever gets a ticket joins the batch the moment its pages land, so seats are kept for tickets.
        taken = sum(len(each.open) for each in self._requests if each.phase != "waiting")
        if taken and taken + len(request.open) > self._seats:
            # Answers end, and their seats become free; only the wait for room may be in vain.
            for each in self._queue:
                each.deadline = now + _ROOM_WITHIN_S
            return NoPages("all seats are taken")
        try:
            ticket = self._receiver.grant(
                now,
                request.id,
                request.link,
                len(request.tokens),
                keys=request.keys,
                verify=random.random() < self._verify_share,
                patient=not request.submit.fallback,
                ticket_id=request.called,
            )
        except NoPages as error:
            if now < request.deadline:
                return error
            reason = f"no room for the prompt within {_ROOM_WITHIN_S:.0f} s: {error}"
            if isinstance(error, ShareUsed):
                self._moving.strand(now, request, reason)
            else:
                self._requests.fail(request, 503, reason, 2.0)
            return None
        except LinkLost as error:
            # The only way that a request has is worth waiting for.
            only_way = not request.submit.fallback and not self._moving.others(request)
            if isinstance(error, LinkSilent) and only_way and now < request.deadline:
                return error
            self._moving.strand(now, request, str(error))
            return None
        request.phase, request.ticket, request.route = "granted", ticket.id, "remote"
        request.called = b""
        # The grant goes out first: it is on the link before the PE's front can hear of its ticket from here.
        self._carry_out(now)
        if request in self._requests and request.phase == "granted":
            if not self._reserved and not any(r is not request and r.phase == "waiting" for r in self._queue):
                self._reserved = self._receiver.reserve_id()
                told = self._reserved
            else:
                told = b""
            self._send(Granted(request_id=request.id, ticket=ticket.id, next_ticket=told))
        return None


def grant_in_turn(
    waiting: Sequence[Request], grant: Callable[[Request], NoPages | LinkSilent | None]
) -> list[Request]:
    """Ask `grant` for each in order; it returns what the request lacks, or None. Returns those who still wait.

    Behind one that lacks pages or a seat all wait, or small requests would overtake a large one for ever. Behind one
    whose link has used up its share or is silent, only those of the same link wait.
    """
    kept: list[Request] = []
    closed: set[LinkKey] = set()
    blocked = False
    for request in waiting:
        if not blocked and request.link not in closed:
            lack = grant(request)
            if lack is None:
                continue
            if isinstance(lack, ShareUsed | LinkSilent):
                closed.add(request.link)
            else:
                blocked = True
        kept.append(request)
    return kept
