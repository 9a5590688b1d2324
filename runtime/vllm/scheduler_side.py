# SPDX-License-Identifier: Apache-2.0
"""The connector in vLLM's scheduler: which requests come from or go to other engines, what each step tells of them.

Requests and outputs are vLLM's objects, read by their attributes. What a router says of a request is in its
`kv_transfer_params` (doc/vllm.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.meta import Call, Chunk, Finished, ForScheduler, Load, StepFacts, by_turns
from kvrail.runtime.vllm.settings import Settings

__all__ = ["SchedulerSide"]

_log = logging.getLogger(__name__)
# vLLM's words for requests that ended with what they were asked for.
_GOOD_ENDS = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
# `first_needed` of a KV cache group: the first token whose KV is needed when so many are computed.
FirstNeeded = Callable[[int], int]
# `end_with_error(request)`: vLLM is to end a request that waits and holds no blocks.
EndWithError = Callable[[Any], None]
# `block_tables(request_id)`: blocks of each KV cache group as of this step, or None when it is not scheduled.
BlockTables = Callable[[str], Sequence[Sequence[int]] | None]


@dataclass(slots=True, eq=False)
class _Out:
    """A request that is prefilled here for another engine. `told`: the workers know of its ticket.

    `table`: its blocks when all of its prompt was scheduled.
    """

    request: Any
    ticket: bytes
    told: bool
    computed: int = 0
    table: list[list[int]] = field(default_factory=list)


class BlockKeeper(Protocol):
    """Holds on to blocks that vLLM lets go: `name` is a request's, or that of a load whose blocks are written into."""

    def keep(self, name: str, blocks: list[int]) -> bool:
        """Whether it holds them now, until `let_go`."""
        ...

    def let_go(self, name: str) -> None: ...


@dataclass(slots=True, eq=False)
class _In:
    """A request whose KV comes from another engine. `asked`: its load has begun, and is the only one of its life.

    `begun`: its first token is known.
    """

    request: Any
    ticket: bytes
    peer: tuple[str, int]
    hand_off: bool
    begun: bool = False
    asked: bool = False
    done: bool = False
    local: int = 0
    start: int = 0
    end: int = 0


