# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's worker: pushes the blocks that vLLM has computed into the blocks that a CE has granted.

vLLM prefills whether the grant is here or not; what it computed before goes out when the grant comes. A finished
request's blocks are vLLM's again (`sent`) when its ticket is over: pushed, refused, cancelled, or not granted in time.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrail.runtime.vllm.layer_parts import Parts
from kvrail.runtime.vllm.meta import Chunk, Finished, LayerDone, StepFacts
from kvrail.runtime.vllm.posting import Posting
from kvrail.runtime.vllm.results import Results
from kvrail.transfer.foreign_pool import ForeignPools
from kvrail.transfer.layout import BlockLayout
from kvrail.transfer.ledger_events import carry_out, tell_sender
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkRefusal,
    LinkUp,
    Received,
)
from kvrail.transfer.links import Links
from kvrail.transfer.native_writers import NativeWriters
from kvrail.transfer.planner import Planner
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import (
    AbortPrefill,
    PrefillEnded,
    Push,
    ReleaseSource,
    Ring,
    Send,
    SenderEffect,
    StartPrefill,
)
from kvrail.transfer.wire import Beat, Grant, HandOff, encode, unpack_u32

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Pushing"]

_log = logging.getLogger(__name__)
_U32 = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class _Sending:
    """One request, from its call to vLLM's hearing that its blocks are free.

    `wanted`: the tokens that its grant covers, once it has started. `computed`, `pages`, `after`: as of the last step
    that was told. `ahead`: tokens that the running step computes, when their pushes have begun.
    """

    request_id: str
    ticket: bytes
    tokens: int
    computed: int = 0
    ahead: int = 0
    pages: list[int] = field(default_factory=list)
    after: _ucx.CudaFence | None = None
    wanted: tuple[int, int] | None = None
    finished: Finished | None = None
    released: bool = False

    @property
    def going(self) -> bool:
        """Whether its ticket has begun, and neither vLLM nor the ledger has ended it."""
        return self.wanted is not None and self.finished is None and not self.released


