# SPDX-License-Identifier: Apache-2.0
"""Waiting for events of a reactor."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from kvrail.transfer.ucx import EventKind

if TYPE_CHECKING:
    from kvrail.transfer._ucx import Reactor


class NativeEvents:
    """The events of one reactor, kept until a test takes them."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._epoll = select.epoll()
        self._epoll.register(reactor.event_fd, select.EPOLLIN)
        self.events: list[tuple[int, int, int, int, bytes]] = []

    def poll(self, timeout: float = 0.0) -> None:
        """Wait for the eventfd, and take what is there."""
        if self._epoll.poll(timeout):
            self.events += self._reactor.drain()

    def take(
        self, kind: EventKind, count: int = 1, timeout: float = 20.0
    ) -> list[tuple[int, int, int, int, bytes]]:
        """The first `count` events of that kind, in order, once they are there; AssertionError when they are not."""
        deadline = time.monotonic() + timeout
        while True:
            found = [event for event in self.events if event[0] == kind][:count]
            if len(found) == count:
                for event in found:
                    self.events.remove(event)
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"{count} {kind.name} wanted in {timeout} s, got {self.events}"
            self.poll(min(left, 0.5))

    def messages(self, count: int = 1) -> list[bytes]:
        """The next `count` messages."""
        return [event[4] for event in self.take(EventKind.MESSAGE, count)]

    def none(self, kind: EventKind, within: float) -> bool:
        """Whether no event of that kind comes within that time."""
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            self.poll(left)
        return not any(event[0] == kind for event in self.events)

    def close(self) -> None:
        self._epoll.close()
