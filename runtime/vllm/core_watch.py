# SPDX-License-Identifier: Apache-2.0
"""Whether the loop of an engine core turns: it is asked something small again and again, and answers between two steps.

A core that dies is told by vLLM itself; one that hangs (stopped, dead locked, waiting for a worker that hangs) is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

__all__ = ["CoreWatch"]

_log = logging.getLogger(__name__)
_ASK_S = 1.0


class CoreWatch:
    """`ask` is answered by the loop; when that takes more than `limit_s`, the core is taken as stuck until it answers.

    Made and used in one event loop. `limit_s` must be more than the longest step takes.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], limit_s: float) -> None:
        self.trouble = ""
        self._ask = ask
        self._limit_s = limit_s
        self._stuck = asyncio.Event()
        self._task = asyncio.create_task(self._watch())

    async def until_stuck(self) -> None:
        """Return when the core is taken as stuck."""
        await self._stuck.wait()

    async def _watch(self) -> None:
        while True:
            answer = asyncio.ensure_future(self._ask())
            silent_s = 0.0
            while not answer.done():
                since = time.monotonic()
                await asyncio.wait({answer}, timeout=_ASK_S)
                # When it was this process that stood still, the answer may wait to be read.
                silent_s += min(time.monotonic() - since, 2 * _ASK_S)
                if silent_s > self._limit_s and not answer.done():
                    self._note(silent_s)
            if answer.exception() is not None:
                return  # It has died, and vLLM tells that to everybody.
            if self.trouble:
                _log.warning("the engine core answers again")
                self.trouble = ""
                self._stuck.clear()
            await asyncio.sleep(_ASK_S)

    def _note(self, silent_s: float) -> None:
        if not self.trouble:
            _log.error("the engine core has not finished a step for %.0f s", silent_s)
        self.trouble = f"vLLM's engine core has not finished a step for {silent_s:.0f} s"
        self._stuck.set()
