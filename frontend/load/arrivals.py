# SPDX-License-Identifier: Apache-2.0
"""When requests arrive: so many at a time, or at a rate, with a long prompt now and then; and what that cost us."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.request import Recording, Target, post

__all__ = ["Effort", "Load", "Turn", "run_load"]

_LAG_EVERY_S = 0.005
# A server that refuses at once must not be asked in a tight loop.
_AFTER_ERROR_S = 0.1


@dataclass(frozen=True)
class Load:
    """`concurrency` streams without a pause, or arrivals at `rate` a second (Poisson), for a count or a time.

    With `long_every_s`, a prompt of `long_in` tokens arrives that often beside the others.
    """

    tokens_in: int
    tokens_out: int
    concurrency: int = 1
    rate: float | None = None
    requests: int | None = None
    seconds: float | None = None
    long_in: int = 0
    long_out: int = 1
    long_every_s: float | None = None
    within_s: float = 600.0


@dataclass(frozen=True)
class Effort:
    """What the generator itself took, to judge whether it was in its own way. Seconds."""

    cpu_s: float
    wall_s: float
    lag_p99_s: float


@dataclass(frozen=True)
class Turn:
    """One run of a load. What arrived outside of `window` (perf_counter) came without the load beside it."""

    recordings: list[Recording]
    window: tuple[float, float]
    effort: Effort


async def run_load(load: Load, target: Target, prompts: Prompts, first: int = 0) -> Turn:
    """Run it once; the requests have the numbers `first`, `first + 1`, …"""
    numbers = itertools.count(first)
    recordings: list[Recording] = []
    begun, cpu = time.perf_counter(), time.process_time()
    deadline = begun + load.seconds if load.seconds is not None else float("inf")
    left = itertools.repeat(None) if load.requests is None else iter([None] * load.requests)

    async def ask(label: str, body: bytes) -> None:
        recordings.append(await post(target, prompts.path, body, label, within_s=load.within_s))
        if recordings[-1].error:
            await asyncio.sleep(_AFTER_ERROR_S)

    def more() -> bool:
        return time.perf_counter() < deadline and next(left, 0) is None

    async def stream() -> None:
        while more():
            await ask("short", prompts.body(load.tokens_in, load.tokens_out, next(numbers)))

    async def arrive(rate: float) -> None:
        draw = random.Random(first)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as asked:
            while more():
                body = prompts.body(load.tokens_in, load.tokens_out, next(numbers))
                await asyncio.sleep(due - time.perf_counter())
                asked.create_task(ask("short", body))
                due += draw.expovariate(rate)

    async def arrive_long(every_s: float) -> None:
        # The others have numbers from `first` on; these count down from below.
        async with asyncio.TaskGroup() as asked:
            for number, due in _every(begun, every_s):
                if due >= deadline:
                    return
                body = prompts.body(load.long_in, load.long_out, 2**40 + first + number)
                await asyncio.sleep(due - time.perf_counter())
                asked.create_task(ask("long", body))

    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(lags))
    gc.collect()
    gc.disable()
    try:
        beside: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as running:
            if load.long_every_s is not None:
                beside = running.create_task(arrive_long(load.long_every_s))
            if load.rate is not None:
                main = [running.create_task(arrive(load.rate))]
            else:
                main = [running.create_task(stream()) for _ in range(load.concurrency)]
            await asyncio.wait(main)
            if beside is not None and load.seconds is None:
                beside.cancel()
    finally:
        gc.enable()
        watch.cancel()
    ended = time.perf_counter()
    lags.sort()
    lag = lags[int(0.99 * len(lags))] if lags else 0.0
    effort = Effort(time.process_time() - cpu, ended - begun, lag)
    return Turn(recordings, (begun, min(ended, deadline)), effort)


def _every(begun: float, every_s: float) -> Iterator[tuple[int, float]]:
    for number in itertools.count(1):
        yield number, begun + number * every_s


async def _watch_lag(lags: list[float]) -> None:
    """How late this process comes to what it should do now: what it would add to a measured time."""
    while True:
        due = time.perf_counter() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append(time.perf_counter() - due)
