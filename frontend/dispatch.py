# SPDX-License-Identifier: Apache-2.0
"""The story of one request, top to bottom: route, submit, call the prefill engine, hand on what comes back.

Whatever ends it early (a stop string, a client that left, a fault) ends both legs: the rank is told, and so is the
prefill engine that was called.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrail.frontend.metrics import FrontMetrics
from kvrail.frontend.prefill_call import PrefillCalls, RemotePrefill
from kvrail.frontend.tracing import Span, Tracing
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.admission import Admission, Place
from kvrail.runtime.control.peers import PeerWatcher
from kvrail.runtime.control.prefix_directory import PrefixDirectory
from kvrail.runtime.control.rank_client import RankClient, Steering
from kvrail.runtime.control.routing import PeerKey, RankView, Route, another, choose
from kvrail.runtime.errors import BadRequest, EngineFailed, RuntimeFault, fault_of
from kvrail.runtime.messages import (
    CACHE_USED,
    CacheUse,
    Deferred,
    Failed,
    Granted,
    Output,
    Sampling,
    Stranded,
    Submit,
)
from kvrail.runtime.prefix import extend_keys, namespace
from kvrail.transfer.wire import pack_u32

__all__ = ["Dispatcher", "Job"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One request, ready to be served. `outcome` is set by whoever ends it early for a good reason.

    `route` is where its prompt was prefilled, by the newest output. `drop_choice` ends one of its answers while the
    others go on. `deadline`: the moment (time.monotonic()) from which nobody waits for it any more.
    """

    request_id: str
    api: str
    tokens: npt.NDArray[np.uint32]
    sampling: Sampling
    affinity: bytes
    cache: CacheUse = CACHE_USED
    outcome: str = ""
    route: str = ""
    drop_choice: Callable[[int], None] = lambda choice: None
    started: float = field(default_factory=time.monotonic)
    # Names of the prompt's pages, for routing by prefix; empty with other policies.
    page_keys: list[bytes] = field(default_factory=list)
    deadline: float | None = None
    # Headers that name the client's trace, and the span of this request below it.
    trace: Mapping[str, str] = field(default_factory=dict)
    span: Span | None = None

    @property
    def end(self) -> str:
        """Why it ended before its last output; "" when the client left."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.outcome or ("timeout" if late else "")


class Dispatcher:
    """Serves jobs on the ranks of this front. `peers` is None where there are no prefill engines (single)."""

    def __init__(
        self,
        config: LaunchConfig,
        ranks: Sequence[RankClient],
        peers: PeerWatcher | None,
        admission: Admission,
        calls: PrefillCalls,
        metrics: FrontMetrics,
        tracing: Tracing,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._peers = peers
        self._admission = admission
        self._calls = calls
        self._metrics = metrics
        self._tracing = tracing
        self._prefixes = PrefixDirectory() if config.routing == "prefix" else None
        metrics.waiting.set_function(lambda: admission.waiting)
        for rank in ranks:
            rank.subscribe(admission.wake)
        if peers is not None:
            peers.subscribe(admission.wake)

    def check_room(self, api: str) -> None:
        """Raise what `run` is sure to raise now, whatever the job is: to be asked before anything is spent on one."""
        try:
            self._admission.check()
        except RuntimeFault as fault:
            self._metrics.requests.labels(api, "none", f"http_{fault.status}").inc()
            raise

    async def run(self, job: Job) -> AsyncGenerator[Output, None]:
        """The outputs of `job`; the last one has a finish reason. Close it to give the job up.

        Raises the RuntimeFault that ended the job: before the first output as well as between two.
        """
        job.span = self._tracing.span(f"kvrail {job.api}", job.trace, job.started)
        note = _Note(job)
        if self._prefixes is not None and job.cache.use:
            first = namespace("", salt=job.cache.salt)
            extend_keys(job.page_keys, first, job.tokens, self._config.page_tokens)
        try:
            if job.sampling.prompt_logprobs is not None and self._local_prefill == "never":
                raise BadRequest(
                    "echo: log-probabilities of a prompt come only from a local prefill, and --local-prefill is never",
                    param="echo",
                )
            place = await self._admission.enter(lambda: self._choose(job))
            try:
                # Closed here and now, not when the garbage collector comes by: closing tells the rank.
                note.placed()
                async with contextlib.aclosing(self._on_rank(job, place)) as outputs:
                    async for output in outputs:
                        if not note.began:
                            self._learn(job, place.route, output)
                        place.prefilled()
                        note.output(output, self._metrics)
                        yield output
            finally:
                place.leave()
        except RuntimeFault as fault:
            note.outcome, note.reason = f"http_{fault.status}", fault.message
            raise
        except Exception:
            note.outcome = "http_500"
            raise
        finally:
            note.end(self._metrics)

    async def _on_rank(self, job: Job, place: Place) -> AsyncGenerator[Output, None]:
        """Submit, call the prefill engine when the pages are granted, and yield outputs."""
        rank, peer = self._ranks[place.route.rank], place.route.peer
        submit = Submit(
            request_id=job.request_id,
            tokens=pack_u32(job.tokens),
            sampling=job.sampling,
            peer=peer.key if peer else None,
            fallback=self._config.local_prefill != "never" or self._peers is None,
            cache=job.cache,
        )
        remote = (
            RemotePrefill(
                self._calls, rank, peer, submit, job.span, lambda asked: self._room_but(rank, asked)
            )
            if peer is not None
            else None
        )
        with rank.submit(submit) as request:
            request.on_steering = lambda event: self._steer(event, job, place, remote)
            if remote is not None and request.called:
                # Beside the grant, not behind it: the two meet at the prefill engine's rank.
                remote.call(request.called)
            # At that moment, not when the client has read all: one that reads slowly must keep nobody out.
            request.on_end = place.leave
            job.drop_choice = lambda choice: request.abort_choice(choice, "ended by a stop string")
            try:
                async for event in request:
                    match event:
                        case Failed():
                            raise fault_of(event.status, event.reason, event.retry_after_s)
                        case Output(finish_reason="abort"):
                            raise EngineFailed("the engine gave the request up")
                        case Output():
                            yield event
            finally:
                reason = job.end or "cancelled by the client"
                if remote is not None and (remote.ahead or not request.ended):
                    remote.take_back(reason)
                request.abort(reason)

    def _steer(self, event: Steering, job: Job, place: Place, remote: RemotePrefill | None) -> None:
        """The rank says how it stands with the ticket of a request."""
        match event:
            case _ if remote is None:
                _log.error("request %s: the rank speaks of tickets, yet no peer was chosen", job.request_id)
            case Granted():
                remote.granted(event.ticket)
            case Deferred():
                remote.take_back("its grant has to wait")
            case Stranded():
                self._move(event, job, place, remote)

    def _move(self, event: Stranded, job: Job, place: Place, remote: RemotePrefill) -> None:
        """Ask another prefill rank in place of the one that is lost, or tell the rank that there is none."""
        lost = place.route.peer
        assert lost is not None
        assert self._peers is not None
        others = [view for view in self._peers.views if view.key in event.others]
        peer = another(
            policy=self._config.routing,
            affinity=job.affinity,
            others=others,
            lost=lost,
            full=self._config.local_prefill == "never",
        )
        if peer is None:
            remote.take_back("it is prefilled here")
        else:
            place.move(peer)
            remote.move(peer)
        self._ranks[place.route.rank].move(job.request_id, peer.key if peer else None)

    def _room_but(self, rank: RankClient, asked: set[PeerKey]) -> bool:
        """Whether a prefill rank with a link to `rank`, other than those, has room."""
        if self._peers is None:
            return False
        linked = self._peers.links_up(rank) - asked
        return any(view.key in linked and view.load < view.limit for view in self._peers.views)

    @property
    def _local_prefill(self) -> Literal["auto", "never", "always"]:
        return self._config.local_prefill if self._peers else "always"

    def _learn(self, job: Job, route: Route, output: Output) -> None:
        """The first output says who has the prompt now, and how much of it the prefill rank had before."""
        if self._prefixes is None:
            return
        ready = self._ranks[route.rank].ready
        if route.peer is not None and output.route == "remote":
            self._prefixes.correct(
                job.page_keys, route.peer.key, output.cached_tokens // self._config.page_tokens
            )
            self._prefixes.note(job.page_keys, route.peer.key)
        if ready is not None:
            self._prefixes.note(job.page_keys, (ready.self_rank.incarnation, route.rank))

    def _choose(self, job: Job) -> Route | None:
        held = self._prefixes.longest(job.page_keys) if self._prefixes is not None else {}
        views = [
            RankView(
                rank=rank.rank,
                load=self._admission.at_rank[rank.rank],
                limit=rank.ready.queue_limit,
                links_up=self._peers.links_up(rank) if self._peers else frozenset(),
                links_silent=self._peers.links_silent(rank) if self._peers else frozenset(),
                held=held.get((rank.ready.self_rank.incarnation, rank.rank), 0),
            )
            for rank in self._ranks
            if rank.usable and rank.ready is not None
        ]
        return choose(
            policy=self._config.routing,
            affinity=job.affinity,
            ranks=views,
            peers=[view._replace(held=held.get(view.key, 0)) for view in self._peers.views]
            if self._peers
            else (),
            # The logits of a whole prompt do not travel: where they are wanted, it is prefilled here.
            local_prefill="always" if job.sampling.prompt_logprobs is not None else self._local_prefill,
            short=len(job.tokens) <= self._config.local_prefill_max_tokens,
        )


class _Note:
    """What is written down about one request: metrics, and one line in the log without any of its text."""

    def __init__(self, job: Job) -> None:
        self.outcome = ""
        self.reason = ""
        self._job = job
        self._route = "none"
        self._tokens = 0
        self._cached = 0
        self._placed_s: float | None = None
        self._first_s: float | None = None
        self._handed_over = False
        # When each choice was heard of last.
        self._last: dict[int, float] = {}

    def placed(self) -> None:
        """A rank has a place for it."""
        self._placed_s = time.monotonic() - self._job.started

    @property
    def began(self) -> bool:
        """Whether an output has come."""
        return self._first_s is not None

    def output(self, output: Output, metrics: FrontMetrics) -> None:
        now = time.monotonic()
        count = len(output.tokens) // 4
        self._route = output.route
        if output.prompt_logprobs:
            return
        if self._first_s is None:
            self._first_s = now - self._job.started
            metrics.first_token.labels(output.route).observe(self._first_s)
        elif count and output.choice in self._last:
            since = now - self._last[output.choice]
            if output.route == "remote" and not self._handed_over:
                self._handed_over = True
                metrics.handover.observe(since)
            metrics.between_tokens.observe(since / count)
        self._last[output.choice] = now
        self._tokens += count
        self._cached = output.cached_tokens

    @property
    def _ended(self) -> float:
        """When the last output came."""
        return max(self._last.values(), default=self._job.started)

    def end(self, metrics: FrontMetrics) -> None:
        job = self._job
        outcome = self.outcome or job.end or "cancelled"
        metrics.requests.labels(job.api, self._route, outcome).inc()
        if self._first_s is not None:
            metrics.prompt_tokens.inc(len(job.tokens))
            metrics.completion_tokens.inc(self._tokens)
            metrics.cached_tokens.inc(self._cached)
            metrics.whole.prompt.observe(len(job.tokens))
            metrics.whole.generation.observe(self._tokens)
            metrics.whole.end_to_end.observe(time.monotonic() - job.started)
            metrics.whole.decoding.observe(self._ended - job.started - self._first_s)
        if self._placed_s is not None:
            metrics.whole.queued.observe(self._placed_s)
        if outcome in ("stop", "length"):
            metrics.whole.succeeded(outcome)
        self._trace(outcome)
        _log.info(
            "request %s: %s %s, prefill %s, %d prompt tokens (%d cached), %d new, first after %s, all after %.3f s%s",
            job.request_id,
            job.api,
            outcome,
            self._route,
            len(job.tokens),
            self._cached,
            self._tokens,
            "-" if self._first_s is None else f"{self._first_s:.3f} s",
            time.monotonic() - job.started,
            f": {self.reason}" if self.reason else "",
        )

    def _trace(self, outcome: str) -> None:
        """End the request's span; its parts are known by now."""
        job = self._job
        if job.span is None:
            return
        if self._placed_s is not None:
            job.span.below("wait for a place", job.started, job.started + self._placed_s)
        if self._placed_s is not None and self._first_s is not None:
            first = job.started + self._first_s
            job.span.below("first token", job.started + self._placed_s, first, prefill=self._route)
            job.span.below("answer", first, self._ended, tokens=self._tokens)
        job.span.end(
            error=self.reason,
            request_id=job.request_id,
            outcome=outcome,
            prefill=self._route,
            prompt_tokens=len(job.tokens),
            cached_tokens=self._cached,
            completion_tokens=self._tokens,
        )
