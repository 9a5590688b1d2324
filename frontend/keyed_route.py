# SPDX-License-Identifier: Apache-2.0
"""Routes for clients: the key, and what kind of body comes, are looked at before the body is read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvrail.frontend.envelope import Unauthorized
from kvrail.runtime.control.auth import ApiKeys

__all__ = ["keyed_route"]


def keyed_route(keys: ApiKeys) -> type[APIRoute]:
    """The class of routes that need one of `keys`."""

    class KeyedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if not keys.allow(request.headers.get("authorization")):
                    raise Unauthorized("give a valid API key: Authorization: Bearer …")
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if request.method == "POST" and kind != "application/json":
                    raise HTTPException(415, "the body must be JSON: Content-Type: application/json")
                return await handle(request)

            return guarded

    return KeyedRoute
