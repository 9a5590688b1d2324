# SPDX-License-Identifier: Apache-2.0
"""The conversation that makes a link, both sides, without any I/O: generators that take and give frames.

    CE (dials)                                    PE (listens)
    Hello   version, nonce, who I am, who you are →
                                                ← Challenge   version, nonce
    Proof   HMAC(token, "ce", all of the above) →               a wrong token ends here, and learns nothing
                                                ← Welcome     HMAC(token, "pe", all of the above)
    Offer   UCX version, layout, epoch, pools   →               with memfds, IPC handles over a Unix socket
                                                ← Accept      worker address, which transports

Who knows no more of a PE than where it listens names nobody in its Hello; then the PE answers the Proof with an
Introduction, which says who it is, and nothing else follows.

Either side may answer `Refuse` with the reason instead, and then closes. From the Offer on, each frame ends in a tag
under a key of this session, so that nobody in between can change an address or a key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

import msgspec

from kvrail.transfer.control_socket import FIRST_LIMIT, FRAME_LIMIT, Frame
from kvrail.transfer.errors import LinkRefused, TransferError
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.layout import Layout
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.wire import PROTOCOL_VERSION

__all__ = [
    "Accept",
    "Agreed",
    "Introduction",
    "Offer",
    "PoolOffer",
    "Refuse",
    "Refused",
    "Turn",
    "WrongPeer",
    "accepting",
    "asking",
    "dialing",
]

_NONCE_BYTES = 32
_INCARNATION_BYTES = 16
_TAG_BYTES = 32
_REASON_CHARS = 500


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    protocol: int
    nonce: bytes
    incarnation: bytes
    rank: int
    peer: bytes
    peer_rank: int


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge"):
    protocol: int
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag="proof"):
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    mac: bytes


class Introduction(msgspec.Struct, frozen=True, kw_only=True, tag="introduction"):
    """PE → CE: who listens here, and on which Unix socket as well."""

    incarnation: bytes
    rank: int
    unix_path: str


class PoolOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of the CE. `memory`: host or cuda. `fd`: position of its memfd among those passed with the offer, or -1.
    `handle`: by which another process of this host maps its GPU memory (CUDA IPC), and where in it the pool begins.
    """

    pool: int
    base: int
    nbytes: int
    unit_bytes: int
    memory: Literal["host", "cuda"]
    key: bytes
    fd: int = -1
    handle: bytes = b""
    handle_offset: int = 0


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """CE → PE: what the CE gives, and what it allows.

    `address` is the CE's UCX worker address with every transport, empty when the CE cannot watch the PE's process
    (then no transport whose writes end only with that process may be used, and no pool has an fd or a handle).
    `network_address` has none of those. `probe_unit`: first unit of the probe pool that this link's self-test may use.
    `gpu`: on which the pools lie.
    """

    ucx: tuple[int, int, int]
    layout: Layout
    epoch: int
    cookie: int
    address: bytes
    network_address: bytes
    pools: list[PoolOffer]
    probe_unit: int
    lane: str
    put_transport: str
    require_lane: str | None
    # Why a same-host lane cannot be had ("" when it can), for people.
    distance: str
    # Where the CE listens for the writer of lane stream (a numeric host and a port), if it does.
    stream: tuple[str, int] | None = None
    gpu: Gpu | None = None


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag="accept"):
    """PE → CE: which of the two addresses it uses, and its own worker address of the same kind."""

    scope: Literal["all", "network"]
    address: bytes


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    reason: str
    # The dialer reached another engine (process life) than it meant to.
    wrong_peer: bool = False


class Agreed(NamedTuple):
    """How a handshake ended on the CE. `secret`: what only the two sides know, for the connection of lane stream."""

    offer: Offer
    accept: Accept
    secret: bytes


class Turn(NamedTuple):
    """What a side does next: send `payload` with `fds`, then wait for one frame of at most `limit` bytes."""

    payload: bytes
    fds: tuple[int, ...] = ()
    limit: int = FIRST_LIMIT


