# SPDX-License-Identifier: Apache-2.0
"""Runs loads at engines, within a part's time, with prompts that no cache has seen, and keeps what was found."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrail.frontend.load.answer import Trace, read
from kvrail.frontend.load.arrivals import Load, Turn, run_load
from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.request import Target
from kvrail.frontend.split_bench.engines import Engine

__all__ = ["Clock", "Row", "Runner", "Settings", "in_turn", "was_cut"]

Row = dict[str, Any]
_CUT = "no end of the answer within"


@dataclass(frozen=True)
class Settings:
    """What is asked. Lengths in tokens, but for the replay's, in words."""

    tokens_in: int
    tokens_out: int
    concurrency: tuple[int, ...]
    per_stream: int
    push_in: int
    push_requests: int
    mixed_s: float
    mixed_streams: int
    mixed_in: int
    mixed_out: int
    mixed_long_in: int
    mixed_every_s: float
    handover_in: tuple[int, ...]
    rounds: int
    conversations: int
    turns: int
    shared_words: int
    task_words: int
    turn_words: int
    answer_tokens: int


class Clock:
    """The time that a part may take, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(0.0, self._deadline - time.monotonic())


class Runner:
    """`say` is told what runs now; `keep` gets every row as soon as it is found."""

    def __init__(self, prompts: Prompts, say: Callable[[str], None], keep: Callable[[Row], None]) -> None:
        self.prompts, self.say, self.keep = prompts, say, keep
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Requests with numbers from here on, a million of them, are new."""
        return 1_000_000 * next(self._numbers)

    def run(self, engine: Engine, load: Load, clock: Clock) -> Turn:
        """Run a load once; answers that the part's time does not allow for end with an error (`was_cut`)."""
        within_s = max(0.1, min(load.within_s, clock.left_s))
        load = dataclasses.replace(load, within_s=within_s)
        return asyncio.run(run_load(load, Target(engine.url), self.prompts, self.next_number()))

    def traces(self, engine: Engine, load: Load, clock: Clock) -> list[Trace]:
        """The same, read."""
        return [read(recording) for recording in self.run(engine, load, clock).recordings]

    def warm_up(self, engines: Iterable[Engine], lengths: Sequence[int], clock: Clock) -> None:
        """A request a device of each length: what a rank does once only (compiling, growing) does not count."""
        for engine in engines:
            for length in lengths:
                self.say(f"{engine.name}: warming up with {length} tokens")
                count = engine.plan.devices
                self.run(engine, Load(length, 8, concurrency=count, requests=count), clock)


def in_turn(engines: Sequence[Engine], turn: int) -> Sequence[Engine]:
    """All engines, in the order of this round: who begins changes, so that none always comes last."""
    return engines if turn % 2 == 0 else engines[::-1]


def was_cut(errors: Iterable[str]) -> bool:
    """Whether the part's time ran out under it."""
    return any(_CUT in error for error in errors)
