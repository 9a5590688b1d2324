# SPDX-License-Identifier: Apache-2.0
"""The queue of a front: first come first served, bounded, and no place is ever lost."""

from __future__ import annotations

import asyncio

import pytest

from kvrail.runtime.control.admission import Admission
from kvrail.runtime.control.routing import PeerView, Route
from kvrail.runtime.errors import Overloaded, Unavailable

PEER = PeerView((b"p" * 16, 0), "pe", "http://pe", 0, 1)


def one_at_a_time(admission: Admission) -> Route | None:
    return Route(0, PEER) if admission.at_rank[0] < 1 else None


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_first_come_first_served() -> None:
    async def run() -> None:
        admission = Admission(8)
        order: list[int] = []
        running = await admission.enter(lambda: one_at_a_time(admission))

        async def request(number: int) -> None:
            place = await admission.enter(lambda: one_at_a_time(admission))
            order.append(number)
            await asyncio.sleep(0)
            place.leave()

        tasks = [asyncio.create_task(request(n)) for n in range(4)]
        await settle()
        assert (admission.waiting, order) == (4, [])
        running.leave()
        running.leave()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]
        assert (admission.waiting, admission.at_rank[0], dict(admission.at_peer)) == (0, 0, {})

    asyncio.run(run())


def test_beyond_the_bound_requests_are_refused_at_once() -> None:
    async def run() -> None:
        admission = Admission(1)
        await admission.enter(lambda: one_at_a_time(admission))
        waiting = asyncio.create_task(admission.enter(lambda: one_at_a_time(admission)))
        await settle()
        with pytest.raises(Overloaded) as refused:
            await admission.enter(lambda: one_at_a_time(admission))
        assert refused.value.retry_after_s
        waiting.cancel()

    asyncio.run(run())


def test_one_that_leaves_the_queue_does_not_stop_it() -> None:
    async def run() -> None:
        admission = Admission(8)
        running = await admission.enter(lambda: one_at_a_time(admission))
        first = asyncio.create_task(admission.enter(lambda: one_at_a_time(admission)))
        second = asyncio.create_task(admission.enter(lambda: one_at_a_time(admission)))
        await settle()
        running.leave()
        first.cancel()  # it has been woken, and gives its turn on
        async with asyncio.timeout(5):
            (await second).leave()
        assert (admission.waiting, admission.at_rank[0]) == (0, 0)

    asyncio.run(run())


def test_a_fault_reaches_all_who_wait() -> None:
    async def run() -> None:
        admission = Admission(8)
        await admission.enter(lambda: one_at_a_time(admission))
        lost = False

        def choose() -> Route | None:
            if lost:
                raise Unavailable("no rank is ready yet")
            return None

        waiting = [asyncio.create_task(admission.enter(choose)) for _ in range(3)]
        await settle()
        lost = True
        admission.wake()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 3

    asyncio.run(run())


def test_stopping_refuses_who_waits_and_who_comes() -> None:
    async def run() -> None:
        admission = Admission(8)
        await admission.enter(lambda: one_at_a_time(admission))
        waiting = asyncio.create_task(admission.enter(lambda: one_at_a_time(admission)))
        await settle()
        admission.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await waiting
        with pytest.raises(Unavailable, match="stopping"):
            await admission.enter(lambda: Route(0, None))

    asyncio.run(run())
