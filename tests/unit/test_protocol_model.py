# SPDX-License-Identifier: Apache-2.0
"""Random histories of one CE and two PEs: no write lands in a page that its ticket does not own, nothing is left over.

Real PagePool, Receiver and Sender; the wire, the native writers and the engines are simulated (kit/protocol_world.py).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kit.protocol_world import World
from kit.simulated_pe import CE
from kvrail.transfer.wire import Cancel, Doorbell, Quiesced

T = TypeVar("T")
HOST = st.integers(0, 1)
PICK = st.integers(0, 1000)
FAULTS = [
    "kill",
    "freeze",
    "ce drops the link",
    "pe drops the link",
    "suspect",
    "put fails",
    "engine fails",
    "caller aborts",
    "call lost",
    "call duplicated",
    "call again",
]
TURNS = ["ce", "pe", "kept back", "overtake"]
REPAIRS = [
    "thaw",
    "restart",
    "hear of death",
    "pe link ends",
    "fence",
    "worker dies",
    "recover",
    "connect",
]


def picked(items: list[T], pick: int) -> T:
    """One of `items` (not empty); shrinks to the newest."""
    return items[-1 - pick % len(items)]


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.connect(0)
        self.world.connect(1)

    # --- the good way -----------------------------------------------------------------------------------------

    @rule(
        host=HOST,
        tokens=st.integers(0, 18),
        verify=st.booleans(),
        called=st.sampled_from([True, True, False]),
        prompt=st.integers(0, 3),
        ahead=st.booleans(),
        patient=st.booleans(),
    )
    def submit(
        self, host: int, tokens: int, verify: bool, called: bool, prompt: int, ahead: bool, patient: bool
    ) -> None:
        """A request gets its grant; its call may be faster or slower than that, or there without one."""
        waiting = len(self.world.calls)
        self.world.submit(host, tokens, verify, prompt, ahead, patient)
        if called and len(self.world.calls) > waiting:
            self.call(0)

    @precondition(lambda self: self.world.calls)
    @rule(pick=PICK)
    def call(self, pick: int) -> None:
        """The prefill call reaches whatever runs at that address."""
        host, request_id, ticket = call = picked(self.world.calls, pick)
        if self.world.hosts[host].running:
            self.world.calls.remove(call)
            self.world.hosts[host].call(self.world.now, request_id, ticket)

    @rule(host=HOST, to_pe=st.integers(0, 3), to_ce=st.integers(0, 3))
    def talk(self, host: int, to_pe: int, to_ce: int) -> None:
        """Some messages arrive, in the order in which they were sent."""
        for connection in self.world.connections(host)[-2:]:
            for _ in range(to_pe):
                self.world.say_to_pe(connection)
            for _ in range(to_ce):
                self.world.say_to_ce(connection)

    @rule(
        host=HOST,
        pick=PICK,
        tokens=st.integers(1, 20),
        finish=st.sampled_from([None, None, None, "length"]),
        token_first=st.booleans(),
    )
    def compute(self, host: int, pick: int, tokens: int, finish: str | None, token_first: bool) -> None:
        """The engine does a step of one prompt."""
        process = self.world.hosts[host]
        if process.running:
            for connection in process.connections[-1:]:
                self.world.say_to_pe(connection)
            if process.prefills:
                prefill = picked(list(process.prefills.values()), pick)
                process.compute(self.world.now, prefill, tokens, finish, token_first)

    @rule(pick=PICK, count=st.integers(1, 6))
    def land(self, pick: int, count: int) -> None:
        """Puts land, of any writer of any link that ever was."""
        writers = [w for c in self.world.connections() for w in c.writers.values() if w.puts]
        if writers:
            self.world.land(picked(writers, pick), count)

    @rule(host=HOST, count=st.integers(1, 5))
    def native_events(self, host: int, count: int) -> None:
        process = self.world.hosts[host]
        if process.running:
            process.native_events(self.world.now, count)

    @rule(host=HOST, seconds=st.sampled_from([0.5, 3, 6, 16, 31]), beats=st.booleans())
    def time_passes(self, host: int, seconds: float, beats: bool) -> None:
        self.world.advance(seconds)
        if beats:
            self.world.beat(host)

    @rule(pick=PICK, cancel=st.booleans())
    def request_ends(self, pick: int, cancel: bool) -> None:
        """The client leaves, or a sequence has its last token."""
        if cancel and self.world.requests:
            self.world.cancel(picked(list(self.world.requests), pick))
        elif self.world.sequences:
            self.world.finish_sequence(picked(list(self.world.sequences), pick))

    # --- the other ways ---------------------------------------------------------------------------------------

    @rule(host=HOST, pick=PICK, side=st.sampled_from(TURNS))
    def message_out_of_turn(self, host: int, pick: int, side: str) -> None:
        """A late duplicate on any epoch of this link, one that a broken link kept back, or one before its turn."""
        process = self.world.hosts[host]
        if side == "ce":
            heard = [(c, m) for c in process.connections for m in c.heard_by_ce]
            if heard:
                self.world.hear(*picked(heard, pick))
            return
        messages = [m for c in process.connections for m in c.heard_by_pe]
        if side == "kept back":
            messages = [m for c in process.connections if not c.ce_open for m in c.to_pe]
        elif side == "overtake":
            messages = [m for c in process.connections[-1:] for m in c.to_pe if isinstance(m, Cancel)]
        if messages and process.running:
            process.sender.on_message(self.world.now, CE, picked(messages, pick))
            process.carry_out()

    @precondition(lambda self: self.world.requests)
    @rule(pick=PICK, landed=st.booleans(), wrong=st.sampled_from(["link", "epoch"]))
    def wrong_witness(self, pick: int, landed: bool, wrong: str) -> None:
        """Somebody says that all is well with a ticket: the other PE, or the right one of another epoch."""
        request = picked(list(self.world.requests.values()), pick)
        link, epoch = request.link, request.epoch
        if wrong == "epoch":
            epoch += 1
        else:
            link = next(process.key for process in self.world.hosts if process.key != link)
        said: Doorbell | Quiesced = Quiesced(ticket=request.ticket, epoch=epoch, proven=True)
        if landed:
            said = Doorbell(ticket=request.ticket, epoch=epoch, status="failed")
        self.world.receiver.on_message(self.world.now, link, said)
        self.world.carry_out()

    @rule(host=HOST, pick=PICK, fault=st.sampled_from(FAULTS))
    def breaks(self, host: int, pick: int, fault: str) -> None:
        world, process = self.world, self.world.hosts[host]
        prefills, now = list(process.prefills.values()), world.now
        calls = [call for call in world.calls if call[0] == host]
        writers = [w for c in process.connections for w in c.writers.values() if w.puts]
        current = world.current(host)
        if fault == "kill":
            world.kill(host)
        elif fault == "freeze":
            process.frozen = True
        elif fault == "ce drops the link" and current is not None:
            world.ce_drops(current)
        elif fault == "suspect":
            world.receiver.link_suspect(now, process.key)
            world.carry_out()
        elif fault == "call lost" and calls:
            call = picked(calls, pick)
            world.calls.remove(call)
            world.receiver.give_up(now, call[2], "the prefill call failed")
            world.carry_out()
        elif not process.running:
            return
        elif fault == "pe drops the link" and process.connection is not None:
            world.excused.add(process)
            process.lose_link(now, process.connection)
        elif fault == "put fails" and writers:
            world.excused.add(process)
            writer = picked(sorted(writers, key=lambda w: w.stopped), pick)
            writer.connection.fail(writer)
        elif fault == "engine fails" and prefills:
            process.sender.prefill_failed(now, picked(prefills, pick).ticket, "out of memory")
            process.carry_out()
        elif fault == "caller aborts" and prefills:
            process.sender.abort(now, picked(prefills, pick).request_id, "caller gone")
            process.carry_out()
        elif fault.startswith("call ") and calls:
            _, request_id, ticket = picked(calls, pick)
            process.call(now, request_id + (" again" if fault == "call again" else ""), ticket)

    @rule(host=HOST, pick=PICK, repair=st.sampled_from(REPAIRS))
    def gets_on(self, host: int, pick: int, repair: str) -> None:
        world, process = self.world, self.world.hosts[host]
        dead = [p for p in world.processes if not p.alive]
        closed = [c for c in world.connections() if not c.ce_open and not c.worker_gone]
        if repair == "thaw":
            process.frozen = False
        elif repair == "restart":
            world.restart(host)
        elif repair == "hear of death" and dead:
            world.hear_of_death(picked(dead, pick))
        elif repair == "pe link ends" and process.running:
            for connection in process.connections:
                process.end_link(connection)
        elif repair == "fence" and world.fences:
            world.ce_drops(world.fences.pop(0))
        elif repair == "worker dies" and closed:
            world.worker_dies(picked(closed, pick))
        elif repair == "recover":
            world.receiver.link_recovered(process.key)
        elif repair == "connect":
            world.connect(host)

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_idle()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# --- long walks ---------------------------------------------------------------------------------------------------


def walk(seed: int, steps: int) -> World:
    """A long history with rare faults, so that much is under way when one comes; the world, settled and checked."""
    chance = random.Random(seed)
    faults = chance.choice([0.5, 2, 6])
    machine = Protocol()

    def some(limit: int) -> int:
        return chance.randrange(limit)

    def submit() -> None:
        ahead = chance.random() < 0.5
        verify, called, patient = (chance.random() < odds for odds in (0.5, 0.8, 0.3))
        machine.submit(some(2), some(19), verify, called, some(2), ahead, patient)

    def compute() -> None:
        finish = chance.choice([None, None, None, None, "length"])
        machine.compute(some(2), some(9), 1 + some(20), finish, chance.random() < 0.7)

    def wrong_witness() -> None:
        machine.wrong_witness(some(9), chance.random() < 0.5, chance.choice(["link", "epoch"]))

    moves = [
        (10, submit),
        (5, lambda: machine.world.calls and machine.call(some(9))),
        (14, lambda: machine.talk(some(2), some(4), some(4))),
        (14, compute),
        (14, lambda: machine.land(some(9), 1 + some(4))),
        (10, lambda: machine.native_events(some(2), 1 + some(5))),
        (4, lambda: machine.time_passes(some(2), chance.choice([0.5, 1, 3, 6, 16]), True)),
        (5, lambda: machine.request_ends(some(9), chance.random() < 0.4)),
        (4, lambda: machine.message_out_of_turn(some(2), some(99), chance.choice(TURNS))),
        (2, lambda: machine.world.requests and wrong_witness()),
        (faults, lambda: machine.breaks(some(2), some(9), chance.choice(FAULTS))),
        (8, lambda: machine.gets_on(some(2), some(9), chance.choice(REPAIRS))),
    ]
    weights = [weight for weight, _ in moves]
    for _ in range(steps):
        chance.choices(moves, weights)[0][1]()
        machine.counts_add_up()
    machine.teardown()
    return machine.world


def test_long_walks_reach_everything() -> None:
    worlds = [walk(seed, 250) for seed in range(240)]
    seen: Counter[str] = Counter()
    for world in worlds:
        seen += world.seen + world.receiver.counters
        seen += sum((process.sender.counters for process in world.processes), Counter[str]())
    expected = {
        "put": 2000,
        "called in vain": 20,
        "matched": 200,
        "matched all": 50,
        "FirstTokenReady": 500,
        "Landed": 400,
        "Lost": 300,
        "Fence": 70,
        "late_doorbells": 200,
        "late_first_tokens": 100,
        "failed_doorbells": 60,
        "unproven_answers": 8,
        "unanswered_cancels": 100,
        "expired": 150,
        "stale_epochs": 80,
        "proofs_refused": 100,
        "ended_landed": 500,
        "ended_failed": 250,
        "ended_quiesced": 120,
        "ended_unproven": 15,
        "ended_gone": 60,
        "duplicate_grants": 200,
        "unknown_tickets": 300,
    }
    rare = {what: seen[what] for what, least in expected.items() if seen[what] < least}
    assert not rare, f"the walks no longer reach this often enough to mean anything: {rare}"
