# SPDX-License-Identifier: Apache-2.0
"""HTTP to one server, of which nothing is read but where an answer begins and ends.

It is for the ways that every first token goes: from a front to its vLLM server, with all other tokens, and from there
to a prefill engine. Requests and answers are bytes here: a client library that makes objects of them takes longer than
all the rest of such a way.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import httptools

__all__ = ["Answer", "Header", "Upstream", "UpstreamLost"]

Header = tuple[bytes, bytes]
_CONNECT_S = 3.0
# Of one answer that its client does not take; then the server has to wait.
_UNREAD_BYTES = 1 << 18


class UpstreamLost(Exception):
    """No answer, or not the whole of it. The server may have heard the request all the same."""


class Upstream:
    """Connections to the server at `to` (a Unix socket, or host and port), used again for `idle_s` seconds.

    That is less than the server keeps its own. `tls`: whom we trust, and the name that it must prove. To be used and
    closed in one event loop.
    """

    def __init__(
        self,
        to: Path | tuple[str, int],
        *,
        tls: tuple[ssl.SSLContext, str] | None = None,
        idle_s: float = 4.0,
    ) -> None:
        self._to = to
        self._tls = tls
        self._idle_s = idle_s
        self._kept: list[_Connection] = []

    async def ask(
        self, method: bytes, target: bytes, headers: Iterable[Header], body: bytes | None = None
    ) -> Answer:
        """Send a request; returns when its answer has begun. `target`: path and query as they go over the wire.

        Neither HEAD nor an upgrade. Nothing is sent twice. Raises UpstreamLost; cancelled, it hangs up.
        """
        connection = self._unused() or await self._connect()
        head = [method, b" ", target, b" HTTP/1.1\r\nhost: engine\r\n"]
        for name, value in headers:
            head += (name, b": ", value, b"\r\n")
        if body is not None:
            head.append(b"content-length: %d\r\n" % len(body))
        answer = connection.send(b"".join(head) + b"\r\n", body or b"")
        try:
            return await answer.begun()
        except BaseException:
            answer.close()
            raise

    def close(self) -> None:
        """Hang up what is idle."""
        while self._kept:
            self._kept[-1].hang_up()

    def _unused(self) -> _Connection | None:
        while self._kept:
            connection = self._kept.pop()
            if not connection.closing:
                return connection
            connection.hang_up()  # The server has ended it; its connection_lost is still to come.
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._kept, self._idle_s)
        try:
            async with asyncio.timeout(_CONNECT_S):
                if isinstance(self._to, Path):
                    await loop.create_unix_connection(lambda: connection, str(self._to))
                else:
                    host, port = self._to
                    trust, name = self._tls or (None, None)
                    await loop.create_connection(
                        lambda: connection, host, port, ssl=trust, server_hostname=name
                    )
        except TimeoutError:
            raise UpstreamLost(f"no connection within {_CONNECT_S:g} s") from None
        except OSError as error:  # Among them what is wrong with a certificate.
            raise UpstreamLost(f"no connection: {error.strerror or error}") from None
        except UnicodeError as error:  # A name that no resolver takes.
            raise UpstreamLost(f"no connection: {error}") from None
        return connection


class Answer:
    """An answer: `status`, and `headers` as they came, names in any case."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: list[Header] = []
        # Until the end of the answer; by then the connection may be somebody else's.
        self._connection: _Connection | None = connection
        self._pieces: list[bytes] = []
        self._whole = False
        self._waiting: asyncio.Future[None] | None = None

    async def begun(self) -> Answer:
        """Itself, once status and headers are here. Raises UpstreamLost."""
        while not self.status:
            if self._connection is None:
                raise UpstreamLost("it hung up before it answered")
            await self._change()
        return self

    async def whole(self, limit: int) -> bytes:
        """All of the body. Raises UpstreamLost, also when it has more than `limit` bytes."""
        parts = []
        while piece := await self.piece():
            parts.append(piece)
            if (limit := limit - len(piece)) < 0:
                raise UpstreamLost("its answer is too large")
        return b"".join(parts)

    async def piece(self) -> bytes:
        """All of the body that is here and was not given yet, at least a byte; b"" at its end. Raises UpstreamLost."""
        while not self._pieces:
            if self._whole:
                return b""
            if self._connection is None:
                raise UpstreamLost("it hung up in the middle of an answer")
            await self._change()
        found = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._connection is not None:
            self._connection.read_on()
        return found

    def close(self) -> None:
        """Nobody wants the rest. After the end, nothing happens."""
        if self._connection is not None:
            self._connection.hang_up()

    # For the connection

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def end(self, *, whole: bool) -> None:
        self._whole, self._connection = whole, None

    def changed(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _change(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting


class _Connection(asyncio.Protocol):
    """One socket, with one answer at a time; between two it is in `kept`."""

    def __init__(self, kept: list[_Connection], idle_s: float) -> None:
        self._kept = kept
        self._idle_s = idle_s
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._unread = 0
        self._end_of_idle: asyncio.TimerHandle | None = None

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> Answer:
        if self._end_of_idle is not None:
            self._end_of_idle.cancel()
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer(self)
        if self._transport is None or self._transport.is_closing():
            self._answer.end(whole=False)
        elif body:
            self._transport.writelines([head, body])
        else:
            self._transport.write(head)
        return self._answer

    def read_on(self) -> None:
        """What was here has been read."""
        if self._unread > _UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._unread = 0

    def hang_up(self) -> None:
        if self._end_of_idle is not None:
            self._end_of_idle.cancel()
        if self in self._kept:
            self._kept.remove(self)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer, before = self._answer, self._unread
        if self._parser is None or answer is None:
            self.hang_up()  # Bytes that nobody asked for.
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self._answer is not None:  # Else it was whole, and what is wrong came behind it.
                answer.end(whole=False)
            self.hang_up()
        if before <= _UNREAD_BYTES < self._unread and self._transport is not None:
            self._transport.pause_reading()
        answer.changed()

    def connection_lost(self, error: Exception | None) -> None:
        self.hang_up()
        if self._answer is not None:
            self._answer.end(whole=False)
            self._answer.changed()

    # httptools.HttpResponseParser

    def on_message_begin(self) -> None:
        if self._answer is None:
            # Left for the next answer's parser, the rest of it would pass for the beginning of that answer.
            raise ValueError("bytes behind the end of an answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._answer is not None
        status = self._parser.get_status_code()
        if status < 200:  # More of them follow, and then an answer.
            self._answer.headers = []
        else:
            self._answer.status = status

    def on_body(self, body: bytes) -> None:
        assert self._answer is not None
        self._unread += len(body)
        self._answer.take(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._answer is None or not self._answer.status:
            return
        keeps = self._parser.should_keep_alive()
        self._answer.end(whole=True)
        self._answer, self._unread = None, 0
        if keeps:
            self._end_of_idle = asyncio.get_running_loop().call_later(self._idle_s, self.hang_up)
            self._kept.append(self)
        elif self._transport is not None:
            self._transport.close()
