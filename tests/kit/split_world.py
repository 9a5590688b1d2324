# SPDX-License-Identifier: Apache-2.0
"""Both ranks of a split in one process: real roles, ledgers and engines, over links and writers that run on command.

What a writer was told to push it copies when the world lets it, from the address that it was given: a source page
that was reused meanwhile gives wrong tokens, and a target page that no ticket holds is an error at once.
"""

from __future__ import annotations

import ctypes
import random as pacing
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

from kvrail.runtime.completion import Completion
from kvrail.runtime.messages import (
    Abort,
    Deferred,
    Failed,
    Granted,
    Outputs,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Submit,
)
from kvrail.runtime.prefilling import Prefilling
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkKey,
    LinkUp,
    PeerBeat,
    Proven,
    Received,
    WriterEvent,
)
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.sender import Sender
from kvrail.transfer.wire import decode, pack_u32, unpack_u32

__all__ = ["SplitWorld"]

CE, PE = LinkKey(b"c" * 16, 0), LinkKey(b"p" * 16, 0)
_LANE = LaneInfo("put", "tcp", "host", "worker")


def _unit_pool(name: str, memory: bytearray, units: int, unit_bytes: int) -> Any:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if memory else 0
    return SimpleNamespace(name=name, address=address, units=units, unit_bytes=unit_bytes)


def _pools(rig: Any) -> Any:
    layout, pool = rig.model.layout, rig.pool
    state = _unit_pool("state", rig.state, pool.state_slots, layout.state_bytes) if pool.state_slots else None
    return SimpleNamespace(
        pages=_unit_pool("pages", rig.memory, pool.pages, layout.unit_bytes),
        state=state,
        cuda=None,
        fence=lambda stream: None,
    )


class _Writer:
    """One native writer: what it was told, in order, carried out by `run`."""

    def __init__(self, world: SplitWorld, number: int, epoch: int) -> None:
        self.world, self.number, self.epoch = world, number, epoch
        self.todo: deque[Any] = deque()
        self.done = 0
        self.stopped = False

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
        assert not self.stopped
        # The native writer copies its arguments at once.
        units = zip(source, target, strict=True)
        self.todo += [(pool, address, int(s), int(t), part, after) for s, t in units]

    def ring(self, message: bytes) -> None:
        self.todo.append(message)

    def renew(self, ttl_s: float) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True
        self.todo.append(None)

    def run(self, count: int) -> None:
        while self.todo and count:
            count -= 1
            one = self.todo[0]
            if isinstance(one, tuple) and not self.stopped and one[-1] is not None and not one[-1].done():
                return
            self.todo.popleft()
            if one is None:
                self.world.tell_pe(self, "quiet", True)
            elif isinstance(one, bytes):
                if not self.stopped:
                    self.world.to_ce.append((self.epoch, decode(one)))
                    self.world.tell_pe(self, "rung", True)
            elif not self.stopped:
                self.world.copy(*one[:-1])
                self.done += 1
                if not self.todo:
                    self.world.tell_pe(self, "progress", True)


class _Fence:
    """Work on a GPU that is done after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.looks = 0


class Checksums(Executor):
    """The thread of checksums, which gets on when the world says so."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append(lambda: future.set_result(work(*args, **options)))
        return future

    def run(self) -> None:
        while self.waiting:
            self.waiting.popleft()()


