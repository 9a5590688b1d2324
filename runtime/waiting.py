# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a ticket: in which order they get theirs, and what becomes of those that wait in vain."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvrail.runtime.decoding import Decoding
from kvrail.runtime.requests import Request, Requests
from kvrail.transfer.errors import LinkLost, NoPages, ShareUsed
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.receiver import Receiver

__all__ = ["Waiting", "grant_in_turn"]

# A request that finds no room for its ticket in this time is refused: something else holds the pool.
_ROOM_WITHIN_S = 30.0


class Waiting:
    """The queue for tickets. `granted` is called for each ticket, at once: its grant may then be on the link.

    `seats`: choices that may hold a ticket or run together. `largest_ticket`: pages that one link may hold.
    """

    def __init__(
        self,
        *,
        receiver: Receiver,
        requests: Requests,
        decoding: Decoding,
        granted: Callable[[float, Request], None],
        verify_share: float,
        seats: int,
        largest_ticket: int,
    ) -> None:
        self._receiver = receiver
        self._requests = requests
        self._decoding = decoding
        self._granted = granted
        self._verify_share = verify_share
        self._seats = seats
        self._largest_ticket = largest_ticket
        self._queue: list[Request] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, now: float, request: Request, lacking: int) -> None:
        """It needs a ticket for the `lacking` pages that the pool does not have yet."""
        if lacking <= self._largest_ticket:
            request.deadline = now + _ROOM_WITHIN_S
            self._queue.append(request)
            return
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
            waiting = [request for request in self._queue if request in self._requests]
            self._queue = grant_in_turn(waiting, lambda request: self._grant(now, request))

    def _grant(self, now: float, request: Request) -> NoPages | None:
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
            )
        except NoPages as error:
            if now < request.deadline:
                return error
            reason = f"no room for the prompt within {_ROOM_WITHIN_S:.0f} s: {error}"
            if isinstance(error, ShareUsed):
                self._decoding.fall_back(request, reason)
            else:
                self._requests.fail(request, 503, reason, 2.0)
            return None
        except LinkLost as error:
            self._decoding.fall_back(request, str(error))
            return None
        request.phase, request.ticket, request.route = "granted", ticket.id, "remote"
        self._granted(now, request)
        return None


def grant_in_turn(waiting: Sequence[Request], grant: Callable[[Request], NoPages | None]) -> list[Request]:
    """Ask `grant` for each in order; it returns what the request lacks, or None. Returns those who still wait.

    Behind one that lacks pages or a seat all wait, or small requests would overtake a large one for ever. Behind one
    whose link has used up its share, only those of the same link wait.
    """
    kept: list[Request] = []
    full: set[LinkKey] = set()
    blocked = False
    for request in waiting:
        if not blocked and request.link not in full:
            lack = grant(request)
            if lack is None:
                continue
            if isinstance(lack, ShareUsed):
                full.add(request.link)
            else:
                blocked = True
        kept.append(request)
    return kept
