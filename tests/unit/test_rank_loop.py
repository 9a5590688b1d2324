# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank's loop tells its front things."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import zmq

from kvrail.runtime import messages
from kvrail.runtime.messages import CacheFlushed, FlushCache, Stats
from kvrail.runtime.rank import Front, Loop


def test_whoever_hears_of_a_flush_has_its_metrics() -> None:
    held = {"pages": 5}

    def flush() -> tuple[int, int]:
        return held.pop("pages"), 0

    role: Any = SimpleNamespace(
        engine=SimpleNamespace(flush_cache=flush, has_work=False),
        stats=lambda steps: Stats(steps=steps, gauges=dict(held), counters={}),
        tick=lambda now: None,
        beat=lambda steps: None,
    )
    with (
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.PAIR) as front,
        context.socket(zmq.PAIR) as rank,
    ):
        front.bind("inproc://rank")
        loop = Loop(Front(rank, "inproc://rank"), role, (), None)
        front.send(messages.encode(FlushCache(number=3)))
        loop._turn()
        said = [messages.decode_to_front(front.recv(zmq.NOBLOCK)) for _ in range(2)]
    assert isinstance(said[0], Stats)
    assert said[0].gauges == {}
    assert said[1] == CacheFlushed(number=3, pool_pages=5, host_pages=0)
