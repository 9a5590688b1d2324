# SPDX-License-Identifier: Apache-2.0
"""From settings to a host prefix cache: its memory, its index, and the copier that fits the engine's memory."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache
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
    pages = int(gib * _GIB) // layout.page_bytes
    if not pages:
        raise ConfigError(
            f"--hicache-size-gb {gib:g} holds no page of {layout.page_bytes / 1e6:.1f} MB: give more, or 0 for none"
        )
    try:
        slots = ChunkedPool(
            context, units=pages, unit_bytes=layout.page_bytes, name="host cache", progress=_log_progress
        )
    except OutOfMemory as error:
        raise ConfigError(f"{error}: give less --hicache-size-gb (0: no host cache)") from error
    memory.callback(slots.close)
    _log.info("host prefix cache: %d pages, %.2f GiB (%s)", pages, slots.nbytes / _GIB, slots.backing)
    return HostPrefixCache(
        pool=pool,
        memory=EngineMemory(pools.pages.address, layout.page_bytes),
        slots=slots,
        index=HostCacheIndex(pages),
        copier=ThreadCopier(),
        page_tokens=layout.page_tokens,
    )


def _log_progress(share: float) -> None:
    _log.info("allocating the host prefix cache (%.0f %%)", 100 * share)
