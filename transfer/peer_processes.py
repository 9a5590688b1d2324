# SPDX-License-Identifier: Apache-2.0
"""The processes of peers on this host, and the link epochs whose writers only the end of a process proves quiet."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from kvrail.transfer.control_socket import PeerProcess
from kvrail.transfer.link_events import LinkKey, Proven

__all__ = ["PeerProcesses"]


class _Watched:
    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        # Epochs that ended, and whether their links were ever up (then the rank knows of them).
        self.unproven: dict[int, bool] = {}


class PeerProcesses:
    """Watches pidfds. `gone(key, now)` is called when a process has ended; `forget` is then due."""

    def __init__(self, selector: selectors.BaseSelector, gone: Callable[[LinkKey, float], None]) -> None:
        self._selector = selector
        self._gone = gone
        self._watched: dict[LinkKey, _Watched] = {}

    def watch(self, key: LinkKey, process: PeerProcess | None) -> None:
        """Watch this process (takes its pidfd) until it ends: also when no link to it is left."""
        if process is None or process.pidfd < 0:
            return
        if key in self._watched:
            os.close(process.pidfd)  # The same process: one incarnation is one process life.
            return
        self._watched[key] = _Watched(process.pidfd)

        def ended(now: float) -> None:
            self._gone(key, now)

        self._selector.register(process.pidfd, selectors.EVENT_READ, ended)

    def owes(self, key: LinkKey, epoch: int, *, was_up: bool) -> None:
        """This epoch is over, and what it wrote is quiet only when the process has ended."""
        if key in self._watched:
            self._watched[key].unproven[epoch] = was_up

    @property
    def unproven(self) -> list[tuple[LinkKey, int]]:
        return [(key, epoch) for key, watched in self._watched.items() for epoch in sorted(watched.unproven)]

    def forget(self, key: LinkKey) -> list[Proven]:
        """The process has ended: what that proves."""
        watched = self._watched.pop(key)
        self._selector.unregister(watched.pidfd)
        os.close(watched.pidfd)
        return [Proven(key, epoch, "process") for epoch, was_up in watched.unproven.items() if was_up]

    def close(self) -> None:
        for key in list(self._watched):
            self.forget(key)
