# SPDX-License-Identifier: Apache-2.0
"""The gauges that every rank has: its pool and its engine."""

from __future__ import annotations

from kvrail.runtime.engine_protocol import Engine
from kvrail.transfer.pages import PagePool

__all__ = ["pool_gauges"]


def pool_gauges(pool: PagePool, engine: Engine) -> dict[str, float]:
    """Pages by state and sequences by state. `pages_held` is 0 at idle, or something was lost."""
    load = engine.load
    return {
        "pages_capacity": pool.pages,
        "pages_free": pool.free,
        "pages_cached": pool.cached,
        "pages_shared": pool.shared,
        "pages_owned": pool.owned,
        "pages_quarantined": pool.quarantined,
        "pages_held": pool.owned + pool.shared + pool.quarantined,
        "state_slots_capacity": pool.state_slots,
        "state_slots_free": pool.free_states,
        "sequences_running": load["running"],
        "sequences_waiting": load["waiting"],
        "tokens_waiting": load["waiting_tokens"],
    }
