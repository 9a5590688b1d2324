# SPDX-License-Identifier: Apache-2.0
"""GET /cache and POST /cache/flush, the same for every role: what prefix caches hold, and how to empty them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from kvrail.frontend.envelope import Unauthorized, json_response
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import token_matches
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.errors import Unavailable

__all__ = ["cache_routes"]

_POOL_GAUGES = ("pages_capacity", "pages_free", "pages_cached", "pages_shared", "pages_owned")
_HOST = "hicache_"


def cache_routes(config: LaunchConfig, ranks: Sequence[RankClient], token: bytes) -> APIRouter:
    """The two routes. Flushing needs the cluster token: it slows everybody down."""
    router = APIRouter()

    @router.get("/cache")
    async def summary() -> Response:
        return json_response(
            {
                "role": config.role,
                "page_tokens": config.page_tokens,
                "ranks": [_of_rank(rank) for rank in ranks if rank.stats is not None],
            }
        )

    @router.post("/cache/flush")
    async def flush(request: Request) -> Response:
        if not token_matches(token, request.headers.get("authorization")):
            raise Unauthorized("this internal route needs the cluster token")
        ready = [rank for rank in ranks if rank.ready is not None]
        if not ready:
            raise Unavailable("no rank is ready yet", retry_after_s=1.0)
        flushed = await asyncio.gather(*(rank.flush_cache() for rank in ready))
        found = [
            {"rank": rank.rank, "pool_pages": one.pool_pages, "host_pages": one.host_pages}
            for rank, one in zip(ready, flushed, strict=True)
        ]
        return json_response({"ranks": found})

    return router


def _of_rank(rank: RankClient) -> dict[str, Any]:
    """The pool's pages by who holds them, and the host cache's gauges and counters ({} without one)."""
    assert rank.stats is not None
    counted = rank.stats.gauges | rank.stats.counters
    return {
        "rank": rank.rank,
        "pool": {name.removeprefix("pages_"): counted[name] for name in _POOL_GAUGES if name in counted},
        "host": {
            name.removeprefix(_HOST): value for name, value in counted.items() if name.startswith(_HOST)
        },
    }
