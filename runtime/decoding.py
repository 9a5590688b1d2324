# SPDX-License-Identifier: Apache-2.0
"""The requests that the engine of a completion rank works on: their prompts came over a link, or are computed here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.errors import RuntimeFault
from kvrail.runtime.requests import Request, Requests
from kvrail.transfer.pages import PagePool
from kvrail.transfer.tickets import Landed

__all__ = ["Decoding"]

_log = logging.getLogger(__name__)
# As long as what runs finds no room, somebody is refused each time that this has passed.
_ROOM_WITHIN_S = 30.0


class Decoding:
    """Gives requests to the engine, and what it makes of them to `requests`."""

    def __init__(self, engine: Engine, pool: PagePool, requests: Requests, counters: Counter[str]) -> None:
        self._engine = engine
        self._pool = pool
        self._requests = requests
        self._counters = counters
        self._stalled_since = 0.0

    def adopt(self, request: Request, landed: Landed) -> None:
        """Decode over pages that have landed; they are the engine's from here on."""
        assert request.first is not None, "first tokens are told before pages are adopted"
        request.phase = "decoding"
        try:
            self._engine.adopt(
                request.id,
                request.tokens,
                request.submit.sampling,
                owner=landed.owner,
                first_tokens=request.going_on(request.first),
                cached_tokens=request.first.cached_tokens,
                cache=request.submit.cache,
                keys=request.keys,
            )
        except (RuntimeFault, ValueError) as error:
            self._pool.release(landed.owner)
            self._requests.fail(request, 500, f"the engine did not take the pages: {error}", None)

    def prefill_here(self, request: Request) -> None:
        """Let the engine prefill: from the start, or behind first tokens that are out already."""
        request.phase, request.route, request.cached_tokens = "decoding", "local", 0
        sampling, cache = request.submit.sampling, request.submit.cache
        try:
            if request.first is None:
                self._engine.add(request.id, request.tokens, sampling, cache=cache)
            else:
                firsts = request.going_on(request.first)
                self._engine.resume(request.id, request.tokens, sampling, first_tokens=firsts, cache=cache)
            self._counters["prefills_local"] += 1
        except RuntimeFault as fault:
            self._requests.fail(request, fault.status, fault.message, fault.retry_after_s)

    def fall_back(self, request: Request, reason: str) -> None:
        """No remote prefill for this request (any more): do it here when that is allowed."""
        if not request.submit.fallback:
            self._requests.fail(request, 503, f"the remote prefill failed: {reason}", 1.0)
            return
        _log.warning("request %s: prefilling here, because %s", request.id, reason)
        self._counters["prefill_fallbacks"] += 1
        self.prefill_here(request)

    def take(self, outputs: Sequence[StepOutput]) -> None:
        """What a step of the engine has made."""
        for output in outputs:
            request = self._requests.get(output.sequence_id)
            if request is None:
                continue
            if output.finish_reason == "abort":
                self._requests.fail(request, 503, output.error or "the engine dropped the request", 1.0)
                continue
            if request.route == "local" and output.cached_tokens:
                request.cached_tokens = output.cached_tokens
            if output.prompt_logprobs:
                self._requests.tell_prompt(request, output.prompt_logprobs)
            if output.token is not None or output.finish_reason is not None:
                self._requests.emit(
                    request, output.choice, output.token, output.finish_reason, output.logprob
                )

    def refuse_stalled(self, now: float) -> None:
        """Pages in quarantine may never come back: after a while, refuse one of those who wait for them."""
        waiting = [request for request in self._requests if request.phase == "decoding"]
        if self._engine.has_work or not waiting:
            self._stalled_since = now
        elif now - self._stalled_since > _ROOM_WITHIN_S:
            held = f"{self._pool.quarantined} pages are in quarantine"
            self._requests.fail(waiting[0], 503, f"no room within {_ROOM_WITHIN_S:.0f} s: {held}", 2.0)
