# SPDX-License-Identifier: Apache-2.0
"""What every rank reports: the gauges of its pool and its engine, and what its parts have counted."""

from __future__ import annotations

from collections.abc import Mapping

from kvrail.runtime.engine_protocol import Engine
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.messages import Stats
from kvrail.transfer.pages import PagePool

__all__ = ["completion_counters", "pool_gauges", "rank_stats"]

# Counters that are reported before anything has happened: a rate of what does not exist yet cannot be watched.
_FROM_ZERO = (
    "prefills_remote",
    "prefills_local",
    "prefill_fallbacks",
    "prefill_moves",
    "pages_verified",
    "checksum_mismatches",
    "requests_failed",
    "requests_aborted",
)


def rank_stats(
    steps: int,
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    cache: HostPrefixCache | None,
    links: list[tuple[str, int, dict[str, float]]],
) -> Stats:
    """The report of a rank, with what its host cache (None: it has none) has to say."""
    cached = (cache.gauges(), cache.counters()) if cache is not None else ({}, {})
    return Stats(steps=steps, gauges={**gauges, **cached[0]}, counters={**counters, **cached[1]}, links=links)


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
