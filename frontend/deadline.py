# SPDX-License-Identifier: Apache-2.0
"""A request that takes longer than it may: its outputs end with TimedOut, and closing them gives the request up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from kvrail.frontend.dispatch import Job
from kvrail.runtime.errors import TimedOut
from kvrail.runtime.messages import Output

__all__ = ["in_time"]


def in_time(job: Job, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
    """The outputs of a job, for as long as its deadline allows."""
    return outputs if job.deadline is None else _bounded(outputs, job.started, job.deadline)


async def _bounded(
    outputs: AsyncGenerator[Output, None], started: float, deadline: float
) -> AsyncGenerator[Output, None]:
    async with contextlib.aclosing(outputs):
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    output = await anext(outputs, None)
            except TimeoutError:
                seconds = deadline - started
                raise TimedOut(
                    f"the request took longer than {seconds:.3g} s (--request-timeout-s)"
                ) from None
            if output is None:
                return
            yield output
