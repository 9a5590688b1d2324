# SPDX-License-Identifier: Apache-2.0
"""A PE rank through steps that take long and lanes that are slow: what the CE still wants goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from kvrail.runtime.engine_protocol import SequenceState, StepOutput
from kvrail.runtime.messages import Accepted, Prefill, PrefillDone, Sampling
from kvrail.runtime.prefilling import Prefilling
from kvrail.runtime.rank import Front, Loop
from kvrail.transfer.chunked_pool import Span
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkKey,
    LinkUp,
    PeerBeat,
    Probe,
    Proven,
    Received,
    WriterEvent,
)
from kvrail.transfer.prefill_ticket import CachedPages
from kvrail.transfer.sender import Sender
from kvrail.transfer.wire import Beat, Grant, TicketBeat, pack_u32

LAYOUT = PageLayout(model_id="m", layers=4, kv_heads=1, head_dim=1, dtype="float32", page_tokens=16)
CE, PE = LinkKey(b"c" * 16, 0), LinkKey(b"p" * 16, 0)
TICKET, TTL_S = b"t" * 16, 10.0
SAMPLING = Sampling(max_tokens=4, seed=1)
TCP = LaneInfo("put", "tcp", "host", "worker")


class Writer:
    def __init__(self, ttl_s: float) -> None:
        self.ttl_s, self.done, self.pushed, self.rung = ttl_s, 0, 0, False
        self.told: list[tuple[Any, str]] = []
        self.units: list[tuple[int, list[int], list[int]]] = []
        self.parts: list[tuple[int, int] | None] = []

    def push(
        self,
        pool: int,
        address: int,
        source: Any,
        target: Any,
        *,
        after: Any = None,
        way: str = "",
        part: tuple[int, int] | None = None,
    ) -> None:
        self.pushed += len(target)
        self.parts.append(part)
        self.told.append((after, way))
        self.units.append((address, source.tolist(), target.tolist()))

    def ring(self, message: bytes) -> None:
        self.rung = True

    def renew(self, ttl_s: float) -> None:
        pass

    def stop(self) -> None:
        pass


class Bench:
    """A real ledger and role; engine, links and writers only take notes."""

    def __init__(
        self, lane: LaneInfo = TCP, cache: Any = None, host_pages: CachedPages | None = None
    ) -> None:
        self.sent: list[Any] = []
        self.streams: list[int | None] = []
        self.added: list[str] = []
        self.watchers: list[Any] = []
        self.aborted: list[str] = []
        self.writers: list[Writer] = []
        self.opened: list[int] = []
        self.beats: list[Beat] = []
        engine: Any = SimpleNamespace(
            layout=LAYOUT,
            stream=7,
            add=lambda request, tokens, sampling, prefill_only, cache: self.added.append(request),
            watch=self.watchers.append,
            abort=self.aborted.append,
            release=self.added.remove,
            sequence=lambda request: (
                SequenceState([0, 1], 32, 0, host_pages=host_pages) if request in self.added else None
            ),
        )
        links: Any = SimpleNamespace(
            send=lambda key, message: None,
            writer=self._writer,
            set_beat=lambda key, beat: self.beats.append(beat),
        )
        pools: Any = SimpleNamespace(
            pages=SimpleNamespace(address=0, unit_bytes=LAYOUT.page_bytes), fence=self._fence
        )
        self.role = Prefilling(
            engine=engine,
            pool=SimpleNamespace(),  # type: ignore[arg-type]
            pools=pools,
            links=links,
            sender=Sender(LAYOUT, incarnation=PE.incarnation, rank=PE.rank),
            send=self.sent.append,
            cache=cache,
        )
        self.role.on_link(0, LinkUp(CE, 1, lane))

    def _fence(self, stream: int | None) -> str:
        self.streams.append(stream)
        return f"fence {len(self.streams)}"

    def _writer(self, key: LinkKey, writer: int, ttl_s: float) -> Writer:
        self.writers.append(Writer(ttl_s))
        self.opened.append(writer)
        return self.writers[-1]

    def start(self, tokens: int = 32) -> None:
        grant = Grant(
            ticket=TICKET,
            epoch=1,
            ce=CE.incarnation,
            ce_rank=CE.rank,
            pe=PE.incarnation,
            pe_rank=PE.rank,
            token_start=0,
            token_end=32,
            pages=pack_u32([5, 6]),
            ttl_s=TTL_S,
        )
        self.role.on_link(0, Received(CE, grant))
        self.call("r", tokens)

    def call(self, request: str, tokens: int = 32, ticket: bytes = TICKET) -> None:
        self.role.handle(
            0, Prefill(request_id=request, ticket=ticket, tokens=pack_u32([1] * tokens), sampling=SAMPLING)
        )

    def wanted(self) -> PeerBeat:
        return PeerBeat(CE, Beat(steps=1, state="serving", tickets=[TicketBeat(TICKET, 0)]))

    def progress(self) -> int:
        self.role.beat(1)
        (ticket,) = self.beats[-1].tickets
        return ticket.progress


def done(at: float, bench: Bench) -> None:
    bench.role.on_step(at, [StepOutput("r", 32, 9, None, 0)])


def test_tickets_outlive_a_step_longer_than_their_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.start()
    clock = [0.0]
    heard: list[list[Any]] = [[], [bench.wanted()]]

    def step() -> list[StepOutput]:
        assert bench.beats[-1].tickets, "the CE hears of the ticket before the step, not after it"
        clock[0] += 2 * TTL_S
        return [StepOutput("r", 32, 9, None, 0)]

    bench.role.engine.step, bench.role.engine.has_work = step, True  # type: ignore[method-assign, misc]
    monkeypatch.setattr("kvrail.runtime.rank.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(bench.role, "stats", lambda steps: steps)
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PAIR) as socket:
        front = Front(socket, "inproc://nobody")
        # The CE has renewed the ticket all the while; that is heard when the step is over.
        Loop(front, bench.role, (), lambda now: heard.pop(0))._turn()
    (writer,) = bench.writers
    assert (writer.pushed, writer.rung, writer.ttl_s) == (2, True, TTL_S)
    bench.role.tick(clock[0])
    assert not [message for message in bench.sent if isinstance(message, PrefillDone)]


def test_bytes_that_are_written_count_as_progress_while_the_doorbell_waits() -> None:
    bench = Bench()
    bench.start()
    done(1, bench)
    (writer,) = bench.writers
    assert writer.rung
    before = bench.progress()
    bench.role.tick(2)
    assert bench.progress() == before, "nothing has moved"
    writer.done = 1
    bench.role.tick(3)
    assert bench.progress() > before


def test_a_call_for_other_tokens_than_its_ticket_is_refused() -> None:
    bench = Bench()
    bench.start(tokens=33)
    bench.role.tick(0)
    (end,) = [message for message in bench.sent if isinstance(message, PrefillDone)]
    assert (end.ok, end.status, bench.added) == (False, 400, [])


def test_a_request_id_that_the_engine_still_knows_is_refused() -> None:
    bench = Bench()
    bench.start()
    bench.call("r", ticket=b"u" * 16)
    (end,) = [message for message in bench.sent if isinstance(message, PrefillDone)]
    assert (end.ok, end.status, bench.added) == (False, 409, ["r"])
    done(1, bench)
    assert bench.writers[0].rung


def test_so_is_one_whose_pages_are_kept_behind_a_broken_link() -> None:
    """Its call is over, but a doorbell may be under way: until that is proven, nothing else may take its id."""
    bench = Bench()
    bench.start()
    done(1, bench)
    bench.role.on_link(2, LinkDown(CE, 1, "broken"))
    bench.role.on_link(2, LinkUp(CE, 2, TCP))
    bench.sent.clear()
    bench.call("r", ticket=b"u" * 16)
    (end,) = [message for message in bench.sent if isinstance(message, PrefillDone)]
    assert (end.ok, end.status, bench.added) == (False, 409, ["r"])
    bench.role.on_link(3, Proven(CE, 1, "worker"))
    assert bench.added == []
    bench.call("r", ticket=b"v" * 16)
    assert isinstance(bench.sent[-1], Accepted)


def test_each_step_s_pushes_wait_for_what_that_step_has_queued() -> None:
    bench = Bench()
    bench.start()
    bench.role.on_step(1, [StepOutput("r", 16, None, None, 0)])
    bench.role.on_step(2, [StepOutput("r", 32, 9, None, 0)])
    assert bench.streams == [7, 7], "one fence a step, behind the engine's stream"
    assert [after for after, _ in bench.writers[0].told] == ["fence 1", "fence 2"]


def test_what_the_host_cache_has_goes_out_before_it_is_computed() -> None:
    """Straight from there; on a GPU from the pool, behind the copy into it and not behind the model's work."""
    span = Span(4096, np.array([3], dtype=np.uint32), np.array([0]))
    on_cpu: Any = SimpleNamespace(in_stream_order=False, spans=lambda units: [span])
    on_gpu: Any = SimpleNamespace(in_stream_order=True, behind_loads=lambda: "behind the copies")
    for cache, unit, expected in (
        (on_cpu, 13, [((4096, [3], [5]), None), ((0, [1], [6]), "fence 1")]),
        (on_gpu, 0, [((0, [0], [5]), "behind the copies"), ((0, [1], [6]), "fence 1")]),
    ):
        bench = Bench(cache=cache, host_pages=CachedPages(0, np.array([unit], dtype=np.uint32)))
        bench.start()
        bench.role.on_step(1, [StepOutput("r", 16, None, None, 16)])
        assert bench.streams == []
        bench.role.on_step(2, [StepOutput("r", 32, 9, None, 16)])
        (writer,) = bench.writers
        assert [
            (units, after) for units, (after, _) in zip(writer.units, writer.told, strict=True)
        ] == expected
        assert bench.role._counters["pages_pushed_from_host"] == 1


