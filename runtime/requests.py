# SPDX-License-Identifier: Apache-2.0
"""The open requests of a completion engine's rank, and what its front is told about them.

Outputs are collected and go out once a turn, in one message; a failure goes out behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrail.runtime.engine_protocol import Engine
from kvrail.runtime.messages import Failed, FinishReason, Output, Outputs, Submit, ToFront
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.wire import HandOff, TokenLogprob, pack_u32

__all__ = ["Request", "Requests"]


@dataclass(slots=True, eq=False)
class Request:
    """One request at this rank. `phase` as drawn in completion.py; `deadline`: of its wait for room, or for an answer.

    `link`: where its prompt is prefilled (only of requests that were routed to a peer); `asked`: wherever it was to be.
    `called`: the id of the ticket with which its prefill has been called for already, as long as that may be granted.
    `first`: what was handed over with the first tokens that are out. `keys` name the full pages of its prompt in the
    pool's prefix cache, if it takes part in that. `open`: the choices that have not ended.
    """

    submit: Submit
    tokens: npt.NDArray[np.uint32]
    phase: Literal["waiting", "granted", "first", "stranded", "decoding"]
    deadline: float = 0.0
    keys: list[bytes] = field(default_factory=list)
    called: bytes = b""
    ticket: bytes = b""
    route: Literal["remote", "local"] = "local"
    cached_tokens: int = 0
    open: set[int] = field(default_factory=set)
    first: HandOff | None = None
    link: LinkKey = field(init=False)
    # Why it is stranded.
    trouble: str = ""
    asked: set[LinkKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open.update(range(self.submit.sampling.n))
        if self.submit.peer is not None:
            self.ask(LinkKey(*self.submit.peer))

    def ask(self, link: LinkKey) -> None:
        """Its prompt is to be prefilled there."""
        self.link = link
        self.asked.add(link)

    def going_on(self, hand_off: HandOff) -> dict[int, int]:
        """The first tokens of the choices that have not ended."""
        return {choice: first.token for choice, first in enumerate(hand_off.firsts) if choice in self.open}

    @property
    def id(self) -> str:
        return self.submit.request_id


class Requests:
    """A request is here from `add` until its last choice has ended, it has failed, or it was dropped."""

    def __init__(self, engine: Engine, send: Callable[[ToFront], None], counters: Counter[str]) -> None:
        self._engine = engine
        self._send = send
        self._counters = counters
        self._open: dict[str, Request] = {}
        self._outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._open.values())

    def __contains__(self, request: Request) -> bool:
        """Whether it is open: another one may have its id by now."""
        return self._open.get(request.id) is request

    def get(self, request_id: str) -> Request | None:
        """The open request of that id."""
        return self._open.get(request_id)

    def by_ticket(self, request_id: str, ticket: bytes) -> Request | None:
        """The open request that has this ticket; what is said of an older one concerns nobody."""
        request = self._open.get(request_id)
        return request if request is not None and request.ticket == ticket else None

    def add(self, request: Request) -> None:
        """It has come in; there must be none of its id."""
        self._open[request.id] = request
        self._counters["requests_submitted"] += 1

    def drop(self, request: Request) -> None:
        """Its client wants no more of it. What else it holds is the caller's to give up."""
        del self._open[request.id]
        self._counters["requests_aborted"] += 1

    def emit(
        self,
        request: Request,
        choice: int,
        token: int | None,
        reason: FinishReason | None,
        logprob: TokenLogprob | None,
    ) -> None:
        """A token of one choice, or its end, or both; nothing for a choice that the front has ended."""
        if choice not in request.open:
            return
        if token is not None:
            self._counters["generated_tokens"] += 1
        if reason is not None:
            request.open.discard(choice)
        if not request.open:
            self._counters["requests_finished"] += 1
            del self._open[request.id]
        tokens = b"" if token is None else pack_u32([token])
        self._tell(request, choice, tokens, reason, () if logprob is None else (logprob,))

    def tell_prompt(self, request: Request, logprobs: Sequence[TokenLogprob]) -> None:
        """Log-probabilities of the next tokens of its prompt."""
        self._tell(request, prompt=logprobs)

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

    def fail(self, request: Request, status: int, reason: str, retry_after_s: float | None) -> None:
        """It ends without a good answer; `status` is the HTTP status that this means."""
        self._open.pop(request.id, None)
        if request.phase == "decoding":
            # Its other choices, if it has any.
            self._engine.abort(request.id)
        self._counters["requests_failed"] += 1
        # What it has emitted in this turn goes out first.
        self.flush()
        self._send(Failed(request_id=request.id, status=status, reason=reason, retry_after_s=retry_after_s))

    def flush(self) -> None:
        """Send what was emitted since the last time."""
        if self._outputs:
            self._send(Outputs(items=self._outputs))
            self._outputs = []
