# SPDX-License-Identifier: Apache-2.0
"""A completion engine's calls to its prefill engines: /prefill, once a ticket, and /cancel when nobody wants it.

They run beside their request. What becomes of a prefill that was accepted the two ranks tell each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import msgspec

from kvrail.frontend.metrics import FrontMetrics
from kvrail.frontend.tracing import Span
from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.control.back_off import BackOff
from kvrail.runtime.control.calls import MEDIA_TYPE, CancelCall, PrefillCall
from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections, Reply
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.control.routing import MOST_ASKED, PeerKey, PeerView
from kvrail.runtime.messages import Submit

__all__ = ["PrefillCalls", "RemotePrefill"]

_log = logging.getLogger(__name__)
# A prefill engine answers when its rank has taken the call, which it does between two steps. An engine that is
# frozen is found out sooner, by the link's heartbeats.
_PREFILL_WITHIN_S = 60.0
_CANCEL_WITHIN_S = 5.0
# A full engine is asked again, for less time than its rank keeps a grant that has no call (Sender's `meet_s`).
_FULL_FOR_S = 10.0


class PrefillCalls:
    """All calls of one front, and the tasks that they run in."""

    def __init__(self, connections: KeptConnections, token: bytes, metrics: FrontMetrics) -> None:
        self.connections = connections
        self.headers = {**bearer_header(token), "Content-Type": MEDIA_TYPE}
        self.metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside the request; the set keeps the task alive until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let pending cancels go out (briefly), then drop what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.5)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RemotePrefill:
    """The prefill of one request for `rank`, at `peer` until it moves.

    The prefill engine is called ahead of the grant when the rank has said with which ticket id, else behind it. A call
    ahead that gets no grant under that id is taken back, and another one follows when there is a grant. A full engine
    is asked again for a while, unless `room_but(peers)`: another prefill rank than those has room.
    """

    def __init__(
        self,
        calls: PrefillCalls,
        rank: RankClient,
        peer: PeerView,
        submit: Submit,
        span: Span | None,
        room_but: Callable[[set[PeerKey]], bool] = lambda peers: False,
    ) -> None:
        self._calls = calls
        self._rank = rank
        self._peer = peer
        self._asked = {peer.key}
        self._room_but = room_but
        self._submit = submit
        self._span = span
        # The call that stands, its task, and how many there have been.
        self._call: PrefillCall | None = None
        self._asking: asyncio.Task[None] | None = None
        self._made = 0
        # Whether a call stands for which there may never be a grant.
        self.ahead = False

    def call(self, ticket: bytes) -> None:
        """Ask the prefill engine ahead of the grant. The same ticket must never be offered twice."""
        (incarnation, number), submit = self._peer.key, self._submit
        self._made += 1
        self._call = PrefillCall(
            # A name of its own: the prefill engine may not be done with the one before.
            request_id=submit.request_id if self._made == 1 else f"{submit.request_id}/{self._made}",
            ticket=ticket,
            incarnation=incarnation,
            rank=number,
            tokens=submit.tokens,
            sampling=submit.sampling,
            cache=submit.cache,
        )
        self._asking = self._calls.spawn(self._ask(self._call, self._peer.url))
        self.ahead = True

    def granted(self, ticket: bytes) -> None:
        """The grant is on the link: from here on the ranks settle the ticket, if the request ends in good order."""
        if self._call is None or self._call.ticket != ticket:
            self.take_back("its grant has another ticket")
            self.call(ticket)
        self.ahead = False

    def take_back(self, reason: str) -> None:
        """Spare the prefill engine useless work. Safety does not hang on it."""
        if self._call is not None and self._asking is not None:
            self._asking.cancel()
            self._calls.spawn(self._cancel(self._call, self._peer.url, reason))
        self._call, self._asking, self.ahead = None, None, False

    def move(self, peer: PeerView) -> None:
        """Leave the prefill rank that was asked; `peer` is called as soon as there is a grant for it."""
        self.take_back("it is asked of another prefill engine")
        self._peer = peer
        self._asked.add(peer.key)

    async def _ask(self, call: PrefillCall, engine: str) -> None:
        url, calls = f"{engine}/prefill", self._calls
        body, back_off = msgspec.msgpack.encode(call), BackOff(_FULL_FOR_S)
        try:
            while True:
                reply = await calls.connections.call(
                    "POST",
                    url,
                    headers={**calls.headers, **(self._span.headers() if self._span else {})},
                    body=body,
                    timeout_s=_PREFILL_WITHIN_S,
                )
                # Full: several completion engines at once, each of which had seen room.
                if reply.status != HTTPStatus.TOO_MANY_REQUESTS or self._may_move():
                    break
                wait_s = back_off.next(reply.retry_after_s)
                if wait_s is None:
                    break
                await asyncio.sleep(wait_s)
        except CallFailed as error:
            outcome, reason = "unreachable", f"{url}: {error}"
        else:
            if reply.ok:
                calls.metrics.prefill_calls.labels("accepted").inc()
                return
            outcome, reason = "refused", f"{url}: HTTP {reply.status}: {_said(reply)}"
        calls.metrics.prefill_calls.labels(outcome).inc()
        _log.warning("request %s: %s", call.request_id, reason)
        self._rank.prefill_failed(self._submit.request_id, call.ticket, reason)

    def _may_move(self) -> bool:
        return len(self._asked) < MOST_ASKED and self._room_but(self._asked)

    async def _cancel(self, call: PrefillCall, engine: str, reason: str) -> None:
        cancel = CancelCall(
            request_id=call.request_id, incarnation=call.incarnation, rank=call.rank, reason=reason
        )
        url, calls = f"{engine}/cancel", self._calls
        calls.metrics.cancel_calls.inc()
        try:
            await calls.connections.call(
                "POST",
                url,
                headers=calls.headers,
                body=msgspec.msgpack.encode(cancel),
                timeout_s=_CANCEL_WITHIN_S,
                connect_s=2.0,
            )
        except CallFailed as error:
            _log.info("request %s: %s: %s", call.request_id, url, error)


def _said(reply: Reply) -> str:
    """The message of an error body of ours."""
    try:
        return str(msgspec.json.decode(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.body[:200].decode(errors="replace")
