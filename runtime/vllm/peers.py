# SPDX-License-Identifier: Apache-2.0
"""A completion engine's view of its prefill engines: who they are, whose link is up, and the call of one of them.

Each URL is asked about once a second. What is found goes to the connector as a file with addresses: it keeps a link to
each, and writes into another file how they are. A prompt goes only where the link is up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections
from kvrail.runtime.control.routing import PeerKey, PeerView, Policy, RankView, choose
from kvrail.runtime.control.upstream import Upstream, UpstreamLost
from kvrail.runtime.errors import Unavailable
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.spec import CARD_ROUTE, PREFILL_ROUTE, EngineCard, FirstToken, PeerState, PrefillCall

__all__ = ["Peer", "PeerCalls", "PrefillRefused"]

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_BACK_OFF_LIMIT_S = 10.0
_STATUS_S = 0.25
# An engine that says nothing for so long has lost its calls. A frozen one is found out sooner, by the link.
_SILENT_S = 8.0
_CARD_WITHIN_S = 5.0
_UNBOUNDED = 2**31
# Less than prefill engines keep idle connections.
_KEPT_S = 15.0
_LARGEST_ANSWER = 1 << 20


class PrefillRefused(Exception):
    """A prefill engine did not answer a call with a token. The text says why."""


class Peer(NamedTuple):
    """A prefill engine as a request goes to it: its front's URL, where its connector listens, its port for calls."""

    key: PeerKey
    url: str
    host: str
    port: int
    call_port: int


