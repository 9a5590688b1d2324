# SPDX-License-Identifier: Apache-2.0
"""The handshake, both sides, without sockets: what is told before the token is proved, and every way to be refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import msgspec
import pytest

from kvrail.transfer.control_socket import FIRST_LIMIT, Frame
from kvrail.transfer.errors import LinkRefused
from kvrail.transfer.handshake import (
    Accept,
    Challenge,
    Hello,
    Offer,
    PoolOffer,
    Proof,
    Refused,
    Turn,
    WrongPeer,
    accepting,
    dialing,
)
from kvrail.transfer.layout import PageLayout, require_equal
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.wire import PROTOCOL_VERSION

TOKEN = b"t" * 32
CE = LinkKey(b"c" * 16, 1)
PE = LinkKey(b"p" * 16, 0)
LAYOUT = PageLayout(model_id="m", layers=2, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
SECRET = b"worker address of the ce"
KEY = b"packed remote key"
pack = msgspec.msgpack.encode


def offer(**changes: Any) -> Offer:
    fields = {
        "ucx": (1, 22, 0),
        "layout": LAYOUT,
        "epoch": 1,
        "cookie": 7,
        "address": SECRET,
        "network_address": SECRET,
        "pools": [PoolOffer(pool=0, base=4096, nbytes=8192, unit_bytes=4096, memory="host", key=KEY)],
        "probe_unit": 0,
        "lane": "auto",
        "put_transport": "auto",
        "require_lane": None,
        "distance": "",
    }
    return Offer(**(fields | changes))


class Talk(NamedTuple):
    """What became of a handshake, and every payload that was sent, by the sender's name."""

    ce: Any
    pe: Any
    sent: list[tuple[str, bytes]]


def judge_layout(key: LinkKey, made: Offer, fds: tuple[int, ...], secret: bytes) -> Accept:
    require_equal(LAYOUT, made.layout)
    return Accept(scope="all", address=b"worker address of the pe")


def talk(
    *,
    ce_token: bytes = TOKEN,
    pe_token: bytes = TOKEN,
    expected: LinkKey = PE,
    made: Offer | None = None,
    judge: Callable[[LinkKey, Offer, tuple[int, ...], bytes], Accept] = judge_layout,
    tamper: Callable[[int, bytes], bytes] = lambda position, payload: payload,
) -> Talk:
    """Let both sides speak until both have ended. `tamper(position, payload)` sits on the wire."""
    sides: dict[str, Generator[Turn | None, Frame, Any]] = {
        "ce": dialing(ce_token, CE, expected, os.urandom(32), lambda: (made or offer(), ())),
        "pe": accepting(pe_token, PE, os.urandom(32), judge),
    }
    ends: dict[str, Any] = {}
    sent: list[tuple[str, bytes]] = []

    def step(name: str, payload: bytes | None) -> bytes | None:
        try:
            side = sides[name]
            turn = next(side) if payload is None else side.send(Frame(payload, ()))
        except StopIteration as end:
            ends[name] = end.value
            turn = end.value if isinstance(end.value, Turn) else None
        except Refused as refusal:
            ends[name] = refusal
            return refusal.payload
        except LinkRefused as refusal:
            ends[name] = refusal
            return None
        return turn.payload if turn else None

    assert step("pe", None) is None
    speaker, payload = "ce", step("ce", None)
    while payload is not None:
        sent.append((speaker, payload))
        listener = "pe" if speaker == "ce" else "ce"
        if listener in ends:
            break
        payload = step(listener, tamper(len(sent) - 1, payload))
        speaker = listener
    return Talk(ends.get("ce"), ends.get("pe"), sent)


def test_both_sides_agree() -> None:
    result = talk()
    ours, accept, _ = result.ce
    assert (ours.epoch, accept.scope, accept.address) == (1, "all", b"worker address of the pe")
    assert len(result.sent) == 6


def test_both_sides_have_a_secret_that_nobody_said() -> None:
    heard: list[bytes] = []

    def judge(key: LinkKey, made: Offer, fds: tuple[int, ...], secret: bytes) -> Accept:
        heard.append(secret)
        return judge_layout(key, made, fds, secret)

    talks = [talk(judge=judge) for _ in range(2)]
    assert [made.ce.secret for made in talks] == heard
    assert len(heard[0]) == 32
    assert heard[0] != heard[1]
    assert all(heard[0] not in payload for made in talks for _, payload in made.sent)


@pytest.mark.parametrize("wrong", ["ce_token", "pe_token"])
def test_wrong_token_learns_nothing(wrong: str) -> None:
    result = talk(**{wrong: b"x" * 32})
    assert isinstance(result.ce, LinkRefused)
    assert "cluster token" in str(result.ce)
    assert isinstance(result.pe, LinkRefused)
    everything = b"".join(payload for _, payload in result.sent)
    for secret in (SECRET, KEY, b"model_id", b"worker address of the pe", TOKEN):
        assert secret not in everything
    # The PE has said no more than its nonce and the refusal.
    assert len([1 for who, _ in result.sent if who == "pe"]) == 2


