# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's serving layer and its engine core: requests and outputs can be turned aside, or put in.

It stands in for the core client of an AsyncLLM and hands on all that it does not know. Everything runs in the event
loop of the API server, and everything comes out in the order in which it went in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvrail.runtime.vllm.compat import outputs_of, without_transfer_params
from kvrail.runtime.vllm.notes import NOTES

__all__ = ["CoreTap", "Splitter"]

_log = logging.getLogger(__name__)


class Splitter(Protocol):
    """Who decides which requests are served in two places."""

    def take(self, request: Any) -> bool:
        """Serve this request, or return False: the core serves it alone."""

    def drop(self, request_id: str) -> bool:
        """Nobody waits for this request any more. False: it is not one of those taken."""


class CoreTap:
    """A core client around `core`. `splitter` may be set until the first request comes."""

    def __init__(self, core: Any) -> None:
        self.splitter: Splitter | None = None
        # What belongs to this server, and the AsyncLLM that asks, once it serves; of no meaning here.
        self.side: object = None
        self.client: Any = None
        # What is done with outputs of requests that the serving layer does not know: they give what takes their place.
        self.taps: dict[str, Callable[[Any], list[Any]]] = {}
        self._core = core
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def add_request_async(self, request: Any) -> None:
        """From the serving layer, and so from a client: what it says about transfers counts for nothing."""
        request = without_transfer_params(request)
        if getattr(request, "abort_immediately", False):
            return  # Its only purpose is to end the transfer that it names.
        if self.splitter is None and (notes := NOTES.get()) is not None:
            notes.routes.append("local")
        if self.splitter is None or not self.splitter.take(request):
            await self._core.add_request_async(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """From the serving layer: clients that left, stop strings."""
        splitter = self.splitter
        if splitter is not None:
            request_ids = [name for name in request_ids if not splitter.drop(name)]
        if request_ids:
            await self._core.abort_requests_async(request_ids)

    async def get_output_async(self) -> Any:
        """What the serving layer sees. Raises what the core client raises."""
        if self._pump is None:
            self._pump = asyncio.create_task(self._read())
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Also from another thread than the loop's."""
        if self._pump is not None:
            self._pump.get_loop().call_soon_threadsafe(self._pump.cancel)
        self._core.shutdown(*args, **kwargs)

    def put_in(self, outputs: list[Any]) -> None:
        """Let the serving layer see these outputs next."""
        if outputs:
            self._queue.put_nowait(outputs_of(0, outputs))

    def submit(self, request: Any, tap: Callable[[Any], list[Any]]) -> None:
        """Give the core a request of ours; its outputs go to `tap`."""
        self.taps[request.request_id] = tap
        self._spawn(self._core.add_request_async(request))

    def withdraw(self, request_id: str) -> None:
        """Take a request of ours out of the core. What it still says is nobody's."""
        if self.taps.pop(request_id, None) is not None:
            self._spawn(self._core.abort_requests_async([request_id]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # Tasks begin in the order in which they were made, and each sends at its first step: an abort never overtakes.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The core is dead; whoever waits for outputs is told so.
            _log.error("the engine core took no message: %s", error)

    async def _read(self) -> None:
        try:
            while True:
                found = await self._core.get_output_async()
                if self.taps and any(output.request_id in self.taps for output in found.outputs):
                    found.outputs = [new for output in found.outputs for new in self._seen(output)]
                self._queue.put_nowait(found)
        except Exception as error:
            self._queue.put_nowait(error)

    def _seen(self, output: Any) -> list[Any]:
        tap = self.taps.get(output.request_id)
        if tap is None:
            return [output]
        if output.finish_reason is not None:
            del self.taps[output.request_id]
        return tap(output)
