# SPDX-License-Identifier: Apache-2.0
"""A simulated wire and simulated prefill engine processes around the real PE ledger, as unkind as a real network.

A put lands whenever it likes, page by page: long after its writer was stopped, its link closed, or (over sockets) its
process killed. Only what the design calls a proof stops it: the destroyed worker of the receiving side ("worker"
links), or the end of the writing process ("process" links).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrail.transfer.layout import PageLayout
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import (
    AbortPrefill,
    DropWriter,
    FenceMode,
    LinkKey,
    OpenWriter,
    PrefillEnded,
    Push,
    ReleaseSource,
    RenewWriter,
    Ring,
    Send,
    SenderEffect,
    StartPrefill,
    StopWriter,
)
from kvrail.transfer.wire import Doorbell, FirstToken, HandOff, LinkMessage, Quiesced

__all__ = ["CE", "LAYOUT", "Connection", "Prefill", "Process", "SimWriter"]

CE: LinkKey = (b"c" * 16, 0)
LAYOUT = PageLayout(
    model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=4, state_bytes=8
)
JUNK = ("junk",)


@dataclass(eq=False)
class SimWriter:
    """Native writer of one ticket: puts that have been posted and not landed, and a doorbell behind them."""

    key: int
    ticket: bytes
    connection: Connection
    puts: deque[tuple[int, int, int]] = field(default_factory=deque)
    bell: Doorbell | None = None
    stopped: bool = False
    failed: bool = False
    quiet_told: bool = False

    def settle(self) -> None:
        """What the native thread reports by itself."""
        link = self.connection
        if not link.pe_open:
            return
        if not self.puts and self.bell is not None and not self.stopped and not self.failed:
            link.to_ce.append(self.bell)
            link.process.last_words[self.ticket] += 1
            link.events.append(("rung", self.key, True))
            self.bell = None
        healthy = not self.failed and link.ce_open
        if self.stopped and not self.quiet_told and (not self.puts or not healthy):
            # A broken endpoint ends every callback at once, though bytes may still be on their way.
            self.quiet_told = True
            link.events.append(("quiet", self.key, healthy))


@dataclass(eq=False)
class Connection:
    """One epoch of a link. `ce_open`, `pe_open`: that side's native link exists; it is what sends and hears."""

    process: Process
    epoch: int
    mode: FenceMode
    to_pe: deque[LinkMessage] = field(default_factory=deque)
    to_ce: deque[LinkMessage] = field(default_factory=deque)
    heard_by_pe: list[LinkMessage] = field(default_factory=list)
    heard_by_ce: list[LinkMessage] = field(default_factory=list)
    events: deque[tuple[str, int, bool]] = field(default_factory=deque)
    writers: dict[int, SimWriter] = field(default_factory=dict)
    ce_open: bool = True
    pe_open: bool = True
    pe_told_down: bool = False
    worker_gone: bool = False

    @property
    def key(self) -> LinkKey:
        return self.process.key

    def land(self, writer: SimWriter, write: Callable[[bytes, int, int, Any], None]) -> bool:
        """Let the writer's next put reach the CE's memory, if anything of it can still move."""
        process = self.process
        if not writer.puts:
            return False
        if self.mode == "process" and (process.frozen or not process.alive):
            return False
        if self.mode == "worker" and self.worker_gone:
            self.fail(writer)
            writer.puts.clear()
            return False
        pool, source, target = writer.puts.popleft()
        write(writer.ticket, pool, target, process.memory.get((pool, source), JUNK))
        if process.alive:
            if not writer.puts and self.pe_open:
                self.events.append(("progress", writer.key, True))
            writer.settle()
        return True

    def fail(self, writer: SimWriter) -> None:
        """The native thread reports a failed put."""
        if not writer.failed:
            writer.failed = True
            if self.pe_open:
                self.events.append(("failed", writer.key, False))
            writer.settle()


@dataclass
class Prefill:
    """A prompt that the simulated engine computes: its page table, and how far it is."""

    ticket: bytes
    request_id: str
    tokens: int
    pages: list[int]
    done: int = 0


