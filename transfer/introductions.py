# SPDX-License-Identifier: Apache-2.0
"""PEs of which a CE knows only where they listen: asked who they are, again whenever no link to them is left.

Whoever answers is then dialed like any other peer. An engine that was started again at the same address is a new peer,
and the one that was there before is forgotten.
"""

from __future__ import annotations

import os
import random
import selectors
from collections.abc import Callable, Generator

from kvrail.transfer import control_socket, handshake
from kvrail.transfer.connector import LinkSetup, NewLink, Talk
from kvrail.transfer.control_socket import Frame
from kvrail.transfer.errors import TransferError
from kvrail.transfer.handshake import Introduction, Turn
from kvrail.transfer.interfaces import with_our_scope
from kvrail.transfer.link_events import LinkKey, LinkRefusal, PeerAddress

__all__ = ["Introductions"]


class _Place:
    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.key: LinkKey | None = None
        self.talk: Talk | None = None
        self.answer: Introduction | None = None
        self.attempts = 0
        self.due_at = 0.0
        self.told = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Introductions:
    """`met(new, old)` hears who listens at a place, and who did before; `linked` says whether a peer has a link."""

    def __init__(
        self,
        setup: LinkSetup,
        selector: selectors.BaseSelector,
        *,
        met: Callable[[PeerAddress, LinkKey | None], None],
        linked: Callable[[LinkKey], bool],
        report: Callable[[LinkRefusal, float], None],
    ) -> None:
        self._setup = setup
        self._selector = selector
        self._met = met
        self._linked = linked
        self._report = report
        self._places: dict[tuple[str, int], _Place] = {}

    def want(self, host: str, port: int) -> None:
        self._places.setdefault((host, port), _Place(host, port))

    def unwant(self, host: str, port: int) -> LinkKey | None:
        """Ask no more; returns who was last heard to listen there."""
        place = self._places.pop((host, port), None)
        if place is None:
            return None
        if place.talk is not None:
            place.talk.drop()
        return place.key

    def who(self, host: str, port: int) -> LinkKey | None:
        """Who was last heard to listen there."""
        place = self._places.get((host, port))
        return place.key if place is not None else None

    def tick(self, now: float) -> None:
        for place in list(self._places.values()):
            if place.talk is not None:
                place.talk.tick(now)
            elif place.key is not None and self._linked(place.key):
                place.attempts, place.due_at = 0, 0.0
            elif now >= place.due_at:
                self._ask(place, now)

    def close(self) -> None:
        for place in self._places.values():
            if place.talk is not None:
                place.talk.drop()
        self._places.clear()

    def _ask(self, place: _Place, now: float) -> None:
        options = self._setup.options
        longest = min(options.redial_max_s, options.redial_min_s * 2**place.attempts)
        place.attempts = min(place.attempts + 1, 16)
        place.due_at = now + longest * random.uniform(0.5, 1.0)
        try:
            stream = control_socket.dial_tcp(with_our_scope(place.host, options.kv_host), place.port)
        except TransferError as error:
            self._tell(place, str(error), now)
            return

        def ended(talk: Talk, outcome: NewLink | TransferError | None, at: float) -> None:
            self._ended(place, talk, outcome, at)

        place.talk = talk = Talk(self._selector, stream, None, ended)
        talk.begin(self._question(place, talk), now, now + options.handshake_s)

    def _question(self, place: _Place, talk: Talk) -> Generator[Turn, Frame, Introduction]:
        answer = yield from handshake.asking(self._setup.token, self._setup.me, os.urandom(32))
        place.answer = answer
        talk.made = lambda: None
        return answer

    def _ended(self, place: _Place, talk: Talk, outcome: NewLink | TransferError | None, now: float) -> None:
        place.talk = None
        if isinstance(outcome, TransferError):
            self._tell(place, str(outcome), now)
            return
        talk.close()
        answer, place.answer = place.answer, None
        assert answer is not None
        place.told = ""
        key = LinkKey(answer.incarnation, answer.rank)
        if key == place.key:
            return  # The dialer is at it already.
        old, place.key = place.key, key
        self._met(PeerAddress(*key, place.host, place.port, answer.unix_path), old)

    def _tell(self, place: _Place, reason: str, now: float) -> None:
        if reason != place.told:
            place.told = reason
            self._report(LinkRefusal(None, f"the prefill engine at {place}: {reason}"), now)
