# SPDX-License-Identifier: Apache-2.0
"""Calls over kept connections: used again, never sent twice, and every kind of silence and nonsense is an error."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections, Reply

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TRUST = ssl.create_default_context()


class Server:
    """Answers each request with the next of `answers`; b"" hangs up instead, None says nothing at all."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.connections = 0
        self.requests: list[bytes] = []
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                self.requests.append(head + await reader.readexactly(int(found[1]) if found else 0))
                answer = self.answers.pop(0) if self.answers else GOOD
                if answer is None:
                    continue
                if not answer:
                    break
                writer.write(answer)
        writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def talking(
    *answers: bytes | None, trust: ssl.SSLContext = TRUST, tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[tuple[Server, KeptConnections]]:
    server = Server(list(answers))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    connections = KeptConnections(trust, **settings)
    try:
        yield server, connections
    finally:
        await connections.close()
        listener.close()
        for writer in server.writers:
            writer.close()


async def post(connections: KeptConnections, url: str, **changes: Any) -> Reply:
    settings = {"headers": {"X-Name": "value"}, "body": b"abc", "timeout_s": 5.0, **changes}
    return await connections.call("POST", f"{url}/prefill", **settings)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_one_connection_serves_call_after_call() -> None:
    async def test() -> None:
        chunked = b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        async with talking(GOOD, chunked, b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD) as (server, connections):
            assert await post(connections, server.url) == (200, b"ok", None)
            reply = await post(connections, server.url)
            assert (reply[:2], reply.ok) == ((503, b"abcde"), False)
            assert (await post(connections, server.url)).ok
            assert server.connections == 1
            assert server.requests[0].startswith(b"POST /prefill HTTP/1.1\r\n")
            assert server.requests[0].endswith(b"\r\n\r\nabc")
            assert b"X-Name: value" in server.requests[0]

    run(test)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (b"", None),
        (b"Retry-After: 3\r\n", 3.0),
        (b"Retry-After: 1\r\nRetry-After-Ms: 50\r\n", 0.05),
        (b"Retry-After: 2\r\nRetry-After-Ms: soon\r\n", 2.0),
        (b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", None),
        (b"Retry-After: -1\r\n", None),
        (b"Retry-After: inf\r\n", None),
        (b"Retry-After: nan\r\n", None),
    ],
)
def test_when_to_ask_again_is_read_from_the_headers(headers: bytes, seconds: float | None) -> None:
    async def test() -> None:
        full = b"HTTP/1.1 429 Full\r\n" + headers + b"Content-Length: 0\r\n\r\n"
        async with talking(full) as (server, connections):
            assert (await post(connections, server.url)).retry_after_s == seconds

    run(test)


def test_calls_side_by_side_have_connections_of_their_own() -> None:
    async def test() -> None:
        async with talking() as (server, connections):
            replies = await asyncio.gather(*(post(connections, server.url) for _ in range(5)))
            assert [reply.status for reply in replies] == [200] * 5
            assert server.connections == 5
            await post(connections, server.url)
            assert server.connections == 5

    run(test)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + bytes((16 << 20) + 1),
    ],
    ids=["hung up", "half an answer", "no HTTP", "too large"],
)
def test_what_is_no_answer_is_an_error_and_is_not_asked_again(answer: bytes) -> None:
    async def test() -> None:
        async with talking(GOOD, answer) as (server, connections):
            await post(connections, server.url)
            server.answers.append(b"")  # behind half an answer
            with pytest.raises(CallFailed):
                await post(connections, server.url, timeout_s=0.5)
            assert len(server.requests) == 2, "the same call went out twice"
            server.answers.clear()
            assert (await post(connections, server.url)).ok
            assert server.connections == 2

    run(test)


def test_silence_ends_and_so_does_a_caller_that_leaves() -> None:
    async def test() -> None:
        async with talking(None, None) as (server, connections):
            began = time.monotonic()
            with pytest.raises(CallFailed, match=r"no answer within 0\.2 s"):
                await post(connections, server.url, timeout_s=0.2)
            assert time.monotonic() - began < 5
            leaving = asyncio.create_task(post(connections, server.url))
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            # An answer that comes late must not be taken for that of the next call.
            assert (await post(connections, server.url)).ok
            assert server.connections == 3

    run(test)


def test_connections_that_were_closed_or_grew_old_are_not_used() -> None:
    async def test() -> None:
        closing = GOOD.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
        async with talking(closing, GOOD, GOOD + GOOD, idle_s=0.3) as (server, connections):
            await post(connections, server.url)
            await post(connections, server.url)
            assert server.connections == 2, "the server said that it closes the first one"
            await post(connections, server.url)
            await post(connections, server.url)
            assert server.connections == 3, "an answer that nobody had asked for"
            server.writers[-1].close()
            await asyncio.sleep(0.05)
            await post(connections, server.url)
            assert server.connections == 4, "the other side has gone"
            await asyncio.sleep(0.4)
            await post(connections, server.url)
            assert server.connections == 5, "too old"

    run(test)


def test_nobody_there() -> None:
    async def test() -> None:
        async with talking() as (server, _):
            port = server.port
        connections = KeptConnections(TRUST)
        for url, why in (
            (f"http://127.0.0.1:{port}", "Connection refused$"),
            ("http://no-such-host.invalid", "[A-Z][a-z ]+$"),
            ("http://" + "x" * 70 + ".test", ""),
        ):
            with pytest.raises(CallFailed, match=f"^cannot connect: {why}"):
                await post(connections, url)
        await connections.close()

    run(test)


def test_tls_is_checked(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    async def test() -> None:
        async with talking(trust=trust, tls=tls) as (server, connections):
            url = server.url.replace("http:", "https:")
            for _ in range(2):
                assert (await post(connections, url.replace("127.0.0.1", "localhost"))).ok
            assert server.connections == 1
            with pytest.raises(CallFailed, match="certificate"):
                await post(connections, url)
            strangers = KeptConnections(TRUST)
            with pytest.raises(CallFailed, match="certificate"):
                await post(strangers, url.replace("127.0.0.1", "localhost"))
            await strangers.close()

    run(test)
