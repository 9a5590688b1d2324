# SPDX-License-Identifier: Apache-2.0
"""What every HTTP answer of ours has in common: a request id, a bound on the body, and OpenAI error bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import Cancelled, RuntimeFault, TooLong

__all__ = [
    "Envelope",
    "NoSuchModel",
    "Unauthorized",
    "error_body",
    "install_error_bodies",
    "json_response",
    "request_id",
    "until_disconnect",
]

_access = logging.getLogger("kvrail.access")
# What a client's own request id may look like; others are ignored, as the id goes into logs and headers.
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# A client that sends nothing more of its body for so long keeps nobody else out.
_BODY_WITHIN_S = 30.0
# Asked all the time by machines: they are worth a line only when they fail.
_WATCHED = ("/health", "/ready", "/metrics", "/lanes", "/ranks", "/vllm/card", "/favicon.ico")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_REASONS = {
    "missing": "is required",
    "extra_forbidden": "is not a known field",
    "json_invalid": "the body is not valid JSON",
}


class Unauthorized(RuntimeFault):
    """No valid API key, or no valid cluster token on an internal route."""

    status = 401
    kind = "authentication_error"


class NoSuchModel(RuntimeFault):
    """The request names a model that is not served here."""

    status = 404
    kind = "invalid_request_error"


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    """The OpenAI error object of a fault."""
    codes = {
        TooLong: "context_length_exceeded",
        Unauthorized: "invalid_api_key",
        NoSuchModel: "model_not_found",
    }
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": codes.get(type(fault)),
        }
    }


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer, encoded by msgspec."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def request_id(request: Request) -> str:
    """The id of this request: ours, never the client's, as it names things inside."""
    return str(request.scope["state"]["request_id"])


def install_error_bodies(app: FastAPI, *, for_clients: bool = True) -> None:
    """Answer every failure of `app` with an OpenAI error body. Not `for_clients`: it is a prefill engine's."""

    async def fault(request: Request, error: Exception) -> Response:
        assert isinstance(error, RuntimeFault)
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
            # What OpenAI's clients look at first, and completion engines.
            headers["Retry-After-Ms"] = str(math.ceil(1000 * error.retry_after_s))
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(error_body(error), error.status, headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = _KINDS.get(error.status_code, "invalid_request_error")
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message.lower()}"
            if not for_clients and (request.url.path == "/" or request.url.path.startswith("/v1/")):
                message += "; this is a prefill engine: ask its completion engine (--role ce)"
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        return json_response(body, error.status_code, dict(error.headers or {}))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = _field(first["loc"]) if first["type"] != "json_invalid" else ""
        reason = _REASONS.get(first["type"], first["msg"].removeprefix("Value error, "))
        if first["type"] == "value_error" and len(first["loc"]) == 1:
            # Of fields that contradict each other; the text names the field that is to change.
            message, param = reason, reason.partition(":")[0]
        elif param:
            message = f"{param}: {reason}"
        elif len(first["loc"]) == 1 and first["type"] != "json_invalid":
            message = "the body must be a JSON object"
        elif first["type"] == "extra_forbidden":
            message = f"{str(first['loc'][-1])[:100]!r} {reason}"
        else:
            message = reason
        body = {"message": message, "type": "invalid_request_error", "param": param or None, "code": None}
        return json_response({"error": body}, 400)

    async def unexpected(request: Request, error: Exception) -> Response:
        # The traceback goes to the log; a client learns nothing about the inside.
        body = {"message": "internal error", "type": "server_error", "param": None, "code": None}
        return json_response({"error": body}, 500)

    app.add_exception_handler(RuntimeFault, fault)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)


def _field(location: tuple[int | str, ...]) -> str:
    """("body", "messages", 0, "role") → "messages[0].role". What follows a union's tag is left out."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier():
            name += f".{part}" if name else part
        else:
            break
    return name


@contextlib.asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Run the block only as long as the client is there: raises Cancelled inside it when the client leaves.

    The request's body must have been read before.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # The server may cancel this task as well (when it stops): that must go on.
        if gone and task.uncancel() == 0:
            raise Cancelled("the client went away") from None
        raise
    finally:
        watcher.cancel()


class Envelope:
    """Around an application, outermost: gives each request its id, bounds its body, and logs it.

    A client's own `x-request-id` comes back to it and stands in the log; inside, ours counts.
    """

    def __init__(self, app: ASGIApp, config: LaunchConfig) -> None:
        self._app = app
        self._limit = int(config.max_body_mb * 2**20)
        self._logs = config.access_log == "json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        number = uuid.uuid4().hex
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        theirs = given if _CLIENT_ID.fullmatch(given) else b""
        scope.setdefault("state", {})["request_id"] = number
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        size = 0
        status = 0
        whole = False

        async def bounded() -> Message:
            nonlocal size, whole
            # At once, when it says itself that it is too large.
            if length.isdigit() and int(length) > self._limit:
                raise _too_large(self._limit)
            try:
                async with asyncio.timeout(None if whole else _BODY_WITHIN_S):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"nothing more of the body came for {_BODY_WITHIN_S:g} s") from None
            whole = whole or not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._limit:
                raise _too_large(self._limit)
            return message

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", theirs or number.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, bounded, named)
        finally:
            if self._logs and (status >= 400 or scope["path"] not in _WATCHED):
                _log_access(scope, number, theirs, status, size, time.monotonic() - started)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit / 2**20:g} MiB (--max-body-mb)")


def _log_access(scope: Scope, number: str, theirs: bytes, status: int, size: int, seconds: float) -> None:
    """One line of JSON. Status 0: the client left before there was an answer."""
    line = {
        "request_id": number,
        "client_request_id": theirs.decode("ascii") or None,
        "client": (scope.get("client") or ("",))[0],
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "body_bytes": size,
        "seconds": round(seconds, 4),
    }
    _access.info("%s", json.dumps(line))
