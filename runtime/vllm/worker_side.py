# SPDX-License-Identifier: Apache-2.0
"""The connector in a vLLM worker: registers its KV tensors, hands each step's facts to the service thread, and reports.

What a step costs is a queue entry and an eventfd write, and nothing at all when nothing concerns other engines.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvrail.runtime.vllm.gpu_worker import stream_of
from kvrail.runtime.vllm.meta import ForScheduler, LayerDone, StepFacts
from kvrail.runtime.vllm.results import Outcome
from kvrail.runtime.vllm.service import Service

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["WorkerSide"]

_log = logging.getLogger(__name__)
# How long a step may wait for pushes out of blocks that vLLM takes back; each takes milliseconds.
_SETTLE_S = 1.0
# While requests are parked and nothing runs, vLLM asks again and again, and would keep two cores busy with it. What it
# asks for wakes it at once; only a request that comes in just then waits: 2 ms at most, or, when nothing has happened
# for longer, a share of that time, for then long prompts are computed elsewhere.
_IDLE_S, _MOST_IDLE_S, _IDLE_SHARE = 0.002, 0.010, 1 / 8


class WorkerSide:
    """One a worker, used by vLLM's thread. Before `start` (profiling runs) it does nothing."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._facts: StepFacts | None = None
        self._idle = False
        # Since when steps compute nothing and have nothing new to tell; 0.0 while they do.
        self._idle_since = 0.0
        # The last outcome had something in it.
        self._told = False
        self._news = ForScheduler()

    def start(self, service: Service) -> None:
        """The KV tensors are registered."""
        self._service = service

    def before_forward(self, facts: StepFacts) -> None:
        """A step begins: what does not wait for its forward pass goes out now."""
        self._facts, self._idle = facts, facts.idle
        if facts.early or not facts.idle:
            self._idle_since = 0.0
        if self._service is None:
            return
        if facts.preempted:
            self._service.settle(facts.preempted, _SETTLE_S)
        if facts.early:
            early = StepFacts(
                calls=facts.calls, finished=facts.finished, loads=facts.loads, cancelled=facts.cancelled
            )
            self._service.post(early)

    def after_layer(self, layer: str) -> None:
        """A layer of the forward pass is done (on a GPU: queued on the calling thread's stream): it can go ahead."""
        if self._service is not None and self._facts is not None and self._facts.chunks:
            after = self._recorded(stream_of(self.device))
            self._service.post(LayerDone(layer, self._facts.chunks), after)

    def after_forward(self, stream: int | None) -> None:
        """The forward pass is done (on a GPU: queued on `stream`): what it computed can be pushed behind it."""
        facts, self._facts = self._facts, None
        if self._service is None or facts is None or not facts.chunks:
            return
        self._service.post(StepFacts(chunks=facts.chunks), self._recorded(stream))

    def outcome(self) -> Outcome:
        """What has happened since the last step. Its news are kept for `take_news` as well."""
        if self._service is None:
            return Outcome()
        if self._idle and not self._told:
            # Here, and not behind the forward pass: GPU runners leave out what follows a pass that there is none of.
            # vLLM acts on an outcome behind the step after it (it has two steps under way): that one must not wait.
            now = time.monotonic()
            self._idle_since = self._idle_since or now
            share_s = _IDLE_SHARE * (now - self._idle_since)
            self._service.results.wait(min(max(_IDLE_S, share_s), _MOST_IDLE_S))
        self._idle = False
        outcome = self._service.results.take()
        self._told = outcome != Outcome()
        self._news = outcome.news
        return outcome

    def take_news(self) -> ForScheduler:
        """What the scheduler's side is to hear of the last outcome."""
        news, self._news = self._news, ForScheduler()
        return news

    @property
    def device(self) -> _ucx.CudaDevice | None:
        """The GPU that the KV is in; None on a CPU."""
        return self._service.cuda if self._service is not None else None

    def _recorded(self, stream: int | None) -> _ucx.CudaFence | None:
        cuda = self.device
        return cuda.record(stream) if cuda is not None and stream is not None else None

    def close(self) -> None:
        """vLLM shuts down."""
        if self._service is not None:
            self._service.close()
