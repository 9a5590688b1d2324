# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: a chat box, and what the engine says of itself, live. One file, nothing is loaded from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

__all__ = ["page_route"]

# Only its own inline script and style, and calls to this server: nothing that an answer holds can load anything.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_route() -> APIRouter:
    """Serves the page. It needs no key; the chat box asks for one where the server does."""
    router = APIRouter()
    page = files("kvrail.frontend").joinpath("page.html").read_bytes()

    @router.get("/", include_in_schema=False)
    async def show() -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    return router
