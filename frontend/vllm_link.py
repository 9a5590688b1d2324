# SPDX-License-Identifier: Apache-2.0
"""A front's connection to its vLLM server: HTTP over a Unix socket, and what the server last said of itself."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections, Reply
from kvrail.runtime.control.upstream import Upstream
from kvrail.runtime.vllm.spec import STATE_ROUTE, ServerState

__all__ = ["VllmLink"]

_log = logging.getLogger(__name__)
_POLL_S = 0.5
# Longer than the server's event loop is ever busy with one thing, such as a long text to tokenise.
_ANSWER_S = 10.0
# A server that says nothing for so long is taken as stuck, as a rank of the embedded engine is.
_SILENT_S = 60.0


class VllmLink:
    """The server behind `socket`. `state` is None until it serves; `trouble` says why."""

    def __init__(self, socket: Path, status_file: Path) -> None:
        # The way of all that clients ask.
        self.upstream = Upstream(socket)
        self._calls: KeptConnections | None = None
        self._socket = socket
        self.state: ServerState | None = None
        self.trouble = "the model is loading"
        # Called, with the trouble, as long as the server, or the engine core behind it, is taken as stuck.
        self.on_silent: Callable[[str], object] = lambda trouble: None
        self._status_file = status_file
        self._was_ready = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> VllmLink:
        self._calls = KeptConnections(self._socket, idle_s=4.0)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.upstream.close()
        if self._calls is not None:
            await self._calls.close()

    def connector(self) -> dict[str, Any]:
        """What the connector last wrote of its links; empty when there is none."""
        try:
            found = json.loads(self._status_file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def metrics(self) -> bytes:
        """vLLM's own metrics, or nothing when it does not answer."""
        try:
            reply = await self._get("/metrics")
        except CallFailed:
            return b""
        return reply.body if reply.ok else b""

    async def _get(self, path: str) -> Reply:
        assert self._calls is not None
        return await self._calls.call("GET", f"http://vllm{path}", headers={}, timeout_s=_ANSWER_S)

    async def _watch(self) -> None:
        heard = time.monotonic()
        while True:
            try:
                reply = await self._get(STATE_ROUTE)
                if not reply.ok:
                    raise CallFailed(f"HTTP {reply.status}")
                self._take(msgspec.msgpack.decode(reply.body, type=ServerState))
                heard = time.monotonic()
            except (CallFailed, msgspec.MsgspecError) as error:
                self.state = None
                if self._was_ready:
                    trouble = f"vLLM does not answer: {error}"
                    if trouble != self.trouble:
                        _log.warning("%s", trouble)
                    self.trouble = trouble
                    if time.monotonic() - heard > _SILENT_S:
                        self.on_silent(trouble)
            await asyncio.sleep(_POLL_S)

    def _take(self, state: ServerState) -> None:
        self.trouble = state.trouble
        if state.trouble:
            self.state = None
            self.on_silent(state.trouble)
            return
        self.state = state
        if not self._was_ready:
            self._was_ready = True
            _log.info(
                "vLLM %s is ready: longest context %d tokens", state.card.version, state.card.max_model_len
            )
