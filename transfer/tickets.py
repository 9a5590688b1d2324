# SPDX-License-Identifier: Apache-2.0
"""The words that both ticket ledgers share: link keys, ticket states with their transitions, and effects.

The ledgers are sans-IO: facts go in as method calls, and what must be done comes out as a list of effects
(`take_effects`), to be carried out in order before the next fact goes in. doc/protocol.md tells the whole story.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvrail.transfer.wire import Doorbell, HandOff, LinkMessage

__all__ = [
    "CE_MOVES",
    "PAGE_POOL",
    "PE_MOVES",
    "STATE_POOL",
    "AbortPrefill",
    "CeState",
    "DropWriter",
    "Fence",
    "FenceMode",
    "FirstTokenReady",
    "Landed",
    "LinkKey",
    "Lost",
    "OpenWriter",
    "PeState",
    "PrefillEnded",
    "Proof",
    "Push",
    "ReceiverEffect",
    "ReleaseSource",
    "RenewWriter",
    "Ring",
    "Send",
    "SenderEffect",
    "StartPrefill",
    "StopWriter",
    "moved",
    "owner_of",
]

# A peer rank: (incarnation, rank). A restarted peer has another incarnation, so it is another peer (I6).
LinkKey = tuple[bytes, int]

# What proves all writers of a broken link quiet: the end of this side's UCX worker (tcp, rdma), or only the end
# of the writer's process (shm, cma, cuda_ipc, peer).
FenceMode = Literal["worker", "process"]
Proof = Literal["worker", "process"]

# Numbers of the pools on a link (2 is the probe area, which no ticket touches).
PAGE_POOL = 0
STATE_POOL = 1


def owner_of(ticket: bytes) -> str:
    """The name under which a ticket owns pages in the CE's PagePool."""
    return ticket.hex()


class CeState(enum.Enum):
    """A ticket as the CE sees it."""

    GRANTED = "granted"  # the PE may write; nothing is here yet
    HANDED = "handed"  # the first token is here and final; the doorbell is not
    STOPPING = "stopping"  # dead, pages in quarantine; cancel sent, the answer must come before a deadline
    UNPROVEN = "unproven"  # dead, pages in quarantine until the fence, the PE's end, or a late answer
    LANDED = "landed"  # over: the pages went to the caller for the sequence
    FREED = "freed"  # over: the pages are free


CE_MOVES: Mapping[CeState, frozenset[CeState]] = {
    CeState.GRANTED: frozenset(
        {CeState.HANDED, CeState.LANDED, CeState.STOPPING, CeState.UNPROVEN, CeState.FREED}
    ),
    CeState.HANDED: frozenset({CeState.LANDED, CeState.STOPPING, CeState.UNPROVEN, CeState.FREED}),
    CeState.STOPPING: frozenset({CeState.UNPROVEN, CeState.FREED}),
    CeState.UNPROVEN: frozenset({CeState.FREED}),
    CeState.LANDED: frozenset(),
    CeState.FREED: frozenset(),
}


class PeState(enum.Enum):
    """A ticket as the PE sees it."""

    CALLED = "called"  # the prefill call is here, the grant is not
    GRANTED = "granted"  # the grant is here, the prefill call is not
    PREFILLING = "prefilling"  # both are here; pages are computed and pushed
    RINGING = "ringing"  # everything is pushed and the doorbell waits for the last put
    STOPPING = "stopping"  # the writer was told to stop; its proof of quiet must come before a deadline
    LANDED = "landed"  # over: a good doorbell went out
    FAILED = "failed"  # over: a failed doorbell went out (or the call was refused before any grant)
    QUIESCED = "quiesced"  # over: the cancel was answered, writer proven quiet
    UNPROVEN = "unproven"  # over: the CE was told that the writer is not proven quiet
    GONE = "gone"  # over: the link is gone


_PE_ENDS = {PeState.FAILED, PeState.QUIESCED, PeState.UNPROVEN, PeState.GONE}
PE_MOVES: Mapping[PeState, frozenset[PeState]] = {
    PeState.CALLED: frozenset({PeState.PREFILLING, PeState.FAILED, PeState.QUIESCED}),
    PeState.GRANTED: frozenset({PeState.PREFILLING, PeState.FAILED, PeState.QUIESCED, PeState.GONE}),
    PeState.PREFILLING: frozenset({PeState.RINGING, PeState.STOPPING, *_PE_ENDS}),
    PeState.RINGING: frozenset({PeState.LANDED, PeState.STOPPING, *_PE_ENDS}),
    PeState.STOPPING: frozenset({PeState.LANDED, *_PE_ENDS}),
    PeState.LANDED: frozenset(),
    PeState.FAILED: frozenset(),
    PeState.QUIESCED: frozenset(),
    PeState.UNPROVEN: frozenset(),
    PeState.GONE: frozenset(),
}

