# SPDX-License-Identifier: Apache-2.0
"""From settings to a host prefix cache: its memory, its index, and the copier that fits the engine's memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.cuda_copier import CudaCopier
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.host_cache import EngineMemory, HostPrefixCache, States
from kvrail.runtime.host_cache_index import HostCacheIndex
from kvrail.runtime.page_copier import PageCopier, ThreadCopier
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.memory import OutOfMemory, Pools, available_bytes
from kvrail.transfer.pages import PagePool

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["build_host_cache"]

_log = logging.getLogger(__name__)
_GIB = 1 << 30
# States, unless their number was given; as many as half of the size holds is the other bound.
_CPU_STATES, _GPU_STATES = 256, 4096
# Without pages: how many the index knows at most.
_NAMES = 1 << 16
_ADVICE = "say what it may take with --hicache-size-gb (0: no host cache)"


class _TooSmall(ConfigError):
    """The size holds no page."""


def build_host_cache(
    config: LaunchConfig,
    context: _ucx.Context,
    layout: PageLayout,
    pools: Pools,
    pool: PagePool,
    memory: contextlib.ExitStack,
    *,
    gpu: _ucx.CudaDevice | None = None,
    stream: int | None = None,
) -> HostPrefixCache | None:
    """The cache of one rank, or None when its size is 0. Its memory is closed with `memory`.

    `gpu` copies out of it: between it and its own memory for an engine that computes on `stream` there, or to peers
    (lane peer of a CPU rank). Raises ConfigError, saying what to do, when the host cannot give the size that was asked
    for; of the default size it takes what there is, and warns.
    """
    gib = config.resolved_hicache_size_gb
    if not gib:
        return None
    nbytes = int(gib * _GIB)
    asked = config.hicache_size_gb is not None
    if not asked:
        # The other half is for pages of the file cache, for a peer's role on this host, and for everybody else.
        nbytes = min(nbytes, available_bytes() // 2 // config.dp)
    with contextlib.ExitStack() as built:
        try:
            cache = _build(
                config, context, layout, pools, pool, built, nbytes, fewer=not asked, gpu=gpu, stream=stream
            )
        except (OutOfMemory, CudaFailed, _TooSmall) as error:
            if asked:
                raise ConfigError(f"{error}: give less --hicache-size-gb (0: no host cache)") from error
            _log.warning("there is no host prefix cache: %s; %s", error, _ADVICE)
            return None
        memory.push(built.pop_all())
    return cache


def _build(
    config: LaunchConfig,
    context: _ucx.Context,
    layout: PageLayout,
    pools: Pools,
    pool: PagePool,
    memory: contextlib.ExitStack,
    nbytes: int,
    *,
    fewer: bool,
    gpu: _ucx.CudaDevice | None,
    stream: int | None,
) -> HostPrefixCache:
    on_gpu = gpu is not None and stream is not None

    def chunks(units: int, unit_bytes: int, name: str, pin: _ucx.CudaDevice | None) -> ChunkedPool:
        made = ChunkedPool(
            context,
            units=units,
            unit_bytes=unit_bytes,
            name=name,
            progress=_progress(name, units * unit_bytes),
            pin=pin,
            collapse=not on_gpu,
            fewer=fewer,
        )
        memory.callback(made.close)
        if made.shortage:
            _log.warning("%s: %.1f of %.1f GiB: %s; %s", name, made.nbytes / _GIB, units * unit_bytes / _GIB,
                         made.shortage, _ADVICE)  # fmt: skip
        return made

    pages, state_slots = _sizes(config, layout, nbytes, _GPU_STATES if on_gpu else _CPU_STATES)
    kept = None
    if state_slots:
        # Nobody pushes states from here.
        kept = chunks(
            state_slots, layout.state_bytes, "states of the host prefix cache", gpu if on_gpu else None
        )
        state_slots = kept.units
    slots = None
    if layout.layers:
        slots = chunks(pages, layout.page_bytes, "host prefix cache", gpu)
        pages = slots.units
    states = None
    if kept is not None:
        assert pools.state is not None
        states = States(
            kept, EngineMemory(pools.state.address, layout.state_bytes), config.hicache_state_interval
        )
    copier: PageCopier = (
        ThreadCopier()
        if gpu is None or stream is None
        else CudaCopier(gpu, stream, state_bytes=layout.state_bytes if state_slots else 0)
    )
    size = sum(each.nbytes for each in (slots, kept) if each is not None) / _GIB
    _log.info(
        "host prefix cache: %.1f GiB%s, %d pages, %d states",
        size,
        " (pinned)" if gpu else "",
        pages,
        state_slots,
    )
    return HostPrefixCache(
        pool=pool,
        memory=EngineMemory(pools.pages.address, layout.page_bytes),
        slots=slots,
        index=HostCacheIndex(pages, state_slots),
        copier=copier,
        page_tokens=layout.page_tokens,
        states=states,
    )


def _sizes(config: LaunchConfig, layout: PageLayout, nbytes: int, most_states: int) -> tuple[int, int]:
    """Pages and states that `nbytes` hold together; states take at most half, unless their number was given.

    Without pages all is for states, and the pages are names: a prompt's way to its state.
    """
    states = 0
    if not layout.layers:
        states = config.hicache_state_slots or min(most_states, max(1, nbytes // layout.state_bytes))
        return _NAMES, states
    if layout.state_bytes:
        states = config.hicache_state_slots or min(most_states, max(1, nbytes // 2 // layout.state_bytes))
    pages = (nbytes - states * layout.state_bytes) // layout.page_bytes
    if pages < 1:
        beside = f" beside {states} states of {layout.state_bytes / 1e6:.1f} MB" if states else ""
        raise _TooSmall(f"{nbytes / _GIB:.3g} GiB hold no page of {layout.page_bytes / 1e6:.1f} MB{beside}")
    return pages, states


def _progress(name: str, nbytes: int) -> Callable[[float], None]:
    """Says how far it is, at each tenth: tens of GiB take a while."""
    told = 0

    def tell(share: float) -> None:
        nonlocal told
        if int(10 * share) > told:
            told = int(10 * share)
            _log.info("allocating the %s, %.1f GiB (%d %%)", name, nbytes / _GIB, 10 * told)

    return tell
