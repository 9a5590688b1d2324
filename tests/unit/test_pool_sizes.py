# SPDX-License-Identifier: Apache-2.0
"""How memory is divided between pages and state slots."""

from __future__ import annotations

from typing import Any

import pytest

from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.pool_sizes import pool_sizes
from kvrail.transfer.layout import PageLayout

MIB = 1 << 20


def layout(layers: int, window_layers: int, window: int = 256) -> PageLayout:
    """Pages of `layers` / 8 MiB, slots of `window_layers` / 4 MiB (with 256 tokens)."""
    return PageLayout.with_rings(
        model_id="m",
        layers=layers,
        kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        page_tokens=128,
        window_layers=window_layers,
        window=window,
    )


def sizes(shape: PageLayout, **flags: Any) -> tuple[int, int]:
    return pool_sizes(LaunchConfig(role="single", model="m", **flags), shape)


def test_without_state_all_memory_is_pages() -> None:
    assert layout(8, 0).page_bytes == MIB
    assert sizes(layout(8, 0)) == (1024, 0)
    assert sizes(layout(8, 0), kv_memory_gb=0.5) == (512, 0)
    assert sizes(layout(8, 0), kv_pages=7) == (7, 0)
    # The flag says nothing about a model that has no state.
    assert sizes(layout(8, 0), state_slots=9) == (1024, 0)


def test_a_slot_for_each_sequence_and_at_most_half_of_the_memory() -> None:
    assert layout(8, 8).state_bytes == 2 * MIB
    assert sizes(layout(8, 8)) == (1024 - 128, 64)
    assert sizes(layout(8, 8), max_num_seqs=300) == (512, 256)
    assert sizes(layout(8, 8), state_slots=300) == (424, 300)
    assert sizes(layout(8, 8), kv_pages=7, max_num_seqs=300) == (7, 300)


def test_without_full_layers_there_are_no_pages() -> None:
    assert sizes(layout(0, 8)) == (0, 64)
    assert sizes(layout(0, 8), max_num_seqs=1000) == (0, 512)
    assert sizes(layout(0, 8), kv_pages=7) == (0, 64)


@pytest.mark.parametrize(
    ("shape", "flags", "match"),
    [
        (layout(8, 0), {"kv_memory_gb": 0.001}, r"holds 1 pages of 1\.0 MB: give more memory"),
        (layout(8, 80, 8192), {}, r"no state slot of 671\.1 MB beside the pages"),
        (layout(8, 8), {"state_slots": 512}, "holds 0 pages of 1.0 MB beside 512 state slots"),
    ],
)
def test_too_little_memory(shape: PageLayout, flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sizes(shape, **flags)
