# SPDX-License-Identifier: Apache-2.0
"""One request at a completion engine, and in which order those without a ticket get theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrail.runtime.messages import Submit
from kvrail.transfer.errors import NoPages, ShareUsed
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.wire import HandOff

__all__ = ["Request", "grant_in_turn"]


@dataclass(slots=True, eq=False)
class Request:
    """One request at this rank. `phase` as drawn in completion.py; `deadline`: of its wait for room.

    `keys` name the full pages of its prompt in the pool's prefix cache, if it takes part in that. `open`: the choices
    that have not ended.
    """

    submit: Submit
    tokens: npt.NDArray[np.uint32]
    phase: Literal["waiting", "granted", "first", "decoding"]
    deadline: float
    keys: list[bytes] = field(default_factory=list)
    ticket: bytes = b""
    route: Literal["remote", "local"] = "local"
    cached_tokens: int = 0
    open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open.update(range(self.submit.sampling.n))

    def going_on(self, hand_off: HandOff) -> dict[int, int]:
        """The first tokens of the choices that have not ended."""
        return {choice: first.token for choice, first in enumerate(hand_off.firsts) if choice in self.open}

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def link(self) -> LinkKey:
        """Where its prompt is prefilled; only for requests that were routed to a peer."""
        assert self.submit.peer is not None
        return LinkKey(*self.submit.peer)


def grant_in_turn(waiting: Sequence[Request], grant: Callable[[Request], NoPages | None]) -> list[Request]:
    """Ask `grant` for each in order; it returns what the request lacks, or None. Returns those who still wait.

    Behind one that lacks pages or a seat all wait, or small requests would overtake a large one for ever. Behind one
    whose link has used up its share, only those of the same link wait.
    """
    kept: list[Request] = []
    full: set[LinkKey] = set()
    blocked = False
    for request in waiting:
        if not blocked and request.link not in full:
            lack = grant(request)
            if lack is None:
                continue
            if isinstance(lack, ShareUsed):
                full.add(request.link)
            else:
                blocked = True
        kept.append(request)
    return kept
