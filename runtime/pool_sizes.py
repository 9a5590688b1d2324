# SPDX-License-Identifier: Apache-2.0
"""How many pages and state slots a rank has: as asked for, or what the memory that was asked for holds."""

from __future__ import annotations

from typing import NamedTuple

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.transfer.layout import PageLayout

__all__ = ["PoolSizes", "pool_sizes"]

_GIB = 1 << 30
_DEFAULT_POOL_GIB = 1.0
# Of the GPU memory that the model leaves free, the pools take so much unless told otherwise: activations, kernels
# that are compiled later and another rank on the same GPU need the rest.
_DEFAULT_GPU_SHARE = 0.5


class PoolSizes(NamedTuple):
    """`pages` is 0 for a model without full-attention layers, `state_slots` for one without state."""

    pages: int
    state_slots: int


def pool_sizes(config: LaunchConfig, layout: PageLayout, gpu_free_bytes: int | None = None) -> PoolSizes:
    """Sizes of a rank's pools. Raises ConfigError when the memory does not hold two pages, or a state slot.

    A slot for each sequence that may run; where memory is given in GiB, slots take at most half of it, or all of it
    when nothing is paged. `gpu_free_bytes`: what the GPU has free; None for pools in host memory.
    """
    slots = 0
    default = _DEFAULT_POOL_GIB if gpu_free_bytes is None else gpu_free_bytes * _DEFAULT_GPU_SHARE / _GIB
    budget = int((config.kv_memory_gb or default) * _GIB)
    if layout.state_bytes:
        slots = config.state_slots or config.resolved_max_num_seqs
        if config.state_slots is None and config.kv_pages is None:
            slots = min(slots, (budget // 2 if layout.layers else budget) // layout.state_bytes)
        if not slots:
            raise ConfigError(
                f"--kv-memory-gb {budget / _GIB:g} holds no state slot of {layout.state_bytes / 1e6:.1f} MB beside the "
                "pages: give more memory, or say how many with --state-slots"
            )
    if not layout.layers:
        return PoolSizes(0, slots)
    if config.kv_pages is not None:
        return PoolSizes(config.kv_pages, slots)
    pages = (budget - slots * layout.state_bytes) // layout.page_bytes
    if pages < 2:
        raise ConfigError(
            f"--kv-memory-gb {budget / _GIB:g} holds {max(0, pages)} pages of {layout.page_bytes / 1e6:.1f} MB"
            + (f" beside {slots} state slots" if slots else "")
            + ": give more memory, or fewer --page-tokens"
        )
    return PoolSizes(pages, slots)
