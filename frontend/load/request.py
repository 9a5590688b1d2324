# SPDX-License-Identifier: Apache-2.0
"""One HTTP request whose answer is recorded as it arrives: bytes and times, read only when the load is over.

A client library reads an answer while it comes, which costs it 130 µs of CPU a token and makes sixteen streams
disturb each other by milliseconds. Here a piece of an answer costs one read and one list entry.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["Recording", "Target", "post"]


@dataclass(frozen=True)
class Target:
    """A server: its URL without a path, and headers for every request."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    def head(self, path: str, length: int) -> bytes:
        """Request line and headers of a POST of JSON. The server closes the connection after its answer."""
        parts = urlsplit(self.url)
        lines = [
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(slots=True)
class Recording:
    """`begun`: when the request was handed to an open connection. `pieces`: what came, and when (perf_counter)."""

    label: str
    begun: float = 0.0
    ended: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""
    hung_up: bool = False


class _Line(asyncio.Protocol):
    def __init__(self, recording: Recording, request: bytes) -> None:
        self._pieces = recording.pieces
        self._recording = recording
        self._request = request
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._recording.begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self._recording.ended = time.perf_counter()
        if error is not None:
            self._recording.error = f"{type(error).__name__}: {error}"
        if not self.closed.done():
            self.closed.set_result(None)


async def post(
    target: Target,
    path: str,
    body: bytes,
    label: str,
    *,
    within_s: float,
    hang_up_after_s: float | None = None,
) -> Recording:
    """Send, and record until the server closes. `hang_up_after_s`: close first, as a client that loses patience.

    What goes wrong with the connection is noted in the recording; nothing is raised.
    """
    recording = Recording(label, begun=time.perf_counter())
    parts = urlsplit(target.url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    loop = asyncio.get_running_loop()
    request = target.head(path, len(body)) + body
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(within_s):
            transport, line = await loop.create_connection(
                lambda: _Line(recording, request), parts.hostname or "", port, ssl=secure
            )
            if hang_up_after_s is None:
                await line.closed
            else:
                await asyncio.wait([line.closed], timeout=hang_up_after_s)
                recording.hung_up = not line.closed.done()
    except TimeoutError:
        recording.error = f"no end of the answer within {within_s:g} s"
    except OSError as error:
        recording.error = f"{type(error).__name__}: {error}"
    finally:
        if transport is not None:
            transport.abort()
    recording.ended = recording.ended or time.perf_counter()
    return recording
