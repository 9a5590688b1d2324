# SPDX-License-Identifier: Apache-2.0
"""The splitter of a completion engine: takes requests that can be split, and is the hands of each (legs.py)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, Literal

import msgspec

from kvrail.runtime.control.routing import affinity_key
from kvrail.runtime.vllm.carried import why_unsplit, why_whole
from kvrail.runtime.vllm.compat import (
    default_sampling,
    ending_of,
    failed_output,
    first_token_output,
    renamed,
    text_from_the_end,
    variant,
)
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.legs import Attempt, Split
from kvrail.runtime.vllm.notes import NOTES, Notes
from kvrail.runtime.vllm.peers import Peer, PeerCalls, PrefillRefused
from kvrail.runtime.vllm.spec import FirstToken, PrefillCall
from kvrail.transfer.wire import pack_u32

__all__ = ["RequestSplitter"]

_log = logging.getLogger(__name__)
# How much of a prompt stands for its conversation.
_AFFINITY_TOKENS = 256


class RequestSplitter:
    """Splits what can be split, as `local_prefill` says."""

    def __init__(
        self,
        tap: CoreTap,
        config: Any,
        peers: PeerCalls,
        counters: SplitCounters,
        *,
        local_prefill: Literal["auto", "never", "always"],
        short: int,
    ) -> None:
        self.unsplit = "--local-prefill always" if local_prefill == "always" else why_unsplit(config)
        self.running: dict[str, _SplitRequest] = {}
        self.tap = tap
        self.peers = peers
        self.counters = counters
        self.may_fall_back = local_prefill != "never"
        self.max_model_len: int = config.model_config.max_model_len
        self._short = short if local_prefill == "auto" else 0
        self._defaults = default_sampling()
        if self.unsplit:
            _log.warning("every prompt is prefilled here: %s", self.unsplit)

    def take(self, request: Any) -> bool:
        """Begin to serve the request in two places; False: let the core do it alone."""
        why = self.unsplit or why_whole(request, self._defaults)
        tokens = request.prompt_token_ids
        if not why and len(tokens) <= self._short:
            why = "it is short"
        peer, full = None, not why
        if not why:
            peer = self.peers.choose(affinity_key(repr(tokens[:_AFFINITY_TOKENS])))
            why = "" if peer is not None else "no prefill engine can take it"
        notes = NOTES.get() or Notes()
        if peer is None and not self.may_fall_back:
            self._refuse(request, full, why, notes)
            return True
        if peer is None:
            _log.debug("request %s is prefilled here: %s", request.request_id, why)
            self.counters.route.labels("local").inc()
            notes.routes.append("local")
            return False
        split = _SplitRequest(self, request, peer, notes)
        self.running[request.request_id] = split
        split.begin()
        return True

    def _refuse(self, request: Any, full: bool, why: str, notes: Notes) -> None:
        """End it. vLLM will see an error of the engine; the client gets our words instead."""
        notes.refusal = (503 if full else 400, f"{why}, and --local-prefill is never")
        self.tap.put_in([failed_output(request.request_id)])

    def drop(self, request_id: str) -> bool:
        """The serving layer wants no more of it."""
        split = self.running.get(request_id)
        if split is None:
            return False
        split.legs.abort()
        split.settle()
        return True


class _SplitRequest:
    """One request in two places: what its legs want done."""

    def __init__(self, owner: RequestSplitter, request: Any, peer: Peer, notes: Notes) -> None:
        self.legs: Split[Any] = Split(self, may_fall_back=owner.may_fall_back)
        self._owner = owner
        self._request = request
        self._peer = peer
        self._notes = notes
        self._place = len(notes.routes)
        notes.routes.append("")
        self._ticket = secrets.token_bytes(16)
        self._started = time.monotonic()
        self._first_at = 0.0
        self._token_1: int | None = None
        self._call: asyncio.Task[None] | None = None
        room = owner.max_model_len - len(request.prompt_token_ids)
        self._only_token_1 = min(request.sampling_params.max_tokens, room) <= 1

    def begin(self) -> None:
        """Both legs at once."""
        self.legs.start(only_token_1=self._only_token_1)
        # Behind the tasks of both: there is time until token 1 comes.
        asyncio.get_running_loop().call_soon(self._prepare_text)

    def _prepare_text(self) -> None:
        client, request = self._owner.tap.client, self._request
        if client is not None:
            text_from_the_end(client, request.request_id, request.prompt_token_ids)

    def settle(self) -> None:
        """Forget the request once it is over."""
        if self.legs.done:
            self._owner.running.pop(self._request.request_id, None)

    # What Split asks for

    def call_prefill(self) -> None:
        self._call = asyncio.create_task(self._prefill())

    def drop_prefill(self) -> None:
        # A cancelled call closes its connection, and the engine at its other end stops for that.
        if self._call is not None and self._call is not asyncio.current_task():
            self._call.cancel()

    def submit(self, number: int, attempt: Attempt) -> None:
        tokens, transfer = self._request.prompt_token_ids, None
        if attempt == "handoff":
            # Token 1 is not known yet: the connector puts it into its place when it hands the KV over.
            tokens = [*tokens, tokens[-1]]
            transfer = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "ticket": self._ticket.hex(),
                "remote_host": self._peer.host,
                "remote_port": self._peer.port,
                "first_token": "handoff",
            }
        elif attempt == "behind token 1":
            assert self._token_1 is not None
            tokens = [*tokens, self._token_1]
        request = variant(
            self._request,
            self._name(number),
            tokens,
            fewer=0 if attempt == "prompt" else 1,
            transfer=transfer,
        )
        self._owner.tap.submit(request, lambda output: self._heard(number, output))

    def withdraw(self, number: int) -> None:
        self._owner.tap.withdraw(self._name(number))

    def failure(self, reason: str) -> Any:
        _log.error("request %s failed: %s (--local-prefill never)", self._request.request_id, reason)
        self._notes.refusal = (503, f"{reason}, and --local-prefill is never")
        return failed_output(self._request.request_id)

    def note(self, what: Literal["remote", "fallback"], reason: str) -> None:
        self._owner.counters.route.labels(what).inc()
        if what == "fallback":
            _log.warning("request %s is prefilled here after all: %s", self._request.request_id, reason)
        # The newest word counts: a prefill engine may be lost behind token 1.
        self._notes.routes[self._place] = "remote" if what == "remote" else "local"

    # What comes back

    async def _prefill(self) -> None:
        request = self._request
        sampling = variant(request, "", (), fewer=0, transfer=None).sampling_params
        sampling.max_tokens, sampling.min_tokens = 1, min(1, sampling.min_tokens)
        call = PrefillCall(
            version=self._owner.peers.version,
            model=self._owner.peers.model,
            ticket=b"" if self._only_token_1 else self._ticket,
            tokens=pack_u32(request.prompt_token_ids),
            sampling=msgspec.msgpack.encode(sampling),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        try:
            first = await self._owner.peers.prefill(self._peer, call)
        except PrefillRefused as refused:
            found = self.legs.prefill_failed(str(refused))
        except Exception as error:
            _log.exception("request %s: the call to the prefill engine failed", request.request_id)
            found = self.legs.prefill_failed(f"{type(error).__name__}: {error}")
        else:
            found = self._take_token_1(first)
        self._owner.tap.put_in(found)
        self.settle()

    def _take_token_1(self, first: FirstToken) -> list[Any]:
        self._token_1 = first.token
        self._first_at = time.monotonic()
        output = first_token_output(
            self._request.request_id,
            first,
            prompt_tokens=len(self._request.prompt_token_ids),
            since=self._started,
            last=self._only_token_1,
        )
        return self.legs.token_1(output, final=first.stopped or self._only_token_1)

    def _heard(self, number: int, output: Any) -> list[Any]:
        ending = ending_of(output)
        if output.new_token_ids and self._first_at:
            self._owner.counters.handover.observe(time.monotonic() - self._first_at)
            self._first_at = 0.0
        found = self.legs.core(number, renamed(output, self._request.request_id), ending)
        self.settle()
        return found

    def _name(self, number: int) -> str:
        return f"{self._request.request_id}#{number}"
