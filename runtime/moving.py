# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefill engine is dead, silent or refuses: they are asked of another one, else computed here.

The rank knows which links work, the front which engine has room: so the rank says that a request is stranded and who
could take it, and the front answers with one of them, or none. The dead ticket keeps its pages until proof; the next
one takes fresh pages. First tokens that are out stay, and those of the next engine are ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from kvrail.runtime.control.routing import MOST_ASKED
from kvrail.runtime.decoding import Decoding
from kvrail.runtime.messages import LinkReport, Stranded, ToFront
from kvrail.runtime.requests import Request, Requests
from kvrail.transfer.link_events import LinkDown, LinkEvent, LinkKey, LinkUp, Recovered, Suspect

__all__ = ["Moving"]

_log = logging.getLogger(__name__)
# A front answers at once; beyond this its word would come too late to be of use.
_ANSWER_WITHIN_S = 10.0


class Moving:
    """`links`: what is known of each link. `give_up` ends the ticket of a request; that it is lost is told later."""

    def __init__(
        self,
        *,
        links: Mapping[LinkKey, LinkReport],
        requests: Requests,
        decoding: Decoding,
        give_up: Callable[[float, bytes, str], None],
        send: Callable[[ToFront], None],
        counters: Counter[str],
    ) -> None:
        self._links = links
        self._requests = requests
        self._decoding = decoding
        self._give_up = give_up
        self._send = send
        self._counters = counters
        self._silent: set[LinkKey] = set()

    def note(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link: whoever waits for a silent one goes to another as soon as there is one."""
        match event:
            case Suspect(key):
                self._silent.add(key)
            case Recovered(key) | LinkDown(key):
                self._silent.discard(key)
            case LinkUp(key):
                self._silent.discard(key)
            case _:
                return
        for request in list(self._requests):
            if (
                request.phase in ("granted", "first")
                and request.link in self._silent
                and self.others(request)
            ):
                self._give_up(now, request.ticket, "silent, and another prefill engine is there")

    def others(self, request: Request) -> list[LinkKey]:
        """Who else could prefill it: links that work, to whoever has not been asked."""
        if len(request.asked) >= MOST_ASKED:
            return []
        return [key for key, link in self._links.items() if link.state == "up" and key not in request.asked]

    def strand(self, now: float, request: Request, reason: str) -> None:
        """It will not be prefilled where it was to be."""
        others = self.others(request)
        if not others:
            self._decoding.fall_back(request, reason)
            return
        _log.warning("request %s: to be prefilled elsewhere, because %s", request.id, reason)
        request.phase, request.ticket, request.called = "stranded", b"", b""
        request.deadline, request.trouble = now + _ANSWER_WITHIN_S, reason
        self._send(Stranded(request_id=request.id, reason=reason, others=list(others)))

    def moved(self, request: Request, peer: tuple[bytes, int] | None) -> bool:
        """The front's answer. Whether the request waits for a ticket again, of `request.link`."""
        if request.phase != "stranded":
            return False
        if peer is None:
            self._decoding.fall_back(request, request.trouble)
            return False
        self._counters["prefill_moves"] += 1
        request.ask(LinkKey(*peer))
        request.phase = "waiting"
        return True

    def reap(self, now: float) -> None:
        """Nobody waits for ever, not even for the front."""
        for request in list(self._requests):
            if request.phase == "stranded" and now > request.deadline:
                self._decoding.fall_back(request, request.trouble)
