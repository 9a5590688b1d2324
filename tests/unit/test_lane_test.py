# SPDX-License-Identifier: Apache-2.0
"""How many rounds a lane test takes: each one costs a step of the model on a rank that is busy."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.transfer.handshake import Offer, PoolOffer
from kvrail.transfer.lane_test import News, lane_test
from kvrail.transfer.lanes import Plan, Wishes
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.memory import PROBE_POOL

LAYOUT = PageLayout(model_id="m", layers=2, kv_heads=2, head_dim=32, dtype="float32", page_tokens=64)
POOLS = [
    PoolOffer(pool=number, base=1 << 20, nbytes=8 << 20, unit_bytes=4096, memory="host", key=b"k")
    for number in (0, PROBE_POOL)
]
OFFER = Offer(
    ucx=(1, 22, 0),
    layout=LAYOUT,
    epoch=1,
    cookie=1,
    address=b"a",
    network_address=b"n",
    pools=POOLS,
    probe_unit=0,
    lane="auto",
    put_transport="auto",
    require_lane=None,
    distance="",
)


@pytest.mark.parametrize(("late_s", "rounds"), [(-10.0, 1 + 9 + 5 + 3), (1.0, 1 + 3)])
def test_a_busy_rank_probes_each_size_once(late_s: float, rounds: int) -> None:
    writer = SimpleNamespace(push=lambda *_: None, ring=lambda _: None)
    opened: list[int] = []

    def open_writer(key: int, ttl_s: float) -> Any:
        opened.append(key)
        return writer

    link: Any = SimpleNamespace(
        import_put=lambda *_, **__: None, writer=open_writer, transports=lambda: ["tcp/lo"]
    )
    pool: Any = SimpleNamespace(
        name="probe", address=1, unit_bytes=4096, nbytes=8 << 20, write=lambda *_: None
    )
    wishes = Wishes("auto", "auto", None)
    test = lane_test(
        link, OFFER, Plan(("put",), "all", "auto", ""), (wishes, wishes), (), pool, 0, itertools.count(1)
    )
    next(test)
    news, lane = News("verdict", True, ""), None
    while lane is None:
        try:
            test.send(news)
        except StopIteration as end:
            lane = end.value
        news = News("rung", True, "", time.monotonic() - late_s)
    assert (len(opened), len(lane.probes), lane.label) == (rounds, 3, "put/tcp")