def test_the_way_of_a_push_is_the_one_that_the_probes_say_is_faster() -> None:
    page = LAYOUT.page_bytes
    for slow in ("kernel", "engine"):
        ways: dict[Any, float] = {"kernel": 10.0, "engine": 10.0, slow: 1000.0}
        probes = tuple(Probe(page, 1.0, us, 1, way) for way, us in ways.items())
        bench = Bench(LaneInfo("peer", "cuda_ipc", "cuda", "process", probes))
        bench.start()
        done(1, bench)
        (way,) = {way for _, way in bench.writers[0].told}
        assert way in ways
        assert way != slow
        ((_, _, counted),) = bench.role._board.counters()
        assert counted[f"bytes_by_{way}"] == counted["bytes"] == 2 * page


def test_what_of_a_push_no_prefill_hides_is_counted() -> None:
    bench = Bench()
    bench.start()
    bench.role.on_step(1, [StepOutput("r", 16, None, None, 0)])
    bench.role.on_step(2, [StepOutput("r", 32, 9, None, 0)])
    # Heard of half a second later, behind another step.
    bench.role.on_link(2.75, WriterEvent(CE, 1, "rung", bench.opened[0], True, at=2.25))
    ((_, _, counted),) = bench.role._board.counters()
    assert counted["unhidden_seconds"] == 0.25
    assert not bench.role._rings


