# SPDX-License-Identifier: Apache-2.0
"""The front's way to its server: bytes as they come, connections used again, and each way in which an answer breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvrail.runtime.control.upstream import Answer, Upstream, UpstreamLost

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: 1\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request with the next of `answers`, piece by piece; at a None in it, it hangs up."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                for piece in self.answers.pop(0) if self.answers else [GOOD]:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def talking(
    folder: Path, *answers: list[bytes | None], idle_s: float = 4.0
) -> AsyncIterator[tuple[Server, Upstream]]:
    server = Server(*answers)
    listener = await asyncio.start_unix_server(server.serve, folder / "s")
    upstream = Upstream(folder / "s", idle_s=idle_s)
    try:
        async with asyncio.timeout(20):
            yield server, upstream
    finally:
        upstream.close()
        listener.close()


async def ask(upstream: Upstream, body: bytes | None = b"abc") -> Answer:
    return await upstream.ask(b"POST", b"/a?b=%20", [(b"x-name", b"\xfc")], body)


async def rest(answer: Answer) -> bytes:
    found = b""
    while piece := await answer.piece():
        found += piece
    return found


def test_one_connection_for_many(tmp_path: Path) -> None:
    async def test() -> None:
        chunked = [
            b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\na\r\n",
            b"2\r\nbc\r\n0\r\n\r\n",
        ]
        async with talking(tmp_path, [GOOD], chunked) as (server, upstream):
            answer = await ask(upstream)
            assert (answer.status, answer.headers) == (200, [(b"Content-Length", b"2"), (b"X-A", b"1")])
            assert await rest(answer) == b"ok"
            assert await answer.piece() == b"", "and again"
            answer = await ask(upstream, None)
            assert (answer.status, await rest(answer)) == (201, b"abc")
            head = b"POST /a?b=%20 HTTP/1.1\r\nhost: engine\r\nx-name: \xfc\r\n"
            assert server.requests == [head + b"content-length: 3\r\n\r\nabc", head + b"\r\n"]
            answer.close()
            assert (await rest(await ask(upstream))) == b"ok"
            assert server.connections == 1

    asyncio.run(test())


def test_an_answer_that_is_read_late_is_not_mixed_with_the_next(tmp_path: Path) -> None:
    async def test() -> None:
        other = GOOD.replace(b"ok", b"no")
        async with talking(tmp_path, [GOOD], [other]) as (server, upstream):
            first = await ask(upstream)
            await asyncio.sleep(0.05)
            second = await ask(upstream)
            assert server.connections == 1
            first.close()
            assert (await rest(second), await rest(first)) == (b"no", b"ok")

    asyncio.run(test())


def test_pieces_come_as_they_are_sent(tmp_path: Path) -> None:
    async def test() -> None:
        head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with talking(tmp_path, [head, b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]) as (_, upstream):
            answer = await ask(upstream)
            assert [await answer.piece() for _ in range(3)] == [b"a", b"b", b""]

    asyncio.run(test())


def test_who_does_not_read_stops_the_server(tmp_path: Path) -> None:
    async def test() -> None:
        size = 1 << 24
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
        async with talking(tmp_path, [whole]) as (_, upstream):
            answer = await ask(upstream)
            await asyncio.sleep(0.3)
            piece = await answer.piece()
            assert len(piece) < size / 4
            assert len(piece) + len(await rest(answer)) == size
            assert await rest(await ask(upstream)) == b"ok"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([None], "before it answered"),
        ([b"HTTP/1.1 200 OK\r\n", None], "before it answered"),
        ([b"what?\r\n\r\n"], "before it answered"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", None], "in the middle"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", b"z\r\n"], "in the middle"),
    ],
)
def test_answers_that_break(tmp_path: Path, pieces: list[bytes | None], said: str) -> None:
    async def test() -> None:
        async with talking(tmp_path, pieces) as (server, upstream):
            with pytest.raises(UpstreamLost, match=said):
                await rest(await ask(upstream))
            assert await rest(await ask(upstream)) == b"ok"
            assert server.connections == 2

    asyncio.run(test())


def test_who_leaves_hangs_up(tmp_path: Path) -> None:
    async def test() -> None:
        never: list[bytes | None] = [GOOD.replace(b": 2", b": 9")]
        async with talking(tmp_path, never) as (server, upstream):
            answer = await ask(upstream)
            assert await answer.piece() == b"ok"
            answer.close()
            await server.left.wait()
            with pytest.raises(UpstreamLost):
                await answer.piece()
        async with talking(tmp_path / "..", []) as (server, upstream):
            asking = asyncio.create_task(ask(upstream))
            await asyncio.sleep(0.1)
            asking.cancel()
            await server.left.wait()

    asyncio.run(test())


@pytest.mark.parametrize("closes", ["the server says so", "the server hangs up", "it is old"])
def test_a_connection_that_is_over_is_not_used_again(tmp_path: Path, closes: str) -> None:
    async def test() -> None:
        said = GOOD.replace(b"X-A: 1", b"Connection: close") if closes == "the server says so" else GOOD
        answer: list[bytes | None] = [said, None] if closes == "the server hangs up" else [said]
        idle_s = 0.05 if closes == "it is old" else 4.0
        async with talking(tmp_path, answer, idle_s=idle_s) as (server, upstream):
            assert await rest(await ask(upstream)) == b"ok"
            await asyncio.sleep(0.2)
            assert await rest(await ask(upstream)) == b"ok"
            assert server.connections == 2

    asyncio.run(test())


def test_nobody_listens(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(UpstreamLost, match="no connection: No such file"):
            await ask(Upstream(tmp_path / "none"))

    asyncio.run(test())


def test_a_connection_that_is_just_being_closed_is_not_used_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with talking(tmp_path, [GOOD, None]) as (server, upstream):
            assert await rest(await ask(upstream)) == b"ok"
            connection = upstream._kept[0]
            while not connection.closing:
                await asyncio.sleep(0)
            assert upstream._kept == [connection], "the end has been read, and is not told yet"
            assert await rest(await ask(upstream)) == b"ok"
            assert server.connections == 2

    asyncio.run(test())


@pytest.mark.parametrize("more", [GOOD, b"HTTP/1.1 200 OK\r\nX-Not", b"H", b"what?\r\n\r\n"])
def test_bytes_behind_an_answer_are_nobodys(tmp_path: Path, more: bytes) -> None:
    async def test() -> None:
        async with talking(tmp_path, [GOOD + more], [b": asked\r\nContent-Length: 3\r\n\r\nbad"]) as (
            server,
            upstream,
        ):
            assert await rest(await ask(upstream)) == b"ok", "what was whole stays so"
            server.answers.clear()
            assert await rest(await ask(upstream)) == b"ok"
            assert server.connections == 2

    asyncio.run(test())


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_without_a_body(tmp_path: Path, status: bytes) -> None:
    async def test() -> None:
        async with talking(tmp_path, [b"HTTP/1.1 " + status + b"\r\nX-A: 1\r\n\r\n"]) as (server, upstream):
            answer = await ask(upstream)
            assert (answer.status, await rest(answer)) == (int(status[:3]), b"")
            assert await rest(await ask(upstream)) == b"ok"
            assert server.connections == 1

    asyncio.run(test())


def test_a_name_that_no_resolver_takes() -> None:
    async def test() -> None:
        with pytest.raises(UpstreamLost, match=r"no connection: .*label"):
            await ask(Upstream(("a" * 80, 80)))

    asyncio.run(test())
