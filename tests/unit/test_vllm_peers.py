# SPDX-License-Identifier: Apache-2.0
"""What a completion engine with vLLM knows of its prefill engines, and what it writes and reads beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from prometheus_client import CollectorRegistry

from kvrail.runtime.control.kept_connections import CallFailed, Reply
from kvrail.runtime.vllm import peers as module
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.front_files import PeersFile, StatusFile
from kvrail.runtime.vllm.peers import PeerCalls, PrefillRefused
from kvrail.runtime.vllm.spec import CARD_ROUTE, PREFILL_ROUTE, EngineCard, FirstToken, PrefillCall
from kvrail.transfer.link_events import LinkDown, LinkKey, LinkRefusal

_CALL = PrefillCall(version="1", model="m", ticket=b"t" * 16, tokens=b"\0" * 4, sampling=b"")


def card(**changes: Any) -> EngineCard:
    fields: dict[str, Any] = {
        "version": "1",
        "model": "m",
        "address": "127.0.0.1:4000",
        "call_port": 4001,
        "incarnation": "ab",
        "max_model_len": 9,
        "load": 0,
        "limit": 2,
    }
    return EngineCard(**{**fields, **changes})


class Engines:
    """Prefill engines by host, in place of KeptConnections; and the port on which the first is called."""

    def __init__(self) -> None:
        self.cards: dict[str, EngineCard | int] = {}
        self.answer = (200, msgspec.msgpack.encode(FirstToken(token=7, stopped=False)))
        self.frozen = False
        self.hung_up = 0

    async def call(self, method: str, url: str, *, headers: Any, timeout_s: Any) -> Reply:
        host, _, path = url.partition("://")[2].partition("/")
        assert headers["Authorization"] == "Bearer token"
        found = self.cards.get(host)
        if found is None:
            raise CallFailed("nobody listens")
        if isinstance(found, int):
            return Reply(found, b'{"error": {"message": "the model is loading"}}')
        assert (f"/{path}", method, timeout_s) == (CARD_ROUTE, "GET", 5.0)
        return Reply(200, msgspec.msgpack.encode(found))

    @contextlib.asynccontextmanager
    async def called(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[EngineCard]:
        """The card of an engine that takes calls."""
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        yield card(call_port=listener.sockets[0].getsockname()[1])
        listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(f"POST {PREFILL_ROUTE} HTTP/1.1\r\n".encode())
            assert b"\r\nauthorization: Bearer token\r\n" in head
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert msgspec.msgpack.decode(await reader.readexactly(length), type=PrefillCall) == _CALL
            if self.frozen:
                await reader.read()
                self.hung_up += 1
            else:
                status, body = self.answer
                writer.write(b"HTTP/1.1 %d ?\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
                await writer.drain()
        writer.close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_POLL_S": 0.02,
        "_STATUS_S": 0.02,
        "_BACK_OFF_LIMIT_S": 0.05,
        "_SILENT_S": 0.3,
    }.items():
        monkeypatch.setattr(module, name, value)


@contextlib.asynccontextmanager
async def watching(
    folder: Path, engines: Engines, *urls: str, trust: ssl.SSLContext | None = None
) -> AsyncIterator[PeerCalls]:
    calls = PeerCalls(
        urls or ("http://a",),
        b"token",
        engines,  # type: ignore[arg-type]
        trust or ssl.create_default_context(),
        SplitCounters(CollectorRegistry()),
        version="1",
        model="m",
        routing="least-loaded",
        status_file=folder / "status.json",
        peers_file=folder / "peers.json",
    )
    calls.start()
    try:
        yield calls
    finally:
        await calls.close()


def links(folder: Path, **states: str) -> None:
    found = [
        {"address": f"127.0.0.{host[1:]}:4000", "state": state, "reason": "x"}
        for host, state in states.items()
    ]
    (folder / "aside").write_text(json.dumps({"links": found}))
    os.replace(folder / "aside", folder / "status.json")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_prompt_goes_only_where_the_link_is_up(scheme: str, tmp_path: Path) -> None:
    trust, tls = _certificate("a") if scheme == "https" else (None, None)

    async def test() -> None:
        engines = Engines()
        async with (
            engines.called(tls) as found,
            watching(tmp_path, engines, f"{scheme}://a/", trust=trust) as calls,
        ):
            engines.cards["a"] = found
            await until(lambda: "link is connecting" in calls.states[0].trouble)
            assert calls.choose(b"x") is None
            assert json.loads((tmp_path / "peers.json").read_text()) == ["127.0.0.1:4000"]
            links(tmp_path, h1="up")
            await until(lambda: calls.states[0].trouble == "")
            peer = calls.choose(b"x")
            assert peer is not None
            assert peer[1:] == (f"{scheme}://a", "127.0.0.1", 4000, found.call_port)
            assert (await calls.prefill(peer, _CALL)).token == 7
            links(tmp_path, h1="down")
            await until(lambda: calls.choose(b"x") is None)
            assert calls.states[0].trouble == "link is down: x"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (None, "nobody listens"),
        (401, "cluster token"),
        (404, "no prefill engine with --engine vllm"),
        (503, "the model is loading"),
        (card(version="2"), "it runs vLLM 2, and this engine 1"),
        (card(model="n"), "another model"),
    ],
)
def test_an_engine_that_cannot_be_used(found: EngineCard | int | None, trouble: str, tmp_path: Path) -> None:
    async def test() -> None:
        engines = Engines()
        links(tmp_path, h1="up")
        if found is not None:
            engines.cards["a"] = found
        async with watching(tmp_path, engines) as calls:
            await until(lambda: trouble in calls.states[0].trouble)
            assert calls.choose(b"x") is None
            engines.cards["a"] = card()
            await until(lambda: calls.choose(b"x") is not None)

    asyncio.run(test())


def test_full_engines_and_restarted_ones(tmp_path: Path) -> None:
    async def test() -> None:
        engines = Engines()
        engines.cards = {"a": card(load=2), "b": card(address="127.0.0.2:4000", incarnation="cd", load=1)}
        links(tmp_path, h1="up", h2="up")
        async with watching(tmp_path, engines, "http://a", "http://b") as calls:
            await until(lambda: all(not state.trouble for state in calls.states))
            assert {calls.choose(bytes([n])).url for n in range(20)} == {"http://b"}  # type: ignore[union-attr]
            engines.cards["b"] = card(address="127.0.0.3:4000", incarnation="ef", load=2)
            await until(lambda: calls.choose(b"x") is None)
            assert json.loads((tmp_path / "peers.json").read_text()) == ["127.0.0.1:4000", "127.0.0.3:4000"]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((429, b'{"error": {"message": "full"}}'), "HTTP 429: full"),
        ((500, b"\xff?"), "HTTP 500: \ufffd\\?"),
        ((200, b"?"), "cannot be read"),
        ((200, b"?" * (2 << 20)), "too large"),
        (None, "http://a: no connection"),
    ],
)
def test_calls_that_fail(answer: tuple[int, bytes] | None, said: str, tmp_path: Path) -> None:
    async def test() -> None:
        engines = Engines()
        links(tmp_path, h1="up")
        engines.answer = answer or engines.answer
        async with engines.called() as found, watching(tmp_path, engines) as calls:
            engines.cards["a"] = card(call_port=1) if answer is None else found
            await until(lambda: calls.choose(b"x") is not None)
            peer = calls.choose(b"x")
            assert peer is not None
            with pytest.raises(PrefillRefused, match=said):
                await calls.prefill(peer, _CALL)
            assert calls.states[0].load == 0

    asyncio.run(test())


def test_a_certificate_of_somebody_else(tmp_path: Path) -> None:
    trust, tls = _certificate("b")

    async def test() -> None:
        engines = Engines()
        links(tmp_path, h1="up")
        async with (
            engines.called(tls) as found,
            watching(tmp_path, engines, "https://a", trust=trust) as calls,
        ):
            engines.cards["a"] = found
            await until(lambda: calls.choose(b"x") is not None)
            with pytest.raises(PrefillRefused, match="certificate"):
                await calls.prefill(calls.choose(b"x"), _CALL)  # type: ignore[arg-type]

    asyncio.run(test())


def test_an_engine_that_vanishes_loses_its_calls(tmp_path: Path) -> None:
    async def test() -> None:
        engines = Engines()
        engines.frozen = True
        links(tmp_path, h1="up")
        async with engines.called() as found, watching(tmp_path, engines) as calls:
            engines.cards["a"] = found
            await until(lambda: calls.choose(b"x") is not None)
            peer = calls.choose(b"x")
            assert peer is not None
            left = asyncio.create_task(calls.prefill(peer, _CALL))
            lost = asyncio.create_task(calls.prefill(peer, _CALL))
            await until(lambda: calls.states[0].load == 2)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            await until(lambda: engines.hung_up == 1)
            del engines.cards["a"]
            async with asyncio.timeout(5):
                with pytest.raises(PrefillRefused, match="said nothing"):
                    await lost

    asyncio.run(test())


def _certificate(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server with that name: what callers trust, and what it shows."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(tls)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return trust, tls


def test_the_peers_file(tmp_path: Path) -> None:
    file = PeersFile(tmp_path / "peers.json")
    assert file.read(0.0) is None
    (tmp_path / "peers.json").write_text('["127.0.0.1:4000", "[::1]:5"]')
    assert file.read(0.1) is None, "it was looked at a moment ago"
    assert file.read(1.0) == [("127.0.0.1", 4000), ("::1", 5)]
    assert file.read(2.0) is None, "nothing has changed"
    (tmp_path / "new").write_text("[]")
    os.replace(tmp_path / "new", tmp_path / "peers.json")
    assert file.read(3.0) == []


def test_the_status_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    file = StatusFile(path, 0, {"page_tokens": 16})
    key = LinkKey(b"i" * 16, 0)
    numbers: dict[str, float] = {"landed": 1}

    def write(now: float) -> dict[str, Any]:
        file.tick(now, {key: ("127.0.0.1:4000", 96.0)}, lambda: ({"loads": 0}, numbers))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    assert write(0.0) == {"page_tokens": 16, "links": [], "gauges": {"loads": 0}, "counters": {"landed": 1}}
    file.note(LinkRefusal(key, "other layout"))
    (link,) = write(0.1)["links"]
    assert (link["address"], link["state"], link["reason"]) == ("127.0.0.1:4000", "refused", "other layout")
    assert link["counters"] == {"bytes": 96.0}
    numbers["landed"] = 2
    assert write(0.2)["counters"] == {"landed": 1}, "numbers alone can wait"
    assert write(1.5)["counters"] == {"landed": 2}
    for n in range(40):
        file.note(LinkRefusal(LinkKey(bytes([n]) * 16, 0), "gone"))
    file.note(LinkDown(key, 1, "lost"))
    assert len(write(3.0)["links"]) <= 9
