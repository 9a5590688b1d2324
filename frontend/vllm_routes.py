# SPDX-License-Identifier: Apache-2.0
"""Routes of a role with vLLM that are not vLLM's: health, links, metrics, and a prefill engine's internal ones."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvrail.frontend.envelope import Unauthorized, json_response
from kvrail.frontend.health_route import health_route
from kvrail.frontend.vllm_counts import ProxyCounts
from kvrail.frontend.vllm_link import VllmLink
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import token_matches
from kvrail.runtime.control.calls import MEDIA_TYPE
from kvrail.runtime.errors import Unavailable
from kvrail.runtime.vllm.spec import CARD_ROUTE

__all__ = ["engine_routes", "vllm_status_routes"]


def vllm_status_routes(
    config: LaunchConfig, link: VllmLink, counts: ProxyCounts, stopping: Callable[[], bool]
) -> APIRouter:
    """The routes that watch over a role."""
    router = APIRouter()
    router.include_router(health_route(config))

    # HEAD as well: that is how some load balancers ask.
    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        reasons = ["the server is stopping"] if stopping() else _missing(config, link)
        if reasons:
            return json_response({"status": "not ready", "reasons": reasons}, 503, {"Retry-After": "1"})
        return json_response({"status": "ready"})

    @router.get("/lanes")
    async def lanes() -> Response:
        state, connector = link.state, link.connector()
        peers = state.peers if state is not None else ()
        urls = {peer.address: peer.url for peer in peers if peer.address}
        links = [
            {**one, "peer_url": urls.get(one.get("address", ""), "")} for one in connector.get("links", ())
        ]
        return json_response(
            {
                "role": config.role,
                "engine": "vllm",
                **{
                    name: connector.get(name)
                    for name in ("page_tokens", "page_bytes", "window", "state_bytes")
                },
                "links": links,
                "prefill_engines": [{"url": peer.url, "trouble": peer.trouble} for peer in peers],
                "unsplit": state.unsplit if state is not None else "",
            }
        )

    # Load generators ask so whether there is anything to scrape.
    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def exposition() -> Response:
        both = generate_latest(counts.registry) + await link.metrics()
        return Response(both, media_type=CONTENT_TYPE_LATEST)

    return router


def engine_routes(link: VllmLink, token: bytes, stopping: Callable[[], bool]) -> APIRouter:
    """What completion engines ask a prefill engine, under the cluster token."""
    router = APIRouter(include_in_schema=False)

    def check(request: Request) -> None:
        if not token_matches(token, request.headers.get("authorization")):
            raise Unauthorized("this internal route needs the cluster token")
        if stopping():
            raise Unavailable("this prefill engine is stopping", retry_after_s=5.0)
        if link.state is None:
            raise Unavailable(link.trouble, retry_after_s=2.0)

    @router.get(CARD_ROUTE)
    async def card(request: Request) -> Response:
        check(request)
        assert link.state is not None
        return Response(msgspec.msgpack.encode(link.state.card), media_type=MEDIA_TYPE)

    return router


def _missing(config: LaunchConfig, link: VllmLink) -> list[str]:
    """Why a request could not be admitted now; empty when one could."""
    if link.state is None:
        return [link.trouble]
    if config.role == "ce" and config.local_prefill == "never" and all(p.trouble for p in link.state.peers):
        return [f"{peer.url}: {peer.trouble}" for peer in link.state.peers]
    return []
