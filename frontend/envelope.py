# SPDX-License-Identifier: Apache-2.0
"""What every HTTP answer of ours has in common: a request id, a bound on the body, and OpenAI error bodies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

# Room for a prompt of some million tokens; no honest request is longer.
BODY_LIMIT = 32 * 2**20
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


def install_error_bodies(app: FastAPI) -> None:
    """Answer every failure of `app` with an OpenAI error body."""

    async def fault(request: Request, error: Exception) -> Response:
        assert isinstance(error, RuntimeFault)
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(error_body(error), error.status, headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = _KINDS.get(error.status_code, "invalid_request_error")
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message.lower()}"
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
    """Around an application, outermost: gives each request its id and bounds its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = number
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_LIMIT:
                raise HTTPException(413, f"the body is larger than {BODY_LIMIT >> 20} MiB")
            return message

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number.encode())]
            await send(message)

        await self._app(scope, bounded, named)
