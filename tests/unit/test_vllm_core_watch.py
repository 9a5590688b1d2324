# SPDX-License-Identifier: Apache-2.0
"""An engine core whose loop stands still is found out, and one that turns again is believed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvrail.runtime.vllm import core_watch
from kvrail.runtime.vllm.core_watch import CoreWatch


class Core:
    def __init__(self) -> None:
        self.turns = asyncio.Event()
        self.turns.set()
        self.dead = False
        self.asked = 0

    async def ask(self) -> bool:
        self.asked += 1
        await self.turns.wait()
        if self.dead:
            raise RuntimeError("dead")
        return False


async def until(holds: object) -> None:
    async with asyncio.timeout(5):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def test_a_core_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_watch, "_ASK_S", 0.02)

    async def test() -> None:
        core = Core()
        watch = CoreWatch(core.ask, 0.1)
        waiting = asyncio.create_task(watch.until_stuck())
        await until(lambda: core.asked > 3)
        assert watch.trouble == ""
        core.turns.clear()
        await asyncio.sleep(0.06)
        assert not waiting.done(), "it may be at a long step"
        await asyncio.wait_for(waiting, 5)
        assert "has not finished a step" in watch.trouble
        asked = core.asked
        await asyncio.sleep(0.1)
        assert core.asked == asked, "questions pile up at a core that stands still"
        core.turns.set()
        await until(lambda: watch.trouble == "")
        again = asyncio.create_task(watch.until_stuck())
        await until(lambda: core.asked > asked + 3)
        assert not again.done()
        again.cancel()

    asyncio.run(test())


def test_it_was_this_process_that_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_watch, "_ASK_S", 0.02)
    clock = [0.0]
    monkeypatch.setattr(core_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def test() -> None:
        core = Core()
        core.turns.clear()
        watch = CoreWatch(core.ask, 0.1)
        await until(lambda: core.asked)
        clock[0] += 1000
        await asyncio.sleep(0.06)
        assert watch.trouble == ""

    asyncio.run(test())


def test_a_core_that_dies_is_for_vllm_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_watch, "_ASK_S", 0.02)

    async def test() -> None:
        core = Core()
        core.dead = True
        watch = CoreWatch(core.ask, 0.1)
        await asyncio.wait_for(watch._task, 5)
        assert watch.trouble == ""

    asyncio.run(test())
