# SPDX-License-Identifier: Apache-2.0
"""HTTP connections of our servers: nobody can have them keep an endless head, and what is no HTTP is refused in JSON.

uvicorn bounds neither when httptools reads for it, and all of a head is read before any key is looked at.
"""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LARGEST_HEAD", "BoundedHttp"]

# Bytes of a request's line and headers, or of what stands between two pieces of its body. At least: what has been read
# from a socket at once is looked at as a whole.
LARGEST_HEAD = 64 << 10
# As long as an idle connection is kept: each that says nothing, or half a request, costs a descriptor.
_HEAD_WITHIN_S = 30.0


class BoundedHttp(HttpToolsProtocol):
    """One connection; given to uvicorn.Config as `http`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What has come since the last piece of a body, or end of a head or body.
        self._between = 0
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._between += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._between > LARGEST_HEAD:
            self._refuse(431, f"the head of a request may have {LARGEST_HEAD} bytes")
        elif self._head_due is None and not self._answering:
            # What begins no request (the rest of a body whose answer is out) has ended uvicorn's wait for one.
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._between = 0
        self._head_is_here()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn has found something that is no HTTP/1."""
        self._refuse(400, msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_is_here()
        self._head_due = self.loop.call_later(_HEAD_WITHIN_S, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        if self._answering:
            # It belongs to a request behind the one that is being answered: there is time until that is over.
            self._expect_head()
        elif not self.transport.is_closing():
            self._refuse(408, f"no whole request came within {_HEAD_WITHIN_S:g} s")

    def _refuse(self, status: int, reason: str) -> None:
        """Answer, unless an answer is under way, and hang up."""
        cycle = self.cycle
        # (`cycle` is the newest request's: with others in line an older one is being answered.)
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
            body = msgspec.json.encode({"error": error})
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
