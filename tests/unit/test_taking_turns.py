# SPDX-License-Identifier: Apache-2.0
"""Who takes the loop for long lets a token of another stream through, from the rank's socket to the client's."""

from __future__ import annotations

import asyncio
import socket

from kvrail.frontend.taking_turns import others_first


def test_what_has_come_for_others_is_through() -> None:
    async def run() -> list[str]:
        loop, told = asyncio.get_running_loop(), list[str]()
        theirs, ours = socket.socketpair()
        readable: asyncio.Future[None] = loop.create_future()
        events: asyncio.Queue[str] = asyncio.Queue()

        async def listen() -> None:
            await readable
            events.put_nowait("token")

        async def stream() -> None:
            told.append(await events.get())

        def heard() -> None:
            loop.remove_reader(ours)
            readable.set_result(None)

        with theirs, ours:
            async with asyncio.TaskGroup() as group:
                group.create_task(listen())
                group.create_task(stream())
                await asyncio.sleep(0.01)
                loop.add_reader(ours, heard)
                theirs.send(b"x")
                await others_first()
                return list(told)

    assert asyncio.run(run()) == ["token"]
