# SPDX-License-Identifier: Apache-2.0
"""What the listener and the dialer share: their surroundings, a handshake under way, and the link it ends in."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from kvrail.transfer.control_socket import ControlStream, Frame, PeerProcess
from kvrail.transfer.conversation import Conversation
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.errors import TransferError
from kvrail.transfer.foreign_pool import ForeignPool
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.handshake import Offer, Turn
from kvrail.transfer.lane_test import TestSlices
from kvrail.transfer.lanes import Plan
from kvrail.transfer.layout import Layout
from kvrail.transfer.link_events import LinkKey, LinkOptions
from kvrail.transfer.memory import HostPool

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["AnyPool", "LinkPools", "LinkSetup", "NewLink", "Talk"]

AnyPool = HostPool | DevicePool | ForeignPool


class LinkPools(Protocol):
    """The pools that a rank's links write and offer: `memory.Pools`, or those of another engine."""

    @property
    def memory(self) -> Literal["host", "cuda"]: ...
    @property
    def probe(self) -> HostPool | DevicePool: ...
    def by_id(self) -> Iterator[tuple[int, AnyPool]]:
        """(pool id on the link, pool), without those that do not exist."""
        ...


@dataclass(frozen=True)
class LinkSetup:
    """What every handshake of this rank needs. `gpu`: that of the pools, or the one that copies for host pools."""

    reactor: _ucx.Reactor
    me: LinkKey
    token: bytes
    layout: Layout
    pools: LinkPools
    options: LinkOptions
    ucx_version: tuple[int, int, int]
    gpu: Gpu | None = None
    slices: TestSlices = field(default_factory=TestSlices)


class NewLink(NamedTuple):
    """A link whose handshake is over: authenticated, layouts equal, native link open, its stream still here.

    Who receives this owns the native link, the sockets, the fds and the pidfd in it. `plan` is None on the CE.
    """

    key: LinkKey
    epoch: int
    native: _ucx.Link
    stream: ControlStream
    peer_address: bytes
    process: PeerProcess | None
    offer: Offer
    fds: tuple[int, ...]
    plan: Plan | None
    # Of the connection of lane stream, and, on a CE, where its writer is listened for.
    secret: bytes
    listening: socket.socket | None = None


class Talk:
    """One handshake under way, and what it has made so far. `done` hears of its end, once.

    With None when it was no more than a question: then whoever hears it closes the talk.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        stream: ControlStream,
        process: PeerProcess | None,
        done: Callable[[Talk, NewLink | TransferError | None, float], None],
    ) -> None:
        self._selector = selector
        self.stream = stream
        self._fd = stream.fileno()
        self._done = done
        self._over = False
        self.process = process
        # Set by the side that runs the handshake, as it learns and makes them.
        self.key: LinkKey | None = None
        self.native: _ucx.Link | None = None
        self.fds: tuple[int, ...] = ()
        self.listening: socket.socket | None = None
        self.made: Callable[[], NewLink | None] | None = None

    @property
    def silent(self) -> bool:
        """Whether it is under way, and the peer has said nothing yet."""
        return not self._over and not self._conversation.heard

    def begin(self, generator: Generator[Turn | None, Frame, object], now: float, deadline: float) -> None:
        self._conversation: Conversation[object] = Conversation(self.stream, generator, deadline)
        self._selector.register(self._fd, self._mask(), self.advance)
        self.advance(now)

    def advance(self, now: float) -> None:
        """Do what can be done now; called when the socket is ready, or the deadline has passed."""
        if self._over:
            return  # Dropped by what came before it in the same turn of the loop.
        try:
            result = self._conversation.advance(now)
        except TransferError as error:
            self._abandon()
            self._done(self, error, now)
            return
        if result is None:
            self._selector.modify(self._fd, self._mask(), self.advance)
            return
        self._over = True
        self._selector.unregister(self._fd)
        assert self.made is not None
        self._done(self, self.made(), now)

    def tick(self, now: float) -> None:
        if now > self._conversation.deadline:
            self.advance(now)

    def drop(self) -> None:
        """Give up without telling anyone."""
        self._abandon()
        self._conversation.close()

    def close(self) -> None:
        """After its end: it has come to nothing that somebody took."""
        self.stream.close()
        self._give_back()

    def _abandon(self) -> None:
        self._over = True
        self._selector.unregister(self._fd)
        self._give_back()

    def _give_back(self) -> None:
        if self.native is not None:
            self.native.close()
        if self.listening is not None:
            self.listening.close()
        for fd in self.fds:
            os.close(fd)
        if self.process is not None and self.process.pidfd >= 0:
            os.close(self.process.pidfd)

    def _mask(self) -> int:
        return selectors.EVENT_WRITE if self.stream.wants_write else selectors.EVENT_READ