class Pushing:
    """The role of a PE worker; used by the service thread only."""

    def __init__(
        self,
        *,
        links: Links,
        sender: Sender,
        pools: ForeignPools,
        layout: BlockLayout,
        parts: Parts,
        results: Results,
    ) -> None:
        self._links = links
        self._sender = sender
        self._pools = pools
        self._layout = layout
        self._geometry = parts.geometry
        self._results = results
        self._requests: dict[str, _Sending] = {}
        self._grants: dict[bytes, tuple[LinkKey, _U32]] = {}
        self._writers = NativeWriters(links, sender)
        self.counters: Counter[str] = Counter()
        self._posting = Posting(links, self._writers, pools, parts, self.counters)
        # What the ledger wants pushed just now is still being computed.
        self._ahead = False

    # --- what comes in ----------------------------------------------------------------------------------------

    def handle(self, now: float, facts: StepFacts, after: _ucx.CudaFence | None = None) -> None:
        """Facts of one step; its chunks are computed when `after` is done."""
        for call in facts.calls:
            if call.request_id not in self._requests:
                self._requests[call.request_id] = _Sending(call.request_id, call.ticket, call.tokens)
                # Until it is finished nothing is held that vLLM could use, so it may wait as long as that takes.
                self._sender.prefill(now, call.request_id, call.ticket, meet_s=math.inf)
                self._carry_out(now)
        for chunk in facts.chunks:
            self._on_chunk(now, chunk, after)
        if facts.chunks:
            self._carry_out(now)
            self._posting.rest(after)
        for finished in facts.finished:
            self._on_finished(now, finished)
        self._carry_out(now)

    def handle_layer(self, now: float, done: LayerDone, after: _ucx.CudaFence | None = None) -> None:
        """A layer of the running step is computed when `after` is done."""
        for chunk in done.chunks:
            request = self._requests.get(chunk.request_id)
            if request is not None and request.going and request.ahead < chunk.computed:
                request.ahead = chunk.computed
                self._feed_ahead(now, request, chunk)
        self._posting.layer(done.layer, after)

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""
        match event:
            case LinkUp(key, _, lane):
                self._posting.planners[key] = Planner.of(lane.probes)
            case LinkDown(key):
                self._posting.planners.pop(key, None)
            case LinkRefusal(_, reason):
                _log.warning("no link: %s", reason)
            # What the ledger refuses, or has already, changes nothing here.
            case Received(key, Grant() as grant) if len(grant.pages) % 4 == 0:
                self._grants.setdefault(grant.ticket, (key, unpack_u32(grant.pages)))
            case _:
                pass
        tell_sender(self._sender, now, event)
        self._carry_out(now)

    def tick(self, now: float) -> None:
        """Timers, and what the ledger wants done."""
        self._writers.look(now)
        self._sender.reap(now)
        self._carry_out(now)
        if len(self._grants) > 8192:
            # The ledger has long refused the older ones whose calls never came; newer ones may still wait for theirs.
            live = {request.ticket for request in self._requests.values()}
            for ticket in [one for one in list(self._grants)[:4096] if one not in live]:
                del self._grants[ticket]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return self._sender.next_deadline()

    def beat(self, steps: int) -> None:
        """Each link hears how far its tickets are."""
        for key in self._posting.planners:
            self._links.set_beat(
                key, Beat(steps=steps, state="serving", tickets=self._sender.beat_tickets(key))
            )

    def preempted(self, request_ids: list[str]) -> None:
        """vLLM takes their blocks, to compute them anew later: what stands there is not to be pushed any more."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.computed, request.ahead, request.pages = 0, 0, []

    def unread(self, request_id: str) -> bool:
        """Whether nothing of this request's blocks is being read: all that was posted is written."""
        request = self._requests.get(request_id)
        own = self._writers.of(request.ticket) if request is not None else []
        return all(writer.done + writer.failed >= writer.posted for writer in own)

    def give_up(self, now: float, request_ids: list[str]) -> None:
        """vLLM takes the blocks of these back, although they are being read: their KV cannot be right."""
        for request_id in request_ids:
            self._sender.abort(now, request_id, "vLLM preempted it while it was read")
        self._carry_out(now)

    def abandon(self) -> None:
        """Links and ledger are gone: nothing is read any more, and nothing more will be sent."""
        for request in list(self._requests.values()):
            request.released = True
            self._settle(request)

    def refuse(self, facts: StepFacts) -> None:
        """After `abandon`: what vLLM still tells is answered at once."""
        for finished in facts.finished:
            self._requests.pop(finished.request_id, None)
            self._results.sent(finished.request_id)

    def gauges(self) -> dict[str, int]:
        """All zero at idle."""
        return {**self._sender.gauges(), "sending": len(self._requests), "writers_open": len(self._writers)}

    # --- requests ---------------------------------------------------------------------------------------------

    def _on_chunk(self, now: float, chunk: Chunk, after: _ucx.CudaFence | None) -> None:
        request = self._requests.get(chunk.request_id)
        if request is None or request.finished is not None:
            return
        request.computed, request.pages, request.after = chunk.computed, chunk.pages, after
        self._feed(now, request)

    def _on_finished(self, now: float, finished: Finished) -> None:
        request = self._requests.get(finished.request_id)
        if request is None:
            call = finished.call
            if call is None:
                # Nobody has a ticket for it, or its ticket was over before.
                self._results.sent(finished.request_id)
                return
            request = _Sending(call.request_id, call.ticket, call.tokens)
            self._requests[call.request_id] = request
            self._sender.prefill(now, call.request_id, call.ticket)
        request.finished = finished
        if finished.token is None:
            self._sender.abort(now, request.request_id, "the prefill was aborted")
        else:
            request.computed = max(request.computed, finished.computed)
            request.pages = finished.pages
            self._feed(now, request)
            self._sender.hurry(now, request.ticket)
        self._settle(request)

    def _feed(self, now: float, request: _Sending) -> None:
        """Tell the ledger what is computed, when the ticket has begun."""
        if request.wanted is None or request.released:
            return
        if fault := self._fault(request, request.computed, request.pages):
            self._sender.prefill_failed(now, request.ticket, fault)
            return
        if request.computed:
            self._sender.computed(now, request.ticket, request.computed, request.pages)
        finished = request.finished
        if finished is not None and finished.token is not None:
            # It does not say that the answer ends here: whoever routes hears that from vLLM, and the KV may be wanted.
            record = HandOff(first_token=finished.token, seed=0, next_position=request.tokens)
            self._sender.first_token(now, request.ticket, record)

    def _feed_ahead(self, now: float, request: _Sending, chunk: Chunk) -> None:
        """Let the ledger begin with what the running step computes: its doorbell waits for the first token anyway.

        A fault is told when the step is done, as without layers.
        """
        if not self._fault(request, chunk.computed, chunk.pages):
            self._sender.computed(now, request.ticket, chunk.computed, chunk.pages)
            self._ahead = True
            self._carry_out(now)
            self._ahead = False

    def _fault(self, request: _Sending, computed: int, pages: list[int]) -> str:
        """Why its blocks cannot go where the grant wants them, or ""."""
        assert request.wanted is not None
        start, end = request.wanted
        if request.ticket not in self._grants:
            return "its grant is not known any more"
        key, targets = self._grants[request.ticket]
        ready = min(computed, end)
        if ready <= start:
            return ""
        theirs, layout = self._links.peer_units(key), self._layout
        last = int(targets.max())
        for (pool_id, _), part in zip(self._pools.page_pools(), self._geometry.ranges, strict=True):
            if last >= theirs[pool_id] // part.tensors:
                return f"the grant names block {last}, which the completion engine does not have"
        count = len(targets) if ready >= end else layout.whole_pages(ready - start)
        first = layout.whole_pages(start)
        source = np.array(pages[first : first + count], dtype=np.uint32)
        if len(source) < count:
            return f"{len(pages)} blocks hold {computed} tokens"
        missing = np.flatnonzero((source == 0) & (targets[:count] != 0))
        if len(missing):
            return f"block {int(missing[0]) // layout.groups} is out of the sliding window here, and wanted there"
        return ""

    def _settle(self, request: _Sending) -> None:
        """Report it when both are through with it: vLLM, and the ledger."""
        known = self._requests.get(request.request_id) is request
        if known and request.finished is not None and request.released:
            del self._requests[request.request_id]
            if request.wanted is not None:  # Else the ticket, and its grant, may be another request's.
                self._grants.pop(request.ticket, None)
            self._results.sent(request.request_id)

    def _release(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.released = True
            self._settle(request)

    # --- the ledger's decisions -------------------------------------------------------------------------------

    def _carry_out(self, now: float) -> None:
        carry_out(self._sender, lambda effect: self._do(now, effect))

    def _do(self, now: float, effect: SenderEffect) -> None:
        match effect:
            case Send(link, message):
                self._links.send(LinkKey(*link), message)
            case StartPrefill(request_id, ticket, start, end):
                self._start(now, request_id, ticket, start, end)
            case AbortPrefill(request_id) | ReleaseSource(request_id):
                self._release(request_id)
            case Push():
                self._push(effect)
            case Ring(_, writer, bell):
                if (native := self._writers.get(writer)) is not None:
                    native.ring(encode(bell))
            case PrefillEnded(request_id, ok, reason):
                self._ended(request_id, ok, reason)
            case _:
                self._writers.do(now, effect)

    def _start(self, now: float, request_id: str, ticket: bytes, start: int, end: int) -> None:
        request = self._requests[request_id]
        request.wanted = (start, end)
        # A CE that computes the last token of the prompt itself does not ask for it.
        if not start <= end or request.tokens - end not in (0, 1):
            reason = f"the prompt has {request.tokens} tokens here, and the grant is for {start} to {end}"
            self._sender.prefill_failed(now, ticket, reason, status=400)
            return
        self._feed(now, request)

    def _ended(self, request_id: str, ok: bool, reason: str) -> None:
        self.counters["sent" if ok else "unsent"] += 1
        request = self._requests.get(request_id)
        if not ok:
            _log.warning("request %s: its KV was not sent: %s", request_id, reason)
        if request is not None and request.wanted is None:
            self._release(request_id)  # It never held anything for the ledger.

    def _push(self, push: Push) -> None:
        if self._ahead:
            self._posting.begin(push)
            return
        ticket = self._writers.ticket(push.writer)
        request = next((one for one in self._requests.values() if one.ticket == ticket), None)
        self._posting.whole(push, request.after if request is not None else None)
