# SPDX-License-Identifier: Apache-2.0
"""The gauges that every rank has (its pool and its engine), and the counters of a completion rank."""

from __future__ import annotations

from collections.abc import Mapping

from kvrail.runtime.engine_protocol import Engine
from kvrail.transfer.pages import PagePool

__all__ = ["completion_counters", "pool_gauges"]

# Counters that are reported before anything has happened: a rate of what does not exist yet cannot be watched.
_FROM_ZERO = (
    "prefills_remote",
    "prefills_local",
    "prefill_fallbacks",
    "pages_verified",
    "checksum_mismatches",
    "requests_failed",
    "requests_aborted",
)


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


def completion_counters(own: Mapping[str, int], ledger: Mapping[str, int]) -> dict[str, float]:
    """The counters of a completion rank: its own, and those of its ticket ledger."""
    return {**dict.fromkeys(_FROM_ZERO, 0), **own, **{f"ticket_{name}": n for name, n in ledger.items()}}
