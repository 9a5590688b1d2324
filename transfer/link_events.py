# SPDX-License-Identifier: Apache-2.0
"""What the rank loop is told about links, and what it may ask for: keys, options, lanes, events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kvrail.transfer.wire import Beat, LinkMessage

__all__ = [
    "Fence",
    "Lane",
    "LaneInfo",
    "LinkDown",
    "LinkEvent",
    "LinkKey",
    "LinkOptions",
    "LinkRefusal",
    "LinkUp",
    "PeerAddress",
    "PeerBeat",
    "PeerLike",
    "PeerStuck",
    "Probe",
    "Proven",
    "Received",
    "Recovered",
    "Suspect",
    "Way",
    "WriterEvent",
]

# What proves that a link's writers are quiet: its worker destroyed (on lane stream its reading thread joined as well),
# or the writer's process gone.
Fence = Literal["worker", "process"]
Lane = Literal["shm", "peer", "put", "stream"]
# How one batch is copied on its lane: peer has the page-copy kernel and the copy engine, the others have one way each.
Way = Literal["kernel", "engine", "put", "shm", "stream"]


class LinkKey(NamedTuple):
    """One rank of one engine process life: how a peer is known."""

    incarnation: bytes
    rank: int


class PeerLike(Protocol):
    """Where a PE rank listens."""

    @property
    def incarnation(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def unix_path(self) -> str: ...


class PeerAddress(NamedTuple):
    incarnation: bytes
    rank: int
    host: str
    port: int
    unix_path: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How links behave. `require_lane`: shm, peer, put, put/<transport> or stream; a link with another is refused."""

    socket_dir: Path
    kv_host: str = "127.0.0.1"
    # Where a PE listens; 0 takes a free port.
    kv_port: int = 0
    lane: Literal["auto", "shm", "peer", "put", "stream"] = "auto"
    put_transport: Literal["auto", "cma", "tcp"] = "auto"
    require_lane: str | None = None
    heartbeat_s: float = 0.25
    # This many intervals without a beat make a link suspect.
    suspect_beats: int = 4
    # A peer that says it serves, and whose step counter stands still for this long, is stuck.
    stuck_s: float = 10.0
    # Each side answers between two of its steps, about three times; the lane test has four times as long.
    handshake_s: float = 30.0
    redial_min_s: float = 0.1
    redial_max_s: float = 5.0
    # Threads that put on one link of a PE; 0: as many as pay on this machine (lanes.rails_for).
    rails: int = 0


class Probe(NamedTuple):
    """One measured batch: bytes, GB/s and µs from the push until it is complete at the peer; how many runs of
    neighbouring units it was, and the way that it took.
    """

    nbytes: int
    gb_per_s: float
    us: float
    runs: int = 1
    way: Way = "put"


@dataclass(frozen=True)
class LaneInfo:
    """The lane that pages take on a link. `reason` says why not a faster one ("" when this is the fastest), `slow`
    that it is far slower than the hardware in between ("" when it is not, or nobody knows). `rails`: how many threads
    of the PE put on it at the same time.
    """

    name: Lane
    transport: str
    memory: str
    fence: Fence
    probes: tuple[Probe, ...] = ()
    reason: str = ""
    same_host: bool = False
    slow: str = ""
    rails: int = 1

    @property
    def label(self) -> str:
        """shm, peer, stream, put/cma, put/tcp, …: what --require-lane and metrics say."""
        return f"put/{self.transport}" if self.name == "put" else self.name

    @property
    def card_writes_gpu(self) -> bool:
        """Whether a network card writes into GPU memory: the GPU may see that later than the CPU sees the doorbell."""
        return self.name == "put" and self.memory == "cuda" and self.transport not in ("cuda_ipc", "tcp")


class LinkUp(NamedTuple):
    """The lane works: grants may be sent. Comes once for each epoch, on both sides."""

    key: LinkKey
    epoch: int
    lane: LaneInfo


class LinkDown(NamedTuple):
    """The link of this epoch is over. Its writers may still write until Proven."""

    key: LinkKey
    epoch: int
    reason: str


class LinkRefusal(NamedTuple):
    """No link came to be; told again when the reason changes. `key` is None for a stranger that dialed us."""

    key: LinkKey | None
    reason: str


class Proven(NamedTuple):
    """Nothing of this epoch's writers can land any more. Comes once for each epoch that was up and ended; perhaps late.

    On the PE (`how` = "worker"): none of our own writes of this epoch is running any more.
    """

    key: LinkKey
    epoch: int
    how: Fence


class Suspect(NamedTuple):
    """Heartbeats are missing: no grants."""

    key: LinkKey


class Recovered(NamedTuple):
    """Heartbeats are back."""

    key: LinkKey


class PeerStuck(NamedTuple):
    """The peer's process lives and says it serves, but its step loop stands still (told once, until it moves)."""

    key: LinkKey
    for_s: float


class Received(NamedTuple):
    key: LinkKey
    message: LinkMessage


class PeerBeat(NamedTuple):
    key: LinkKey
    beat: Beat


class WriterEvent(NamedTuple):
    """A writer's news: progress (all so far complete here), rung, quiet (`ok`: proven), failed (with the reason).

    `at`: when a doorbell went out (time.monotonic()); this is heard of when the step loop comes round.
    """

    key: LinkKey
    epoch: int
    kind: Literal["progress", "rung", "quiet", "failed"]
    writer: int
    ok: bool
    reason: str = ""
    at: float = 0.0


LinkEvent = (
    LinkUp
    | LinkDown
    | LinkRefusal
    | Proven
    | Suspect
    | Recovered
    | PeerStuck
    | Received
    | PeerBeat
    | WriterEvent
)