class SchedulerSide:
    """One an engine. `block_tokens`: of every KV cache group, for each of which there is a `needed`. `recompute`: vLLM
    computes requests whose load failed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        block_tokens: int,
        needed: Sequence[FirstNeeded],
        engine_id: str,
        recompute: bool,
        end_with_error: EndWithError,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._needed = needed
        # Set when vLLM has made its block pool.
        self.keeper: BlockKeeper | None = None
        self._engine_id = engine_id
        self._recompute = recompute
        self._end_with_error = end_with_error
        self._out: dict[str, _Out] = {}
        self._in: dict[str, _In] = {}
        # Finished here, and not yet reported as sent (or as received) by the workers.
        self._leaving: set[str] = set()
        # Loads that failed with somebody still able to write into their blocks.
        self._held: set[str] = set()
        self._facts = StepFacts()

    # --- what vLLM's scheduler calls --------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has come in; called again with the same one, it does nothing."""
        params = request.kv_transfer_params
        request_id = request.request_id
        if not params or request_id in self._out or request_id in self._in:
            return
        if params.get("do_remote_decode") and self._settings.role == "pe":
            self._take_out(request, params)
        elif params.get("do_remote_prefill") and self._settings.role == "ce":
            self._take_in(request, params)
        elif params.get("do_remote_decode") or params.get("do_remote_prefill"):
            _log.error(
                "request %s asks for what this engine's kv_role does not do; it runs here alone", request_id
            )

    def external_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """(tokens whose KV comes from elsewhere beyond the `local` first ones, whether that happens between steps).

        None: the request is not to be scheduled now.
        All but the request's last token, which is computed here either way: of a plain request that is the prompt's
        last token, else the placeholder for the first one of the answer.
        """
        self.on_new_request(request)
        coming = self._in.get(request.request_id)
        if coming is None:
            return 0, False
        if coming.asked:
            if coming.hand_off and coming.done and not coming.begun:
                # Its load has failed, and vLLM would compute the placeholder.
                _log.error("request %s fails: its first token is not known", request.request_id)
                self._end_with_error(request)
                return None, False
            return 0, False
        coming.local = local
        count = int(request.num_tokens) - 1 - local
        if count <= 0 and coming.hand_off:
            # All KV is here. Still it must wait for its first token, and only what is loaded waits.
            count = 1
        return (count, True) if count > 0 else (0, False)

    def after_alloc(self, request: Any, groups: Sequence[Sequence[int]], external: int) -> None:
        """vLLM has put blocks down for the tokens that are to come (`groups`: block ids of each KV cache group)."""
        coming = self._in.get(request.request_id)
        if coming is None or coming.asked:
            return
        coming.asked = True
        coming.end = int(request.num_tokens) - 1
        if external <= 0:
            # vLLM has or computes it all by itself. The PE, which may hold KV for it, is granted nothing and lets go.
            del self._in[request.request_id]
            coming.start = coming.end
            self._facts.loads.append(self._load(coming, groups, unasked=True))
            return
        coming.start = min(coming.local, coming.end)
        self._facts.loads.append(self._load(coming, groups))

    def build(self, output: Any, block_tables: BlockTables) -> StepFacts:
        """What the workers hear with this step."""
        facts, self._facts = self._facts, StepFacts()
        waiting = self.busy or any(coming.asked and not coming.done for coming in self._in.values())
        facts.idle = bool(waiting) and not output.total_num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            if request_id in self._out:
                self._out[request_id].computed = 0
                facts.preempted.append(request_id)
        if self._out:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                going = self._out.get(request_id)
                if going is not None:
                    self._chunk(facts, going, int(scheduled), block_tables)
        return facts

    def finished(self, request: Any, groups: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is done with a request: (whether its blocks stay until it is reported as sent, what a router hears)."""
        request_id = request.request_id
        coming = self._in.pop(request_id, None)
        if coming is not None and coming.asked and not coming.done:
            # Parked: vLLM itself keeps its blocks until it is reported as received.
            self._facts.cancelled.append(request_id)
            self._leaving.add(request_id)
        going = self._out.pop(request_id, None)
        if going is None:
            return False, None
        prompt = int(request.num_prompt_tokens)
        good = request.status.name in _GOOD_ENDS and len(request.output_token_ids) > 0
        if not good and not going.told:
            return False, None
        if good:
            groups = self._with_first_needed(going, groups, prompt)
        self._facts.finished.append(
            Finished(
                request_id=request_id,
                token=int(request.output_token_ids[0]) if good else None,
                computed=prompt if good else 0,
                pages=by_turns(groups, 0, -(-prompt // self._block_tokens)) if good else [],
                call=None if going.told else Call(request_id, going.ticket, prompt),
            )
        )
        self._leaving.add(request_id)
        return True, self._answer(going, prompt) if good else None

    def hear(self, *, sent: Sequence[str], received: Sequence[str], news: ForScheduler) -> None:
        """What the workers reported with this step, before vLLM acts on it: it lets blocks of failed loads go next."""
        for name, blocks in news.held.items():
            if self.keeper is None or not self.keeper.keep(name, blocks):
                # Nothing is worse than to give them to somebody else.
                raise RuntimeError(
                    f"this vLLM cannot hold the blocks {blocks}, into which an engine may still write"
                )
            self._held.add(name)
        for name in news.quiet & self._held:
            self._held.remove(name)
            if self.keeper is not None:
                self.keeper.let_go(name)
        for request_id, token in news.tokens.items():
            coming = self._in.get(request_id)
            if coming is not None and coming.hand_off:
                put_first_token(coming.request, token)
                coming.begun = True
        for request_id in received:
            self._leaving.discard(request_id)
            coming = self._in.get(request_id)
            if coming is not None:
                coming.done = True
        self._leaving.difference_update(sent)
        if self.keeper is not None:
            for request_id in sent:
                self.keeper.let_go(request_id)

    @property
    def busy(self) -> bool:
        """Whether the workers have something to report although no request runs."""
        return bool(self._leaving or self._held)

    # --- inside -----------------------------------------------------------------------------------------------

    def _take_out(self, request: Any, params: dict[str, Any]) -> None:
        given = params.get("ticket")
        try:
            ticket = os.urandom(16) if given is None else _ticket(given)
        except ConfigError as error:
            _log.error("request %s: %s; its KV stays here", request.request_id, error)
            return
        going = _Out(request, ticket, told=given is not None)
        self._out[request.request_id] = going
        if going.told:
            self._facts.calls.append(Call(request.request_id, ticket, int(request.num_prompt_tokens)))

    def _take_in(self, request: Any, params: dict[str, Any]) -> None:
        hand_off = params.get("first_token") == "handoff"
        ticket, peer = bytes(16), ("", 0)
        try:
            ticket = _ticket(params.get("ticket"))
            if hand_off and not request.prompt_token_ids:
                raise ConfigError("first_token needs a prompt of token ids")
        except ConfigError as error:
            _log.error("request %s: %s", request.request_id, error)
        else:
            # One that is not among them goes on as it is, for the workers to refuse.
            host, port = str(params.get("remote_host")), params.get("remote_port")
            peer = self._settings.peer_of(host, port) or (host, port if isinstance(port, int) else 0)
        if hand_off:
            # (Set for requests whose prompt must be computed here, as for its log-probabilities: this one's is not.)
            request.skip_reading_prefix_cache = False
        self._in[request.request_id] = _In(request, ticket, peer, hand_off)

    def _load(self, coming: _In, groups: Sequence[Sequence[int]], *, unasked: bool = False) -> Load:
        first, last = coming.start // self._block_tokens, -(-coming.end // self._block_tokens)
        return Load(
            request_id=coming.request.request_id,
            ticket=coming.ticket,
            peer=coming.peer,
            token_start=coming.start,
            token_end=coming.end,
            pages=[] if unasked else by_turns(groups, first, last),
            hand_off=coming.hand_off,
            recompute=self._recompute,
            unasked=unasked,
        )

    def _chunk(self, facts: StepFacts, going: _Out, scheduled: int, block_tables: BlockTables) -> None:
        prompt = int(going.request.num_prompt_tokens)
        computed = min(int(going.request.num_computed_tokens) + scheduled, prompt)
        if computed <= going.computed:
            return
        groups = block_tables(going.request.request_id)
        if groups is None:
            return
        going.computed = computed
        if computed == prompt:
            going.table = [list(group) for group in groups]
        if going.told:
            pages = by_turns(groups, 0, -(-computed // self._block_tokens))
            facts.chunks.append(Chunk(going.request.request_id, computed, pages))

    def _with_first_needed(
        self, going: _Out, groups: Sequence[Sequence[int]], prompt: int
    ) -> Sequence[Sequence[int]]:
        """`groups` with the blocks that whoever computes the prompt's last token needs.

        For the token behind it, vLLM has let a block more of a sliding window go a moment ago.
        """
        if self.keeper is None or len(going.table) != len(groups):
            return groups
        found = [list(group) for group in groups]
        kept: list[int] = []
        for group, before, needed in zip(found, going.table, self._needed, strict=True):
            for at in range(needed(prompt - 1) // self._block_tokens, min(len(group), len(before))):
                if not group[at] and before[at]:
                    group[at] = before[at]
                    kept.append(before[at])
        if kept and not self.keeper.keep(going.request.request_id, kept):
            return groups
        return found

    def _answer(self, going: _Out, prompt: int) -> dict[str, Any]:
        """What the router passes on to the CE."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "ticket": going.ticket.hex(),
            "remote_engine_id": self._engine_id,
            "remote_host": self._settings.told_host,
            "remote_port": self._settings.kv_port,
            "remote_num_tokens": prompt,
        }


def put_first_token(request: Any, token: int) -> None:
    """Replace the placeholder at the end of a request that has not run yet by the token that it stands for."""
    request.prompt_token_ids[-1] = token
    request._all_token_ids[-1] = token
    if request.block_hashes:
        # The last full block may hold it.
        request.block_hashes.pop()
        request.update_block_hashes()


def _ticket(text: Any) -> bytes:
    try:
        ticket = bytes.fromhex(text)
    except (TypeError, ValueError):
        ticket = b""
    if len(ticket) != 16:
        raise ConfigError(f"kv_transfer_params: ticket must be 32 hex digits, not {text!r}")
    return ticket
