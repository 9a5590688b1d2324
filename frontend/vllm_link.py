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

import httpx
import msgspec

from kvrail.runtime.control.kept_connections import KeptConnections
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
        # Bodies may take as long as they take; that the server is alive, its state says.
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket), limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
            ),
            base_url="http://vllm",
            timeout=httpx.Timeout(None, connect=5.0),
        )
        # The way of prefill calls, on which every millisecond is one of a first token.
        self.calls: KeptConnections | None = None
        self._socket = socket
        self.state: ServerState | None = None
        self.trouble = "the model is loading"
        # Called, with the trouble, as long as the server, or the engine core behind it, is taken as stuck.
        self.on_silent: Callable[[str], object] = lambda trouble: None
        self._status_file = status_file
        self._was_ready = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> VllmLink:
        self.calls = KeptConnections(self._socket, idle_s=4.0)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.client.aclose()
        if self.calls is not None:
            await self.calls.close()

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
            response = await self.client.get("/metrics", timeout=_ANSWER_S, follow_redirects=True)
        except httpx.HTTPError:
            return b""
        return response.content if response.is_success else b""

    async def _watch(self) -> None:
        heard = time.monotonic()
        while True:
            try:
                response = await self.client.get(STATE_ROUTE, timeout=_ANSWER_S)
                response.raise_for_status()
                self._take(msgspec.msgpack.decode(response.content, type=ServerState))
                heard = time.monotonic()
            except (httpx.HTTPError, msgspec.MsgspecError) as error:
                self.state = None
                if self._was_ready:
                    trouble = f"vLLM does not answer: {type(error).__name__} {error}".rstrip()
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
