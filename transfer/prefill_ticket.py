# SPDX-License-Identifier: Apache-2.0
"""One ticket as the prefill engine keeps it: which of its pages can go out next, and what its doorbell says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrail.transfer.layout import TicketLayout
from kvrail.transfer.tickets import PAGE_POOL, PE_MOVES, STATE_POOL, LinkKey, PeState, PrefillEnded, moved
from kvrail.transfer.wire import Doorbell, Grant, HandOff, LinkMessage, Quiesced, unpack_u32

__all__ = ["Batch", "CachedPages", "PrefillTicket", "ticket_gauges"]

_U32 = npt.NDArray[np.uint32]


class Batch(NamedTuple):
    """Units of one pool that can go out together: source here (or in the host cache: `cached`), target at the CE."""

    pool: int
    source: _U32
    target: _U32
    cached: bool = False


class CachedPages(NamedTuple):
    """Pages of a prompt that can be read from the host prefix cache: from page number `first` on, in `slots`."""

    first: int
    slots: _U32


@dataclass(slots=True, eq=False)
class PrefillTicket:
    """A grant, a prefill call, or both. `writer` is 0 until something has been pushed or rung."""

    id: bytes
    state: PeState
    deadline: float
    request_id: str | None = None
    link: LinkKey | None = None
    grant: Grant | None = None
    targets: _U32 = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    writer: int = 0
    pushed: int = 0
    state_pushed: bool = False
    state_source: int = -1
    sources: list[_U32] = field(default_factory=list)
    computed: int = 0
    hand_off: HandOff | None = None
    progress: int = 0
    holds_source: bool = False
    quiet_told: bool = False
    # How it ends once its writer is quiet, and what the prefill call is told.
    answer_cancel: bool = False
    reason: str = ""
    status: int = 500
    retry_after_s: float | None = None

    def move(self, new: PeState) -> None:
        """Change state as the table allows."""
        self.state = moved(PE_MOVES, self.state, new)

    @property
    def told(self) -> tuple[LinkKey, Grant]:
        """Its link and grant; only for states that have them."""
        if self.link is None or self.grant is None:
            raise AssertionError(f"a ticket that is {self.state.value} has no grant")
        return self.link, self.grant

    def take_grant(self, link: LinkKey, grant: Grant, layout: TicketLayout) -> str:
        """Take in the grant; returns what is wrong with it, or ""."""
        self.link, self.grant = link, grant
        start, end = grant.token_start, grant.token_end
        if start < 0 or end < start or (end > start and start % layout.page_tokens):
            return f"the grant covers tokens {start} to {end}"
        if len(grant.pages) != 4 * layout.pages_for(end - start):
            return f"the grant has {len(grant.pages) / 4:g} pages for {end - start} tokens"
        if (grant.state_slot >= 0) != (layout.state_bytes > 0):
            return f"the grant names state slot {grant.state_slot}, states have {layout.state_bytes} bytes"
        if not grant.ttl_s > 0:
            return f"the grant lives for {grant.ttl_s} s"
        self.targets = unpack_u32(grant.pages)
        return ""

    def next_batches(
        self,
        tokens_done: int,
        pages: Sequence[int],
        state_slot: int,
        layout: TicketLayout,
        cached: CachedPages | None = None,
    ) -> list[Batch]:
        """What became final with `tokens_done` prompt tokens in the page table `pages`.

        What is in `cached` as well goes out from there: it may still be on its way into the pages.

        The last, partly filled page and the state are final when the whole range is computed. Raises ValueError when
        the page table is too short or the state is missing.
        """
        _, grant = self.told
        start, end = grant.token_start, grant.token_end
        self.computed = max(self.computed, min(tokens_done, end))
        whole = layout.whole_pages(max(0, self.computed - start))
        ready = len(self.targets) if self.computed >= end else whole
        first = layout.whole_pages(start)
        source = np.array(pages[first + self.pushed : first + ready], dtype=np.uint32)
        target = self.targets[self.pushed : ready]
        if len(source) != len(target):
            raise ValueError(f"{tokens_done} tokens are computed, but the page table has {len(pages)} pages")
        batches = _from_cache(source, target, first + self.pushed, cached) if len(target) else []
        self.pushed = max(self.pushed, ready)
        if grant.verify:
            self.sources.append(source)
        if self.wants_state and self.computed_all:
            if state_slot < 0:
                raise ValueError("the prompt is computed, but no state slot was given to push")
            self.state_pushed, self.state_source = True, state_slot
            here, there = (np.array([slot], dtype=np.uint32) for slot in (state_slot, grant.state_slot))
            batches.append(Batch(STATE_POOL, here, there))
        return batches

    @property
    def wants_state(self) -> bool:
        """Whether its state slot is still to be pushed."""
        return self.grant is not None and self.grant.state_slot >= 0 and not self.state_pushed

    @property
    def computed_all(self) -> bool:
        """Whether KV of its whole range stands on this side."""
        return self.grant is not None and self.computed >= self.grant.token_end

    @property
    def complete(self) -> bool:
        """Whether everything has been pushed and the first token is known."""
        return self.computed_all and self.hand_off is not None and not self.wants_state

    def landed_bell(self, layout: TicketLayout) -> Doorbell:
        """The good doorbell, still without checksums."""
        _, grant = self.told
        return Doorbell(
            ticket=self.id,
            epoch=grant.epoch,
            status="landed",
            token_start=grant.token_start,
            token_end=grant.token_end,
            hand_off=self.hand_off,
            pushed_bytes=len(self.targets) * layout.page_bytes + self.state_pushed * layout.state_bytes,
        )

    def pushed_pages(self) -> _U32:
        """This side's pages in grant order (kept only when the grant asks to verify)."""
        return np.concatenate([np.empty(0, dtype=np.uint32), *self.sources])

    def last_message(self, quiet: bool, doubt: str) -> LinkMessage:
        """What tells the CE that it failed. Only a quiet writer lets it say so for certain (I4)."""
        _, grant = self.told
        if not quiet:
            reason = f"{self.reason}; {doubt}"
            return Quiesced(ticket=self.id, epoch=grant.epoch, proven=False, reason=reason)
        if self.answer_cancel:
            return Quiesced(ticket=self.id, epoch=grant.epoch, proven=True, reason=self.reason)
        return Doorbell(ticket=self.id, epoch=grant.epoch, status="failed", reason=self.reason)

    def answer_to_call(self, reason: str, status: int) -> PrefillEnded:
        """How its prefill call ends."""
        return PrefillEnded(
            self.request_id or "",
            status == 200,
            reason=reason,
            status=status,
            cached_tokens=self.hand_off.cached_tokens if self.hand_off is not None else 0,
            retry_after_s=self.retry_after_s,
        )


def _from_cache(source: _U32, target: _U32, first: int, cached: CachedPages | None) -> list[Batch]:
    """Batches of pages number `first` and following, in their order."""
    if cached is None:
        return [Batch(PAGE_POOL, source, target)]
    begin = min(max(cached.first - first, 0), len(source))
    end = min(max(cached.first + len(cached.slots) - first, begin), len(source))
    slots = cached.slots[begin + first - cached.first : end + first - cached.first]
    batches = [
        Batch(PAGE_POOL, source[:begin], target[:begin]),
        Batch(PAGE_POOL, slots, target[begin:end], True),
        Batch(PAGE_POOL, source[end:], target[end:]),
    ]
    return [batch for batch in batches if len(batch.target)]


def ticket_gauges(tickets: Collection[PrefillTicket]) -> dict[str, int]:
    """Tickets by what they wait for."""
    states = Counter(ticket.state for ticket in tickets)
    return {
        "tickets": len(tickets),
        "tickets_waiting": states[PeState.CALLED] + states[PeState.GRANTED],
        "tickets_stopping": states[PeState.STOPPING],
        "target_pages": sum(len(ticket.targets) for ticket in tickets),
    }
