# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server has besides vLLM's own routes: an ASGI middleware that only its front can reach.

It gives the front /kvrail/state, takes prefill calls on a prefill engine, and puts the header into answers that says
where the prompt was prefilled. For that it holds an answer's start back until its first byte: by then token 1 is there.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.runtime.vllm.compat import decode_sampling, first_token_of, prefill_request
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.notes import NOTES, Notes
from kvrail.runtime.vllm.server_side import ServerSide
from kvrail.runtime.vllm.spec import PREFILL_ROUTE, STATE_ROUTE, PrefillCall
from kvrail.transfer.wire import unpack_u32

__all__ = ["ServerApp"]

_Reply = tuple[int, bytes]


class ServerApp:
    """Around vLLM's application; named to it by --middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in (STATE_ROUTE, PREFILL_ROUTE):
            client = getattr(scope["app"].state, "engine_client", None)
            tap = getattr(client, "engine_core", None)
            assert isinstance(tap, CoreTap), "the core client was not replaced"
            side = ServerSide.of(tap)
            if scope["path"] == STATE_ROUTE:
                status, body = 200, msgspec.msgpack.encode(side.state(client))
            else:
                status, body = await self._prefill(tap, side, await _body(receive), receive)
            await _answer(send, status, body)
            return
        notes = Notes()
        token = NOTES.set(notes)
        try:
            await self._app(scope, receive, _Annotated(send, notes))
        finally:
            NOTES.reset(token)

    async def _prefill(self, tap: CoreTap, side: ServerSide, body: bytes, receive: Receive) -> _Reply:
        try:
            call = msgspec.msgpack.decode(body, type=PrefillCall)
            tokens = unpack_u32(call.tokens).tolist()
        except (msgspec.MsgspecError, ValueError) as error:
            return _refusal(400, f"the body is no PrefillCall: {error}")
        if why := side.why_refused(call, len(tokens)):
            side.counters.calls.labels("refused").inc()
            return _refusal(*why)
        try:
            sampling = decode_sampling(call.sampling)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            return _refusal(400, f"sampling: {error}")
        transfer = None
        if call.ticket:
            transfer = {"do_remote_decode": True, "do_remote_prefill": False, "ticket": call.ticket.hex()}
        name = f"prefill-{next(self._numbers)}-{call.ticket.hex()}"
        request = prefill_request(name, tokens, sampling, transfer, call.cache_salt, call.priority)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def heard(output: Any) -> list[Any]:
            if not answer.done():
                answer.set_result(output)
            return []

        side.load += 1
        leaving = asyncio.create_task(_gone(receive))
        stuck = asyncio.create_task(side.core.until_stuck())
        try:
            tap.submit(request, heard)
            await asyncio.wait((answer, leaving, stuck), return_when=asyncio.FIRST_COMPLETED)
        finally:
            side.load -= 1
            leaving.cancel()
            stuck.cancel()
            if not answer.done():
                tap.withdraw(name)
        if not answer.done():
            trouble = side.core.trouble
            return _refusal(503, trouble) if trouble else _refusal(499, "the caller went away")
        first = first_token_of(answer.result())
        if first is None:
            return _refusal(500, "the engine gave the prefill up")
        side.counters.calls.labels("accepted").inc()
        return 200, msgspec.msgpack.encode(first)


class _Annotated:
    """Sends an answer on, with what was noted about its request."""

    def __init__(self, send: Send, notes: Notes) -> None:
        self._send = send
        self._notes = notes
        self._start: Message | None = None
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._replaced:
            return
        if self._start is not None:
            start, self._start = self._start, None
            if self._notes.refusal is not None:
                self._replaced = True
                status, reason = self._notes.refusal
                await _answer(self._send, *_refusal(status, reason))
                return
            if self._notes.route:
                start["headers"] = [
                    *start.get("headers", ()),
                    (b"x-kvrail-prefill", self._notes.route.encode()),
                ]
            await self._send(start)
        await self._send(message)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(status: int, reason: str) -> _Reply:
    kind = {400: "invalid_request_error", 503: "service_unavailable"}.get(status, "server_error")
    error = {"message": reason, "type": kind, "param": None, "code": None}
    return status, msgspec.json.encode({"error": error})


async def _answer(send: Send, status: int, body: bytes) -> None:
    kind = b"application/json" if status != 200 else b"application/msgpack"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
