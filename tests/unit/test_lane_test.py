# SPDX-License-Identifier: Apache-2.0
"""How many rounds a lane test takes: each one costs a step of the model on a rank that is busy."""

from __future__ import annotations

import itertools
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.handshake import Offer, PoolOffer
from kvrail.transfer.lane_test import News, lane_test
from kvrail.transfer.lanes import Plan, Wishes
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LaneInfo
from kvrail.transfer.memory import PROBE_POOL
from kvrail.transfer.wire import SelfTest, decode

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


GPU_OFFER = msgspec.structs.replace(
    OFFER,
    pools=[msgspec.structs.replace(pool, memory="cuda", handle=b"h" * 64) for pool in POOLS],
    gpu=Gpu(uuid=b"g" * 16, name="GPU"),
)
WISHES = (Wishes("auto", "auto", None), Wishes("auto", "auto", None))
PLANS = {
    "put": Plan(("put",), "all", "auto", ""),
    "peer": Plan(("peer", "put"), "all", "auto", ""),
    "rivals": Plan(("stream", "put"), "network", "auto", "far"),
}


class Bench:
    """A lane test over a link that only takes notes. `broken`: ways whose self-test fails."""

    def __init__(
        self,
        lane: str = "put",
        *,
        broken: tuple[str, ...] = (),
        memory: str = "host",
        rails: int = 1,
        slow: str = "",
    ) -> None:
        self.slow = slow
        self.used: list[bool] = []
        self.opened: list[int] = []
        self.imported: list[tuple[str, int]] = []
        self.broken = broken
        self.last_way = ""
        self.opened_rails: list[int] = []
        self.timed = False
        link: Any = SimpleNamespace(
            import_put=lambda pool, **_: self.imported.append(("put", pool)),
            import_stream=lambda pool, **_: self.imported.append(("stream", pool)),
            write_stream=lambda fd, secret: os.close(fd),
            settle_stream=self.used.append,
            import_peer=lambda pool, **_: self.imported.append(("peer", pool)),
            writer=self._writer,
            transports=lambda: ["tcp/lo"],
            open_rails=self.opened_rails.append,
        )
        pool: Any = SimpleNamespace(
            name="probe", memory=memory, address=1, unit_bytes=4096, nbytes=8 << 20, write=lambda *_: None
        )
        offer = GPU_OFFER if lane == "peer" else OFFER
        self.listening = socket.create_server(("127.0.0.1", 0))
        if lane == "rivals":
            offer = msgspec.structs.replace(OFFER, stream=self.listening.getsockname())
        self.test = lane_test(link, offer, PLANS[lane], WISHES, (), pool, 0, itertools.count(1), rails=rails)

    def _writer(self, key: int, ttl_s: float) -> Any:
        self.opened.append(key)
        return SimpleNamespace(push=self._push, ring=self._ring)

    def _push(self, pool: int, address: int, source: Any, target: Any, *, way: str, rail: int = 0) -> None:
        self.last_way = f"rail {rail}" if rail else way

    def _ring(self, message: bytes) -> None:
        test = decode(message)
        assert isinstance(test, SelfTest)
        # A speed probe is an empty test, which waits for its doorbell and not for a verdict.
        self.timed = test.nbytes == 0

    def run(self, late_s: float = -10.0) -> LaneInfo:
        with self.listening:
            return self._run(late_s)

    def _run(self, late_s: float) -> LaneInfo:
        next(self.test)
        while True:
            if self.last_way in self.broken:
                news = News("failed", False, "broken")
            elif self.timed:
                late = late_s - 100.0 if self.last_way == self.slow else late_s
                news = News("rung", True, "", time.monotonic() - late)
            else:
                news = News("verdict", True, "")
            try:
                self.test.send(news)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(("late_s", "rounds"), [(-10.0, 1 + 9 + 5 + 3), (1.0, 1 + 3)])
def test_a_busy_rank_probes_each_size_once(late_s: float, rounds: int) -> None:
    bench = Bench()
    lane = bench.run(late_s)
    assert (len(bench.opened), len(lane.probes), lane.label) == (rounds, 3, "put/tcp")


def test_both_ways_of_a_peer_are_tested_and_timed() -> None:
    bench = Bench("peer", memory="cuda")
    lane = bench.run(1.0)
    assert (lane.label, lane.transport, lane.memory, lane.fence) == ("peer", "cuda_ipc", "cuda", "process")
    assert [(probe.way, probe.nbytes, probe.runs) for probe in lane.probes] == [
        (way, nbytes, runs)
        for way in ("kernel", "engine")
        for nbytes, runs in ((4096, 1), (256 << 10, 1), (256 << 20, 64), (256 << 10, 64))
    ]
    assert bench.imported == [("peer", 4), ("peer", 0)]


def test_without_the_kernel_the_engine_is_left_and_it_is_said() -> None:
    bench = Bench("peer", broken=("kernel",), memory="cuda")
    lane = bench.run(1.0)
    assert {probe.way for probe in lane.probes} == {"engine"}
    assert "peer without kernel: self-test put failed: broken" in lane.reason


def test_when_nothing_works_every_reason_is_given() -> None:
    bench = Bench("peer", broken=("kernel", "engine", "put"), memory="host")
    with pytest.raises(LaneUnavailable) as refusal:
        bench.run()
    said = str(refusal.value)
    assert "peer: kernel: self-test put failed: broken; engine: self-test put failed" in said
    assert "no fast way from host memory to GPU memory here" in said


def test_each_rail_is_tested_alone_and_the_lane_says_how_many_work() -> None:
    bench = Bench(rails=4)
    lane = bench.run(1.0)
    # Once the link's own worker, once each other rail, and one probe of each size.
    assert (bench.opened_rails, lane.rails, len(bench.opened), lane.reason) == ([4], 4, 1 + 3 + 3, "")
    bench = Bench(rails=4, broken=("rail 2",))
    lane = bench.run(1.0)
    assert (lane.rails, lane.label) == (3, "put/tcp")
    assert lane.reason == "put without rail 2: self-test put failed: broken (UCX has no fast, permitted way)"


def test_only_lanes_whose_puts_cost_the_cpu_have_rails() -> None:
    bench = Bench("peer", memory="cuda", rails=4)
    assert (bench.run(1.0).rails, bench.opened_rails) == (1, [])


@pytest.mark.parametrize(("slow", "taken"), [("put", "stream"), ("stream", "put")])
def test_of_stream_and_put_the_faster_is_taken(slow: str, taken: str) -> None:
    bench = Bench("rivals", slow=slow)
    lane = bench.run()
    assert (lane.name, lane.transport, lane.fence, bench.used) == (
        taken,
        "tcp",
        "worker",
        [taken == "stream"],
    )
    # Scattered units as well: they are what tells the two apart.
    assert [(probe.way, probe.runs) for probe in lane.probes] == [(taken, 1)] * 3 + [(taken, 64)]
    # The pages are imported for that lane alone.
    assert bench.imported == [("stream", PROBE_POOL), ("put", PROBE_POOL), (taken, 0)]
    assert lane.reason == "far"


@pytest.mark.parametrize(("broken", "taken"), [("put", "stream"), ("stream", "put")])
def test_a_rival_that_does_not_work_leaves_the_other(broken: str, taken: str) -> None:
    bench = Bench("rivals", broken=(broken,))
    lane = bench.run()
    assert (lane.name, bench.used) == (taken, [taken == "stream"])
    assert f"{broken}: self-test put failed: broken" in lane.reason
