# SPDX-License-Identifier: Apache-2.0
"""What a peer's heartbeats say about it: beating, silent (suspect), or beating with a step loop that stands still."""

from __future__ import annotations

import msgspec

from kvrail.transfer.link_events import (
    LinkEvent,
    LinkKey,
    LinkOptions,
    PeerBeat,
    PeerStuck,
    Recovered,
    Suspect,
)
from kvrail.transfer.wire import Beat

__all__ = ["Heart"]

_decoder = msgspec.msgpack.Decoder(Beat)


class Heart:
    """Judges one peer, by our own clock. `observe` is called a few times per heartbeat interval."""

    def __init__(self, key: LinkKey, options: LinkOptions, now: float) -> None:
        self._key = key
        self._interval = options.heartbeat_s
        self._limit = options.heartbeat_s * options.suspect_beats
        self._stuck_s = options.stuck_s
        self._observed_at = now
        self._arrived_at = now
        self._grace_until = now
        self._payload = b""
        self._beat: Beat | None = None
        self._moved_at = now
        self._stuck = False
        self.suspect = False

    def observe(self, now: float, age_s: float, payload: bytes, *, unread: bool = False) -> list[LinkEvent]:
        """The last beat was read `age_s` ago, with `payload`. `unread`: more waits in the socket.

        Raises msgspec.DecodeError when it is no Beat.
        """
        events: list[LinkEvent] = []
        if now - self._observed_at > self._limit or (unread and age_s > self._limit):
            # It is we who were stopped, or our progress thread that does not come round to reading: what the peer
            # sent meanwhile may still wait in the socket.
            self._grace_until = now + self._interval
            self._moved_at = now
        self._observed_at = now
        arrived_at = now - age_s
        # The same beat is seen at the same instant, give or take the time between two reads of the clock.
        if payload and (self._beat is None or arrived_at - self._arrived_at > self._interval / 4):
            self._arrived_at = arrived_at
            events += self._take(now, payload)
        if not self.suspect and age_s > self._limit and now >= self._grace_until:
            self.suspect = True
            events.append(Suspect(self._key))
        elif self.suspect and age_s <= self._limit:
            self.suspect = False
            self._moved_at = now
            events.append(Recovered(self._key))
        still_s = now - self._moved_at
        serving = self._beat is not None and self._beat.state == "serving"
        if serving and not self.suspect and not self._stuck and still_s > self._stuck_s:
            self._stuck = True
            events.append(PeerStuck(self._key, still_s))
        return events

    def _take(self, now: float, payload: bytes) -> list[LinkEvent]:
        before = self._beat
        if payload != self._payload or before is None:
            self._payload, self._beat = payload, _decoder.decode(payload)
        assert self._beat is not None
        if before is None or (before.steps, before.state) != (self._beat.steps, self._beat.state):
            self._moved_at = now
            self._stuck = False
        return [PeerBeat(self._key, self._beat)]
