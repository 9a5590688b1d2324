# SPDX-License-Identifier: Apache-2.0
"""A completion engine's rank (and a single engine's): requests in, tickets out, pages landed, tokens decoded.

A request is prefilled on the PE rank that its front chose, or here. It moves like this:

    waiting ──grant──▶ granted ──first token──▶ first ──doorbell──▶ decoding ──▶ over
       │                  │                       │
       └──────────────────┴── lost, fallback ─────┴──▶ decoding (the engine prefills by itself)

The ledger (transfer/receiver.py) says when pages may change hands; nothing is decoded before its doorbell.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.errors import RuntimeFault
from kvrail.runtime.handing_over import counts_of, damage_of, fault_of_hand_off
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.link_board import LinkBoard
from kvrail.runtime.messages import (
    Abort,
    Connect,
    Disconnect,
    Failed,
    FinishReason,
    Granted,
    Output,
    Outputs,
    PrefillFailed,
    Stats,
    Submit,
    ToFront,
    ToRank,
)
from kvrail.runtime.rank_stats import completion_counters, pool_gauges, rank_stats
from kvrail.runtime.waiting import Request, grant_in_turn
from kvrail.transfer.errors import LinkLost, NoPages, ShareUsed
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkUp,
    PeerBeat,
    Proven,
    Received,
    Recovered,
    Suspect,
)
from kvrail.transfer.links import Links
from kvrail.transfer.memory import Pools
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import Fence, FirstTokenReady, Landed, Lost, ReceiverEffect, Send
from kvrail.transfer.wire import Beat, HandOff, TokenLogprob, pack_u32, unpack_u32

__all__ = ["Completion"]

_log = logging.getLogger(__name__)
# A request that finds no room for its ticket in this time is refused: something else holds the pool.
_ROOM_WITHIN_S = 30.0


class Completion:
    """The role of a CE or single rank; implements rank.Role. `links` is None for a single engine."""

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
    ) -> None:
        self.engine = engine
        self._pool = pool
        self._pools = pools
        self._links = links
        self._receiver = receiver
        self._send = send
        self._verify_share = verify_share
        self._seats = seats
        self._largest_ticket = largest_ticket
        self._cache = cache
        self._board = LinkBoard(send)
        # Links whose pages a network card writes into our GPU.
        self._written_by_card: set[LinkKey] = set()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._stalled_since = 0.0
        self._outputs: list[Output] = []
        self._counters: Counter[str] = Counter()

    # --- what comes in ----------------------------------------------------------------------------------------

    def handle(self, now: float, message: ToRank) -> None:
        """A message from the front."""
        match message:
            case Submit():
                self._submit(now, message)
            case Abort(request_id=request_id, reason=reason, choice=choice):
                self._abort(now, request_id, reason, choice)
            case PrefillFailed(request_id=request_id, ticket=ticket, reason=reason):
                if self._by_ticket(request_id, ticket):
                    self._receiver.give_up(now, ticket, reason)
            case Connect(peer=peer) if self._links is not None:
                self._board.connecting(LinkKey(peer.incarnation, peer.rank))
                self._links.connect(peer)
            case Disconnect(incarnation=incarnation, rank=rank, reason=reason) if self._links is not None:
                self._board.drop(LinkKey(incarnation, rank))
                self._links.disconnect(LinkKey(incarnation, rank), reason)
            case _:
                _log.warning("%s is not for this role", type(message).__name__)

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""
        self._board.note(event)
        receiver = self._receiver
        match event:
            case LinkUp(key, epoch, lane):
                if lane.card_writes_gpu:
                    self._written_by_card.add(key)
                receiver.link_up(now, key, epoch, lane.fence)
            case LinkDown(key, epoch, reason):
                self._written_by_card.discard(key)
                receiver.link_down(now, key, epoch, reason)
            case Proven(key, epoch, how):
                receiver.proven(now, key, epoch, how)
            case Suspect(key):
                receiver.link_suspect(now, key)
            case Recovered(key):
                receiver.link_recovered(key)
            case Received(key, message):
                receiver.on_message(now, key, message)
            case PeerBeat(key, beat):
                receiver.on_beat(now, key, beat)
        self._carry_out(now)

    def on_step(self, now: float, outputs: list[StepOutput]) -> None:
        """The model has run one step."""
        for output in outputs:
            request = self._requests.get(output.sequence_id)
            if request is None:
                continue
            if output.finish_reason == "abort":
                self._fail(request, 503, output.error or "the engine dropped the request", 1.0)
                continue
            if request.route == "local" and output.cached_tokens:
                request.cached_tokens = output.cached_tokens
            if output.prompt_logprobs:
                self._tell(request, prompt=output.prompt_logprobs)
            if output.token is not None or output.finish_reason is not None:
                self._emit(request, output.choice, output.token, output.finish_reason, output.logprob)
        self._flush()

    def tick(self, now: float) -> None:
        """Timers, grants that found no room before, effects, and this turn's outputs in one message."""
        self._receiver.reap(now)
        self._carry_out(now)
        self._grant_waiting(now)
        self._carry_out(now)
        self._refuse_stalled(now)
        self._flush()

    # --- requests ---------------------------------------------------------------------------------------------

    def _submit(self, now: float, message: Submit) -> None:
        request_id = message.request_id
        if request_id in self._requests:
            self._send(Failed(request_id=request_id, status=409, reason="a request of this id is running"))
            return
        try:
            tokens = unpack_u32(message.tokens)
        except ValueError:
            self._send(Failed(request_id=request_id, status=400, reason="token ids are not uint32"))
            return
        request = Request(message, tokens, "waiting", now + _ROOM_WITHIN_S)
        self._requests[request_id] = request
        self._counters["requests_submitted"] += 1
        request.keys = self.engine.prefix_keys(tokens, message.cache) if message.peer else []
        lacking = self.engine.layout.pages_for(len(tokens)) - self._pool.known(request.keys)
        if message.peer is None:
            self._prefill_here(request, None)
        elif lacking > self._largest_ticket:
            reason = (
                f"its {lacking} pages are more than one link may hold ({self._largest_ticket}: --link-share)"
            )
            if message.fallback:
                self._lost(request, reason, None)
            else:  # Trying again would help nobody.
                self._fail(request, 400, f"the prompt is too long to be prefilled elsewhere: {reason}", None)
        else:
            self._waiting.append(request)

    def _grant_waiting(self, now: float) -> None:
        """Tickets for those who wait, in turn, as long as there is room."""
        self._waiting = grant_in_turn(
            [r for r in self._waiting if self._requests.get(r.id) is r], lambda r: self._grant(now, r)
        )

    def _grant(self, now: float, request: Request) -> NoPages | None:
        """None: the request has a ticket, or has gone another way. Else what it has to wait for."""
        # Whoever gets a ticket joins the batch the moment its pages land, so seats are kept for tickets.
        taken = sum(len(r.open) for r in self._requests.values() if r.phase != "waiting")
        if taken and taken + len(request.open) > self._seats:
            # Answers end, and their seats become free; only the wait for room may be in vain.
            for each in self._waiting:
                each.deadline = now + _ROOM_WITHIN_S
            return NoPages("all seats are taken")
        try:
            ticket = self._receiver.grant(
                now,
                request.id,
                request.link,
                len(request.tokens),
                keys=request.keys,
                verify=random.random() < self._verify_share,
            )
        except NoPages as error:
            if now < request.deadline:
                return error
            reason = f"no room for the prompt within {_ROOM_WITHIN_S:.0f} s: {error}"
            if isinstance(error, ShareUsed):
                self._lost(request, reason, None)
            else:
                self._fail(request, 503, reason, 2.0)
            return None
        except LinkLost as error:
            self._lost(request, str(error), None)
            return None
        request.phase, request.ticket, request.route = "granted", ticket.id, "remote"
        # The grant itself goes out first: it is on the link before the PE's front can hear of the ticket.
        self._carry_out(now)
        if self._requests.get(request.id) is request and request.phase == "granted":
            self._send(Granted(request_id=request.id, ticket=ticket.id))
        return None

    def _refuse_stalled(self, now: float) -> None:
        """Pages in quarantine may never come back: after a while, refuse one of those who wait for them."""
        waiting = (
            [] if self.engine.has_work else [r for r in self._requests.values() if r.phase == "decoding"]
        )
        if not waiting:
            self._stalled_since = now
        elif now - self._stalled_since > _ROOM_WITHIN_S:
            self.engine.abort(waiting[0].id)
            held = f"{self._pool.quarantined} pages are in quarantine"
            self._fail(waiting[0], 503, f"no room within {_ROOM_WITHIN_S:.0f} s: {held}", 2.0)

    def _prefill_here(self, request: Request, hand_off: HandOff | None) -> None:
        """Let the engine prefill: from the start, or behind a first token that is out already."""
        request.phase, request.route = "decoding", "local"
        sampling = request.submit.sampling
        try:
            if hand_off is None:
                self.engine.add(request.id, request.tokens, sampling, cache=request.submit.cache)
            else:
                firsts, cache = request.going_on(hand_off), request.submit.cache
                self.engine.resume(request.id, request.tokens, sampling, first_tokens=firsts, cache=cache)
            self._counters["prefills_local"] += 1
        except RuntimeFault as fault:
            self._fail(request, fault.status, fault.message, fault.retry_after_s)

    def _abort(self, now: float, request_id: str, reason: str, choice: int | None) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if choice is not None:
            request.open.discard(choice)
            if request.open:
                if request.phase == "decoding":
                    self.engine.abort(request_id, choice)
                return
        del self._requests[request_id]
        self._counters["requests_aborted"] += 1
        if request.phase in ("granted", "first"):
            self._receiver.cancel(now, request.ticket, reason)
        elif request.phase == "decoding":
            self.engine.abort(request_id)

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
                if request := self._by_ticket(request_id, ticket):
                    self._first_token(now, request, hand_off)
            case Landed():
                self._landed(now, effect)
            case Lost(request_id, ticket, reason, hand_off):
                if request := self._by_ticket(request_id, ticket):
                    self._lost(request, reason, hand_off)
            case _:
                raise AssertionError(f"no links, yet {effect}")

    def _by_ticket(self, request_id: str, ticket: bytes) -> Request | None:
        request = self._requests.get(request_id)
        return request if request is not None and request.ticket == ticket else None

    def _first_token(self, now: float, request: Request, hand_off: HandOff) -> None:
        fault = fault_of_hand_off(
            hand_off, request.submit.sampling, len(request.tokens), self.engine.vocab_size
        )
        if fault:
            # A peer of another version, or a broken one: its KV is not to be trusted either.
            self._counters["bad_hand_offs"] += 1
            self._receiver.cancel(now, request.ticket, fault)
            self._fail(request, 502, f"the prefill engine handed over what cannot be used: {fault}", None)
            return
        request.phase = "first"
        request.cached_tokens = hand_off.cached_tokens
        self._counters["prefills_remote"] += 1
        for choice, first in enumerate(hand_off.firsts):
            reason: FinishReason | None = first.finish_reason  # type: ignore[assignment]
            self._emit(request, choice, first.token, reason, first.logprob)

    def _landed(self, now: float, landed: Landed) -> None:
        request = self._by_ticket(landed.request_id, landed.ticket)
        if request is None:
            self._pool.release(landed.owner)
            return
        self._board.count(request.link, **counts_of(landed))
        if request.link in self._written_by_card and self._pools.cuda is not None:
            # Before anything on the GPU reads them.
            self._pools.cuda.flush_remote_writes()
        fault = damage_of(landed, self._pools, self._counters)
        if fault:
            _log.error("request %s: %s", request.id, fault)
            self._counters["checksum_mismatches"] += 1
            self._pool.release(landed.owner)
            self._fail(request, 500, f"the KV pages of the prompt arrived damaged ({fault})", None)
            return
        if request.phase == "granted":
            # The doorbell carries the first token too: a first-token message need not have come.
            self._first_token(now, request, landed.hand_off)
            if request.id not in self._requests:
                self._pool.release(landed.owner)
                return
        request.phase = "decoding"
        try:
            self.engine.adopt(
                request.id,
                request.tokens,
                request.submit.sampling,
                owner=landed.owner,
                first_tokens=request.going_on(landed.hand_off),
                cached_tokens=landed.hand_off.cached_tokens,
                cache=request.submit.cache,
            )
        except (RuntimeFault, ValueError) as error:
            self._pool.release(landed.owner)
            self._fail(request, 500, f"the engine did not take the pages: {error}", None)

    def _lost(self, request: Request, reason: str, hand_off: HandOff | None) -> None:
        """No remote prefill for this request (any more): do it here when that is allowed."""
        if not request.submit.fallback:
            self._fail(request, 503, f"the remote prefill failed: {reason}", 1.0)
            return
        _log.warning("request %s: prefilling here, because %s", request.id, reason)
        self._counters["prefill_fallbacks"] += 1
        self._prefill_here(request, hand_off)

    def _emit(
        self,
        request: Request,
        choice: int,
        token: int | None,
        reason: FinishReason | None,
        logprob: TokenLogprob | None,
    ) -> None:
        if choice not in request.open:
            return
        if token is not None:
            self._counters["generated_tokens"] += 1
        if reason is not None:
            request.open.discard(choice)
        if not request.open:
            self._counters["requests_finished"] += 1
            del self._requests[request.id]
        tokens = b"" if token is None else pack_u32([token])
        self._tell(request, choice, tokens, reason, () if logprob is None else (logprob,))

    def _tell(
        self,
        request: Request,
        choice: int = 0,
        tokens: bytes = b"",
        reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        prompt: Sequence[TokenLogprob] = (),
    ) -> None:
        route, cached = request.route, request.cached_tokens
        self._outputs.append(
            Output(request.id, tokens, reason, route, cached, list(logprobs), choice, list(prompt))
        )

    def _fail(self, request: Request, status: int, reason: str, retry_after_s: float | None) -> None:
        self._requests.pop(request.id, None)
        if request.phase == "decoding":
            # Its other choices, if it has any.
            self.engine.abort(request.id)
        self._counters["requests_failed"] += 1
        # What it has emitted in this turn goes out first.
        self._flush()
        self._send(Failed(request_id=request.id, status=status, reason=reason, retry_after_s=retry_after_s))

    def _flush(self) -> None:
        if self._outputs:
            self._send(Outputs(items=self._outputs))
            self._outputs = []

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
