# SPDX-License-Identifier: Apache-2.0
"""A completion engine's view of its prefill engines: asks each URL who serves there, and keeps the links wanted.

Every rank of ours keeps a link to every rank of theirs. Peers are known by incarnation: another one at the same URL
is another peer, and the old one's links are dropped. A URL that does not answer changes nothing: whether a link
still lives is for the link's own heartbeats to say.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.control.calls import RankCard, RanksReply
from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.control.routing import PeerKey, PeerView

__all__ = ["PeerWatcher"]

_log = logging.getLogger(__name__)
_BACK_OFF_LIMIT_S = 10.0


class PeerWatcher:
    """Polls the prefill engines and reconciles the links of `ranks` with what it finds.

    `at_peer`: the prefills that this front has at each peer, kept current by its owner. `patience_s`: for how long
    a link whose peer has fallen silent counts as one that may come back.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: bytes,
        ranks: Sequence[RankClient],
        connections: KeptConnections,
        at_peer: Mapping[PeerKey, int],
        *,
        patience_s: float,
        interval_s: float = 1.0,
    ) -> None:
        self.urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self.trouble: dict[str, str] = dict.fromkeys(self.urls, "not asked yet")
        self._headers = bearer_header(token)
        self._ranks = ranks
        self._connections = connections
        self._at_peer = at_peer
        self._patience_s = patience_s
        self._interval_s = interval_s
        self._listeners: list[Callable[[], None]] = []
        self._found: dict[str, list[RankCard]] = {}
        # Prefills that others have there: what a peer reported less what we had there at that moment.
        self._others: dict[PeerKey, int] = {}
        # What each of our ranks has been told; the first item is the incarnation of ours that was told.
        self._told: dict[int, tuple[bytes, set[PeerKey]]] = {}
        self._states: dict[tuple[int, PeerKey], tuple[str, str]] = {}
        # Until when (time.monotonic()) who has no other way waits for the peer at the end of this link.
        self._hoped_until: dict[tuple[int, PeerKey], float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to poll. An engine that cannot be reached now is found when it comes up."""
        for rank in self._ranks:
            rank.subscribe(self._reconcile)
        self._tasks = [asyncio.create_task(self._watch(url)) for url in self.urls]

    async def close(self) -> None:
        """Stop polling; links stay as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each answer of a prefill engine, and when a silent one is given up."""
        self._listeners.append(listener)

    @property
    def views(self) -> list[PeerView]:
        """The known prefill ranks with their load, of which our own part is newer than their last report."""
        return [
            PeerView(
                key=_key(card),
                name=f"{url}#{card.peer.rank}",
                url=url,
                load=self._others.get(_key(card), 0) + self._at_peer.get(_key(card), 0),
                limit=card.limit,
            )
            for url, cards in self._found.items()
            for card in cards
        ]

    def links_up(self, rank: RankClient) -> frozenset[PeerKey]:
        """The prefill ranks to which `rank` has a working link."""
        return frozenset(key for key, report in rank.links.items() if report.state == "up")

    def links_silent(self, rank: RankClient) -> frozenset[PeerKey]:
        """The prefill ranks that have fallen silent so lately that they may well come back."""
        now = time.monotonic()
        return frozenset(key for key in rank.links if self._hoped_until.get((rank.rank, key), 0.0) > now)

    @property
    def any_link_up(self) -> bool:
        """Whether at least one of our ranks has a working link."""
        return any(self.links_up(rank) for rank in self._ranks)

    def url_of(self, key: PeerKey) -> str:
        """The URL at which a peer was found, or "" for one that is gone."""
        return next((view.url for view in self.views if view.key == key), "")

    async def _watch(self, url: str) -> None:
        wait_s = self._interval_s
        while True:
            try:
                reply = await self._ask(url)
                self._note(url, "")
                self._take(url, reply.ranks)
                wait_s = self._interval_s
            except (CallFailed, msgspec.MsgspecError, PermissionError) as error:
                self._note(url, str(error) or type(error).__name__)
                wait_s = min(wait_s * 2, _BACK_OFF_LIMIT_S)
            except Exception:
                # Whatever it is: an engine that nobody asks any more would be lost until a restart.
                _log.exception("prefill engine %s could not be asked", url)
                wait_s = _BACK_OFF_LIMIT_S
            # Jitter: many completion engines must not ask a restarted prefill engine in step.
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _ask(self, url: str) -> RanksReply:
        reply = await self._connections.call("GET", f"{url}/ranks", headers=self._headers, timeout_s=5.0)
        if reply.status in (401, 403):
            raise PermissionError("it refuses our cluster token (both sides need the same --token-file)")
        if not reply.ok:
            raise CallFailed(f"it is no prefill engine (GET /ranks: HTTP {reply.status})")
        return msgspec.msgpack.decode(reply.body, type=RanksReply)

    def _take(self, url: str, cards: list[RankCard]) -> None:
        for card in self._found.get(url, ()):
            self._others.pop(_key(card), None)
        self._found[url] = cards
        for card in cards:
            self._others[_key(card)] = max(0, card.load - self._at_peer.get(_key(card), 0))
        self._reconcile()
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _note(self, url: str, trouble: str) -> None:
        """Log a change of a URL's state once."""
        if trouble != self.trouble[url]:
            if trouble:
                _log.warning("prefill engine %s does not answer: %s", url, trouble)
            else:
                _log.info("prefill engine %s answers", url)
            self.trouble[url] = trouble

    def _reconcile(self) -> None:
        """Tell each ready rank of ours which links to make and to drop. Does nothing when nothing has changed."""
        wanted = {_key(card): card.peer for cards in self._found.values() for card in cards}
        for rank in self._ranks:
            if rank.ready is None:
                self._told.pop(rank.rank, None)
                continue
            ours = rank.ready.self_rank.incarnation
            told_to, told = self._told.get(rank.rank, (ours, set()))
            if told_to != ours:
                told = set()
            for key in told - wanted.keys():
                rank.disconnect(*key, "that prefill rank is gone or was restarted")
            for key in wanted.keys() - told:
                rank.connect(wanted[key])
            self._told[rank.rank] = (ours, set(wanted))
        self._time_silence()
        self._log_links()

    def _time_silence(self) -> None:
        """Give each link that has fallen silent its time to come back; nobody waits for one beyond that."""
        silent = {
            (rank.rank, key)
            for rank in self._ranks
            for key, report in rank.links.items()
            if report.state == "suspect"
        }
        self._hoped_until = {key: until for key, until in self._hoped_until.items() if key in silent}
        for key in silent - self._hoped_until.keys():
            self._hoped_until[key] = time.monotonic() + self._patience_s
            # A moment more: who is woken must find it over.
            asyncio.get_running_loop().call_later(self._patience_s + 0.01, self._tell)

    def _log_links(self) -> None:
        """Log each change of a link's state once."""
        seen: dict[tuple[int, PeerKey], tuple[str, str]] = {}
        for rank in self._ranks:
            for key, report in rank.links.items():
                seen[(rank.rank, key)] = (report.state, report.reason)
                if self._states.get((rank.rank, key)) == (report.state, report.reason):
                    continue
                name = f"{key[0].hex()[:8]}/{key[1]}"
                if report.state == "up":
                    _log.info(
                        "link of rank %d to prefill rank %s is up: lane %s, transport %s, %s memory",
                        rank.rank,
                        name,
                        report.lane,
                        report.transport,
                        report.memory,
                    )
                else:
                    level = logging.INFO if report.state == "connecting" else logging.WARNING
                    why = f": {report.reason}" if report.reason else ""
                    _log.log(
                        level,
                        "link of rank %d to prefill rank %s is %s%s",
                        rank.rank,
                        name,
                        report.state,
                        why,
                    )
        self._states = seen


def _key(card: RankCard) -> PeerKey:
    return (card.peer.incarnation, card.peer.rank)
