# SPDX-License-Identifier: Apache-2.0
"""Every message that two ranks say to each other on a link, versioned, with its encoding.

Link messages are tagged msgpack maps (UCX active messages; the native layer keeps them in order). They carry
page **indices**, never addresses, and each names the link epoch that it belongs to: a message of an older epoch
is counted and dropped. `doc/protocol.md` tells who sends what when.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "HAND_OFF_VERSION",
    "PROTOCOL_VERSION",
    "Beat",
    "Cancel",
    "Doorbell",
    "FirstSample",
    "FirstToken",
    "Grant",
    "HandOff",
    "LaneChosen",
    "LinkMessage",
    "Quiesced",
    "SelfTest",
    "SelfTestResult",
    "TicketBeat",
    "TokenLogprob",
    "decode",
    "encode",
    "pack_u32",
    "unpack_u32",
]

PROTOCOL_VERSION = 4
HAND_OFF_VERSION = 1


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a sampled token, and of the likeliest ones beside it."""

    logprob: float
    top: list[tuple[int, float]] = []


class FirstSample(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of one choice. `finish_reason` is set when the choice ends with it."""

    token: int
    finish_reason: str | None = None
    logprob: TokenLogprob | None = None


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decoding needs besides KV. Additive: a new field has a default, or the version rises.

    What follows from the tokens alone is not in it: penalties count tokens, and a grammar's state is the first
    token fed to the grammar, which the completion engine has from its own client.
    """

    version: int = HAND_OFF_VERSION
    first_token: int
    finish_reason: str | None = None
    logprob: TokenLogprob | None = None
    # The sampler draws from Philox(seed, position): this is all of its state.
    seed: int
    next_position: int
    cached_tokens: int = 0
    # Choices 1, 2, … of a request that wants several answers to its prompt.
    others: list[FirstSample] = []

    @property
    def firsts(self) -> list[FirstSample]:
        """The first token of every choice."""
        own = FirstSample(token=self.first_token, finish_reason=self.finish_reason, logprob=self.logprob)
        return [own, *self.others]

    @property
    def ended(self) -> bool:
        """Whether every choice ends with its first token: then nothing will be decoded."""
        return self.finish_reason is not None and all(one.finish_reason is not None for one in self.others)


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """CE → PE: permission to write. `pages` are uint32 LE indices into the CE's page pool, in token order.

    Zero pages are legal. `ttl_s` is a duration; heartbeats renew it.
    """

    ticket: bytes
    epoch: int
    ce: bytes
    ce_rank: int
    pe: bytes
    pe_rank: int
    token_start: int
    token_end: int
    pages: bytes
    state_slot: int = -1
    ttl_s: float
    verify: bool = False


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """CE → PE: stop writing for this ticket, and answer `Quiesced` (or the doorbell that crossed this)."""

    ticket: bytes
    epoch: int
    reason: str


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first"):
    """PE → CE: the first token, final, ahead of the last pages."""

    ticket: bytes
    epoch: int
    hand_off: HandOff


class Doorbell(msgspec.Struct, frozen=True, kw_only=True, tag="bell"):
    """PE → CE: the last message of a ticket. Sent once, and only after every put of the ticket has landed.

    `landed`: KV of tokens [token_start, token_end) is complete. `checksums`: uint64 LE, one a page in grant
    order, or None. `failed`: it is not, and nothing of this ticket will be written any more.
    """

    ticket: bytes
    epoch: int
    status: Literal["landed", "failed"]
    token_start: int = 0
    token_end: int = 0
    reason: str = ""
    hand_off: HandOff | None = None
    checksums: bytes | None = None
    state_checksum: int | None = None
    pushed_bytes: int = 0


class Quiesced(msgspec.Struct, frozen=True, kw_only=True, tag="quiesced"):
    """PE → CE: the answer to a cancel. `proven` is False when the PE cannot prove that its writes have ended."""

    ticket: bytes
    epoch: int
    proven: bool
    reason: str = ""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, tag="selftest"):
    """PE → CE: a test pattern was put into the probe pool; check it. `checksum` is of `nbytes` at `offset`."""

    epoch: int
    offset: int
    nbytes: int
    checksum: int


class SelfTestResult(msgspec.Struct, frozen=True, kw_only=True, tag="selftested"):
    """CE → PE: whether the pattern arrived, or what was wrong."""

    epoch: int
    ok: bool
    reason: str = ""


class LaneChosen(msgspec.Struct, frozen=True, kw_only=True, tag="lane"):
    """PE → CE: the outcome of the lane tests; the first message that the rank loops hear of a link.

    `name` "" means that no permitted lane works, for `reason`; the link is over then. Else `reason` says why a
    faster lane was not taken, and `slow` that it is slower than it should be. `probes`: (bytes, GB/s, µs, runs of
    neighbouring units, way). `rails`: how many threads of the PE put at the same time.
    """

    epoch: int
    name: Literal["shm", "peer", "put", "stream", ""]
    transport: str = ""
    memory: str = ""
    fence: Literal["worker", "process"] = "process"
    probes: list[tuple[int, float, float, int, Literal["kernel", "engine", "put", "shm", "stream"]]] = []
    reason: str = ""
    slow: str = ""
    rails: int = 1


LinkMessage = Grant | Cancel | FirstToken | Doorbell | Quiesced | SelfTest | SelfTestResult | LaneChosen


class TicketBeat(msgspec.Struct, frozen=True, array_like=True):
    """One ticket in a heartbeat. `progress` rises as the ticket's request gets nearer to its doorbell."""

    ticket: bytes
    progress: int


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What each side says in every heartbeat on the control stream.

    `steps` counts turns of the step loop: it stands still when the loop is stuck. PE: its tickets with their
    progress (this renews them at the CE). CE: the tickets that it still wants (this renews them at the PE).
    """

    steps: int
    state: Literal["loading", "compiling", "serving", "stopping"]
    tickets: list[TicketBeat] = []


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)


def encode(message: LinkMessage) -> bytes:
    """Bytes of a link message."""
    return _encoder.encode(message)


def decode(data: bytes) -> LinkMessage:
    """The message in `data`; raises msgspec.ValidationError or DecodeError on anything else."""
    return _decoder.decode(data)


def pack_u32(values: npt.ArrayLike) -> bytes:
    """Indices or token ids as little-endian uint32 bytes."""
    return np.ascontiguousarray(values, dtype="<u4").tobytes()


def unpack_u32(data: bytes) -> npt.NDArray[np.uint32]:
    """The inverse of `pack_u32`; raises ValueError when the length is no multiple of four."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