NOW = 1.5


@pytest.fixture
def queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is NOW while a step is being queued."""
    monkeypatch.setattr("kvrail.runtime.prefilling.time", SimpleNamespace(monotonic=lambda: NOW))


@pytest.mark.parametrize(
    ("ms", "parts"), [(0.5, []), (3.9, []), (4.1, [2]), (9.1, [1, 2]), (200.0, [1, 2, 3])]
)
def test_the_end_of_a_prompt_leaves_in_parts_where_its_link_is_slow(ms: float, parts: list[int]) -> None:
    """More parts than layers there are not; and what is computed for nobody, or not yet granted, has no link."""
    nbytes = 32 * LAYOUT.token_bytes
    bench = Bench(LaneInfo("put", "rc", "cuda", "worker", (Probe(nbytes, 1.0, ms * 1e3, 1, "put"),)))
    assert bench.role.step_begins({"r": 32}) == []
    bench.start()
    assert bench.role.step_begins({"r": 32, "somebody else's": 1 << 20}) == parts


def test_a_step_that_is_queued_is_pushed_by_layers_each_behind_its_work(queueing: None) -> None:
    bench = Bench()
    assert bench.watchers == [bench.role]
    bench.start()
    bench.role.tick(NOW)
    layer = LAYOUT.page_bytes // 4
    for layers in (1, 3):
        bench.role.layers_queued(layers)
    bench.role.step_queued({"r": 32, "somebody else's": 7})
    (writer,) = bench.writers
    assert writer.parts == [(0, layer), (layer, 2 * layer), (3 * layer, layer)]
    assert [after for after, _ in writer.told] == ["fence 1", "fence 2", "fence 3"]
    assert writer.units == 3 * [(0, [0, 1], [5, 6])]
    assert not writer.rung
    # The step itself is over: its pages are out, and whole pages count once.
    done(NOW, bench)
    assert (len(writer.parts), writer.rung) == (3, True)
    ((_, _, counted),) = bench.role._board.counters()
    assert (counted["pages"], counted["bytes"]) == (2, 2 * LAYOUT.page_bytes)


def test_the_layers_of_a_step_are_no_parts_of_the_next_one(queueing: None) -> None:
    bench = Bench()
    bench.start()
    for tokens, layers in ((16, 1), (32, 2)):
        bench.role.tick(NOW)
        bench.role.layers_queued(layers)
        if tokens == 32:
            bench.role.step_queued({"r": tokens})
        # (The first one was never queued to its end.)
        bench.role.on_step(NOW, [StepOutput("r", tokens, None, None, 0)])
    half = LAYOUT.page_bytes // 2
    assert bench.writers[0].parts == [None, (0, half), (half, half)]
    assert [units[1:] for units in bench.writers[0].units] == [([0], [5]), ([1], [6]), ([1], [6])]


@pytest.mark.parametrize("long_one", ["this one", "the one before"])
def test_a_step_that_may_outlive_its_tickets_is_pushed_when_it_is_over(queueing: None, long_one: str) -> None:
    """Until then their renewals have not been heard."""
    bench = Bench()
    if long_one == "the one before":
        bench.role.tick(NOW - 5)
        bench.role.on_step(NOW, [])
    bench.start()
    bench.role.tick(NOW if long_one == "the one before" else NOW - 5)
    bench.role.layers_queued(1)
    bench.role.step_queued({"r": 32})
    assert not bench.writers
    done(NOW, bench)
    assert bench.writers[0].parts == [None]
    assert bench.writers[0].rung


def test_what_the_ledger_wants_of_the_engine_waits_for_the_end_of_a_step(queueing: None) -> None:
    bench = Bench()
    bench.start()
    bench.role.tick(NOW)
    # Too few pages for so many tokens: the ledger ends the ticket at once.
    bench.role.engine.sequence = lambda request: SequenceState([0], 32, 0)  # type: ignore[method-assign]
    bench.role.step_queued({"r": 32})
    (end,) = [message for message in bench.sent if isinstance(message, PrefillDone)]
    assert not end.ok
    assert bench.aborted == [], "the engine is in the middle of it"
    done(NOW, bench)
    assert bench.aborted == ["r"]
