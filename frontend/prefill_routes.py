# SPDX-License-Identifier: Apache-2.0
"""The internal routes of a prefill engine: /prefill, /cancel and /ranks, all under the cluster token.

A prefill engine only answers; it never dials an address that it found in a request. /prefill answers as soon as a
rank has taken the call: what becomes of it the two ranks tell each other on their link.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from kvrail.frontend.envelope import Unauthorized, json_response
from kvrail.frontend.metrics import FrontMetrics
from kvrail.frontend.tracing import Span, Tracing
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import token_matches
from kvrail.runtime.control.calls import MEDIA_TYPE, CancelCall, PrefillCall, RankCard, RanksReply
from kvrail.runtime.control.rank_client import PrefillEvent, RankClient, RankRequest
from kvrail.runtime.errors import BadRequest, Overloaded, RuntimeFault, Unavailable, fault_of
from kvrail.runtime.messages import Accepted, Prefill, PrefillDone

__all__ = ["PrefillDesk"]

_log = logging.getLogger(__name__)
_Call = TypeVar("_Call", PrefillCall, CancelCall)
# A rank takes messages between two steps, and a step is bounded by --max-num-batched-tokens.
_ACCEPT_WITHIN_S = 55.0
_REMEMBERED_CANCELS = 4096
# A place becomes free with the end of a prefill, of which many are short.
_FULL_AGAIN_S = 0.05


class _Gone(RuntimeFault):
    """Nothing can come of this ticket: its rank was restarted or has refused it, or the request was cancelled."""

    status = 409
    kind = "conflict_error"


class _TakenBack(_Gone):
    """Its completion engine does not want it any more, as happens in normal running."""


class PrefillDesk:
    """Takes prefill calls for the ranks of this front and follows each to its end."""

    def __init__(
        self,
        config: LaunchConfig,
        ranks: Sequence[RankClient],
        token: bytes,
        metrics: FrontMetrics,
        tracing: Tracing,
    ) -> None:
        self.stopping = False
        self._config = config
        self._ranks = ranks
        self._token = token
        self._metrics = metrics
        self._tracing = tracing
        self._running: dict[str, RankRequest[PrefillEvent]] = {}
        # Cancels may overtake their /prefill; the oldest are forgotten, which costs work but never safety.
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._followers: set[asyncio.Task[None]] = set()

    def routes(self) -> APIRouter:
        """The three routes."""
        router = APIRouter()
        # Plain routes: nothing of these bodies is for FastAPI to look into, and /prefill is on a user's way.
        router.add_route("/ranks", self._list_ranks, methods=["GET"])
        router.add_route("/prefill", self._prefill, methods=["POST"])
        router.add_route("/cancel", self._cancel, methods=["POST"])
        return router

    async def close(self) -> None:
        """Stop following. The ranks themselves are stopped elsewhere."""
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    async def _list_ranks(self, request: Request) -> Response:
        self._need_token(request)
        cards = [
            RankCard(peer=rank.ready.self_rank, load=rank.outstanding, limit=rank.ready.queue_limit)
            for rank in self._ranks
            if rank.usable and rank.ready is not None
        ]
        reply = RanksReply(model=self._config.model_name, ranks=cards)
        return Response(msgspec.msgpack.encode(reply), media_type=MEDIA_TYPE)

    async def _prefill(self, request: Request) -> Response:
        self._need_token(request)
        call = await _body(request, PrefillCall)
        span = self._tracing.span("kvrail prefill", request.headers)
        try:
            await self._take(call, span)
        except RuntimeFault as fault:
            taken_back = isinstance(fault, _TakenBack)
            self._metrics.prefill_calls.labels("cancelled" if taken_back else "refused").inc()
            _log.log(
                logging.INFO if taken_back else logging.WARNING,
                "prefill %s refused: %s",
                call.request_id,
                fault.message,
            )
            span.end(error=fault.message, request_id=call.request_id)
            raise
        self._metrics.prefill_calls.labels("accepted").inc()
        return json_response({"status": "accepted"}, 202)

    async def _cancel(self, request: Request) -> Response:
        self._need_token(request)
        call = await _body(request, CancelCall)
        self._metrics.cancel_calls.inc()
        self._cancelled[call.request_id] = None
        while len(self._cancelled) > _REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        running = self._running.pop(call.request_id, None)
        if running is not None:
            _log.info("prefill %s: %s", call.request_id, call.reason)
            running.abort(call.reason)
        return json_response({"status": "cancelled"})

    async def _take(self, call: PrefillCall, span: Span) -> None:
        """Give the call to its rank and return when the rank has it; raises RuntimeFault when it does not."""
        if self.stopping:
            raise Unavailable("this prefill engine is stopping", retry_after_s=5.0)
        if call.request_id in self._cancelled:
            raise _TakenBack("the request was cancelled before its /prefill came")
        if call.request_id in self._running:
            raise _Gone("a prefill of this request is running already")
        rank = self._rank_of(call)
        assert rank.ready is not None
        # Twice: whose first token is out has left its place at the CE, but is here until its doorbell is.
        if rank.outstanding >= 2 * rank.ready.queue_limit:
            raise Overloaded(f"{rank.outstanding} prefills are here already", retry_after_s=_FULL_AGAIN_S)
        if not call.tokens or len(call.tokens) % 4:
            raise BadRequest("tokens: must be uint32 token ids, at least one", param="tokens")
        running = rank.prefill(
            Prefill(
                request_id=call.request_id,
                ticket=call.ticket,
                tokens=call.tokens,
                sampling=call.sampling,
                cache=call.cache,
            )
        )
        self._running[call.request_id] = running
        try:
            async with asyncio.timeout(_ACCEPT_WITHIN_S):
                event = await anext(running, None)
        except TimeoutError:
            self._drop(call.request_id, running)
            raise Unavailable(f"rank {call.rank} did not take the call in time", retry_after_s=1.0) from None
        match event:
            case Accepted():
                follower = asyncio.create_task(self._follow(call.request_id, running, span))
                self._followers.add(follower)
                follower.add_done_callback(self._followers.discard)
            case PrefillDone(ok=True):
                self._drop(call.request_id, running)
                span.end(request_id=call.request_id, cached_tokens=event.cached_tokens)
            case PrefillDone():
                self._drop(call.request_id, running)
                if event.status == HTTPStatus.TOO_MANY_REQUESTS:
                    # A caller would ask again, but its ticket is over with this refusal.
                    raise _Gone(event.reason)
                raise fault_of(event.status, event.reason, event.retry_after_s)
            case None:
                raise _TakenBack("the request was cancelled")

    async def _follow(self, request_id: str, running: RankRequest[PrefillEvent], span: Span) -> None:
        error, cached = "cancelled", 0
        try:
            async for event in running:
                if isinstance(event, PrefillDone):
                    error, cached = event.reason, event.cached_tokens
                    if not event.ok:
                        _log.warning("prefill %s failed: %s", request_id, event.reason)
        finally:
            self._drop(request_id, running)
            span.end(error=error, request_id=request_id, cached_tokens=cached)

    def _drop(self, request_id: str, running: RankRequest[PrefillEvent]) -> None:
        if self._running.get(request_id) is running:
            del self._running[request_id]
        running.abort("the prefill engine gave the call up")

    def _rank_of(self, call: PrefillCall) -> RankClient:
        for rank in self._ranks:
            if rank.ready is not None:
                peer = rank.ready.self_rank
                if (peer.incarnation, peer.rank) == (call.incarnation, call.rank):
                    return rank
        raise _Gone(f"rank {call.rank} of that incarnation is not here any more")

    def _need_token(self, request: Request) -> None:
        if not token_matches(self._token, request.headers.get("authorization")):
            raise Unauthorized("this internal route needs the cluster token")


async def _body(request: Request, kind: type[_Call]) -> _Call:
    try:
        return msgspec.msgpack.decode(await request.body(), type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is no {kind.__name__}: {error}") from None
