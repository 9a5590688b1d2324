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
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx
import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvrail.frontend.envelope import Unauthorized, error_body, request_id, until_disconnect
from kvrail.frontend.vllm_counts import ProxyCounts
from kvrail.frontend.vllm_link import VllmLink
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys
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
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# The key is ours; bytes are passed on as they are, so none may be packed; and no client names a rank.
_NOT_PASSED_ON = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-length",
    "expect",
    "host",
    "x-data-parallel-rank",
    "x-kvrail-prefill",
    "x-request-id",
}
_NOT_PASSED_BACK = _HOP_BY_HOP | {"date", "server", "x-request-id"}


class VllmProxy:
    """Passes requests to the server behind `link`."""

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
        router = APIRouter(include_in_schema=False)
        for path in ("/v1/{rest:path}", *_ROUTES):
            router.add_api_route(path, self._pass, methods=_METHODS)
        return router

    def fail_all(self, reason: str) -> None:
        """End what is open, in good order."""
        for exchange in list(self._open):
            exchange.fail(Unavailable(reason, retry_after_s=5.0))

    async def _pass(self, request: Request) -> Response:
        if not self._keys.allow(request.headers.get("authorization")):
            raise Unauthorized("give a valid API key: Authorization: Bearer …")
        path = request.url.path
        if not path.isprintable() or not {".", ".."}.isdisjoint(path.split("/")):
            # httpx would resolve the dots, and so ask for a route that no client may call.
            raise HTTPException(404)
        self._check_room(request.method)
        exchange = _Exchange(request, self._config.request_timeout_s, self._counts)
        # Before the body is read: no more of them are read at once than may be here.
        self._open.add(exchange)
        try:
            body = await exchange.body()
            async with until_disconnect(request.receive):
                return await exchange.begin(self._link.client, body, lambda: self._open.discard(exchange))
        except BaseException as error:
            self._open.discard(exchange)
            exchange.count(error)
            await exchange.close()
            raise

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
    """One request and its answer."""

    def __init__(self, request: Request, timeout_s: float | None, counts: ProxyCounts) -> None:
        self._request = request
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._counts = counts
        self._task: asyncio.Task[object] | None = None
        self._fault: RuntimeFault | None = None
        self._route = "none"
        self._answer: httpx.Response | None = None

    async def close(self) -> None:
        """Let vLLM know that nobody waits."""
        if self._answer is not None:
            await self._answer.aclose()

    def fail(self, fault: RuntimeFault) -> None:
        """Let it end with this fault."""
        if self._fault is None and self._task is not None:
            self._fault = fault
            self._task.cancel()

    def count(self, error: BaseException | None, status: int = 200) -> None:
        """Note how it ended."""
        outcome = f"http_{status}"
        if isinstance(error, Cancelled | asyncio.CancelledError):
            outcome = "cancelled"
        elif isinstance(error, RuntimeFault):
            outcome = f"http_{error.status}"
        elif isinstance(error, HTTPException):
            outcome = f"http_{error.status_code}"
        elif error is not None:
            outcome = "http_500"
        self._counts.ended(self._request.url.path, self._route, outcome)

    async def body(self) -> bytes:
        """What the client sends. Raises RuntimeFault, and HTTPException when there is too much of it."""
        async with self._bounded():
            try:
                return await self._request.body()
            except ClientDisconnect:
                raise Cancelled("the client went away") from None

    async def begin(self, client: httpx.AsyncClient, body: bytes, ended: Callable[[], object]) -> Response:
        """Send the request; the answer comes back as soon as it has begun."""
        request = self._request
        # Bytes: what is not ASCII goes on as it came.
        hop = {name.strip().lower() for name in request.headers.get("connection", "").split(",")}
        ours_alone = hop | _NOT_PASSED_ON
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in ours_alone]
        ours = [(b"x-request-id", request_id(request).encode()), (b"accept-encoding", b"identity")]
        sent = client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=[*headers, *ours],
            content=body if request.method == "POST" else None,
        )
        async with self._bounded():
            try:
                answer = await client.send(sent, stream=True)
            except httpx.HTTPError as error:
                raise Unavailable(
                    f"the vLLM server does not answer: {type(error).__name__}", retry_after_s=2.0
                ) from error
        self._answer = answer
        self._route = answer.headers.get("x-kvrail-prefill", "none")
        return _Answer(self, answer, ended)

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

    async def chunks(self, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The answer's bytes. Raises RuntimeFault."""
        try:
            async with self._bounded():
                async for chunk in answer.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise EngineFailed(f"the vLLM server broke off: {type(error).__name__}") from error


class _Answer(Response):
    """What vLLM answers, as it comes."""

    def __init__(self, exchange: _Exchange, answer: httpx.Response, ended: Callable[[], object]) -> None:
        self.status_code = answer.status_code
        self.background = None
        self._exchange = exchange
        self._answer = answer
        self._ended = ended
        self.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.decode("latin-1").lower() not in _NOT_PASSED_BACK
        ]
        self._streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        if self._streams:
            # Proxies that collect a whole answer before they pass it on would undo the streaming.
            self.raw_headers.append((b"x-accel-buffering", b"no"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ended: BaseException | None = None
        try:
            async with until_disconnect(receive):
                await self._pass_on(send)
        except Cancelled as gone:
            ended = gone  # Closing the connection tells vLLM.
        except BaseException as error:
            ended = error
            raise
        finally:
            await self._exchange.close()
            self._ended()
            self._exchange.count(ended, self.status_code)

    async def _pass_on(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._exchange.chunks(self._answer)) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RuntimeFault as fault:
            if not self._streams:
                raise  # The connection breaks off: the only way left to say that the answer is not whole.
            _log.warning(
                "request %s: a stream ended early: %s", request_id(self._exchange._request), fault.message
            )
            event = b"\n\ndata: " + msgspec.json.encode(error_body(fault)) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