class Refused(LinkRefused):
    """We refuse. `payload` is the frame that tells the peer why, to be sent before closing."""

    def __init__(self, reason: str, payload: bytes) -> None:
        super().__init__(reason)
        self.payload = payload


class WrongPeer(LinkRefused):
    """Another engine than the one meant answers at this address."""


class _Session:
    """Keys of one handshake. Frames after the proofs carry a tag over direction, position and content."""

    def __init__(self, token: bytes, me: Literal["ce", "pe"]) -> None:
        self._secret = hmac.digest(token, b"kvrail link handshake", "sha256")
        self._me = me.encode()
        self._peer = b"pe" if me == "ce" else b"ce"
        self._transcript = b""

    def said(self, payload: bytes) -> None:
        self._transcript += len(payload).to_bytes(4, "little") + payload

    def proof(self) -> bytes:
        return self._mac(b"proof", self._me)

    def proved(self, mac: bytes) -> bool:
        return hmac.compare_digest(mac, self._mac(b"proof", self._peer))

    def secret(self) -> bytes:
        """Of this one handshake, once both nonces are said; it never goes over the control stream."""
        return self._mac(b"stream")

    def seal(self, payload: bytes) -> bytes:
        return payload + self._tag(self._me, payload)

    def unseal(self, frame: Frame) -> Frame:
        # A refusal is never sealed: it gives nothing away, and must be understood at any moment.
        _raise_refusal(frame.payload)
        content, tag = frame.payload[:-_TAG_BYTES], frame.payload[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._peer, content)):
            raise _refused("a frame of the handshake was changed on its way")
        return Frame(content, frame.fds)

    def _tag(self, who: bytes, content: bytes) -> bytes:
        # One sealed frame goes each way, so direction and transcript make every tag unique.
        return self._mac(b"frame", who, content)

    def _mac(self, *parts: bytes) -> bytes:
        framed = b"".join(len(part).to_bytes(4, "little") + part for part in (*parts, self._transcript))
        return hmac.digest(self._secret, framed, "sha256")


def dialing(
    token: bytes,
    me: LinkKey,
    peer: LinkKey,
    nonce: bytes,
    make_offer: Callable[[], tuple[Offer, tuple[int, ...]]],
) -> Generator[Turn, Frame, Agreed]:
    """The CE's side. Calls `make_offer` only after the peer proved that it holds the token.

    Raises LinkRefused: the peer refused (its reason), or is refused (Refused, with what to tell it).
    """
    session = _Session(token, "ce")
    frame = yield from _prove(session, me, peer, nonce)
    welcome = _expect(frame, Welcome)
    if not session.proved(welcome.mac):
        raise _refused("the peer does not hold our cluster token: both sides must use the same --token-file")
    offer, fds = make_offer()
    frame = yield Turn(session.seal(_pack(offer)), fds, FRAME_LIMIT)
    return Agreed(offer, _expect(session.unseal(frame), Accept), session.secret())


def asking(token: bytes, me: LinkKey, nonce: bytes) -> Generator[Turn, Frame, Introduction]:
    """The CE's side when it knows only where a PE listens. Raises as `dialing` does."""
    session = _Session(token, "ce")
    frame = yield from _prove(session, me, LinkKey(b"", 0), nonce)
    introduction = _expect(session.unseal(frame), Introduction)
    _check_length("incarnation", introduction.incarnation, _INCARNATION_BYTES)
    return introduction


