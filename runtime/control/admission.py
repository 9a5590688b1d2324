# SPDX-License-Identifier: Apache-2.0
"""Requests wait here, first come first served, until a rank can start them soon; a bounded number may wait.

What a front has handed out is counted here, so that a route is chosen and taken in one step of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from kvrail.runtime.control.routing import PeerKey, PeerView, Route
from kvrail.runtime.errors import Overloaded, Unavailable

__all__ = ["Admission", "Place"]


class Place:
    """What one admitted request occupies: a place at its rank, and one at its prefill rank until `prefilled`."""

    def __init__(self, admission: Admission, route: Route) -> None:
        self.route = route
        self._admission = admission
        self._at_rank = True
        self._at_peer = False
        admission.at_rank[route.rank] += 1
        if route.peer is not None:
            self._take(route.peer)

    def _take(self, peer: PeerView) -> None:
        self._at_peer = True
        self._admission.at_peer[peer.key] += 1

    def move(self, peer: PeerView) -> None:
        """Another prefill rank is asked, whatever has become of the one before."""
        self.prefilled()
        self.route = self.route._replace(peer=peer)
        self._take(peer)

    def prefilled(self) -> None:
        """The prefill rank is done with it (or was never asked). Idempotent."""
        if self._at_peer:
            self._at_peer = False
            assert self.route.peer is not None
            key = self.route.peer.key
            self._admission.at_peer[key] -= 1
            if not self._admission.at_peer[key]:
                del self._admission.at_peer[key]  # restarted peers must not pile up here
            self._admission.wake()

    def leave(self) -> None:
        """The request has ended. Idempotent."""
        self.prefilled()
        if self._at_rank:
            self._at_rank = False
            self._admission.at_rank[self.route.rank] -= 1
            self._admission.wake()


class Admission:
    """The queue of a front. `choose` returns a route, None while everything is full, or raises Unavailable."""

    def __init__(self, max_waiting: int) -> None:
        self.at_rank: Counter[int] = Counter()
        self.at_peer: Counter[PeerKey] = Counter()
        self.stopping = False
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Event] = deque()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def check(self) -> None:
        """Raise what `enter` is sure to raise now, whatever is asked for."""
        self._refuse_when_stopping()
        if self._waiting:
            self._refuse_when_full()

    async def enter(self, choose: Callable[[], Route | None]) -> Place:
        """A place, at once or after waiting. Raises Overloaded when the queue is full, and what `choose` raises."""
        self._refuse_when_stopping()
        if not self._waiting:
            route = choose()
            if route is not None:
                return Place(self, route)
        self._refuse_when_full()
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while True:
                await turn.wait()
                turn.clear()
                self._refuse_when_stopping()
                route = choose()
                if route is not None:
                    return Place(self, route)
        finally:
            self._waiting.remove(turn)
            # Whether it got its place, failed or was cancelled: the next one may find room as well.
            self.wake()

    def wake(self) -> None:
        """Something has changed (a place was left, a link is up, a rank was lost): the first in line looks again."""
        if self._waiting:
            self._waiting[0].set()

    def stop(self) -> None:
        """Admit nothing more; those who wait are refused."""
        self.stopping = True
        for turn in self._waiting:
            turn.set()

    def _refuse_when_full(self) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already (--max-queue {self._max_waiting})",
                retry_after_s=2.0,
            )

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Unavailable("the server is stopping", retry_after_s=5.0)
