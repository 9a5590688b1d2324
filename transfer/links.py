# SPDX-License-Identifier: Apache-2.0
"""All links of one rank, as the rank loop sees them: dialed or accepted, watched, fenced, proven quiet.

Everything happens in `poll`, on the caller's thread; nothing here waits. doc/links.md tells the story of a link.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import time
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from kvrail.transfer import wire
from kvrail.transfer.connector import LinkPools, LinkSetup, NewLink
from kvrail.transfer.dialer import Dialer
from kvrail.transfer.errors import LaneUnavailable, LinkLost, TransferError, UcxFailed
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.introductions import Introductions
from kvrail.transfer.lane_test import FIRST_TEST_WRITER, News
from kvrail.transfer.lanes import LaneUnwanted
from kvrail.transfer.layout import Layout
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkEvent,
    LinkKey,
    LinkOptions,
    LinkRefusal,
    LinkUp,
    PeerAddress,
    PeerLike,
    Proven,
    Received,
    WriterEvent,
)
from kvrail.transfer.listener import Listener
from kvrail.transfer.peer_processes import PeerProcesses
from kvrail.transfer.rank_link import RankLink
from kvrail.transfer.ucx import EventKind
from kvrail.transfer.wire import Beat, LaneChosen, LinkMessage, SelfTest, SelfTestResult

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Links"]

_log = logging.getLogger(__name__)

# How long a CE may take to hang up after it was told that no lane works.
_LAST_WORDS_S = 1.0
_WRITER_KINDS: Final[dict[int, Literal["progress", "rung", "quiet", "failed"]]] = {
    EventKind.PROGRESS: "progress",
    EventKind.RUNG: "rung",
    EventKind.QUIET: "quiet",
    EventKind.FAILED: "failed",
}


class Links:
    """One per rank, used from the rank's thread only. Owns the reactor's events.

    `accept`: listen for CEs (a PE rank); else `connect` dials PEs (a CE rank). `gpu`: the reactor's CUDA device, if it
    has one. Close order: links, pools, reactor, context.
    """

    def __init__(
        self,
        *,
        reactor: _ucx.Reactor,
        identity: tuple[bytes, int],
        token: bytes,
        layout: Layout,
        pools: LinkPools,
        options: LinkOptions,
        accept: bool,
        gpu: Gpu | None = None,
    ) -> None:
        self._reactor = reactor
        self._options = options
        self._selector = selectors.EpollSelector()
        self._events: list[LinkEvent] = []
        self._by_id: dict[int, RankLink] = {}
        self._current: dict[LinkKey, RankLink] = {}
        self._processes = PeerProcesses(self._selector, self._process_gone)
        self._process_proofs: dict[LinkKey, list[Proven]] = {}
        self._test_writers = itertools.count(FIRST_TEST_WRITER)
        self._beats_due_at = 0.0
        self._stale = 0
        # What came for links whose handshake is not over on this side: a peer that has sent its Accept goes on at
        # once, by another way.
        self._early: list[tuple[int, int, int, int, bytes]] = []
        me = LinkKey(*identity)
        # Only now: whoever made the reactor has chosen the UCX library.
        from kvrail.transfer import _ucx

        self._setup = LinkSetup(reactor, me, token, layout, pools, options, _ucx.library_version(), gpu)
        self._listener = Listener(self._setup, self._selector, self._report) if accept else None
        self._dialer = None if accept else Dialer(self._setup, self._selector, self._report)
        self._introductions = Introductions(
            self._setup, self._selector, met=self._met, linked=self._linked, report=self._report
        )
        self._selector.register(reactor.event_fd, selectors.EVENT_READ, None)

    # --- what the rank asks for ----------------------------------------------------------------------------------

    @property
    def address(self) -> PeerAddress:
        """PE: where CEs dial."""
        if self._listener is None:
            raise TransferError("this rank dials; it does not listen")
        return self._listener.address

    def fileno(self) -> int:
        """An epoll descriptor, readable when `poll` has work; timers (redial, missed beats) need a poll at times."""
        return self._selector.fileno()

    def connect(self, peer: PeerLike) -> None:
        """CE: keep a link to this PE rank until `disconnect`, or until its process is known to be dead."""
        if self._dialer is None:
            raise TransferError("a prefill engine never dials")
        self._dialer.want(peer)

    def connect_at(self, host: str, port: int) -> None:
        """CE: keep a link to whichever PE rank listens there (a numeric host), also after it was started again."""
        if self._dialer is None:
            raise TransferError("a prefill engine never dials")
        self._introductions.want(host, port)

    def who_at(self, host: str, port: int) -> LinkKey | None:
        """CE: who was last heard to listen there."""
        return self._introductions.who(host, port)

    def forget_at(self, host: str, port: int, reason: str) -> None:
        """CE: whoever listens there is dialed no more, and the link to it ends."""
        key = self._introductions.unwant(host, port)
        if key is not None:
            self.disconnect(key, reason)

    def disconnect(self, key: LinkKey, reason: str) -> None:
        """CE: end the link, and do not dial this peer again."""
        if self._dialer is not None:
            self._dialer.unwant(key)
        self.fence(key, reason)

    def set_beat(self, key: LinkKey, beat: Beat) -> None:
        """What the next heartbeats to this peer say."""
        link = self._current.get(key)
        if link is not None:
            link.native.set_beat(msgspec.msgpack.encode(beat))

    def send(self, key: LinkKey, message: LinkMessage) -> None:
        """Send in order. Raises LinkLost when the link is not up."""
        self._up(key).native.send(wire.encode(message))

    def writer(self, key: LinkKey, writer_key: int, ttl_s: float) -> _ucx.Writer:
        """PE: a writer for one ticket. Its events come as WriterEvent. Raises LinkLost when the link is not up."""
        return self._up(key).native.writer(writer_key, ttl_s=ttl_s)

    def lane(self, key: LinkKey) -> LaneInfo:
        """The lane of a link that is up; raises LinkLost."""
        lane = self._up(key).lane
        assert lane is not None
        return lane

    def peer_units(self, key: LinkKey) -> dict[int, int]:
        """PE: how many units each pool of this CE has; raises LinkLost."""
        return self._up(key).peer_units

    def fence(self, key: LinkKey, reason: str) -> None:
        """End this link so that its writers can be proven quiet; a wanted peer is dialed again, with a new epoch.

        `Proven` follows as soon as its worker is destroyed, or, on a link of class "process", when the peer's process
        has ended. Nothing else proves it.
        """
        link = self._current.get(key)
        if link is not None:
            self._end(link, reason, time.monotonic())

    @property
    def unproven(self) -> list[tuple[LinkKey, int]]:
        """CE: epochs that ended, but whose writers may still write."""
        return self._processes.unproven

    def counters(self) -> dict[str, int]:
        """Counts for metrics: ours, and those of the progress thread (names: transfer/csrc/stats.h)."""
        up = sum(link.state == "up" for link in self._current.values())
        ours = {"links_up": up, "epochs_unproven": len(self.unproven), "messages_stale": self._stale}
        return ours | self._reactor.stats()

    def close(self) -> bool:
        """End every link. True: nobody can write into our pools any more, and they may be unmapped."""
        for side in (self._listener, self._introductions, self._dialer):
            if side is not None:
                side.close()
        accepts = self._listener is not None
        worst = any(link.fence == "process" for link in self._current.values()) or bool(self.unproven)
        for link in self._by_id.values():
            if link.state != "down":
                link.end()
            link.native.close()
        self._by_id.clear()
        self._current.clear()
        self._processes.close()
        self._selector.close()
        return accepts or not worst

    # --- the loop ------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[LinkEvent]:
        """Everything that happened since the last call. `now` is time.monotonic()."""
        for ready, _ in self._selector.select(0):
            if ready.data is not None:
                ready.data(now)
        for event in self._reactor.drain():
            kind, link_id, key, status, payload = event
            link = self._by_id.get(link_id)
            if link is not None:
                self._on_native(link, kind, key, status, payload, now)
            elif self._dialer is not None and self._dialer.opened(link_id):
                self._early.append(event)
        if now >= self._beats_due_at:
            self._beats_due_at = now + self._options.heartbeat_s / 4
            self._watch(now)
        if self._listener is not None:
            self._listener.tick(now)
        if self._dialer is not None:
            self._dialer.tick(now)
            self._introductions.tick(now)
        events, self._events = self._events, []
        return events

    def _watch(self, now: float) -> None:
        for link in list(self._current.values()):
            age_s, payload, unread = link.native.peer_beat()
            if link.state in ("testing", "refused"):
                if now > link.deadline:
                    self._end(link, "the lane test took too long", now)
                continue
            try:
                self._events += link.heart.observe(time.monotonic(), age_s, payload, unread=unread)
            except msgspec.DecodeError as error:
                self._end(link, f"malformed heartbeat: {error}", now)

    def _met(self, peer: PeerAddress, before: LinkKey | None) -> None:
        if before is not None:
            self.disconnect(before, "another engine answers at its address")
        self.connect(peer)

    def _linked(self, key: LinkKey) -> bool:
        return self._dialer is not None and self._dialer.linked(key)

    def _report(self, outcome: NewLink | LinkRefusal, now: float) -> None:
        if isinstance(outcome, LinkRefusal):
            # Strangers can say as much as they like: not above info.
            level = logging.INFO if outcome.key is None else logging.WARNING
            _log.log(level, "link with %s refused: %s", _name(outcome.key), outcome.reason)
            self._events.append(outcome)
            return
        before = self._current.get(outcome.key)
        if before is not None:
            self._end(before, f"replaced by link epoch {outcome.epoch}", now)
        link = RankLink(outcome, self._setup, self._test_writers, now)
        self._by_id[link.native.id] = self._current[link.key] = link
        self._processes.watch(link.key, outcome.process)
        try:
            link.begin(outcome, self._options.heartbeat_s)
            link.start_test()
        except LaneUnavailable as error:
            self._test_failed(link, error, now)
        except (UcxFailed, OSError) as error:
            self._end(link, str(error), now)
        early, self._early = self._early, []
        for event in early:
            kind, link_id, key, status, payload = event
            if link_id == link.native.id:
                self._on_native(link, kind, key, status, payload, now)
            elif self._dialer is not None and self._dialer.opened(link_id):
                self._early.append(event)

    def _on_native(
        self, link: RankLink, kind: int, key: int, status: int, payload: bytes, now: float
    ) -> None:
        if kind == EventKind.FENCED:
            self._fenced(link)
        elif kind in _WRITER_KINDS:
            word, reason, at = _WRITER_KINDS[kind], payload.decode(errors="replace"), 0.0
            if word == "rung":
                reason, at = "", int(reason) * 1e-9
            ok = status == 0 and word != "failed"
            if key >= FIRST_TEST_WRITER:
                self._on_test(link, News(word, ok, reason, at), now)
            else:
                # Also after the end: each writer's last word decides what becomes of its source pages.
                self._events.append(WriterEvent(link.key, link.epoch, word, key, ok, reason, at))
        elif link.state == "down":
            pass  # An epoch that is over says nothing any more.
        elif kind == EventKind.MESSAGE:
            self._on_message(link, payload, now)
        elif kind == EventKind.CONTROL:
            self._end(link, f"control stream: {payload.decode(errors='replace')}", now)
        elif kind == EventKind.LINK_ERROR:
            self._end(link, f"{payload.decode(errors='replace')} ({status})", now)

    def _on_message(self, link: RankLink, payload: bytes, now: float) -> None:
        try:
            message = wire.decode(payload)
        except msgspec.DecodeError as error:
            self._end(link, f"malformed link message: {error}", now)
            return
        if message.epoch != link.epoch:
            self._stale += 1
        elif isinstance(message, SelfTest):
            link.answer_test(message)
        elif isinstance(message, SelfTestResult):
            self._on_test(link, News("verdict", message.ok, message.reason), now)
        elif isinstance(message, LaneChosen):
            if link.state == "testing" and self._dialer is not None:
                try:
                    self._is_up(link, link.on_lane(message))
                except (LaneUnavailable, UcxFailed) as error:
                    self._end(link, str(error), now)
        elif link.state == "up":
            self._events.append(Received(link.key, message))
        else:
            self._end(link, f"{type(message).__name__} before the lane was chosen", now)

    def _on_test(self, link: RankLink, news: News, now: float) -> None:
        if link.state != "testing":
            return
        try:
            lane = link.on_test_news(news)
        except LaneUnavailable as error:
            self._test_failed(link, error, now)
        else:
            if lane is not None:
                self._is_up(link, lane)

    def _test_failed(self, link: RankLink, error: LaneUnavailable, now: float) -> None:
        tried_local = link.plan is not None and link.plan.scope == "all"
        if self._listener is not None and tried_local and not isinstance(error, LaneUnwanted):
            # UCX may have picked a local transport that does not work here (cma without the right to trace, say):
            # when the CE dials again, only network transports are used.
            self._listener.local_lanes_failed(link.key, str(error))
        # The CE hangs up when it has heard why; hanging up ourselves could overtake the message.
        link.refuse(str(error), now + _LAST_WORDS_S)

    def _is_up(self, link: RankLink, lane: LaneInfo) -> None:
        if self._dialer is not None:
            self._dialer.up(link.key)
        level = logging.WARNING if lane.reason else logging.INFO
        why = f": {lane.reason}" if lane.reason else ""
        _log.log(level, "link with %s: lane %s%s", _name(link.key), lane.label, why)
        if lane.slow:
            _log.warning("link with %s: lane %s is SLOW: %s", _name(link.key), lane.label, lane.slow)
        self._events.append(LinkUp(link.key, link.epoch, lane))

    # --- ends and proofs -----------------------------------------------------------------------------------------

    def _end(self, link: RankLink, reason: str, now: float) -> None:
        was = link.state
        if was == "down":
            return
        reason = link.refusal or reason
        if self._current.get(link.key) is link:
            del self._current[link.key]
        link.end()
        if self._listener is None and link.fence == "process":
            self._processes.owes(link.key, link.epoch, was_up=link.was_up)
        _log.warning("link with %s ended: %s", _name(link.key), reason)
        if was == "up":
            self._events.append(LinkDown(link.key, link.epoch, reason))
        elif self._listener is not None:
            self._events.append(LinkRefusal(link.key, reason))
        if self._dialer is not None:
            self._dialer.lost(link.key, now, reason="" if was == "up" else reason)

    def _fenced(self, link: RankLink) -> None:
        self._by_id.pop(link.native.id, None)
        link.native.close()
        if link.was_up and (link.fence == "worker" or self._listener is not None):
            self._events.append(Proven(link.key, link.epoch, "worker"))
        self._tell_process_proofs(link.key)

    def _process_gone(self, key: LinkKey, now: float) -> None:
        """The peer's process has ended: nothing of it can write any more, and it never comes back."""
        link = self._current.get(key)
        if self._dialer is not None:
            self._dialer.unwant(key)
        if link is not None:
            self._end(link, "the peer's process has ended", now)
        self._process_proofs[key] = self._processes.forget(key)
        self._tell_process_proofs(key)

    def _tell_process_proofs(self, key: LinkKey) -> None:
        """A dead process writes nothing, but bytes of it may wait in our worker's tcp sockets: both must be gone."""
        if not any(link.key == key for link in self._by_id.values()):
            self._events += self._process_proofs.pop(key, [])

    def _up(self, key: LinkKey) -> RankLink:
        link = self._current.get(key)
        if link is None or link.state != "up":
            raise LinkLost(f"no link with {_name(key)}")
        return link


def _name(key: LinkKey | None) -> str:
    return "a stranger" if key is None else f"{key.incarnation.hex()[:8]}/{key.rank}"