class Process:
    """One life of a PE: the real ledger, a simulated engine, and the memory that its puts read."""

    def __init__(self, number: int, mode: FenceMode) -> None:
        self.key: LinkKey = (number.to_bytes(16, "big"), 0)
        self.mode = mode
        self.sender = Sender(LAYOUT, incarnation=self.key[0], rank=0, max_tickets=4, meet_s=15, stop_s=10)
        self.alive = True
        self.frozen = False
        self.connection: Connection | None = None
        self.connections: list[Connection] = []
        self.prefills: dict[str, Prefill] = {}
        self.memory: dict[tuple[int, int], Any] = {}
        self.next_page = 0
        self.calls: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        # Doorbells and proven answers for each ticket, and before them unproven ones: never more than one each.
        self.last_words: Counter[bytes] = Counter()
        self.doubts: Counter[bytes] = Counter()

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def connect(self, now: float, epoch: int) -> Connection:
        connection = Connection(self, epoch, self.mode)
        self.connections.append(connection)
        old, self.connection = self.connection, connection
        if old is not None:
            old.pe_told_down = True
        self.sender.link_up(now, CE, epoch)
        self.carry_out()
        return connection

    def hear(self, now: float, connection: Connection, message: LinkMessage) -> None:
        connection.heard_by_pe.append(message)
        self.sender.on_message(now, CE, message)
        self.carry_out()

    def call(self, now: float, request_id: str, ticket: bytes) -> None:
        self.calls[request_id] += 1
        self.sender.prefill(now, request_id, ticket)
        self.carry_out()

    def lose_link(self, now: float, connection: Connection) -> None:
        """The rank loop hears of it; the native thread may still be at it until `end_link`."""
        if not connection.pe_told_down:
            connection.pe_told_down = True
            self.sender.link_down(now, CE, connection.epoch, "the link broke")
            self.carry_out()

    def end_link(self, connection: Connection) -> None:
        """The native link is gone: nothing is rung any more. What was posted may still land."""
        if connection.pe_told_down and connection.pe_open:
            connection.pe_open = False
            self.sender.proven(CE, connection.epoch)
            self.carry_out()

    def native_events(self, now: float, count: int = 1000) -> None:
        for connection in self.connections:
            while connection.events and count:
                count -= 1
                kind, writer, ok = connection.events.popleft()
                if kind == "progress":
                    self.sender.on_progress(now, writer)
                elif kind == "rung":
                    self.sender.on_rung(now, writer)
                elif kind == "quiet":
                    self.sender.on_quiet(now, writer, ok, "" if ok else "a put failed")
                else:
                    self.sender.on_failed(now, writer, "a put failed")
                self.carry_out()

    def compute(
        self, now: float, prefill: Prefill, tokens: int, finish: str | None, token_first: bool
    ) -> None:
        """One step of the engine for one prompt; with its last tokens comes the first token."""
        prefill.done = min(prefill.tokens, prefill.done + tokens)
        first_page = len(prefill.pages) - LAYOUT.pages_for(prefill.tokens)
        for index, page in enumerate(prefill.pages[first_page:]):
            whole = min(prefill.tokens, (index + 1) * LAYOUT.page_tokens) <= prefill.done
            self.memory[(0, page)] = (prefill.ticket, index) if whole else JUNK
        state = prefill.pages[0]
        self.memory[(1, state)] = (prefill.ticket, "state")
        over = prefill.done >= prefill.tokens
        hand_off = HandOff(
            first_token=int.from_bytes(prefill.ticket[:2], "big"),
            finish_reason=finish,
            seed=0,
            next_position=0,
        )
        if over and token_first:
            self.sender.first_token(now, prefill.ticket, hand_off)
        self.sender.computed(now, prefill.ticket, prefill.done, prefill.pages[1:], state_slot=state)
        if over and not token_first:
            self.sender.first_token(now, prefill.ticket, hand_off)
        self.carry_out()

    def tick(self, now: float) -> None:
        self.native_events(now)
        self.sender.reap(now)
        self.carry_out()

    # --- effects ----------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        while effects := self.sender.take_effects():
            for effect in effects:
                self._do(effect)

    def _do(self, effect: SenderEffect) -> None:
        link = self.connection
        if isinstance(effect, Send):
            if link is not None and link.pe_open and link.epoch == effect.message.epoch:
                if isinstance(effect.message, Quiesced) and not effect.message.proven:
                    assert not self.last_words[effect.message.ticket], "doubt after the last word"
                    self.doubts[effect.message.ticket] += 1
                elif isinstance(effect.message, Doorbell | Quiesced):
                    self.last_words[effect.message.ticket] += 1
                assert isinstance(effect.message, Doorbell | Quiesced | FirstToken)
                link.to_ce.append(effect.message)
        elif isinstance(effect, StartPrefill):
            pages = list(range(self.next_page, self.next_page + 1 + LAYOUT.pages_for(effect.token_end)))
            self.next_page += len(pages)
            assert effect.request_id not in self.prefills
            self.prefills[effect.request_id] = Prefill(
                effect.ticket, effect.request_id, effect.token_end, pages
            )
        elif isinstance(effect, AbortPrefill | ReleaseSource):
            # Somebody else's KV from now on. Each prefill ends once: a second time is a KeyError.
            for page in self.prefills.pop(effect.request_id).pages:
                self.memory[(0, page)] = self.memory[(1, page)] = JUNK
        elif isinstance(effect, PrefillEnded):
            self.answers[effect.request_id] += 1
        elif isinstance(effect, OpenWriter):
            assert link is not None
            link.writers[effect.writer] = SimWriter(effect.writer, effect.ticket, link)
        elif not isinstance(effect, RenewWriter | DropWriter):
            writer = next(c.writers[effect.writer] for c in self.connections if effect.writer in c.writers)
            if isinstance(effect, Push):
                triples = zip(effect.source.tolist(), effect.target.tolist(), strict=True)
                writer.puts.extend((effect.pool, source, target) for source, target in triples)
            elif isinstance(effect, Ring):
                assert writer.bell is None
                writer.bell = effect.bell
                if effect.pages is not None:
                    sums = bytes(8 * len(effect.pages))
                    writer.bell = msgspec.structs.replace(effect.bell, checksums=sums, state_checksum=0)
            elif isinstance(effect, StopWriter):
                writer.stopped = True
            writer.settle()
