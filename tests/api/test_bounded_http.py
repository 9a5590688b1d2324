# SPDX-License-Identifier: Apache-2.0
"""What a server of ours keeps of a head that does not end, and how it refuses what is no HTTP: on both its ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from kvrail.runtime.control.bounded_http import LARGEST_HEAD, BoundedHttp

START = b"POST /x HTTP/1.1\r\nHost: x\r\n"
MUCH = b"a" * (LARGEST_HEAD // 4)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app: Any = echo) -> AsyncIterator[int]:
    server = uvicorn.Server(
        uvicorn.Config(app, http=BoundedHttp, port=0, lifespan="off", log_config=None, ws="none")
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


def long_value() -> Iterator[bytes]:
    yield START + b"x-a: "
    while True:
        yield MUCH


def many_headers() -> Iterator[bytes]:
    yield START
    while True:
        yield b"x-a: " + MUCH + b"\r\n"


def long_target() -> Iterator[bytes]:
    yield b"POST /"
    while True:
        yield MUCH


def many_trailers() -> Iterator[bytes]:
    yield START + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    while True:
        yield b"x-a: " + MUCH + b"\r\n"


async def told(port: int, parts: Iterator[bytes]) -> tuple[int, bytes]:
    """How much of it is taken, and what is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent, answered = 0, b""
    for part in parts:
        writer.write(part)
        if not sent:
            # What is read in one piece counts for what it ends with.
            await asyncio.sleep(0.1)
        sent += len(part)
        if sent > LARGEST_HEAD:
            # Sending more resets the connection when it has been refused, and the answer may be lost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    answered = await reader.read(4096)
                    break
    else:
        answered = await reader.read(4096)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return sent, answered


@pytest.mark.parametrize("parts", [long_value, many_headers, long_target, many_trailers])
def test_an_endless_head_is_refused(parts: Any) -> None:
    async def test() -> tuple[int, bytes]:
        async with serving() as port, asyncio.timeout(20):
            return await told(port, parts())

    sent, answered = asyncio.run(test())
    assert LARGEST_HEAD < sent < 1.5 * LARGEST_HEAD
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"content-type: application/json" in head
    assert str(LARGEST_HEAD) in json.loads(body)["error"]["message"]


def test_what_is_no_http_is_refused_in_json() -> None:
    async def test() -> tuple[int, bytes]:
        async with serving() as port, asyncio.timeout(20):
            return await told(port, iter([b"\0\1\2 nothing\r\n\r\n"]))

    _, answered = asyncio.run(test())
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_large_bodies_and_many_requests_on_one_connection_pass() -> None:
    async def test() -> None:
        async with serving() as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b"b" * (3 * LARGEST_HEAD)
            for number in range(6):
                if number % 2:
                    pieces = [b"10000\r\n" + body[:0x10000] + b"\r\n"] * 3 + [b"0\r\n\r\n"]
                    framing = b"Transfer-Encoding: chunked"
                else:
                    pieces, framing = [body], b"Content-Length: %d" % len(body)
                # Heads of this size add up to more than one may have.
                writer.write(START + b"x-a: " + MUCH + b"\r\n" + framing + b"\r\n\r\n" + b"".join(pieces))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(len(body)) == body
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        START,
        # The first request is answered, the second one never comes.
        b"GET /x HTTP/1.1\r\nHost: x\r\n\r\nGET /x",
    ],
)
def test_a_head_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("kvrail.runtime.control.bounded_http._HEAD_WITHIN_S", 0.3)

    async def test() -> bytes:
        async with serving() as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            said = await reader.read()
            writer.close()
            return said

    said = asyncio.run(test())
    head, _, body = said[said.rindex(b"HTTP/1.1") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == "no whole request came within 0.3 s"


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def slowly(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.5)
    await at_once(scope, receive, send)


def test_the_rest_of_a_body_whose_answer_is_out_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrail.runtime.control.bounded_http._HEAD_WITHIN_S", 0.3)

    async def test() -> bytes:
        async with serving(at_once) as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(START + b"Content-Length: 9\r\n\r\n1")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"2")
            said = await reader.read()
            writer.close()
            return said

    assert asyncio.run(test()).startswith(b"HTTP/1.1 408 ")


def test_a_running_answer_outlives_half_a_request_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrail.runtime.control.bounded_http._HEAD_WITHIN_S", 0.1)

    async def test() -> bytes:
        async with serving(slowly) as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\nGET /x")
            said = await reader.read()
            writer.close()
            return said

    said = asyncio.run(test())
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in said


def test_what_is_no_http_behind_requests_in_line_breaks_into_no_answer() -> None:
    async def in_pieces(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % 20)]}
        )
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"ab", "more_body": True})
            await asyncio.sleep(0.02)

    async def test() -> bytes:
        async with serving(in_pieces) as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
            writer.write(request)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(request + b"\0 nothing\r\n\r\n")
            said = await reader.read()
            writer.close()
            return said

    said = asyncio.run(test())
    assert said.replace(b"ab", b"") == b"", "pieces of the first answer, then the end"
