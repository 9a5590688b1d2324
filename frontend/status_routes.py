# SPDX-License-Identifier: Apache-2.0
"""/health, /ready, /lanes and /metrics, the same for every role.

Alive and able are two questions: a completion engine whose prefill engine died is alive, and restarting it would
help nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvrail.frontend.envelope import json_response
from kvrail.frontend.health_route import health_route
from kvrail.frontend.metrics import FrontMetrics
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.peers import PeerWatcher
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.link_board import link_facts

__all__ = ["status_routes"]


def status_routes(
    config: LaunchConfig,
    ranks: Sequence[RankClient],
    peers: PeerWatcher | None,
    metrics: FrontMetrics,
    stopping: Callable[[], bool],
) -> APIRouter:
    """The routes that watch over a role. None of them waits for anything."""
    router = APIRouter()
    router.include_router(health_route(config))

    # HEAD as well: that is how some load balancers ask.
    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        reasons = ["the server is stopping"] if stopping() else _missing(config, ranks, peers)
        if reasons:
            return json_response({"status": "not ready", "reasons": reasons}, 503, {"Retry-After": "1"})
        return json_response({"status": "ready"})

    @router.get("/lanes")
    async def lanes() -> Response:
        return json_response(_lanes(config, ranks, peers))

    # Load generators ask so whether there is anything to scrape.
    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def exposition() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _missing(config: LaunchConfig, ranks: Sequence[RankClient], peers: PeerWatcher | None) -> list[str]:
    """Why a request could not be admitted now; empty when one could."""
    if not any(rank.usable for rank in ranks):
        return [f"rank {rank.rank}: {rank.trouble or 'it does not answer'}" for rank in ranks]
    if peers is not None and config.local_prefill == "never" and not peers.any_link_up:
        troubles = [f"{url}: {trouble}" for url, trouble in peers.trouble.items() if trouble]
        refusals = [
            f"link of rank {rank.rank} to {peers.url_of(key) or key[0].hex()[:8]}: {report.state}: {report.reason}"
            for rank in ranks
            for key, report in rank.links.items()
            if report.reason
        ]
        return ["no link to a prefill engine is up", *troubles, *refusals]
    return []


def _lanes(config: LaunchConfig, ranks: Sequence[RankClient], peers: PeerWatcher | None) -> dict[str, Any]:
    """Every link with its lane, what was measured on it, and why it is down when it is."""
    layouts = [rank.ready.layout for rank in ranks if rank.ready is not None]
    links = []
    for rank in ranks:
        counters = {(i, n): c for i, n, c in rank.stats.links} if rank.stats else {}
        for (incarnation, number), report in rank.links.items():
            links.append(
                {
                    "rank": rank.rank,
                    "peer": incarnation.hex(),
                    "peer_rank": number,
                    "peer_url": peers.url_of((incarnation, number)) if peers else "",
                    **link_facts(report),
                    "counters": counters.get((incarnation.hex(), number))
                    or {"pages": 0.0, "states": 0.0, "bytes": 0.0, "tickets": 0.0},
                }
            )
    return {
        "role": config.role,
        "page_tokens": config.page_tokens,
        "page_bytes": layouts[0].page_bytes if layouts else None,
        "window": layouts[0].window if layouts else None,
        "state_bytes": layouts[0].state_bytes if layouts else None,
        "links": links,
        "prefill_engines": [
            {"url": url, "trouble": trouble} for url, trouble in (peers.trouble if peers else {}).items()
        ],
    }
