# SPDX-License-Identifier: Apache-2.0
"""/health: alive, and who it is. `instance` is drawn anew at each start: one server is known by all of its URLs."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Response

from kvrail.frontend.envelope import json_response
from kvrail.runtime.config import LaunchConfig

__all__ = ["health_route"]


def health_route(config: LaunchConfig) -> APIRouter:
    """Waits for nothing: an engine whose peer died is alive, and restarting it would help nobody."""
    router = APIRouter()
    instance = secrets.token_hex(8)

    # HEAD as well: that is how some load balancers ask.
    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        return json_response(
            {"status": "alive", "role": config.role, "model": config.model_name, "instance": instance}
        )

    return router
