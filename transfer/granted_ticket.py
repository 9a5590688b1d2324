# SPDX-License-Identifier: Apache-2.0
"""One grant as the completion engine keeps it: what it allows, how it is told, what its doorbell must say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrail.transfer.tickets import CE_MOVES, CeState, FenceMode, LinkKey, moved, owner_of
from kvrail.transfer.wire import Doorbell, Grant, HandOff, pack_u32

__all__ = ["PeerLink", "Ticket", "ticket_gauges"]

_LIVE = frozenset({CeState.GRANTED, CeState.HANDED})


@dataclass(slots=True, eq=False)
class Ticket:
    """One grant. Read-only for callers. `deadline` is when its present wait ends, None when only proof ends it.

    `patient`: nobody else can do its prefill, so that a silent peer is waited for as long as the ticket lives.
    """

    id: bytes
    request_id: str
    link: LinkKey
    epoch: int
    fence: FenceMode
    token_start: int
    token_end: int
    pages: npt.NDArray[np.uint32]
    state_slot: int
    verify: bool
    patient: bool
    deadline: float | None
    state: CeState = CeState.GRANTED
    progress: int = -1
    hand_off: HandOff | None = None

    @property
    def owner(self) -> str:
        """The name under which it owns its pages in the PagePool."""
        return owner_of(self.id)

    @property
    def live(self) -> bool:
        """Whether its doorbell would still be accepted."""
        return self.state in _LIVE

    def move(self, new: CeState) -> None:
        """Change state as the table allows."""
        self.state = moved(CE_MOVES, self.state, new)

    def grant(self, ce: LinkKey, ttl_s: float) -> Grant:
        """The message that tells the PE, from this CE rank."""
        return Grant(
            ticket=self.id,
            epoch=self.epoch,
            ce=ce[0],
            ce_rank=ce[1],
            pe=self.link[0],
            pe_rank=self.link[1],
            token_start=self.token_start,
            token_end=self.token_end,
            pages=pack_u32(self.pages),
            state_slot=self.state_slot,
            ttl_s=ttl_s,
            verify=self.verify,
        )

    def fault_of(self, bell: Doorbell) -> str:
        """Why this doorbell is no good one, or "". The checksums themselves are the caller's to compare."""
        if bell.status == "failed":
            return bell.reason or "the prefill failed"
        if (bell.token_start, bell.token_end) != (self.token_start, self.token_end):
            return (
                f"the doorbell covers tokens {bell.token_start} to {bell.token_end}, "
                f"the ticket {self.token_start} to {self.token_end}"
            )
        if bell.checksums is None and self.verify and len(self.pages):
            return "the doorbell has no checksums, though the grant asked for them"
        if bell.checksums is not None and len(bell.checksums) != 8 * len(self.pages):
            return f"the doorbell has {len(bell.checksums) / 8:g} checksums for {len(self.pages)} pages"
        if self.verify and self.state_slot >= 0 and bell.state_checksum is None:
            return "the doorbell has no checksum of the state slot, though the grant asked for it"
        if self.hand_off is None and bell.hand_off is None:
            return "the doorbell came without a first token"
        return ""


@dataclass(slots=True)
class PeerLink:
    """The newest epoch of one peer rank. `held`: pages (and slots) of its tickets and quarantine, all epochs."""

    epoch: int
    fence: FenceMode
    state: Literal["up", "suspect", "fencing", "down"] = "up"
    held: int = 0
    held_slots: int = 0
    tickets: dict[bytes, Ticket] = field(default_factory=dict)

    def live(self) -> list[Ticket]:
        """The tickets whose doorbells would still be accepted."""
        return [ticket for ticket in self.tickets.values() if ticket.live]

    @property
    def unproven(self) -> int:
        """Pages of its tickets that only a fence, the peer's end or a late answer can free."""
        return sum(len(t.pages) for t in self.tickets.values() if t.state is CeState.UNPROVEN)

    @property
    def unproven_slots(self) -> int:
        """State slots of the same tickets."""
        return sum(t.state_slot >= 0 for t in self.tickets.values() if t.state is CeState.UNPROVEN)


def ticket_gauges(tickets: Sequence[Ticket]) -> dict[str, int]:
    """Tickets and their pages by what they wait for."""
    live = [ticket for ticket in tickets if ticket.live]
    dead = [ticket for ticket in tickets if not ticket.live]
    return {
        "tickets": len(live),
        "ticket_pages": sum(len(ticket.pages) for ticket in live),
        "quarantined_tickets": len(dead),
        "quarantined_pages": sum(len(ticket.pages) for ticket in dead),
        "unproven_tickets": sum(ticket.state is CeState.UNPROVEN for ticket in dead),
    }
