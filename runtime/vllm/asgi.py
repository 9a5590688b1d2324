# SPDX-License-Identifier: Apache-2.0
"""Reading a request and answering it, without a framework: what ours answers inside a vLLM server."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Send

__all__ = ["Reply", "answer", "gone", "refusal", "whole_body"]

# Status and body: JSON when it is an error, else msgpack.
Reply = tuple[int, bytes]


async def whole_body(receive: Receive, limit: int) -> bytes | None:
    """The body, or None when it is larger than `limit` bytes or its sender went away."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def gone(receive: Receive) -> None:
    """Return when the caller has left. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(status: int, reason: str) -> Reply:
    """An OpenAI error object."""
    kind = {400: "invalid_request_error", 401: "authentication_error", 503: "service_unavailable"}.get(
        status, "server_error"
    )
    error = {"message": reason, "type": kind, "param": None, "code": None}
    return status, msgspec.json.encode({"error": error})


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send the whole answer."""
    kind = b"application/json" if status != 200 else b"application/msgpack"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
