# SPDX-License-Identifier: Apache-2.0
"""HTTP calls from engine to engine, over connections that are kept open between them.

Such a call stands between a user and the first token, so it is one write and one read on an asyncio transport, with
httptools to read the answer. Nothing is ever sent twice: a call that failed may have been heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

__all__ = ["CallFailed", "KeptConnections", "Reply"]

# No answer of an engine comes near it; whatever is larger is no answer of ours.
_LARGEST_REPLY = 1 << 24


class CallFailed(Exception):
    """No answer, or none that can be read. The other side may have heard the call all the same."""


class Reply(NamedTuple):
    """An answer, whatever its status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """2xx."""
        return 200 <= self.status < 300


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool


class KeptConnections:
    """`call` is all there is to it. `trust`: what https peers must prove. `idle_s`: how long an unused one is kept.

    That must be less than servers keep theirs, or a call meets a connection that is being closed.
    """

    def __init__(self, trust: ssl.SSLContext, *, idle_s: float = 15.0) -> None:
        self._trust = trust
        self._idle_s = idle_s
        # The newest last: it is taken first, and those that a burst has opened grow old.
        self._idle: dict[_Origin, list[_Connection]] = {}

    async def call(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        timeout_s: float,
        connect_s: float = 3.0,
    ) -> Reply:
        """One request and its answer, within `timeout_s` in all. Raises CallFailed; cancelled, it hangs up."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        origin = _Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls)
        lines = [
            f"{method} {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._kept(origin) or await self._open(origin, connect_s)
                reply = await connection.ask(request)
        except TimeoutError:
            raise CallFailed(f"no answer within {timeout_s:g} s") from None
        finally:
            if connection is not None:
                self._put_back(origin, connection)
        return reply

    def close(self) -> None:
        """Hang up."""
        for kept in self._idle.values():
            for connection in kept:
                connection.hang_up()
        self._idle.clear()

    def _kept(self, origin: _Origin) -> _Connection | None:
        kept = self._idle.get(origin, [])
        since = time.monotonic() - self._idle_s
        while kept and (kept[0].closed or kept[0].idle_since < since):
            kept.pop(0).hang_up()
        while kept:
            if not (connection := kept.pop()).closed:
                return connection
        return None

    def _put_back(self, origin: _Origin, connection: _Connection) -> None:
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(origin, []).append(connection)
        else:
            connection.hang_up()

    async def _open(self, origin: _Origin, connect_s: float) -> _Connection:
        try:
            async with asyncio.timeout(connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, origin.host, origin.port, ssl=self._trust if origin.tls else None
                )
        except TimeoutError:
            raise CallFailed(f"no connection within {connect_s:g} s") from None
        except (OSError, UnicodeError) as error:
            # (UnicodeError: a name that no resolver takes.)
            raise CallFailed(f"cannot connect: {error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._whole = False

    async def ask(self, request: bytes) -> Reply:
        """Send, and wait for the answer. Raises CallFailed."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._parser, self._body, self._size = httptools.HttpResponseParser(self), [], 0
        self._whole = False
        if self.closed:
            self._fail("the connection was closed")
        self._transport.write(request)
        return await self._answer

    @property
    def reusable(self) -> bool:
        """The last answer came whole, and the other side goes on."""
        return self._whole and not self.closed

    def hang_up(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # (Those of other event loops are no instances.)
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._whole:
            # Nobody has asked.
            self.hang_up()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
        if self._size > _LARGEST_REPLY:
            self._fail(f"an answer of more than {_LARGEST_REPLY >> 20} MiB")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection broke: {error}" if error else "the connection was closed")

    def _fail(self, reason: str) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallFailed(reason))

    # --- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:
            # A second answer to one question: whose would the next one be?
            self.closed = True

    def on_body(self, piece: bytes) -> None:
        self._size += len(piece)
        self._body.append(piece)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return  # Only on the way to an answer.
        self._whole = True
        if not self._parser.should_keep_alive():
            self.closed = True
        with contextlib.suppress(asyncio.InvalidStateError):
            if self._answer is not None:
                self._answer.set_result(Reply(status, b"".join(self._body)))
