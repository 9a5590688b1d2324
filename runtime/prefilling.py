# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's rank: prompts in, pages pushed to the completion engine that granted them, one first token each.

The ledger (transfer/sender.py) decides; this file carries its decisions to the engine and to the native writers,
and what those answer back to the ledger.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.errors import BadRequest, RuntimeFault
from kvrail.runtime.handing_over import hand_off_record
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.link_board import LinkBoard
from kvrail.runtime.messages import Abort, Accepted, Prefill, PrefillDone, Stats, ToFront, ToRank
from kvrail.runtime.rank_stats import pool_gauges, rank_stats
from kvrail.transfer.checksums import pack_checksums, page_checksums
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
from kvrail.transfer.planner import Planner, count_runs
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import (
    PAGE_POOL,
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
from kvrail.transfer.wire import Beat, Doorbell, encode, unpack_u32

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Prefilling"]

_log = logging.getLogger(__name__)


class _Call:
    """One prefill call, from its arrival to PrefillEnded."""

    __slots__ = ("call", "tokens")

    def __init__(self, call: Prefill, tokens: npt.NDArray[np.uint32]) -> None:
        self.call = call
        self.tokens = tokens


class Prefilling:
    """The role of a PE rank; implements rank.Role."""

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
        self._pools = pools
        self._links = links
        self._sender = sender
        self._send = send
        self._cache = cache
        self._board = LinkBoard(send)
        self._calls: dict[str, _Call] = {}
        self._planners: dict[LinkKey, Planner] = {}
        self._writers = NativeWriters(links, sender)
        # When each writer's last push and its doorbell were handed over, which is when the prompt was computed.
        self._rings: dict[int, float] = {}
        # Behind all of the model's work so far; one serves everything that a step has computed.
        self._fence: _ucx.CudaFence | None = None
        self._counters: Counter[str] = Counter()

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
                self._planners[key] = Planner.of(lane.probes)
            case LinkDown(key):
                self._planners.pop(key, None)
            case WriterEvent(kind="rung", writer=writer, at=at) if writer in self._rings:
                self._board.count(event.key, unhidden_seconds=max(0.0, at - self._rings.pop(writer)))
            case WriterEvent(kind="failed"):
                self._board.count(event.key, failures=1)
            case _:
                pass
        tell_sender(self._sender, now, event)
        # At once: the next event may build on what this one has caused (a grant behind a link that came up).
        self._carry_out(now)

    def on_step(self, now: float, outputs: list[StepOutput]) -> None:
        """The model has run one step: push what became final, send first tokens ahead."""
        self._fence = None
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
            state = self.engine.sequence(output.sequence_id)
            if state is not None:
                self._sender.computed(
                    now,
                    ticket,
                    output.computed,
                    state.pages,
                    state_slot=state.state_slot,
                    cached=state.host_pages,
                )
        self._carry_out(now)

    def tick(self, now: float) -> None:
        """Timers, and what the ledger wants done."""
        self._writers.look(now)
        self._sender.reap(now)
        self._carry_out(now)

    # --- what goes out ----------------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        carry_out(self._sender, lambda effect: self._do(now, effect))

    def _do(self, now: float, effect: SenderEffect) -> None:
        match effect:
            case Send(link, message):
                self._links.send(LinkKey(*link), message)
            case StartPrefill(request_id, ticket, _, token_end):
                self._start(now, request_id, ticket, token_end)
            case AbortPrefill(request_id):
                self.engine.abort(request_id)
            case ReleaseSource(request_id):
                self.engine.release(request_id)
            case Push():
                self._push(effect)
            case Ring(link, writer, bell, pages, state_slot):
                native = self._writers.get(writer)
                if native is None:
                    return
                if pages is not None:
                    bell = self._summed(bell, pages, state_slot)
                native.ring(encode(bell))
                self._rings[writer] = now
                self._board.count(LinkKey(*link), tickets=1)
            case PrefillEnded():
                self._ended(effect)
            case _:
                if isinstance(effect, DropWriter):
                    self._rings.pop(effect.writer, None)
                self._writers.do(now, effect)

    def _push(self, push: Push) -> None:
        writer = self._writers.get(push.writer)
        if writer is None:
            return
        memory = self._pools.pages if push.pool == PAGE_POOL else self._pools.state
        assert memory is not None
        nbytes = len(push.target) * memory.unit_bytes
        if push.cached:
            way = self._push_cached(writer, push, memory.address, nbytes)
        else:
            # The copy waits on the GPU for the model's work, and this thread for neither.
            way = self._push_own(writer, push, memory.address, nbytes, self._computed())
        units = {"pages" if push.pool == PAGE_POOL else "states": len(push.target)}
        by_way = {f"bytes_by_{way}": nbytes} if way else {}
        self._board.count(LinkKey(*push.link), bytes=nbytes, **units, **by_way)

    def _push_own(
        self, writer: _ucx.Writer, push: Push, address: int, nbytes: int, after: _ucx.CudaFence | None
    ) -> str:
        """From our pools, behind `after`; returns the way that the bytes take, "" where there is one only."""
        planner = self._planners.get(LinkKey(*push.link))
        way = planner.choose(nbytes, count_runs(push.source, push.target)) if planner else None
        writer.push(push.pool, address, push.source, push.target, after=after, way=way or "")
        return way or ""

    def _push_cached(self, writer: _ucx.Writer, push: Push, address: int, nbytes: int) -> str:
        """What came from the host cache, while the rest of the prompt is computed: straight from there.

        On a GPU from its pool, right behind the copy into it: a second trip over PCIe would slow down the first, which
        the rest of the prompt waits for, and take longer than one between GPUs.
        """
        assert self._cache is not None
        self._counters["pages_pushed_from_host"] += len(push.target)
        if self._cache.in_stream_order:
            return self._push_own(writer, push, address, nbytes, self._cache.behind_loads())
        for span in self._cache.spans(push.source):
            writer.push(push.pool, span.address, span.units, push.target[span.where])
        return ""

    def _computed(self) -> _ucx.CudaFence | None:
        """What the GPU has to have done before pages of this step may be read; None on a CPU, where it is done."""
        if self._fence is None:
            self._fence = self._pools.fence(self.engine.stream)
        return self._fence

    def _summed(self, bell: Doorbell, pages: npt.NDArray[np.uint32], state_slot: int) -> Doorbell:
        """The doorbell with the checksums of what was pushed. Waits for the model's work."""
        after = self._computed()
        sums = pack_checksums(page_checksums(self._pools.pages, pages, after))
        bell = msgspec.structs.replace(bell, checksums=sums)
        if state_slot >= 0 and self._pools.state is not None:
            slot = np.array([state_slot], dtype=np.uint32)
            state_sum = int(page_checksums(self._pools.state, slot, after)[0])
            bell = msgspec.structs.replace(bell, state_checksum=state_sum)
        return bell

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
