# SPDX-License-Identifier: Apache-2.0
"""A completion engine's worker: grants the blocks that vLLM put down for a request, and says when they are filled.

A load moves like this, and vLLM hears of it once:

    waiting ──link up──▶ granted ──doorbell──▶ received
       │                    ├── lost ──▶ failed, its blocks are held ──▶ (nobody writes any more) ──▶ quiet
       │                    └── cancelled ──▶ (nobody writes any more) ──▶ received
       └── no link in time ──▶ failed;  cancelled ──▶ received

A vLLM that knows failed loads by their blocks alone (before 0.31) would compute a lost request in those very blocks:
there it is told as failed at once, and as received when they are quiet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrail.runtime.vllm.given_blocks import GivenBlocks
from kvrail.runtime.vllm.meta import Load, StepFacts
from kvrail.runtime.vllm.results import Results
from kvrail.transfer.errors import LinkLost, NoPages
from kvrail.transfer.ledger_events import tell_receiver
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkRefusal,
    LinkUp,
)
from kvrail.transfer.links import Links
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import Fence, FirstTokenReady, Landed, Lost, ReceiverEffect, Send, owner_of
from kvrail.transfer.wire import Beat, HandOff

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Landing"]

_log = logging.getLogger(__name__)
# How long a request waits for a link that is not up (an engine that has just started); then its load has failed.
_LINK_WITHIN_S = 3.0


@dataclass(slots=True, eq=False)
class _Loading:
    load: Load
    deadline: float
    granted: bool = False
    failed: bool = False
    stuck: bool = False
    cancelled: bool = False


class Landing:
    """The role of a CE worker; used by the service thread only.

    `offset`: of this worker's rank in the PE's ports. `by_request`: vLLM knows failed loads by request.
    """

    def __init__(
        self,
        *,
        links: Links,
        receiver: Receiver,
        blocks: GivenBlocks,
        results: Results,
        peers: tuple[tuple[str, int], ...],
        offset: int,
        by_request: bool = True,
        cuda: _ucx.CudaDevice | None = None,
    ) -> None:
        self._links = links
        self._receiver = receiver
        self._blocks = blocks
        self._results = results
        self._peers: tuple[tuple[str, int], ...] = ()
        self._offset = offset
        self._by_request = by_request
        self._loads: dict[str, _Loading] = {}
        self._waiting: list[_Loading] = []
        self._by_owner: dict[str, _Loading] = {}
        self._up: set[LinkKey] = set()
        self._cuda = cuda
        # Links over which a network card writes into our GPU.
        self._by_card: set[LinkKey] = set()
        # Why there is no link with those who answer at our peers' addresses.
        self._why_not: dict[LinkKey, str] = {}
        self.counters: Counter[str] = Counter()
        # Bytes by the address of the prefill engine that pushed them.
        self.arrived: Counter[tuple[str, int]] = Counter()
        self.set_peers(peers)

    def set_peers(self, peers: Sequence[tuple[str, int]]) -> None:
        """These are the prefill engines from now on. Links to others end, and what they were to bring has failed."""
        for host, port in set(self._peers) - set(peers):
            self._links.forget_at(host, port + self._offset, "it is no prefill engine of ours any more")
        for host, port in peers:
            self._links.connect_at(host, port + self._offset)
        self._peers = tuple(peers)

    @property
    def places(self) -> dict[tuple[str, int], LinkKey | None]:
        """Who was last heard at the address of each prefill engine."""
        return {(host, port): self._links.who_at(host, port + self._offset) for host, port in self._peers}

    # --- what comes in ----------------------------------------------------------------------------------------

    def handle(self, now: float, facts: StepFacts) -> None:
        """Loads and cancellations of one step."""
        for load in facts.loads:
            self._begin(now, load)
        for request_id in facts.cancelled:
            self._cancel(now, request_id)
        self._carry_out()

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""
        match event:
            case LinkUp(key, _, lane):
                self._up.add(key)
                self._why_not.pop(key, None)
                if lane.card_writes_gpu:
                    self._by_card.add(key)
            case LinkDown(key):
                self._up.discard(key)
            case LinkRefusal(key, reason):
                _log.warning("no link: %s", reason)
                if key is not None:
                    here = set(self.places.values())
                    self._why_not = {one: why for one, why in self._why_not.items() if one in here}
                    self._why_not[key] = reason
            case _:
                pass
        tell_receiver(self._receiver, now, event)
        self._carry_out()

    def tick(self, now: float) -> None:
        """Timers, and loads whose link was not up before."""
        self._receiver.reap(now)
        waiting, self._waiting = self._waiting, []
        for loading in waiting:
            self._grant(now, loading)
        self._carry_out()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        due = [loading.deadline for loading in self._waiting]
        ledger = self._receiver.next_deadline()
        return min(due if ledger is None else [*due, ledger], default=None)

    def beat(self, steps: int) -> None:
        """Each link hears which tickets are still wanted."""
        for key in self._up:
            self._links.set_beat(
                key, Beat(steps=steps, state="serving", tickets=self._receiver.beat_tickets(key))
            )

    def abandon(self) -> None:
        """Links and ledger are gone: every load has failed, and blocks that were granted are never given back."""
        for loading in list(self._loads.values()):
            if not loading.failed and not loading.cancelled:
                self._fail(loading, "the transfer thread has ended")

    def refuse(self, facts: StepFacts) -> None:
        """After `abandon`: what vLLM still asks for has failed at once."""
        for load in facts.loads:
            self._loads[load.request_id] = loading = _Loading(load, 0.0)
            self._fail(loading, "the transfer thread has ended")

    def gauges(self) -> dict[str, int]:
        """All zero at idle."""
        return {**self._receiver.gauges(), "loads": len(self._loads), "blocks_held_for": self._blocks.holding}

    # --- loads ------------------------------------------------------------------------------------------------

    def _begin(self, now: float, load: Load) -> None:
        if load.request_id in self._loads:
            _log.error("request %s asks for its KV twice", load.request_id)
            return
        loading = _Loading(load, now + _LINK_WITHIN_S)
        self._loads[load.request_id] = loading
        self.counters["loads"] += 1
        if load.peer not in self._peers:
            host, port = load.peer
            self._fail(loading, f'{host}:{port} is not among the "peers" of this engine')
        else:
            self._grant(now, loading)

    def _grant(self, now: float, loading: _Loading) -> None:
        load = loading.load
        if loading.cancelled:
            return
        host, port = load.peer
        key = self._links.who_at(host, port + self._offset)
        if key is None or key not in self._up:
            if now < loading.deadline:
                self._waiting.append(loading)
            else:
                why = self._why_not.get(key, "") if key is not None else ""
                place = f"{host}:{port + self._offset}"
                self._fail(loading, f"no link to the prefill engine at {place}{f': {why}' if why else ''}")
            return
        self._blocks.give(load.pages)
        try:
            ticket = self._receiver.grant(
                now,
                load.request_id,
                key,
                load.token_end,
                ticket_id=load.ticket,
                token_start=load.token_start,
            )
        except (LinkLost, NoPages, ValueError) as error:
            self._fail(loading, str(error))
            return
        loading.granted = True
        self._by_owner[ticket.owner] = loading

    def _cancel(self, now: float, request_id: str) -> None:
        loading = self._loads.get(request_id)
        if loading is None or loading.cancelled:
            return  # It has landed or failed: vLLM has heard, or hears with its next step.
        loading.cancelled = True
        self.counters["cancelled"] += 1
        if not loading.granted:
            self._over(loading)
        else:
            self._receiver.cancel(now, loading.load.ticket, "the request has ended")

    def _fail(self, loading: _Loading, reason: str, hand_off: HandOff | None = None) -> None:
        """The KV will not come. The request is over at once; its blocks stay with the ticket until nobody can write."""
        load = loading.load
        if load.unasked:
            self._over(loading)
            return
        _log.warning("request %s: the KV of its prompt did not come: %s", load.request_id, reason)
        self.counters["failed"] += 1
        loading.failed = True
        token = hand_off.first_token if load.hand_off and hand_off is not None else None
        if self._by_request and loading.granted:
            self._results.held(self._name(load), load.pages)
            self._report(load, token)
            return
        if not self._by_request and load.hand_off and load.recompute and token is None:
            # vLLM would compute the placeholder: such a request waits for whoever asked to give it up.
            loading.stuck = True
            _log.error(
                "request %s waits until it is aborted: its first token is not known, and vLLM is told to recompute "
                "failed loads (kv_load_failure_policy)",
                load.request_id,
            )
            return
        self._results.failed(load.request_id, load.pages, token)
        if not loading.granted:
            self._over(loading)

    def _report(self, load: Load, token: int | None) -> None:
        self._loads.pop(load.request_id, None)
        self._results.failed(load.request_id, load.pages, token)
        self._results.received(load.request_id)

    def _name(self, load: Load) -> str:
        """Of the blocks of a load: request ids may come again, and tensor-parallel ranks share them."""
        return f"{load.ticket.hex()}/{self._offset}"

    def _over(self, loading: _Loading) -> None:
        """Nobody writes into its blocks any more."""
        load = loading.load
        if loading.stuck and not loading.cancelled:
            return
        if load.unasked:
            self._loads.pop(load.request_id, None)
            return
        if self._loads.get(load.request_id) is not loading:
            # Reported as failed before.
            self._results.quiet(self._name(load))
            return
        del self._loads[load.request_id]
        if loading.failed and not loading.cancelled:
            self._results.failed(load.request_id, load.pages)
        self._results.received(load.request_id)

    # --- the ledger's decisions -------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while effects := self._receiver.take_effects():
            for effect in effects:
                self._do(effect)
        for owner in self._blocks.take_free():
            loading = self._by_owner.pop(owner, None)
            if loading is not None:
                loading.granted = False
                self._over(loading)

    def _do(self, effect: ReceiverEffect) -> None:
        match effect:
            case Send(link, message):
                try:
                    self._links.send(LinkKey(*link), message)
                except LinkLost as error:
                    # Its LinkDown is on the way and settles every ticket of the link.
                    _log.debug("not sent, the link is gone: %s", error)
            case Fence(link, _, reason):
                self._links.fence(LinkKey(*link), reason)
            case FirstTokenReady():
                pass  # It comes with the doorbell as well, and nothing can be decoded before.
            case Landed():
                self._landed(effect)
            case Lost(request_id, ticket, reason, hand_off):
                loading = self._by_owner.get(owner_of(ticket))
                if loading is not None and loading.load.request_id == request_id and not loading.failed:
                    self._fail(loading, reason, hand_off)

    def _landed(self, landed: Landed) -> None:
        self._blocks.landed(landed.owner)
        loading = self._by_owner.pop(landed.owner)
        load = loading.load
        self._loads.pop(load.request_id, None)
        if load.unasked:
            return
        self.counters["landed"] += 1
        self.counters["bytes"] += landed.bell.pushed_bytes
        self.arrived[load.peer] += landed.bell.pushed_bytes
        if self._by_card and self._cuda is not None:
            # Before anything on the GPU reads them.
            self._cuda.flush_remote_writes()
        self._results.received(load.request_id, landed.hand_off.first_token if load.hand_off else None)
