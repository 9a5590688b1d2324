# SPDX-License-Identifier: Apache-2.0
"""HTTP connections of our servers: nobody can have them keep an endless head, and what is no HTTP is refused in JSON.

uvicorn bounds neither when httptools reads for it, and all of a head is read before any key is looked at.
"""

from __future__ import annotations

import uuid
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LARGEST_HEAD", "BoundedHttp"]

# Bytes of a request's line and headers, or of what stands between two pieces of its body. At least: what has been read
# from a socket at once is looked at as a whole.
LARGEST_HEAD = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """One connection; given to uvicorn.Config as `http`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What has come since the last piece of a body, or end of a head or body.
        self._between = 0

    def data_received(self, data: bytes) -> None:
        self._between += len(data)
        super().data_received(data)
        if self._between > LARGEST_HEAD and not self.transport.is_closing():
            self._refuse(431, f"the head of a request may have {LARGEST_HEAD} bytes")

    def on_headers_complete(self) -> None:
        self._between = 0
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

    def _refuse(self, status: int, reason: str) -> None:
        """Answer, unless an answer is under way, and hang up."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
            body = msgspec.json.encode({"error": error})
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
