# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's rank: prompts in, pages pushed to the completion engine that granted them, one first token each.

The ledger (transfer/sender.py) decides; this file carries its decisions to the engine and to the native writers,
and what those answer back to the ledger.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.errors import BadRequest, RuntimeFault
from kvrail.runtime.handing_over import hand_off_record
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.link_board import LinkBoard
from kvrail.runtime.messages import Abort, Accepted, Prefill, PrefillDone, Stats, ToFront, ToRank
from kvrail.runtime.page_pushes import PagePushes
from kvrail.runtime.rank_stats import pool_gauges, rank_stats
from kvrail.transfer.ledger_events import carry_out, tell_sender
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkUp,
    WriterEvent,
)
from kvrail.transfer.links import Links
from kvrail.transfer.memory import Pools
from kvrail.transfer.native_writers import NativeWriters
from kvrail.transfer.pages import PagePool
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import (
    AbortPrefill,
    DropWriter,
    PrefillEnded,
    Push,
    ReleaseSource,
    Ring,
    Send,
    SenderEffect,
    StartPrefill,
)
from kvrail.transfer.wire import Beat, encode, unpack_u32

__all__ = ["Prefilling"]

_log = logging.getLogger(__name__)


class _Call:
    """One prefill call, from its arrival to PrefillEnded."""

    __slots__ = ("call", "tokens")

    def __init__(self, call: Prefill, tokens: npt.NDArray[np.uint32]) -> None:
        self.call = call
        self.tokens = tokens


