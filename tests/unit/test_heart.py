# SPDX-License-Identifier: Apache-2.0
"""Heartbeats judged on a clock made by hand: missed, back, stuck, and our own pauses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrail.transfer.heart import Heart
from kvrail.transfer.link_events import LinkKey, LinkOptions, PeerBeat, PeerStuck, Recovered, Suspect
from kvrail.transfer.wire import Beat

KEY = LinkKey(b"p" * 16, 0)
OPTIONS = LinkOptions(socket_dir=Path("/none"), heartbeat_s=1.0, suspect_beats=4, stuck_s=5.0)


def beat(steps: int, state: str = "serving") -> bytes:
    return msgspec.msgpack.encode(Beat(steps=steps, state=state))  # type: ignore[arg-type]


class Peer:
    """A peer whose beats arrive when the test says so."""

    def __init__(self) -> None:
        self.heart = Heart(KEY, OPTIONS, 0.0)
        self.now = 0.0
        self.arrived = 0.0
        self.payload = b""
        self.unread = False

    def sends(self, payload: bytes) -> None:
        self.arrived, self.payload = self.now, payload

    def passes(self, seconds: float, *, every: float = 0.25) -> list[object]:
        events: list[object] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every)
            events += self.heart.observe(self.now, self.now - self.arrived, self.payload, unread=self.unread)
        return events


def test_each_beat_is_told_once() -> None:
    peer = Peer()
    peer.sends(beat(1))
    assert [type(event) for event in peer.passes(0.75)] == [PeerBeat]
    peer.sends(beat(1))
    assert [type(event) for event in peer.passes(0.75)] == [PeerBeat]


def test_silence_makes_suspect_and_a_beat_recovers() -> None:
    peer = Peer()
    peer.sends(beat(1))
    peer.passes(1)
    assert peer.passes(2.75) == []
    assert peer.passes(1) == [Suspect(KEY)]
    assert peer.passes(30) == []
    peer.sends(beat(2))
    assert [type(event) for event in peer.passes(0.25)] == [PeerBeat, Recovered]


def test_a_peer_that_never_beats_is_suspect() -> None:
    peer = Peer()
    assert peer.passes(4) == []
    assert peer.passes(1) == [Suspect(KEY)]


def test_beats_without_content_count_as_life() -> None:
    peer = Peer()
    for _ in range(10):
        peer.sends(b"")
        assert peer.passes(1) == []
    assert Suspect(KEY) in peer.passes(5)
    peer.sends(b"")
    assert peer.passes(0.25) == [Recovered(KEY)]


def test_stuck_loop_is_told_once_until_it_moves() -> None:
    peer = Peer()
    told: list[object] = []
    for _ in range(12):
        peer.sends(beat(7))
        told += peer.passes(1)
    stuck = [event for event in told if isinstance(event, PeerStuck)]
    assert len(stuck) == 1
    assert stuck[0].for_s > OPTIONS.stuck_s
    assert Suspect(KEY) not in told
    for steps in range(8, 12):
        peer.sends(beat(steps))
        assert [type(event) for event in peer.passes(1)] == [PeerBeat]


@pytest.mark.parametrize("state", ["loading", "compiling", "stopping"])
def test_only_a_serving_loop_can_be_stuck(state: str) -> None:
    peer = Peer()
    for _ in range(12):
        peer.sends(beat(7, state))
        assert {type(event) for event in peer.passes(1)} == {PeerBeat}


def test_our_own_pause_is_not_held_against_the_peer() -> None:
    """After a long stop of this process the peer's beats still wait in the socket."""
    peer = Peer()
    peer.sends(beat(1))
    peer.passes(1)
    assert peer.passes(20, every=20) == []
    assert peer.passes(0.75) == []
    peer.sends(beat(1))
    assert [type(event) for event in peer.passes(1)] == [PeerBeat]
    # But if it stays silent, the verdict comes.
    assert Suspect(KEY) in peer.passes(10)


def test_beats_that_our_thread_has_not_read_are_no_silence() -> None:
    peer = Peer()
    peer.sends(beat(1))
    peer.passes(1)
    peer.unread = True
    assert peer.passes(20) == []
    peer.unread = False
    peer.sends(beat(1))
    assert [type(event) for event in peer.passes(4)] == [PeerBeat]
    assert peer.passes(1) == [Suspect(KEY)]


def test_noise_for_a_beat_is_an_error() -> None:
    peer = Peer()
    peer.sends(b"\xc1")
    with pytest.raises(msgspec.DecodeError):
        peer.passes(1)
