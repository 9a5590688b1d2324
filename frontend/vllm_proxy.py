# SPDX-License-Identifier: Apache-2.0
"""The routes that vLLM serves: requests and answers go through unchanged, bodies, headers and events alike.

What is ours is around them: API keys, the bound on how many may wait, time limits, an end for a client that left. A
client's words about transfers of KV are taken out where they would count (runtime/vllm/core_tap.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvrail.frontend.envelope import Unauthorized, error_body, request_id, until_disconnect
from kvrail.frontend.vllm_counts import ProxyCounts
from kvrail.frontend.vllm_link import VllmLink
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.control.upstream import Answer, Header, UpstreamLost
from kvrail.runtime.errors import (
    Cancelled,
    EngineFailed,
    Overloaded,
    RuntimeFault,
    TimedOut,
    Unavailable,
)

__all__ = ["VllmProxy"]

_log = logging.getLogger(__name__)
# Besides /v1. Not among them: what controls an engine, and the tokens-in route, which is for other engines.
_ROUTES = ("/tokenize", "/detokenize", "/version", "/classify", "/pooling", "/rerank", "/score", "/v2/rerank")
_METHODS = ["GET", "POST", "DELETE"]
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The key is ours; bytes are passed on as they are, so none may be packed; and no client names a rank.
_NOT_PASSED_ON = _HOP_BY_HOP | {
    b"accept-encoding",
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    b"x-data-parallel-rank",
    b"x-kvrail-prefill",
    b"x-request-id",
}
_NOT_PASSED_BACK = _HOP_BY_HOP | {b"date", b"server", b"x-request-id"}


class VllmProxy:
    """Passes requests to the server behind `link`. An ASGI application."""

    def __init__(self, config: LaunchConfig, link: VllmLink, keys: ApiKeys, counts: ProxyCounts) -> None:
        self.stopping = False
        self._config = config
        self._link = link
        self._keys = keys
        self._counts = counts
        self._open: set[_Exchange] = set()
        counts.open.set_function(lambda: len(self._open))

    def routes(self) -> APIRouter:
        """All that clients may call."""
        router = APIRouter()
        for path in ("/v1/{rest:path}", *_ROUTES):
            # Plain routes: nothing of a request is for FastAPI to look into.
            router.add_route(path, self, methods=_METHODS, include_in_schema=False)  # type: ignore[arg-type]
        return router

    def fail_all(self, reason: str) -> None:
        """End what is open, in good order."""
        for exchange in list(self._open):
            exchange.fail(Unavailable(reason, retry_after_s=5.0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method not in _METHODS:
            raise HTTPException(405)  # HEAD
        if not self._keys.allow(request.headers.get("authorization")):
            raise Unauthorized("give a valid API key: Authorization: Bearer …")
        path = scope["path"]
        if not path.isprintable() or not {".", ".."}.isdisjoint(path.split("/")):
            # Whoever resolves the dots asks for a route that no client may call.
            raise HTTPException(404)
        self._check_room(request.method)
        exchange = _Exchange(request, self._config.request_timeout_s)
        # Before the body is read: no more of them are read at once than may be here.
        self._open.add(exchange)
        ended: BaseException | None = None
        try:
            await exchange.run(self._link, send)
        except BaseException as error:
            ended = error
            raise
        finally:
            self._open.discard(exchange)
            self._counts.ended(path, exchange.route, exchange.outcome(ended))

    def _check_room(self, method: str) -> None:
        if self.stopping:
            raise Unavailable("the server is stopping", retry_after_s=5.0)
        state = self._link.state
        if state is None:
            raise Unavailable(self._link.trouble, retry_after_s=2.0)
        # Nothing is computed for a GET.
        if method != "GET" and len(self._open) >= state.max_num_seqs + self._config.max_queue:
            raise Overloaded(
                f"{len(self._open)} requests are here already (--max-num-seqs and --max-queue)",
                retry_after_s=2.0,
            )


class _Exchange:
    """One request and its answer. `route`: where its prompt was prefilled, as far as the answer says."""

    def __init__(self, request: Request, timeout_s: float | None) -> None:
        self.route = "none"
        self._request = request
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._task: asyncio.Task[object] | None = None
        self._fault: RuntimeFault | None = None
        self._status = 0
        self._streams = self._left = False

    def fail(self, fault: RuntimeFault) -> None:
        """Let it end with this fault."""
        if self._fault is None and self._task is not None:
            self._fault = fault
            self._task.cancel()

    def outcome(self, error: BaseException | None) -> str:
        """How it ended, for the counters."""
        if self._left or isinstance(error, Cancelled | asyncio.CancelledError):
            return "cancelled"
        if isinstance(error, RuntimeFault):
            return f"http_{error.status}"
        if isinstance(error, HTTPException):
            return f"http_{error.status_code}"
        return "http_500" if error is not None else f"http_{self._status}"

    async def run(self, link: VllmLink, send: Send) -> None:
        """From the body to the answer's last byte. Raises RuntimeFault, and HTTPException for too large a body."""
        body = await self._body()
        try:
            async with until_disconnect(self._request.receive):
                try:
                    async with self._bounded():
                        await self._pass(link, body, send)
                except RuntimeFault as fault:
                    if not self._streams:
                        raise  # When it has begun, the connection breaks off: it has no other way to say so.
                    name = request_id(self._request)
                    _log.warning("request %s: a stream ended early: %s", name, fault.message)
                    event = b"\n\ndata: " + msgspec.json.encode(error_body(fault)) + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Cancelled:
            if not self._status:
                raise
            self._left = True  # That the connection was closed has told vLLM.

    async def _body(self) -> bytes:
        async with self._bounded():
            try:
                return await self._request.body()
            except ClientDisconnect:
                raise Cancelled("the client went away") from None

    async def _pass(self, link: VllmLink, body: bytes, send: Send) -> None:
        try:
            answer = await link.upstream.ask(*self._head(), body if self._request.method == "POST" else None)
        except UpstreamLost as error:
            raise Unavailable(f"the vLLM server does not answer: {error}", retry_after_s=2.0) from error
        try:
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": self._begin(answer)}
            )
            while piece := await answer.piece():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except UpstreamLost as error:
            raise EngineFailed(f"the vLLM server broke off: {error}") from error
        finally:
            answer.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self) -> tuple[bytes, bytes, list[Header]]:
        """Method, target and headers, in bytes: what is not ASCII goes on as it came."""
        scope = self._request.scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers: list[Header] = scope["headers"]
        hop = {
            part.strip().lower()
            for name, value in headers
            if name == b"connection"
            for part in value.split(b",")
        }
        ours_alone = hop | _NOT_PASSED_ON
        passed = [(name, value) for name, value in headers if name not in ours_alone]
        passed += [(b"x-request-id", request_id(self._request).encode()), (b"accept-encoding", b"identity")]
        return scope["method"].encode(), target, passed

    def _begin(self, answer: Answer) -> list[Header]:
        """What the client gets of the answer's headers."""
        self._status = answer.status
        headers = [(name.lower(), value) for name, value in answer.headers]
        for name, value in headers:
            if name == b"x-kvrail-prefill":
                self.route = value.decode("ascii", "replace")
            elif name == b"content-type":
                self._streams = value.startswith(b"text/event-stream")
        headers = [(name, value) for name, value in headers if name not in _NOT_PASSED_BACK]
        if self._streams:
            # Proxies that collect a whole answer before they pass it on would undo the streaming.
            headers.append((b"x-accel-buffering", b"no"))
        return headers

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Within the time that the request may take, and until somebody fails it. Raises RuntimeFault."""
        self._task = asyncio.current_task()
        left = None
        if self._timeout_s is not None:
            left = max(0.0, self._timeout_s - (time.monotonic() - self._started))
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            raise TimedOut(f"it took longer than {self._timeout_s:g} s (--request-timeout-s)") from None
        except asyncio.CancelledError:
            if self._fault is not None and self._task is not None and self._task.uncancel() == 0:
                raise self._fault from None
            raise
        finally:
            self._task = None
