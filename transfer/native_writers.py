# SPDX-License-Identifier: Apache-2.0
"""The native writers of a prefill engine's open tickets, under the numbers that its ledger gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.links import Links
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import DropWriter, OpenWriter, RenewWriter, SenderEffect, StopWriter

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["NativeWriters"]


class NativeWriters:
    """Opens, renews, stops and drops them as the ledger says; pushing and ringing are the caller's."""

    def __init__(self, links: Links, sender: Sender) -> None:
        self._links = links
        self._sender = sender
        self._open: dict[int, _ucx.Writer] = {}
        self._tickets: dict[int, bytes] = {}
        # Units that each had written when we last looked.
        self._written: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, writer: int) -> _ucx.Writer | None:
        """None: it was never opened (its link was gone), or is dropped."""
        return self._open.get(writer)

    def ticket(self, writer: int) -> bytes | None:
        """What an open writer is for."""
        return self._tickets.get(writer)

    def of(self, ticket: bytes) -> list[_ucx.Writer]:
        """The open writers of a ticket."""
        return [self._open[writer] for writer, one in self._tickets.items() if one == ticket]

    def do(self, now: float, effect: SenderEffect) -> bool:
        """Carry an effect out; False when it is none about writers. Raises LinkLost."""
        match effect:
            case OpenWriter(link, writer, ttl_s, ticket):
                self._open[writer] = self._links.writer(LinkKey(*link), writer, ttl_s)
                self._tickets[writer] = ticket
            case RenewWriter(_, writer, ttl_s):
                if writer in self._open:
                    self._open[writer].renew(ttl_s)
            case StopWriter(_, writer):
                if writer in self._open:
                    self._open[writer].stop()
                else:
                    self._sender.on_quiet(now, writer, True)
            case DropWriter(_, writer):
                self._open.pop(writer, None)
                self._tickets.pop(writer, None)
                self._written.pop(writer, None)
            case _:
                return False
        return True

    def look(self, now: float) -> None:
        """Tell the ledger who got on.

        With a backlog of pages on a slow lane a writer tells progress only when all is written, minutes later.
        """
        for writer, native in self._open.items():
            if native.done != self._written.get(writer, 0):
                self._written[writer] = native.done
                self._sender.on_progress(now, writer)