class PeerCalls:
    """Watches the prefill engines at `urls` and calls them."""

    def __init__(
        self,
        urls: Sequence[str],
        token: bytes,
        connections: KeptConnections,
        trust: ssl.SSLContext,
        counters: SplitCounters,
        *,
        version: str,
        model: str,
        routing: Policy,
        status_file: Path,
        peers_file: Path,
    ) -> None:
        self.version, self.model = version, model
        self.trouble: dict[str, str] = dict.fromkeys((url.rstrip("/") for url in urls), "not asked yet")
        self._headers = bearer_header(token)
        self._call_headers = [
            *((name.lower().encode(), value.encode()) for name, value in self._headers.items()),
            (b"content-type", b"application/msgpack"),
        ]
        self._connections = connections
        self._trust = trust
        self._upstreams: dict[tuple[str, int], Upstream] = {}
        self._counters = counters
        self._routing = routing
        self._status_file, self._peers_file = status_file, peers_file
        self._cards: dict[str, EngineCard] = {}
        self._heard: dict[str, float] = {}
        self._here: Counter[PeerKey] = Counter()
        self._others: dict[PeerKey, int] = {}
        self._links: dict[str, tuple[str, str]] = {}
        self._calls: dict[str, set[asyncio.Task[Any]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask."""
        self._tell_connector()
        self._tasks = [asyncio.create_task(self._watch(url)) for url in self.trouble]
        self._tasks.append(asyncio.create_task(self._watch_links()))

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for upstream in self._upstreams.values():
            upstream.close()

    @property
    def states(self) -> tuple[PeerState, ...]:
        """How each of them is."""
        found = []
        for url, trouble in self.trouble.items():
            card = self._cards.get(url)
            if card is not None and not trouble:
                how, reason = self._links.get(card.address, ("connecting", ""))
                trouble = "" if how == "up" else f"link is {how}{f': {reason}' if reason else ''}"
            if card is None:
                found.append(PeerState(url=url, trouble=trouble))
                continue
            load = self._load(url, card)
            state = PeerState(url=url, trouble=trouble, address=card.address, load=load, limit=card.limit)
            found.append(state)
        return tuple(found)

    def choose(self, affinity: bytes) -> Peer | None:
        """The engine to prefill a prompt, or None when none can now."""
        views = [
            PeerView(_key(card), url, url, self._load(url, card), card.limit)
            for url, card in self._cards.items()
            if not self.trouble[url]
        ]
        up = frozenset(v.key for v in views if self._links.get(self._cards[v.url].address, ("",))[0] == "up")
        try:
            route = choose(
                policy=self._routing,
                affinity=affinity,
                ranks=[RankView(0, 0, _UNBOUNDED, up)],
                peers=views,
                local_prefill="never",
                short=False,
            )
        except Unavailable:
            return None
        if route is None or route.peer is None:
            return None
        card = self._cards[route.peer.url]
        host, _, port = card.address.rpartition(":")
        return Peer(route.peer.key, route.peer.url, host.strip("[]"), int(port), card.call_port)

    async def prefill(self, peer: Peer, call: PrefillCall) -> FirstToken:
        """Token 1. Cancelling it ends the prefill there. Raises PrefillRefused."""
        self._here[peer.key] += 1
        task = asyncio.current_task()
        assert task is not None
        calls = self._calls.setdefault(peer.url, set())
        calls.add(task)
        try:
            # It takes as long as the prompt takes: the link says whether anyone works.
            answer = await self._upstream(peer).ask(
                b"POST", PREFILL_ROUTE.encode(), self._call_headers, msgspec.msgpack.encode(call)
            )
            try:
                body = await answer.whole(_LARGEST_ANSWER)
            finally:
                answer.close()
            if answer.status != 200:
                self._counters.calls.labels("refused").inc()
                raise PrefillRefused(f"{peer.url}: HTTP {answer.status}: {_said(body)}")
            first = msgspec.msgpack.decode(body, type=FirstToken)
        except UpstreamLost as error:
            self._counters.calls.labels("unreachable").inc()
            raise PrefillRefused(f"{peer.url}: {error}") from None
        except msgspec.MsgspecError as error:
            self._counters.calls.labels("refused").inc()
            raise PrefillRefused(f"{peer.url}: the answer cannot be read: {error}") from None
        except asyncio.CancelledError:
            # Two may cancel: who wants no token any more, and who found that nobody is there to give one.
            if time.monotonic() - self._heard.get(peer.url, 0.0) > _SILENT_S and task.uncancel() == 0:
                self._counters.calls.labels("unreachable").inc()
                raise PrefillRefused(f"{peer.url} has said nothing for {_SILENT_S:g} s") from None
            raise
        finally:
            calls.discard(task)
            self._here[peer.key] -= 1
            if not self._here[peer.key]:
                del self._here[peer.key]
        self._counters.calls.labels("accepted").inc()
        return first

    def _upstream(self, peer: Peer) -> Upstream:
        place = (peer.host, peer.call_port)
        found = self._upstreams.get(place)
        if found is None:
            to = urlsplit(peer.url)
            # It has the certificate of its front, at an address that is not in there.
            tls = (self._trust, to.hostname or "") if to.scheme == "https" else None
            found = self._upstreams[place] = Upstream(place, tls=tls, idle_s=_KEPT_S)
        return found

    def _load(self, url: str, card: EngineCard) -> int:
        return self._others.get(_key(card), 0) + self._here[_key(card)]

    async def _watch(self, url: str) -> None:
        wait_s = _POLL_S
        while True:
            try:
                self._take(url, await self._ask(url))
                wait_s = _POLL_S
            except (CallFailed, msgspec.MsgspecError, PermissionError, ValueError) as error:
                self._note(url, f"{type(error).__name__}: {error}".rstrip(": "))
                wait_s = min(wait_s * 2, _BACK_OFF_LIMIT_S)
            except Exception:
                _log.exception("prefill engine %s could not be asked", url)
                wait_s = _BACK_OFF_LIMIT_S
            if time.monotonic() - self._heard.get(url, 0.0) > _SILENT_S:
                for task in self._calls.get(url, ()):
                    task.cancel()
            # Jitter: many completion engines must not ask a restarted prefill engine in step.
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))

    async def _ask(self, url: str) -> EngineCard:
        reply = await self._connections.call(
            "GET", f"{url}{CARD_ROUTE}", headers=self._headers, timeout_s=_CARD_WITHIN_S
        )
        if reply.status in (401, 403):
            raise PermissionError("it refuses our cluster token (both sides need the same --token-file)")
        if reply.status == 404:
            raise ValueError("it is no prefill engine with --engine vllm")
        if not reply.ok:
            raise ValueError(_said(reply.body) if reply.status == 503 else f"HTTP {reply.status}")
        return msgspec.msgpack.decode(reply.body, type=EngineCard)

    def _take(self, url: str, card: EngineCard) -> None:
        self._heard[url] = time.monotonic()
        old = self._cards.get(url)
        if old is not None and _key(old) != _key(card):
            self._others.pop(_key(old), None)
        if old is not None and _call_place(old) != _call_place(card):
            unused = self._upstreams.pop(_call_place(old), None)
            if unused is not None:
                unused.close()
        self._cards[url] = card
        self._others[_key(card)] = max(0, card.load - self._here[_key(card)])
        trouble = ""
        if card.version != self.version:
            trouble = f"it runs vLLM {card.version}, and this engine {self.version}"
        elif card.model != self.model:
            trouble = "it serves another model, or the same in another number type"
        self._note(url, trouble)
        if old is None or old.address != card.address or old.incarnation != card.incarnation:
            self._tell_connector()

    def _note(self, url: str, trouble: str) -> None:
        """Log a change of a URL's state once."""
        if trouble != self.trouble[url]:
            if trouble:
                _log.warning("prefill engine %s cannot be used: %s", url, trouble)
            else:
                _log.info("prefill engine %s answers", url)
            self.trouble[url] = trouble

    def _tell_connector(self) -> None:
        addresses = sorted({card.address for card in self._cards.values()})
        aside = self._peers_file.with_suffix(".new")
        aside.write_text(json.dumps(addresses))
        os.replace(aside, self._peers_file)

    async def _watch_links(self) -> None:
        seen = 0
        while True:
            try:
                changed = self._status_file.stat().st_mtime_ns
                if changed != seen:
                    links = json.loads(self._status_file.read_text()).get("links", ())
                    self._links = {x["address"]: (x["state"], x.get("reason", "")) for x in links}
                    seen = changed
            except (OSError, ValueError, KeyError, TypeError):
                self._links = {}
            await asyncio.sleep(_STATUS_S)


def _key(card: EngineCard) -> PeerKey:
    return (bytes.fromhex(card.incarnation), 0)


def _call_place(card: EngineCard) -> tuple[str, int]:
    return card.address.rpartition(":")[0].strip("[]"), card.call_port


def _said(body: bytes) -> str:
    """The message of an error body of ours."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
