# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side of the connector tells the workers' with each step, and what comes back. Plain data.

Pages are vLLM's block ids, of all KV cache groups by turns: page i of a list is block number i // groups of group
i mod groups. 0 is vLLM's null block: the group needs no block there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Call", "Chunk", "Finished", "ForScheduler", "LayerDone", "Load", "StepFacts", "by_turns"]


@dataclass(frozen=True, slots=True)
class Call:
    """PE: a request whose KV goes to the holder of this ticket has come in. `tokens`: length of its prompt."""

    request_id: str
    ticket: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """PE: after this step's forward pass, KV of the first `computed` tokens stands in `pages`."""

    request_id: str
    computed: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class LayerDone:
    """PE: of the `chunks` that a step computes, this layer's KV stands in their pages; the others' follow."""

    layer: str
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Finished:
    """PE: vLLM is done with the request, and keeps its blocks until it is reported as sent.

    `token`: the first token that it sampled; None when it was aborted. `call`: of a request that came without a ticket.
    """

    request_id: str
    token: int | None
    computed: int
    pages: list[int]
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """CE: KV of tokens [token_start, token_end) is wanted in `pages`, from the PE that listens at `peer`.

    `hand_off`: the last token of the request is a placeholder for the PE's first one. `recompute`: vLLM computes a
    request whose load failed. `unasked`: vLLM has all KV of it and does not wait; the PE is only to hear so.
    """

    request_id: str
    ticket: bytes
    peer: tuple[str, int]
    token_start: int
    token_end: int
    pages: list[int]
    hand_off: bool = False
    recompute: bool = False
    unasked: bool = False


@dataclass
class StepFacts:
    """One step. `preempted`: PE requests whose blocks vLLM takes back now; `cancelled`: CE requests that have ended.

    `idle`: the step computes nothing, and vLLM runs it only to hear what the workers have to report.
    """

    calls: list[Call] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    idle: bool = False

    @property
    def early(self) -> bool:
        """Whether anything in it does not wait for the step's forward pass."""
        return bool(self.calls or self.finished or self.loads or self.cancelled)


@dataclass
class ForScheduler:
    """What workers report besides what vLLM knows to ask for.

    `tokens`: first tokens of requests. `held`: blocks that somebody may still write into although vLLM hears that their
    load is over, by a name that no other load has; `quiet`: names of those into which nobody can any more.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    held: dict[str, list[int]] = field(default_factory=dict)
    quiet: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.held or self.quiet)


def by_turns(groups: Sequence[Sequence[int]], first: int = 0, last: int | None = None) -> list[int]:
    """Blocks number `first` to `last` (None: all) of each group, by turns; 0 where a group's list is shorter."""
    end = max(map(len, groups), default=0) if last is None else last
    return [group[at] if at < len(group) else 0 for at in range(first, end) for group in groups]
