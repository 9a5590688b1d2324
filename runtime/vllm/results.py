# SPDX-License-Identifier: Apache-2.0
"""What the service thread has to report to vLLM, collected until the next step asks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvrail.runtime.vllm.meta import ForScheduler

__all__ = ["Outcome", "Results"]


@dataclass
class Outcome:
    """Requests by what has happened since the last step. A request is in `sent` and in `received` once in its life.

    `failed`: their KV did not and will not come; told with `received`, and before it where that waits until nobody can
    write into their blocks any more.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    news: ForScheduler = field(default_factory=ForScheduler)


class Results:
    """Filled by the service thread, emptied by vLLM's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._news = threading.Event()

    def wait(self, within_s: float) -> None:
        """Until there is something, or the time is over."""
        self._news.wait(within_s)

    def take(self) -> Outcome:
        """Everything since the last call."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
            self._news.clear()
        return outcome

    def sent(self, request_id: str) -> None:
        """The blocks of this finished request are no longer read."""
        with self._lock:
            self._outcome.sent.add(request_id)
            self._news.set()

    def received(self, request_id: str, token: int | None = None) -> None:
        """The KV is there, or its blocks are at least safe from writers; `token`: the PE's first one."""
        with self._lock:
            self._outcome.received.add(request_id)
            if token is not None:
                self._outcome.news.tokens[request_id] = token
            self._news.set()

    def failed(self, request_id: str, blocks: list[int], token: int | None = None) -> None:
        """The KV will not come into these blocks."""
        with self._lock:
            self._outcome.failed.add(request_id)
            self._outcome.failed_blocks.update(block for block in blocks if block)
            if token is not None:
                self._outcome.news.tokens[request_id] = token
            self._news.set()

    def held(self, name: str, blocks: list[int]) -> None:
        """Whatever vLLM does with the request that had them: nobody may be given these blocks until `quiet`."""
        with self._lock:
            self._outcome.news.held[name] = [block for block in blocks if block]
            self._news.set()

    def quiet(self, name: str) -> None:
        """Nobody writes any more into the blocks that are held under this name."""
        with self._lock:
            self._outcome.news.quiet.add(name)
            self._news.set()
