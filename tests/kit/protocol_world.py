# SPDX-License-Identifier: Apache-2.0
"""One completion engine (real pool, real ledger) and two prefill engine hosts, with everything watched.

Watched at each landing put: the page belongs to the put's ticket. Watched at each step: counts add up, the pages of
running sequences keep what landed in them, requests end once, no link holds more than its share.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kit.simulated_pe import CE, LAYOUT, Connection, Process, SimWriter
from kvrail.transfer.errors import LinkLost, NoPages
from kvrail.transfer.granted_ticket import Ticket
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import (
    Fence,
    FirstTokenReady,
    Landed,
    LinkKey,
    Lost,
    ReceiverEffect,
    Send,
    owner_of,
)
from kvrail.transfer.wire import Beat, HandOff, LinkMessage

__all__ = ["World"]

PAGES, SLOTS, SHARE = 24, 6, 0.5


class Request:
    """What the CE's caller knows of one request."""

    def __init__(self, ticket: Ticket, keys: list[bytes]) -> None:
        self.ticket = ticket.id
        self.keys = keys
        self.start = ticket.token_start
        self.link = ticket.link
        self.epoch = ticket.epoch
        self.tokens = ticket.token_end
        self.first: HandOff | None = None
        self.end = ""


class World:
    """The simulation. Hosts 0 and 1 are an address each; a restarted process there is another peer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = PagePool(PAGES, SLOTS, growth_reserve=2)
        self.minted = 0
        self.receiver = Receiver(
            self.pool,
            LAYOUT,
            incarnation=CE[0],
            rank=CE[1],
            link_share=SHARE,
            ttl_s=30,
            answer_s=5,
            random=self._mint,
        )
        self.born = 0
        self.epoch = 0
        self.processes: list[Process] = []
        self.hosts: list[Process] = [self._boot(0), self._boot(1)]
        self.requests: dict[str, Request] = {}
        self.calls: list[tuple[int, str, bytes]] = []
        self.sequences: dict[str, dict[int, Any]] = {}
        self.memory: dict[tuple[int, int], Any] = {}
        # What the page that stands in the prefix cache under a key must hold as long as it stands there.
        self.content: dict[bytes, Any] = {}
        self.fences: list[Connection] = []
        # Processes that gave cause for pages that only their end can free.
        self.excused: set[Process] = set()
        self.seen: Counter[str] = Counter()

    def _mint(self, count: int) -> bytes:
        self.minted += 1
        return self.minted.to_bytes(2, "big") * (count // 2)

    def _boot(self, host: int) -> Process:
        self.born += 1
        process = Process(self.born, "worker" if host == 0 else "process")
        self.processes.append(process)
        return process

    def connections(self, host: int | None = None) -> list[Connection]:
        if host is None:
            return [c for p in self.processes for c in p.connections]
        return self.hosts[host].connections

    # --- what the CE does -------------------------------------------------------------------------------------

    def submit(
        self, host: int, tokens: int, verify: bool, prompt: int, ahead: bool = False, patient: bool = False
    ) -> None:
        """`prompt`: prompts of one number begin alike. `ahead`: its call is made whether or not there is a grant."""
        link = self.hosts[host].key
        before = self.receiver.held(link), self.pool.shared
        keys = [bytes([prompt, page]) for page in range(tokens // LAYOUT.page_tokens)]
        name = f"r{self.minted}"
        ticket_id = self.receiver.reserve_id() if ahead else b""
        if ahead:
            self.calls.append((host, name, ticket_id))
        try:
            ticket = self.receiver.grant(
                self.now,
                name,
                link,
                tokens,
                keys=keys,
                verify=verify,
                patient=patient,
                ticket_id=ticket_id,
            )
        except (NoPages, LinkLost):
            self.seen["called in vain"] += ahead
            assert (self.receiver.held(link), self.pool.shared) == before, "a grant that fails keeps nothing"
            return
        self.seen["matched"] += ticket.token_start > 0
        self.seen["matched all"] += ticket.token_start == tokens > 0
        assert self.current(host) is not None, "a grant needs a link that is up"
        self.requests[ticket.request_id] = Request(ticket, keys)
        if not ahead:
            self.calls.append((host, ticket.request_id, ticket.id))
        self.carry_out()

    def current(self, host: int) -> Connection | None:
        return next((c for c in reversed(self.connections(host)) if c.ce_open), None)

    def cancel(self, request_id: str) -> None:
        request = self.requests[request_id]
        if self.receiver.cancel(self.now, request.ticket, "client left"):
            assert not request.end
            request.end = "cancelled"
        self.carry_out()

    def finish_sequence(self, name: str) -> None:
        del self.sequences[name]
        self.pool.release(name)

    def carry_out(self) -> None:
        while effects := self.receiver.take_effects():
            for effect in effects:
                self._do(effect)

    def _do(self, effect: ReceiverEffect) -> None:
        self.seen[type(effect).__name__] += 1
        if isinstance(effect, Send):
            for connection in self.connections():
                same = (connection.key, connection.epoch) == (effect.link, effect.message.epoch)
                if same and connection.ce_open:
                    connection.to_pe.append(effect.message)
        elif isinstance(effect, Fence):
            self.fences += [c for c in self.connections() if (c.key, c.epoch) == (effect.link, effect.epoch)]
        elif isinstance(effect, FirstTokenReady):
            request = self.requests[effect.request_id]
            assert not request.end
            assert request.first is None, "a first token is final"
            request.first = effect.hand_off
            if effect.hand_off.ended:
                request.end = "finished"
        elif isinstance(effect, Landed):
            self._landed(effect)
        else:
            assert isinstance(effect, Lost)
            request = self.requests[effect.request_id]
            assert not request.end
            assert effect.hand_off == request.first, "the fallback goes on behind the token that is out"
            request.end = "lost"
            self._fall_back(f"local {effect.request_id}", request.tokens)

    def _landed(self, landed: Landed) -> None:
        request = self.requests[landed.request_id]
        assert not request.end
        assert request.first in (None, landed.hand_off)
        assert landed.pages.tolist() == self.pool.pages_of(landed.owner)
        request.end = "landed"
        name = f"sequence {landed.request_id}"
        held = self._matched(request)
        for index, page in enumerate(landed.pages.tolist(), len(held)):
            assert self.memory.get((0, page)) == (landed.ticket, index), (
                "a doorbell over KV that is not there"
            )
            held[page] = self.memory[(0, page)]
        assert self.memory.get((1, landed.state_slot)) == (landed.ticket, "state")
        self.pool.rename(landed.owner, name)
        self.sequences[name] = held
        # As an engine does: full pages are never written again, and others may read them.
        for key, page in list(zip(request.keys, held, strict=False))[request.start // LAYOUT.page_tokens :]:
            self.pool.share(name, [page], [key])
            if page not in self.pool.pages_of(name):
                self.content[key] = held[page]

    def _matched(self, request: Request) -> dict[int, Any]:
        """The pages that a request reads, with what they hold: what was computed for the beginning of its prompt."""
        pages = self.pool.reads_of(owner_of(request.ticket))
        assert len(pages) == request.start // LAYOUT.page_tokens
        held = {page: self.memory[(0, page)] for page in pages}
        assert list(held.values()) == [self.content[key] for key in request.keys[: len(pages)]]
        return held

    def _fall_back(self, name: str, tokens: int) -> None:
        try:
            pages = self.pool.allocate(name, LAYOUT.pages_for(tokens))
        except NoPages:
            return
        for page in pages:
            self.memory[(0, page)] = name
        self.sequences[name] = dict.fromkeys(pages, name)

    # --- what happens on the way ------------------------------------------------------------------------------

    def write(self, ticket: bytes, pool: int, target: int, content: Any) -> None:
        """A put lands. This is the moment that everything is about."""
        self.seen["put"] += 1
        owner = owner_of(ticket)
        if pool == 0:
            mine = target in self.pool.pages_of(owner) or target in self.pool.quarantined_of(owner)
        else:
            mine = target in (self.pool.state_slot_of(owner), self.pool.quarantined_state_of(owner))
        assert mine, (
            f"a put of ticket {owner[:4]} landed in unit {target} of pool {pool}, which it does not own"
        )
        self.memory[(pool, target)] = content

    def connect(self, host: int) -> None:
        process = self.hosts[host]
        if process.running and self.current(host) is None:
            self.epoch += 1
            self.receiver.link_up(self.now, process.key, self.epoch, process.mode)
            process.connect(self.now, self.epoch)
            self.carry_out()

    def say_to_pe(self, connection: Connection) -> None:
        if connection.to_pe and connection.pe_open and connection.process.running:
            connection.process.hear(self.now, connection, connection.to_pe.popleft())

    def say_to_ce(self, connection: Connection) -> None:
        if connection.to_ce and connection.ce_open:
            message = connection.to_ce.popleft()
            connection.heard_by_ce.append(message)
            self.hear(connection, message)

    def hear(self, connection: Connection, message: LinkMessage) -> None:
        self.receiver.on_message(self.now, connection.key, message)
        self.carry_out()

    def beat(self, host: int) -> None:
        process, connection = self.hosts[host], self.current(host)
        if connection is None or not process.running or connection.pe_told_down:
            return
        ours = Beat(steps=1, state="serving", tickets=self.receiver.beat_tickets(process.key))
        theirs = Beat(steps=1, state="serving", tickets=process.sender.beat_tickets(CE))
        process.sender.on_beat(self.now, CE, ours)
        process.carry_out()
        self.receiver.on_beat(self.now, process.key, theirs)
        self.carry_out()

    def land(self, writer: SimWriter, count: int) -> None:
        for _ in range(count):
            if not writer.connection.land(writer, self.write):
                return

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes:
            if process.running:
                process.tick(self.now)
        self.receiver.reap(self.now)
        self.carry_out()

    # --- what breaks ------------------------------------------------------------------------------------------

    def ce_drops(self, connection: Connection) -> None:
        """The CE's loop hears that a link is over; its worker still lives until `worker_dies`."""
        if connection.ce_open:
            connection.ce_open = False
            self.excused.add(connection.process)
            self.receiver.link_down(self.now, connection.key, connection.epoch, "the link broke")
            self.carry_out()

    def worker_dies(self, connection: Connection) -> None:
        if not connection.ce_open and not connection.worker_gone:
            connection.worker_gone = True
            self.receiver.proven(self.now, connection.key, connection.epoch, "worker")
            self.carry_out()

    def kill(self, host: int) -> None:
        process = self.hosts[host]
        process.alive = False
        for connection in process.connections:
            connection.pe_open = False

    def hear_of_death(self, process: Process) -> None:
        if not process.alive:
            for connection in process.connections:
                self.ce_drops(connection)
                self.receiver.proven(self.now, process.key, connection.epoch, "process")
            self.carry_out()

    def restart(self, host: int) -> None:
        if not self.hosts[host].alive:
            self.hosts[host] = self._boot(host)

    # --- what must hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        self.pool.check()
        gauges = self.receiver.gauges()
        assert self.pool.quarantined == gauges["quarantined_pages"]
        written = sum(len(self.pool.pages_of(name)) for name in self.sequences)
        assert self.pool.owned == gauges["ticket_pages"] + written
        for name, pages in self.sequences.items():
            assert {*self.pool.pages_of(name), *self.pool.reads_of(name)} == set(pages)
        for request in self.requests.values():
            if not request.end:
                self._matched(request)
        held: Counter[LinkKey] = Counter()
        for request in self.requests.values():
            owner = owner_of(request.ticket)
            held[request.link] += len(self.pool.pages_of(owner)) + len(self.pool.quarantined_of(owner))
        for process in self.processes:
            assert self.receiver.held(process.key) == held[process.key] <= SHARE * PAGES
            words = (*process.last_words.values(), *process.doubts.values())
            assert all(count <= 1 for count in words), "a ticket has one last message"
        for name, held in self.sequences.items():
            for page, content in held.items():
                assert self.memory[(0, page)] == content, f"page {page} of {name} was overwritten"

    def settle(self) -> None:
        """Let everything that can still happen happen, with engines that do not hang."""
        for process in self.processes:
            process.frozen = False
        for _ in range(12):
            for host in (0, 1):
                self.receiver.link_recovered(self.hosts[host].key)
            for call in self.calls:
                if self.hosts[call[0]].running:
                    self.hosts[call[0]].call(self.now, call[1], call[2])
            self.calls.clear()
            for fenced in self.fences:
                self.ce_drops(fenced)
            self.fences.clear()
            for process in self.processes:
                self.hear_of_death(process)
                for prefill in list(process.prefills.values()) if process.alive else []:
                    process.compute(self.now, prefill, 100, None, True)
                for connection in process.connections:
                    while connection.to_pe and connection.pe_open and process.running:
                        self.say_to_pe(connection)
                    for writer in connection.writers.values():
                        self.land(writer, 1000)
                    if process.alive:
                        process.native_events(self.now)
                    while connection.to_ce and connection.ce_open:
                        self.say_to_ce(connection)
                    if not connection.ce_open:
                        self.worker_dies(connection)
                        process.lose_link(self.now, connection)
                    elif connection.pe_told_down:
                        self.ce_drops(connection)
                    if process.alive:
                        process.end_link(connection)
                    self.check()
            self.advance(10)

    def check_idle(self) -> None:
        """After `settle`: nothing is held anywhere, everybody got an answer."""
        for name in list(self.sequences):
            self.finish_sequence(name)
        for host in (0, 1):
            process = self.hosts[host]
            if process in self.excused and process.mode == "process":
                self.kill(host)
                self.hear_of_death(process)
        self.check()
        assert not any(self.receiver.gauges().values()), self.receiver.gauges()
        assert (self.pool.free + self.pool.cached, self.pool.free_states) == (PAGES, SLOTS)
        self.pool.flush_cache()
        assert self.pool.free == PAGES
        assert all(request.end for request in self.requests.values())
        assert self.receiver.next_deadline() is None
        for process in self.processes:
            if process.alive:
                assert not process.prefills, "source pages are held"
                assert not any(process.sender.gauges().values()), process.sender.gauges()
                for request_id, calls in process.calls.items():
                    assert 1 <= process.answers[request_id] <= calls