class Prefilling:
    """The role of a PE rank; implements rank.Role, and engine_protocol.StepWatcher for an engine on a GPU."""

    def __init__(
        self,
        *,
        engine: Engine,
        pool: PagePool,
        pools: Pools,
        links: Links,
        sender: Sender,
        send: Callable[[ToFront], None],
        cache: HostPrefixCache | None = None,
    ) -> None:
        self.engine = engine
        self._pool = pool
        self._links = links
        self._sender = sender
        self._send = send
        self._cache = cache
        self._board = LinkBoard(send)
        self._calls: dict[str, _Call] = {}
        self._writers = NativeWriters(links, sender)
        # When each writer's last push and its doorbell were handed over, which is when the prompt was computed.
        self._rings: dict[int, float] = {}
        # What the ledger wants of the engine while that is within a step.
        self._within_step = False
        self._postponed: list[SenderEffect] = []
        # When this turn's step began, at the latest, and how long the one before it took.
        self._ticked = self._step_s = 0.0
        self._counters: Counter[str] = Counter()
        self._pushes = PagePushes(engine, pools, cache, self._board, self._counters)
        if engine.stream is not None:
            engine.watch(self)

    # --- what comes in ----------------------------------------------------------------------------------------

    def handle(self, now: float, message: ToRank) -> None:
        """A message from the front."""
        if isinstance(message, Prefill):
            self._take(now, message)
        elif isinstance(message, Abort):
            self._sender.abort(now, message.request_id, message.reason)

    def _take(self, now: float, message: Prefill) -> None:
        if message.request_id in self._calls or self.engine.sequence(message.request_id) is not None:
            # Also one that was aborted, until its writer is quiet, and one whose link broke, until nothing of it is
            # written any more: the engine knows it by this id.
            self._refuse(message, 409, "a prefill of this request is running already")
            return
        try:
            tokens = unpack_u32(message.tokens)
        except ValueError:
            self._refuse(message, 400, "token ids are not uint32")
            return
        self._calls[message.request_id] = _Call(message, tokens)
        self._sender.prefill(now, message.request_id, message.ticket)
        self._carry_out(now)
        if message.request_id in self._calls:
            self._send(Accepted(request_id=message.request_id))

    def _refuse(self, message: Prefill, status: int, reason: str) -> None:
        self._send(PrefillDone(request_id=message.request_id, ok=False, status=status, reason=reason))

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""
        self._board.note(event)
        match event:
            case LinkUp(key, _, lane):
                self._pushes.link_up(key, lane.probes)
            case LinkDown(key):
                self._pushes.link_down(key)
            case WriterEvent(kind="rung", writer=writer, at=at) if writer in self._rings:
                self._board.count(event.key, unhidden_seconds=max(0.0, at - self._rings.pop(writer)))
            case WriterEvent(kind="failed"):
                self._board.count(event.key, failures=1)
            case _:
                pass
        tell_sender(self._sender, now, event)
        # At once: the next event may build on what this one has caused (a grant behind a link that came up).
        self._carry_out(now)

    def step_begins(self, ending: Mapping[str, int]) -> Sequence[int]:
        """See StepWatcher: the end of a prompt leaves in parts where pushing it takes long."""
        parts, layers = 1, self.engine.layout.layers
        for request_id, tokens in ending.items():
            call = self._calls.get(request_id)
            link = self._sender.link_of(call.call.ticket) if call is not None else None
            if link is not None:
                parts = max(parts, self._pushes.parts(LinkKey(*link), tokens))
        return sorted({layers * part // parts for part in range(1, parts)} - {0})

    def layers_queued(self, layers: int) -> None:
        """See StepWatcher."""
        self._pushes.layers_queued(layers)

    def step_queued(self, computed: Mapping[str, int]) -> None:
        """See StepWatcher: push what is going to be final, each part behind the work that makes it so."""
        now = time.monotonic()
        longest = 2 * max(now - self._ticked, self._step_s)
        self._within_step = True
        self._pushes.step_queued()
        for request_id, tokens in computed.items():
            call = self._calls.get(request_id)
            # What may expire within the step is pushed when its renewals have been heard, behind it (rank.py).
            if call is not None and self._sender.time_left(now, call.call.ticket) > longest:
                self._push_computed(now, request_id, call.call.ticket, tokens)
        self._carry_out(now)
        self._within_step = False
        self._pushes.step_over()

    def on_step(self, now: float, outputs: list[StepOutput]) -> None:
        """The model has run one step: push what became final, send first tokens ahead."""
        postponed, self._postponed = self._postponed, []
        for effect in postponed:
            self._do(now, effect)
        self._pushes.step_over()
        self._step_s = now - self._ticked
        for place, output in enumerate(outputs):
            call = self._calls.get(output.sequence_id)
            if call is None or output.choice:
                # (The first tokens of other choices stand behind that of the first one.)
                continue
            ticket = call.call.ticket
            if output.finish_reason == "abort":
                self._sender.prefill_failed(now, ticket, output.error or "the engine dropped the prompt")
                continue
            if output.token is not None:
                self._counters["prompt_tokens"] += len(call.tokens)
                self._counters["cached_tokens"] += output.cached_tokens
                self._counters["first_tokens"] += 1
                sampling = call.call.sampling
                hand_off = hand_off_record(sampling, len(call.tokens), outputs[place : place + sampling.n])
                # Ahead of the last pages: the user need not wait for them.
                self._sender.first_token(now, ticket, hand_off)
                self._carry_out(now)
                if hand_off.ended:
                    continue
            self._push_computed(now, output.sequence_id, ticket, output.computed)
        self._carry_out(now)

    def _push_computed(self, now: float, request_id: str, ticket: bytes, tokens: int) -> None:
        state = self.engine.sequence(request_id)
        if state is not None:
            self._sender.computed(
                now, ticket, tokens, state.pages, state_slot=state.state_slot, cached=state.host_pages
            )

    def tick(self, now: float) -> None:
        """Timers, and what the ledger wants done."""
        self._ticked = now
        self._writers.look(now)
        self._sender.reap(now)
        self._carry_out(now)

    # --- what goes out ----------------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        carry_out(self._sender, lambda effect: self._do(now, effect))

    def _do(self, now: float, effect: SenderEffect) -> None:
        if self._within_step and isinstance(effect, StartPrefill | AbortPrefill | ReleaseSource):
            self._postponed.append(effect)
            return
        match effect:
            case Send(link, message):
                self._links.send(LinkKey(*link), message)
            case StartPrefill(request_id, ticket, _, token_end):
                self._start(now, request_id, ticket, token_end)
            case AbortPrefill(request_id):
                self.engine.abort(request_id)
            case ReleaseSource(request_id):
                self.engine.release(request_id)
            case Push(writer=writer):
                native = self._writers.get(writer)
                if native is not None:
                    self._pushes.push(native, effect)
            case Ring(link, writer, bell, pages, state_slot):
                native = self._writers.get(writer)
                if native is None:
                    return
                if pages is not None:
                    bell = self._pushes.summed(bell, pages, state_slot)
                native.ring(encode(bell))
                self._rings[writer] = now
                self._board.count(LinkKey(*link), tickets=1)
            case PrefillEnded():
                self._ended(effect)
            case _:
                if isinstance(effect, DropWriter):
                    self._rings.pop(effect.writer, None)
                self._writers.do(now, effect)

    def _start(self, now: float, request_id: str, ticket: bytes, token_end: int) -> None:
        call = self._calls[request_id]
        try:
            if len(call.tokens) != token_end:
                raise BadRequest(f"the call has {len(call.tokens)} tokens, its ticket is for {token_end}")
            self.engine.add(
                request_id, call.tokens, call.call.sampling, prefill_only=True, cache=call.call.cache
            )
        except RuntimeFault as fault:
            self._sender.prefill_failed(
                now, ticket, fault.message, status=fault.status, retry_after_s=fault.retry_after_s
            )

    def _ended(self, end: PrefillEnded) -> None:
        self._calls.pop(end.request_id, None)
        self._counters["prefills_ok" if end.ok else "prefills_failed"] += 1
        self._send(
            PrefillDone(
                request_id=end.request_id,
                ok=end.ok,
                reason=end.reason,
                status=end.status,
                cached_tokens=end.cached_tokens,
                retry_after_s=end.retry_after_s,
            )
        )

    # --- what others see --------------------------------------------------------------------------------------

    def beat(self, steps: int) -> None:
        """Every link hears how far this loop is and how far its tickets are."""
        for key in self._board.up():
            tickets = self._sender.beat_tickets(key)
            self._links.set_beat(key, Beat(steps=steps, state="serving", tickets=tickets))

    def stats(self, steps: int) -> Stats:
        """Gauges and counters, as doc/metrics.md names them."""
        gauges = pool_gauges(self._pool, self.engine) | self._sender.gauges()
        gauges["requests_open"] = len(self._calls)
        gauges["writers_open"] = len(self._writers)
        counters = self._counters + Counter({f"ticket_{k}": n for k, n in self._sender.counters.items()})
        return rank_stats(steps, gauges, counters, self._cache, self._board.counters())
