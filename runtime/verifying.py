# SPDX-License-Identifier: Apache-2.0
"""Landed pages compared with the checksums of their doorbells, on a thread: running answers do not wait for that.

The pages stay their ticket's until the verdict has been taken, so that nobody writes into what is being read.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from kvrail.runtime.handing_over import damage_of
from kvrail.transfer.memory import Pools
from kvrail.transfer.tickets import Landed

__all__ = ["Verifying"]


class Verifying:
    """Belongs to the rank's loop. `wake_fd` is readable when a verdict waits.

    `thread` computes checksums one after the other; by default a thread that is started with the first of them.
    """

    def __init__(self, pools: Pools, counters: Counter[str], thread: Executor | None = None) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pools = pools
        self._counters = counters
        self._thread = thread or ThreadPoolExecutor(1, "checksums")
        self._open: deque[tuple[Landed, Future[str]]] = deque()

    def begin(self, landed: Landed) -> bool:
        """Look at pages that have landed; `take` has the verdict. False: their doorbell has no checksums."""
        if landed.bell.checksums is None and landed.bell.state_checksum is None:
            return False
        verdict = self._thread.submit(damage_of, landed, self._pools)
        self._open.append((landed, verdict))
        verdict.add_done_callback(lambda _: os.eventfd_write(self.wake_fd, 1))
        return True

    def take(self) -> list[tuple[Landed, str]]:
        """What has been looked at since the last call, in order, each with what is wrong with it, or ""."""
        if not self._open:
            return []
        try:
            # As many as have been told of: looking at them would find one whose wake-up is still to come.
            count = os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        taken: list[tuple[Landed, str]] = []
        for _ in range(count):
            landed, verdict = self._open.popleft()
            fault = verdict.result()
            self._counters["pages_verified"] += len(landed.pages)
            self._counters["checksum_mismatches"] += bool(fault)
            taken.append((landed, fault))
        return taken

    def close(self) -> None:
        """Read no page any more: they may be unmapped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        os.close(self.wake_fd)