def test_impostor_without_the_token_gets_no_offer() -> None:
    """A listener that cannot prove the token (it guesses the Welcome) is refused before the offer is made."""
    asked = []

    def make_offer() -> tuple[Offer, tuple[int, ...]]:
        asked.append(1)
        return offer(), ()

    dialer = dialing(TOKEN, CE, PE, os.urandom(32), make_offer)
    next(dialer)
    dialer.send(Frame(pack(Challenge(protocol=PROTOCOL_VERSION, nonce=b"n" * 32)), ()))
    with pytest.raises(LinkRefused, match="does not hold our cluster token"):
        dialer.send(Frame(pack({"type": "welcome", "mac": b"m" * 32}), ()))
    assert not asked


def test_reflected_proof_is_refused() -> None:
    """Sending a dialer's own proof back to it proves nothing: the two directions differ."""
    dialer = dialing(TOKEN, CE, PE, os.urandom(32), lambda: (offer(), ()))
    next(dialer)
    proof = dialer.send(Frame(pack(Challenge(protocol=PROTOCOL_VERSION, nonce=b"n" * 32)), ()))
    mac = msgspec.msgpack.decode(proof.payload, type=Proof).mac
    with pytest.raises(LinkRefused, match="does not hold our cluster token"):
        dialer.send(Frame(pack({"type": "welcome", "mac": mac}), ()))


def test_replayed_handshake_is_refused() -> None:
    first = talk()
    hello, proof = (payload for who, payload in first.sent if who == "ce" and len(payload) < 200)
    listener = accepting(TOKEN, PE, os.urandom(32), judge_layout)
    next(listener)
    listener.send(Frame(hello, ()))
    with pytest.raises(LinkRefused, match="cluster token refused"):
        listener.send(Frame(proof, ()))


def test_other_incarnation_is_a_wrong_peer() -> None:
    result = talk(expected=LinkKey(b"q" * 16, 0))
    assert isinstance(result.ce, WrongPeer)


def test_layout_refusal_names_the_field_on_both_sides() -> None:
    theirs = msgspec.structs.replace(LAYOUT, page_tokens=32)
    result = talk(made=offer(layout=theirs))
    for side in (result.ce, result.pe):
        assert isinstance(side, LinkRefused)
        assert "page_tokens" in str(side)
        assert "layers" not in str(side)


@pytest.mark.parametrize("position", [4, 5])
def test_changed_frame_is_refused(position: int) -> None:
    """Offer (4) and Accept (5): one flipped bit in the middle."""

    def flip(at: int, payload: bytes) -> bytes:
        if at != position:
            return payload
        middle = len(payload) // 2
        return payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]

    result = talk(tamper=flip)
    victim = result.pe if position == 4 else result.ce
    assert isinstance(victim, LinkRefused)
    assert "changed" in str(victim)


HELLO = {
    "type": "hello",
    "protocol": PROTOCOL_VERSION,
    "nonce": b"n" * 32,
    "incarnation": b"i" * 16,
    "rank": 0,
    "peer": PE.incarnation,
    "peer_rank": 0,
}
BAD_FIRST_FRAMES = {
    "empty": b"",
    "noise": b"\xff\x00\xfe" * 20,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "not a map": pack([1, 2, 3]),
    "no type": pack({"protocol": 1}),
    "unknown type": pack({"type": "root", "protocol": 1}),
    "a later message": pack(offer()),
    "a proof": pack(Proof(mac=b"m" * 32)),
    "a challenge": pack(Challenge(protocol=PROTOCOL_VERSION, nonce=b"n" * 32)),
    "missing field": pack({key: value for key, value in HELLO.items() if key != "nonce"}),
    "wrong type": pack(HELLO | {"rank": "zero"}),
    "older version": pack(HELLO | {"protocol": PROTOCOL_VERSION - 1}),
    "newer version": pack(HELLO | {"protocol": PROTOCOL_VERSION + 1}),
    "short nonce": pack(HELLO | {"nonce": b"n"}),
    "empty nonce": pack(HELLO | {"nonce": b""}),
    "short incarnation": pack(HELLO | {"incarnation": b"i"}),
    "trailing bytes": pack(HELLO) + b"\x00",
    "cut": pack(HELLO)[:-3],
    "deeply nested": b"\x91" * 3000,
}


@pytest.mark.parametrize("payload", BAD_FIRST_FRAMES.values(), ids=BAD_FIRST_FRAMES)
def test_bad_first_frame_is_refused(payload: bytes) -> None:
    def judge(*_: object) -> Accept:
        raise AssertionError("a stranger reached the judge")

    listener = accepting(TOKEN, PE, os.urandom(32), judge)
    next(listener)
    with pytest.raises(Refused) as refusal:
        listener.send(Frame(payload, ()))
    assert len(refusal.value.payload) < FIRST_LIMIT


def test_version_refusal_names_both_versions() -> None:
    listener = accepting(TOKEN, PE, os.urandom(32), judge_layout)
    next(listener)
    with pytest.raises(Refused, match=rf"ours {PROTOCOL_VERSION}, theirs {PROTOCOL_VERSION + 1}"):
        listener.send(Frame(pack(HELLO | {"protocol": PROTOCOL_VERSION + 1}), ()))


def test_unexpected_descriptors_are_closed() -> None:
    reader, writer = os.pipe()
    listener = accepting(TOKEN, PE, os.urandom(32), judge_layout)
    next(listener)
    with pytest.raises(Refused):
        listener.send(Frame(pack(HELLO), (reader, writer)))
    for fd in (reader, writer):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_hello_fits_the_first_limit() -> None:
    assert len(pack(Hello(**{k: v for k, v in HELLO.items() if k != "type"}))) < FIRST_LIMIT
