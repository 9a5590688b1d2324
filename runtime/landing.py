# SPDX-License-Identifier: Apache-2.0
"""The hand-over as it arrives at a completion rank: first tokens ahead of the pages, then the pages themselves.

A peer is believed only after a look: a record that cannot be right, or pages that are not what was sent, fail their
request. Nothing is decoded before that.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvrail.runtime.decoding import Decoding
from kvrail.runtime.engine_protocol import Engine
from kvrail.runtime.handing_over import counts_of, fault_of_hand_off
from kvrail.runtime.link_board import LinkBoard
from kvrail.runtime.messages import FinishReason
from kvrail.runtime.requests import Request, Requests
from kvrail.runtime.verifying import Verifying
from kvrail.transfer.link_events import LaneInfo, LinkKey
from kvrail.transfer.memory import Pools
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import Landed
from kvrail.transfer.wire import HandOff

__all__ = ["Landing"]

_log = logging.getLogger(__name__)


class Landing:
    """Takes what the ledger lets through: `first_token`, then `landed`, whose pages `decoding` gets.

    Pages that came with checksums go there by `verified`, in a later turn.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        pool: PagePool,
        pools: Pools,
        receiver: Receiver,
        verifying: Verifying,
        board: LinkBoard,
        requests: Requests,
        decoding: Decoding,
        counters: Counter[str],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._pools = pools
        self._receiver = receiver
        self._verifying = verifying
        self._board = board
        self._requests = requests
        self._decoding = decoding
        self._counters = counters
        # Links whose pages a network card writes into our GPU.
        self._written_by_card: set[LinkKey] = set()

    def link_up(self, key: LinkKey, lane: LaneInfo) -> None:
        """Pages of this link come by that lane."""
        if lane.card_writes_gpu:
            self._written_by_card.add(key)

    def link_down(self, key: LinkKey) -> None:
        """No pages come by this link any more."""
        self._written_by_card.discard(key)

    def first_token(self, now: float, request: Request, hand_off: HandOff) -> bool:
        """The first token of each choice, final, for the user at once; but those that are out stay.

        Returns whether it waits for its pages now: it may have ended, or be computed here instead.
        """
        sampling = request.submit.sampling
        if fault := fault_of_hand_off(hand_off, sampling, len(request.tokens), self._engine.vocab_size):
            # A peer of another version, or a broken one: its KV is not to be trusted either.
            self._counters["bad_hand_offs"] += 1
            self._receiver.cancel(now, request.ticket, fault)
            reason = f"the prefill engine handed over what cannot be used: {fault}"
            self._requests.fail(request, 502, reason, None)
            return False
        request.phase = "first"
        if request.first is not None:
            if hand_off.ended:
                # Where two tokens are as likely, another PE may choose the other one, and end there: no pages come.
                self._decoding.fall_back(request, "the prefill engine that was asked next ended the answer")
            return not hand_off.ended
        request.first = hand_off
        request.cached_tokens = hand_off.cached_tokens
        self._counters["prefills_remote"] += 1
        for choice, first in enumerate(hand_off.firsts):
            reason_: FinishReason | None = first.finish_reason  # type: ignore[assignment]
            self._requests.emit(request, choice, first.token, reason_, first.logprob)
        return request in self._requests

    def landed(self, now: float, landed: Landed) -> None:
        """A good doorbell: the pages are ours, and go to the engine or back to the pool."""
        request = self._requests.by_ticket(landed.request_id, landed.ticket)
        if request is None:
            self._pool.release(landed.owner)
            return
        self._board.count(request.link, **counts_of(landed))
        if request.link in self._written_by_card and self._pools.cuda is not None:
            # Before anything on the GPU reads them.
            self._pools.cuda.flush_remote_writes()
        if not self._verifying.begin(landed):
            self._accept(now, request, landed)

    def verified(self, now: float) -> None:
        """Pages whose checksums have been computed: none of them is decoded before."""
        for landed, fault in self._verifying.take():
            request = self._requests.by_ticket(landed.request_id, landed.ticket)
            if request is None:
                self._pool.release(landed.owner)
            elif not fault:
                self._accept(now, request, landed)
            else:
                self._damaged(request, landed, fault)

    def _damaged(self, request: Request, landed: Landed, fault: str) -> None:
        _log.error("request %s: %s", request.id, fault)
        self._pool.release(landed.owner)
        self._requests.fail(request, 500, f"the KV pages of the prompt arrived damaged ({fault})", None)

    def _accept(self, now: float, request: Request, landed: Landed) -> None:
        """The pages are good."""
        # The doorbell carries the first token too: a first-token message need not have come.
        if request.phase == "granted" and not self.first_token(now, request, landed.hand_off):
            self._pool.release(landed.owner)
            return
        self._decoding.adopt(request, landed)