S = TypeVar("S", bound=enum.Enum)


def moved(moves: Mapping[S, frozenset[S]], old: S, new: S) -> S:
    """`new`, after checking that the table allows the step; AssertionError is a bug in a ledger, never in a peer."""
    if new not in moves[old]:
        raise AssertionError(f"a ticket cannot go from {old.value} to {new.value}")
    return new


# --- effects of both --------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send this message on the link; drop it if the link is down by now."""

    link: LinkKey
    message: LinkMessage


# --- effects of the receiver (CE) -------------------------------------------------------------------------------


class Fence(NamedTuple):
    """Destroy this side's worker of that link epoch, then report `proven`. Nothing to do if it is gone already."""

    link: LinkKey
    epoch: int
    reason: str


class FirstTokenReady(NamedTuple):
    """The first token is final: emit it. With a finish reason the request is over: no other effect follows."""

    request_id: str
    ticket: bytes
    hand_off: HandOff


class Landed(NamedTuple):
    """All KV stands in `pages` (token order). PagePool holds them for `owner`: rename them, or release them.

    The caller owns them from now on, also when the request has gone meanwhile. `bell` carries the checksums.
    """

    request_id: str
    ticket: bytes
    owner: str
    hand_off: HandOff
    pages: npt.NDArray[np.uint32]
    state_slot: int
    bell: Doorbell


class Lost(NamedTuple):
    """No doorbell will be accepted for this ticket: fall back on fresh pages, or fail the request.

    `hand_off`: the first token, if it came: it is final and was emitted, so go on from token 2.
    """

    request_id: str
    ticket: bytes
    reason: str
    hand_off: HandOff | None


ReceiverEffect = Send | Fence | FirstTokenReady | Landed | Lost

# --- effects of the sender (PE) ---------------------------------------------------------------------------------


class StartPrefill(NamedTuple):
    """Grant and call are both here: compute. Exactly one AbortPrefill or ReleaseSource follows.

    KV of tokens [token_start, token_end) is wanted; `token_end` must be the length of the prompt.
    """

    request_id: str
    ticket: bytes
    token_start: int
    token_end: int


class AbortPrefill(NamedTuple):
    """Stop computing and free its pages: no good doorbell can follow (I7)."""

    request_id: str
    ticket: bytes


class ReleaseSource(NamedTuple):
    """The prefill is done and its pages have been read for the last time: free them (I7)."""

    request_id: str
    ticket: bytes


class OpenWriter(NamedTuple):
    """Open the native writer of a ticket; it refuses what is posted after `ttl_s` without a RenewWriter."""

    link: LinkKey
    writer: int
    ttl_s: float
    ticket: bytes


class RenewWriter(NamedTuple):
    link: LinkKey
    writer: int
    ttl_s: float


class Push(NamedTuple):
    """Copy units `source` of this side's pool number `pool` to units `target` of the peer's.

    `cached`: `source` are slots of the host prefix cache instead, which hold the same kind of units.
    """

    link: LinkKey
    writer: int
    pool: int
    source: npt.NDArray[np.uint32]
    target: npt.NDArray[np.uint32]
    cached: bool = False


class Ring(NamedTuple):
    """Let the writer send `bell` behind its last put.

    `pages` and `state_slot` (None and -1 unless the grant asked to verify): this side's units in grant order,
    whose checksums the caller must put into the doorbell first.
    """

    link: LinkKey
    writer: int
    bell: Doorbell
    pages: npt.NDArray[np.uint32] | None
    state_slot: int


class StopWriter(NamedTuple):
    link: LinkKey
    writer: int


class DropWriter(NamedTuple):
    """Nothing more will be asked of this writer; forget it."""

    link: LinkKey
    writer: int


class PrefillEnded(NamedTuple):
    """The answer to a prefill call, exactly one for each. `status` is the HTTP status that it means."""

    request_id: str
    ok: bool
    reason: str = ""
    status: int = 200
    cached_tokens: int = 0
    retry_after_s: float | None = None


SenderEffect = (
    Send
    | StartPrefill
    | AbortPrefill
    | ReleaseSource
    | OpenWriter
    | RenewWriter
    | Push
    | Ring
    | StopWriter
    | DropWriter
    | PrefillEnded
)