def accepting(
    token: bytes,
    me: LinkKey,
    nonce: bytes,
    judge: Callable[[LinkKey, Offer, tuple[int, ...], bytes], Accept],
    introduce: Callable[[], Introduction] | None = None,
) -> Generator[Turn | None, Frame, Turn]:
    """The PE's side. `judge` answers an offer, with the fds that came with it, which it owns, and the secret of
    `Agreed`; or raises TransferError.

    `introduce` answers who asks who is here. Yields None before the first frame. Returns the last turn: the Accept (or
    the Introduction) to send. Raises Refused with what to tell.
    """
    session = _Session(token, "pe")
    frame = yield None
    hello = _expect(frame, Hello)
    _check_version(hello.protocol)
    _check_length("nonce", hello.nonce, _NONCE_BYTES)
    _check_length("incarnation", hello.incarnation, _INCARNATION_BYTES)
    session.said(frame.payload)
    challenge = _pack(Challenge(protocol=PROTOCOL_VERSION, nonce=nonce))
    session.said(challenge)
    frame = yield Turn(challenge)
    proof = _expect(frame, Proof)
    if not session.proved(proof.mac):
        raise _refused("cluster token refused: both sides must use the same --token-file")
    if not hello.peer and introduce is not None:
        return Turn(session.seal(_pack(introduce())))
    if (hello.peer, hello.peer_rank) != me:
        raise _refused("another engine process answers here (restarted?)", wrong_peer=True)
    frame = yield Turn(_pack(Welcome(mac=session.proof())), (), FRAME_LIMIT)
    try:
        offer = _expect(session.unseal(frame), Offer)
    except LinkRefused:
        _close_all(frame.fds)
        raise
    try:
        accept = judge(LinkKey(hello.incarnation, hello.rank), offer, frame.fds, session.secret())
    except TransferError as refusal:
        raise _refused(str(refusal)) from refusal
    return Turn(session.seal(_pack(accept)))


def _prove(session: _Session, me: LinkKey, peer: LinkKey, nonce: bytes) -> Generator[Turn, Frame, Frame]:
    """The CE says who it is and that it holds the token; returns the answer to that."""
    hello = _pack(
        Hello(
            protocol=PROTOCOL_VERSION,
            nonce=nonce,
            incarnation=me.incarnation,
            rank=me.rank,
            peer=peer.incarnation,
            peer_rank=peer.rank,
        )
    )
    session.said(hello)
    frame = yield Turn(hello)
    challenge = _expect(frame, Challenge)
    _check_version(challenge.protocol)
    _check_length("nonce", challenge.nonce, _NONCE_BYTES)
    session.said(frame.payload)
    return (yield Turn(_pack(Proof(mac=session.proof()))))


_M = TypeVar("_M", Hello, Challenge, Proof, Welcome, Introduction, Offer, Accept)
_Message = Hello | Challenge | Proof | Welcome | Introduction | Offer | Accept | Refuse
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_refusals: msgspec.msgpack.Decoder[Refuse] = msgspec.msgpack.Decoder(Refuse)


def _pack(message: _Message) -> bytes:
    return _encoder.encode(message)


def _refused(reason: str, *, wrong_peer: bool = False) -> Refused:
    return Refused(reason, _pack(Refuse(reason=reason, wrong_peer=wrong_peer)))


def _raise_refusal(payload: bytes) -> None:
    try:
        refusal = _refusals.decode(payload)
    except msgspec.DecodeError:
        return
    kind = WrongPeer if refusal.wrong_peer else LinkRefused
    raise kind(f"the peer refused: {refusal.reason[:_REASON_CHARS]}")


def _expect(frame: Frame, kind: type[_M]) -> _M:
    """The message of `kind` in the frame; anything else ends the handshake. Only an Offer may bring fds."""
    _raise_refusal(frame.payload)
    try:
        message = _decoder.decode(frame.payload)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, kind) or (frame.fds and kind is not Offer):
        _close_all(frame.fds)
        raise _refused(f"expected {kind.__name__}, got something else (is this a kvrail link port?)")
    return message


def _check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise _refused(f"protocol versions differ: ours {PROTOCOL_VERSION}, theirs {theirs}")


def _check_length(name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise _refused(f"{name} of {len(value)} bytes, not {length}")


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
