# SPDX-License-Identifier: Apache-2.0
"""From settings to a host prefix cache: its memory, its index, and the copier that fits the engine's memory."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache, States
from kvrail.runtime.host_cache_index import HostCacheIndex
from kvrail.runtime.page_copier import ThreadCopier
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.memory import OutOfMemory, Pools
from kvrail.transfer.pages import PagePool

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["build_host_cache"]

_log = logging.getLogger(__name__)
_GIB = 1 << 30
_STATES = 256
# Without pages: how many the index knows at most.
_NAMES = 1 << 16


def build_host_cache(
    config: LaunchConfig,
    context: _ucx.Context,
    layout: PageLayout,
    pools: Pools,
    pool: PagePool,
    memory: contextlib.ExitStack,
) -> HostPrefixCache | None:
    """The cache of one rank, or None when its size is 0. Its memory is closed with `memory`.

    Raises ConfigError, saying what to do, when the host cannot give that much.
    """
    gib = config.resolved_hicache_size_gb
    if not gib:
        return None
    if pools.pages.memory != "host":
        if config.hicache_size_gb is None:
            return None
        raise ConfigError(
            "--hicache-size-gb: pages in GPU memory cannot be kept in a host cache in this version"
        )
    pages, state_slots = _sizes(config, layout, int(gib * _GIB))
    slots = _chunks(context, pages, layout.page_bytes, "host cache", memory) if layout.layers else None
    states = None
    if state_slots:
        assert pools.state is not None
        kept = _chunks(context, state_slots, layout.state_bytes, "host cache states", memory)
        rings = EngineMemory(pools.state.address, layout.state_bytes)
        states = States(kept, rings, config.hicache_state_interval)
    _log.info("host prefix cache: %d pages, %d states", pages, state_slots)
    return HostPrefixCache(
        pool=pool,
        memory=EngineMemory(pools.pages.address, layout.page_bytes),
        slots=slots,
        index=HostCacheIndex(pages, state_slots),
        copier=ThreadCopier(),
        page_tokens=layout.page_tokens,
        states=states,
    )


def _sizes(config: LaunchConfig, layout: PageLayout, nbytes: int) -> tuple[int, int]:
    """Pages and states that `nbytes` hold together; states take at most half, unless their number was given.

    Without pages all is for states, and the pages are names: a prompt's way to its state.
    """
    states = 0
    if not layout.layers:
        states = config.hicache_state_slots or min(_STATES, max(1, nbytes // layout.state_bytes))
        return _NAMES, states
    if layout.state_bytes:
        states = config.hicache_state_slots or min(_STATES, max(1, nbytes // 2 // layout.state_bytes))
    pages = (nbytes - states * layout.state_bytes) // layout.page_bytes
    if pages < 1:
        beside = f" beside {states} states of {layout.state_bytes / 1e6:.1f} MB" if states else ""
        raise ConfigError(
            f"--hicache-size-gb {nbytes / _GIB:g} holds no page of {layout.page_bytes / 1e6:.1f} MB{beside}: "
            "give more, or 0 for none"
        )
    return pages, states


def _chunks(
    context: _ucx.Context, units: int, unit_bytes: int, name: str, memory: contextlib.ExitStack
) -> ChunkedPool:
    try:
        pool = ChunkedPool(context, units=units, unit_bytes=unit_bytes, name=name, progress=_log_progress)
    except OutOfMemory as error:
        raise ConfigError(f"{error}: give less --hicache-size-gb (0: no host cache)") from error
    memory.callback(pool.close)
    return pool


def _log_progress(share: float) -> None:
    _log.info("allocating the host prefix cache (%.0f %%)", 100 * share)
