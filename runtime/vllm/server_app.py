# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server has besides vLLM's own routes: an ASGI middleware that only its front can reach.

It gives the front /kvrail/state, and puts the header into answers that says where the prompt was prefilled. For that it
holds an answer's start back until its first byte: by then token 1 is there.
"""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.runtime.vllm.asgi import answer, refusal
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.notes import NOTES, Notes
from kvrail.runtime.vllm.server_side import ServerSide
from kvrail.runtime.vllm.spec import STATE_ROUTE

__all__ = ["ServerApp"]


class ServerApp:
    """Around vLLM's application; named to it by --middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == STATE_ROUTE:
            client = getattr(scope["app"].state, "engine_client", None)
            tap = getattr(client, "engine_core", None)
            assert isinstance(tap, CoreTap), "the core client was not replaced"
            tap.client = client
            await answer(send, 200, msgspec.msgpack.encode(ServerSide.of(tap).state(client)))
            return
        notes = Notes()
        token = NOTES.set(notes)
        try:
            await self._app(scope, receive, _Annotated(send, notes))
        finally:
            NOTES.reset(token)


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
                await answer(self._send, *refusal(status, reason))
                return
            if self._notes.route:
                start["headers"] = [
                    *start.get("headers", ()),
                    (b"x-kvrail-prefill", self._notes.route.encode()),
                ]
            await self._send(start)
        await self._send(message)
