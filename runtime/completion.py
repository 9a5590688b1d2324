# SPDX-License-Identifier: Apache-2.0
"""A completion engine's rank (and a single engine's): requests in, tickets out, pages landed, tokens decoded.

A request is prefilled on the PE rank that its front chose, or here. It moves like this:

    waiting ──grant──▶ granted ──first token──▶ first ──doorbell──▶ decoding ──▶ over
       │ ▲                │                       │
       │ │                └────────── lost ───────┤
       └─┼────────────── no ticket ───────────────┤
         └── another PE ── stranded ◀─────────────┴── nobody else ──▶ decoding (the engine prefills by itself)

The ledger (transfer/receiver.py) says when pages may change hands; nothing is decoded before its doorbell. This file
brings what is heard to the ledger and to the four stations, and carries out what the ledger decides: waiting.py
(who gets a ticket when), landing.py (what a peer hands over), moving.py (who is asked next), decoding.py (what the
engine works on).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor

from kvrail.runtime.decoding import Decoding
from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.landing import Landing
from kvrail.runtime.link_board import LinkBoard
from kvrail.runtime.messages import (
    Abort,
    Connect,
    Disconnect,
    Failed,
    Move,
    PrefillFailed,
    Stats,
    Submit,
    ToFront,
    ToRank,
)
from kvrail.runtime.moving import Moving
from kvrail.runtime.rank_stats import completion_counters, pool_gauges, rank_stats
from kvrail.runtime.requests import Request, Requests
from kvrail.runtime.verifying import Verifying
from kvrail.runtime.waiting import Waiting
from kvrail.transfer.errors import LinkLost
from kvrail.transfer.ledger_events import tell_receiver
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkUp,
)
from kvrail.transfer.links import Links
from kvrail.transfer.memory import Pools
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import Fence, FirstTokenReady, Landed, Lost, ReceiverEffect, Send
from kvrail.transfer.wire import Beat, unpack_u32

__all__ = ["Completion"]

_log = logging.getLogger(__name__)


class Completion:
    """The role of a CE or single rank; implements rank.Role. `links` is None for a single engine.

    `checksums`: see Verifying. `wake_fd` is readable when `tick` has something to do.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        pool: PagePool,
        pools: Pools,
        links: Links | None,
        receiver: Receiver,
        send: Callable[[ToFront], None],
        verify_share: float,
        seats: int,
        largest_ticket: int,
        cache: HostPrefixCache | None = None,
        checksums: Executor | None = None,
    ) -> None:
        self.engine = engine
        self._pool = pool
        self._links = links
        self._receiver = receiver
        self._send = send
        self._cache = cache
        self._counters: Counter[str] = Counter()
        self._board = LinkBoard(send)
        self._verifying = Verifying(pools, self._counters, checksums)
        self._requests = Requests(engine, send, self._counters)
        self._decoding = Decoding(engine, pool, self._requests, self._counters)
        self._moving = Moving(
            links=self._board.reports,
            requests=self._requests,
            decoding=self._decoding,
            give_up=receiver.give_up,
            send=send,
            counters=self._counters,
        )
        self._waiting = Waiting(
            receiver=receiver,
            requests=self._requests,
            decoding=self._decoding,
            moving=self._moving,
            carry_out=self._carry_out,
            send=send,
            verify_share=verify_share,
            seats=seats,
            largest_ticket=largest_ticket,
        )
        self._landing = Landing(
            engine=engine,
            pool=pool,
            pools=pools,
            receiver=receiver,
            verifying=self._verifying,
            board=self._board,
            requests=self._requests,
            decoding=self._decoding,
            counters=self._counters,
        )
        self._fallen: list[tuple[Request, Lost]] = []

    @property
    def wake_fd(self) -> int:
        """For the loop's poll."""
        return self._verifying.wake_fd

    def close(self) -> None:
        """No pool is read any more from here on."""
        self._verifying.close()

    # --- what comes in ----------------------------------------------------------------------------------------

    def handle(self, now: float, message: ToRank) -> None:
        """A message from the front."""
        match message:
            case Submit():
                self._submit(now, message)
            case Abort():
                self._abort(now, message)
            case PrefillFailed(request_id=request_id, ticket=ticket, reason=reason):
                if self._requests.by_ticket(request_id, ticket):
                    self._receiver.give_up(now, ticket, reason)
                elif request := self._requests.get(request_id):
                    self._waiting.call_failed(now, request, ticket, reason)
            case Move(request_id=request_id, peer=peer):
                request = self._requests.get(request_id)
                if request is not None and self._moving.moved(request, peer):
                    self._wait(now, request)
            case Connect(peer=peer) if self._links is not None:
                self._board.connecting(LinkKey(peer.incarnation, peer.rank))
                self._links.connect(peer)
            case Disconnect(incarnation=incarnation, rank=rank, reason=reason) if self._links is not None:
                self._board.drop(LinkKey(incarnation, rank))
                self._links.disconnect(LinkKey(incarnation, rank), reason)
            case _:
                _log.warning("%s is not for this role", type(message).__name__)

    def _submit(self, now: float, message: Submit) -> None:
        if self._requests.get(message.request_id) is not None:
            reason = "a request of this id is running"
            self._send(Failed(request_id=message.request_id, status=409, reason=reason))
            return
        try:
            tokens = unpack_u32(message.tokens)
        except ValueError:
            reason = "token ids are not uint32"
            self._send(Failed(request_id=message.request_id, status=400, reason=reason))
            return
        request = Request(message, tokens, "waiting")
        self._requests.add(request)
        if message.peer is None:
            self._decoding.prefill_here(request)
            return
        request.keys = self.engine.prefix_keys(tokens, message.cache)
        self._wait(now, request)

    def _wait(self, now: float, request: Request) -> None:
        lacking = self.engine.layout.pages_for(len(request.tokens)) - self._pool.known(request.keys)
        self._waiting.add(now, request, lacking)

    def _abort(self, now: float, message: Abort) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            return
        decoding = request.phase == "decoding"
        if message.choice is not None:
            request.open.discard(message.choice)
            if request.open:
                if decoding:
                    self.engine.abort(request.id, message.choice)
                return
        self._requests.drop(request)
        if decoding:
            self.engine.abort(request.id)
        elif request.phase != "waiting":
            self._receiver.cancel(now, request.ticket, message.reason)

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""
        self._board.note(event)
        match event:
            case LinkUp(key, _, lane):
                self._landing.link_up(key, lane)
            case LinkDown(key):
                self._landing.link_down(key)
            case _:
                pass
        tell_receiver(self._receiver, now, event)
        self._moving.note(now, event)
        self._carry_out(now)

    def on_step(self, now: float, outputs: list[StepOutput]) -> None:
        """The model has run one step."""
        self._decoding.take(outputs)
        self._requests.flush()

    def tick(self, now: float) -> None:
        """Timers, grants that found no room before, effects, and this turn's outputs in one message."""
        self._receiver.reap(now)
        self._carry_out(now)
        self._landing.verified(now)
        fallen, self._fallen = self._fallen, []
        for request, lost in fallen:
            if request in self._requests:
                self._moving.strand(now, request, lost.reason)
        self._moving.reap(now)
        self._waiting.grant(now)
        self._carry_out(now)
        self._decoding.refuse_stalled(now)
        self._requests.flush()

    # --- the ledger's decisions -------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        while effects := self._receiver.take_effects():
            for effect in effects:
                self._do(now, effect)

    def _do(self, now: float, effect: ReceiverEffect) -> None:
        match effect:
            case Send(link, message) if self._links is not None:
                try:
                    self._links.send(LinkKey(*link), message)
                except LinkLost as error:
                    # Its LinkDown is on the way and settles every ticket of the link.
                    _log.debug("not sent, the link is gone: %s", error)
            case Fence(link, _, reason) if self._links is not None:
                self._links.fence(LinkKey(*link), reason)
            case FirstTokenReady(request_id, ticket, hand_off):
                if request := self._requests.by_ticket(request_id, ticket):
                    self._landing.first_token(now, request, hand_off)
            case Landed():
                self._landing.landed(now, effect)
            case Lost(request_id, ticket):
                # After a long step the links are heard before the front, which may have cancelled this very request.
                if request := self._requests.by_ticket(request_id, ticket):
                    self._fallen.append((request, effect))
            case _:
                raise AssertionError(f"no links, yet {effect}")

    # --- what others see --------------------------------------------------------------------------------------

    def beat(self, steps: int) -> None:
        """Every link hears how far this loop is and which tickets it still wants."""
        if self._links is None:
            return
        for key in self._board.up():
            tickets = self._receiver.beat_tickets(key)
            self._links.set_beat(key, Beat(steps=steps, state="serving", tickets=tickets))

    def stats(self, steps: int) -> Stats:
        """Gauges and counters, as doc/metrics.md names them."""
        gauges = pool_gauges(self._pool, self.engine) | self._receiver.gauges()
        gauges |= {"requests_open": len(self._requests), "requests_without_room": len(self._waiting)}
        counters = completion_counters(self._counters, self._receiver.counters)
        return rank_stats(steps, gauges, counters, self._cache, self._board.counters())