class SplitWorld:
    """`ce` and `pe` are Rigs of one model. Call `act` as often as wanted, then `settle`.

    `queued`: the PE is told of its steps while they run, as on a GPU, and pushes behind fences and in parts.
    """

    def __init__(
        self,
        ce: Any,
        pe: Any,
        random: Any,
        *,
        seats: int = 6,
        share: float = 0.6,
        verify: float = 0.5,
        lose_calls: float = 0.0,
        queued: bool = False,
    ) -> None:
        self.ce, self.pe, self.random = ce, pe, random
        self.lose_calls = lose_calls
        self.now = 0.0
        self.epoch = 1
        self.to_ce: deque[Any] = deque()
        self.to_pe: deque[Any] = deque()
        self.pe_events: deque[WriterEvent] = deque()
        self.calls: deque[Any] = deque()
        self.writers: list[_Writer] = []
        self.checksums, self.pace = Checksums(), pacing.Random(0)
        self.ce_pools, self.pe_pools = _pools(ce), _pools(pe)
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, str]] = {}
        self.failed: dict[str, Failed] = {}
        self.cached: dict[str, int] = {}
        self.open: dict[str, Submit] = {}
        self.closed: dict[str, set[int]] = {}
        self.routes: dict[str, str] = {}
        self.ended_calls: list[str] = []
        # What the CE's rank gave us to call ahead of a grant with, and the requests that were.
        self.next_ticket = b""
        self.ahead: dict[str, bytes] = {}
        self.deferred = 0
        self.copied = self.parts = 0
        self.broken = 0
        layout = ce.model.layout
        pool: PagePool = ce.pool
        self.receiver = Receiver(pool, layout, incarnation=CE[0], rank=0, link_share=share)
        self.sender = Sender(layout, incarnation=PE[0], rank=0)
        ce_links: Any = SimpleNamespace(
            send=lambda key, message: self.to_pe.append((self.epoch, message)),
            fence=lambda key, reason: None,
            set_beat=lambda key, beat: setattr(self, "ce_beat", beat),
        )
        pe_links: Any = SimpleNamespace(
            send=lambda key, message: self.to_ce.append((self.epoch, message)),
            writer=self._writer,
            set_beat=lambda key, beat: setattr(self, "pe_beat", beat),
        )
        self.completion = Completion(
            engine=ce.engine,
            pool=pool,
            pools=self.ce_pools,
            links=ce_links,
            receiver=self.receiver,
            send=self._to_ce_front,
            verify_share=verify,
            seats=min(seats, pool.state_slots or seats),
            largest_ticket=min(int(share * pool.pages), pool.pages - pool.growth_reserve),
            checksums=self.checksums,
        )
        self.prefilling = Prefilling(
            engine=pe.engine,
            pool=pe.pool,
            pools=self.pe_pools,
            links=pe_links,
            sender=self.sender,
            send=self._to_pe_front,
            cache=pe.host,
        )
        if queued:
            self.pe_pools.fence = lambda stream: _Fence(self.pace.randrange(4))
            inner = list(range(1, layout.layers))
            self.prefilling.step_begins = lambda ending: self.pace.sample(inner, min(1, len(inner)))  # type: ignore[method-assign]
            pe.engine.watch(self.prefilling)
        self._up()

    # --- the parts that are made up -------------------------------------------------------------------------------

    def _up(self) -> None:
        self.completion.on_link(self.now, LinkUp(PE, self.epoch, _LANE))
        self.prefilling.on_link(self.now, LinkUp(CE, self.epoch, _LANE))

    def _writer(self, key: LinkKey, number: int, ttl_s: float) -> _Writer:
        self.writers.append(_Writer(self, number, self.epoch))
        return self.writers[-1]

    def tell_pe(self, writer: _Writer, kind: Any, ok: bool) -> None:
        if writer.epoch == self.epoch:
            self.pe_events.append(WriterEvent(CE, writer.epoch, kind, writer.number, ok))

    def copy(
        self, pool: int, address: int, source: int, target: int, part: tuple[int, int] | None = None
    ) -> None:
        there = self.ce_pools.pages if pool == 0 else self.ce_pools.state
        if pool == 0:
            assert self.ce.pool._state[target] in (1, 2), "a page is written that no ticket holds"
        else:
            assert target not in self.ce.pool._free_states, "a state slot is written that no ticket holds"
        self.parts += part is not None
        offset, nbytes = part or (0, there.unit_bytes)
        ctypes.memmove(
            there.address + target * there.unit_bytes + offset,
            address + source * there.unit_bytes + offset,
            nbytes,
        )
        self.copied += 1

    def _to_ce_front(self, message: Any) -> None:
        match message:
            case Granted():
                self.next_ticket = message.next_ticket or self.next_ticket
                if self.ahead.get(message.request_id) != message.ticket:
                    again = "/2" if message.request_id in self.ahead else ""
                    self.calls.append((message.request_id, again, message.ticket))
            case Deferred():
                self.deferred += 1
                self._take_back(message.request_id)
            case Failed():
                self.failed[message.request_id] = message
                self.open.pop(message.request_id, None)
            case Outputs():
                for item in message.items:
                    self._output(item)

    def _output(self, item: Any) -> None:
        name = item.request_id
        assert name in self.tokens, "an output for nobody"
        if name not in self.open:
            return
        assert item.choice not in self.reasons[name], "a choice goes on behind its end"
        if item.choice in self.closed[name]:
            return
        self.tokens[name].setdefault(item.choice, []).extend(unpack_u32(item.tokens).tolist())
        self.cached[name], self.routes[name] = item.cached_tokens, item.route
        if item.finish_reason is not None:
            self.reasons[name][item.choice] = item.finish_reason
            self._over(name)

    def _take_back(self, name: str) -> None:
        made = (name, "", self.ahead[name])
        if made in self.calls:
            self.calls.remove(made)
        else:
            self.prefilling.handle(self.now, Abort(request_id=name))

    def _over(self, name: str) -> None:
        if len(self.closed[name] | self.reasons[name].keys()) == self.open[name].sampling.n:
            del self.open[name]

    def _to_pe_front(self, message: Any) -> None:
        if isinstance(message, PrefillDone):
            self.ended_calls.append(message.request_id)

    # --- what can happen ------------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: Any, sampling: Any, **options: Any) -> None:
        if options.get("peer") and self.next_ticket:
            self.ahead[name], self.next_ticket = self.next_ticket, b""
            options["called"] = (self.ahead[name], self.now)
            self.calls.append((name, "", self.ahead[name]))
        submit = Submit(request_id=name, tokens=pack_u32(tokens), sampling=sampling, **options)
        self.tokens[name], self.reasons[name], self.closed[name] = {}, {}, set()
        self.open[name] = submit
        self.submits = getattr(self, "submits", {}) | {name: submit}
        self.completion.handle(self.now, submit)

    def cancel(self, name: str) -> None:
        self.open.pop(name)
        self.completion.handle(self.now, Abort(request_id=name))
        if self.random.random() < 0.5:
            self.prefilling.handle(self.now, Abort(request_id=name))

    def close_choice(self, name: str, choice: int) -> None:
        self.closed[name].add(choice)
        self.completion.handle(self.now, Abort(request_id=name, choice=choice))
        self._over(name)

    def call(self) -> None:
        if self.calls:
            name, again, ticket = self.calls.popleft()
            if self.random.random() < self.lose_calls:
                self.completion.handle(self.now, PrefillFailed(request_id=name, ticket=ticket, reason="lost"))
                if self.random.random() < 0.5:
                    return
            submit = self.submits[name]
            self.prefilling.handle(
                self.now,
                Prefill(
                    request_id=f"{name}{again}",
                    ticket=ticket,
                    tokens=submit.tokens,
                    sampling=submit.sampling,
                    cache=submit.cache,
                ),
            )

    def hear_ce(self, count: int = 1) -> None:
        while self.to_ce and count:
            count -= 1
            epoch, message = self.to_ce.popleft()
            if epoch == self.epoch:
                self.completion.on_link(self.now, Received(PE, message))

    def hear_pe(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.to_pe))):
            epoch, message = self.to_pe.popleft()
            if epoch == self.epoch:
                self.prefilling.on_link(self.now, Received(CE, message))
        while self.pe_events:
            self.prefilling.on_link(self.now, self.pe_events.popleft())

    def beat(self) -> None:
        self.completion.beat(1)
        self.prefilling.beat(1)
        self.completion.on_link(self.now, PeerBeat(PE, self.pe_beat))
        self.prefilling.on_link(self.now, PeerBeat(CE, self.ce_beat))

    def step(self, rig: Any, role: Any) -> bool:
        if role is self.completion and self.pace.random() < 0.7:
            self.checksums.run()
        role.tick(self.now)
        if not rig.engine.has_work:
            return False
        outputs = rig.engine.step()
        role.on_step(self.now, outputs)
        return True

    def run_writers(self, count: int) -> None:
        if self.writers:
            self.writers[int(self.random.integers(len(self.writers)))].run(count)
        self.writers = [
            w for w in self.writers if w.todo or self.prefilling._writers.get(w.number) is not None
        ]

    def break_link(self) -> None:
        """The PE sees it first; its writers, and a doorbell under way, may still get through until it is proven."""
        self.broken += 1
        self.prefilling.on_link(self.now, LinkDown(CE, self.epoch, "broken"))
        writers, self.writers = self.writers, []
        for writer in writers:
            writer.run(int(self.random.integers(8)))
        if self.random.random() < 0.5:
            self.hear_ce(3)
        for _ in range(int(self.random.integers(4))):
            self.step(self.pe, self.prefilling)
            for writer in writers:
                writer.run(int(self.random.integers(8)))
        if self.random.random() < 0.5:
            self.hear_ce(30)
        self.pe_events.clear()
        self.prefilling.on_link(self.now, Proven(CE, self.epoch, "worker"))
        self.completion.on_link(self.now, LinkDown(PE, self.epoch, "broken"))
        self.completion.on_link(self.now, Proven(PE, self.epoch, "worker"))
        self.epoch += 1
        self._up()

    def check(self) -> None:
        for rig in (self.ce, self.pe):
            rig.pool.check()
            if rig.host is not None:
                rig.host.index.check()

    def act(self, copier: Any = None) -> None:
        """One thing at random."""
        self.now += 0.01
        if self.random.random() < 0.2:
            self.beat()
        choice = int(self.random.integers(8))
        if choice == 0:
            self.call()
        elif choice == 1:
            self.hear_ce(int(self.random.integers(1, 4)))
        elif choice == 2:
            self.hear_pe(int(self.random.integers(1, 4)))
        elif choice in (3, 4):
            self.step(self.pe, self.prefilling)
        elif choice == 5:
            self.step(self.ce, self.completion)
        elif choice == 6:
            self.run_writers(int(self.random.integers(1, 8)))
        elif copier is not None and self.random.random() < 0.4:
            copier.run(int(self.random.integers(1, 3)))
        self.check()

    def settle(self, copier: Any = None, limit: int = 3000) -> None:
        """Let everything come to its end."""
        for _ in range(limit):
            self.now += 0.01
            self.beat()
            while self.calls:
                self.call()
            self.hear_pe(100)
            worked = self.step(self.pe, self.prefilling)
            for writer in self.writers:
                writer.run(1000)
            self.run_writers(1)
            self.hear_pe(100)
            if copier is not None:
                copier.run()
            self.hear_ce(100)
            worked |= self.step(self.ce, self.completion)
            self.check()
            busy = (
                worked
                or self.open
                or self.checksums.waiting
                or self.to_ce
                or self.to_pe
                or self.pe_events
                or self.calls
            )
            if not busy and not self.sender.gauges()["tickets"] and not any(self.receiver.gauges().values()):
                return
        raise AssertionError(f"it does not come to an end: {list(self.open)}, {self.sender.gauges()}")

    def assert_idle(self) -> None:
        for rig in (self.ce, self.pe):
            rig.assert_idle()
            assert not rig.engine._roster._sequences
            assert not rig.engine._roster._families
            if rig.host is not None:
                assert not rig.host._loads
                assert not rig.host._orphans
                assert not rig.host._saves
        assert not self.completion._requests
        assert not self.completion._waiting
        assert not self.prefilling._calls
        assert not len(self.prefilling._writers)
        assert not self.sender._endings._kept
        assert not any(self.receiver.gauges().values())
        assert not any(self.sender.gauges().values())
