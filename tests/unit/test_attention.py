# SPDX-License-Identifier: Apache-2.0
"""The step's attention against its plain meaning: pages and rings, chunks and single tokens, every variant."""

from __future__ import annotations

import random

import pytest
import torch

from kvrail.kernels.attention import Slice, StepPlan
from kvrail.kernels.reference import causal_attention, paged_attention
from kvrail.kernels.step_parts import blocks_of

HEADS, KV_HEADS, PAGE_TOKENS = 6, 3, 16


class World:
    """Sequences that grow by random steps in pages and rings, beside all of their keys and values in order."""

    def __init__(self, seed: int, *, window: int, dim: int, value_dim: int) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.window, self.dims = window, (dim, value_dim)
        wide = max(self.dims)
        # What nobody has written may be anything finite in pages, and zero in rings.
        self.pool = torch.randn(40, 2, 2, PAGE_TOKENS, KV_HEADS, wide, generator=self.torch)
        self.rings = torch.zeros(5, 2, 2, window, KV_HEADS, wide)
        tables = self.rng.sample(range(40), 40)
        self.tables = [tables[12 * n : 12 * n + 12] for n in range(3)]
        self.slots = self.rng.sample(range(5), 3)
        self.done = [0, 0, 0]
        self.pending: dict[tuple[int, int, int], torch.Tensor] = {}
        # [windowed?][sequence] → keys and values so far, of each layer.
        self.seen = [
            [[torch.empty(2, 0, KV_HEADS, d) for d in self.dims] for _ in range(3)] for _ in range(2)
        ]

    def step(self, **variant) -> None:
        active = [n for n in range(3) if self.rng.random() < 0.8] or [0]
        counts = [1 if self.rng.random() < 0.6 else self.rng.randint(2, 30) for _ in active]
        slices = [
            Slice(self.tables[n], self.done[n], count, self.slots[n])
            for n, count in zip(active, counts, strict=True)
        ]
        plan = StepPlan(self.pool, slices, torch.float32, self.rings)
        assert plan.tokens == sum(counts)
        for layer in range(2):
            for windowed in (0, 1):
                self.layer(plan, layer, windowed, active, counts, variant)
        for n, count in zip(active, counts, strict=True):
            self.done[n] += count
            if self.done[n] > 12 * PAGE_TOKENS - 31:
                self.restart(n)

    def restart(self, n: int) -> None:
        self.done[n] = 0
        self.rings[self.slots[n]] = 0
        for kind in self.seen:
            kind[n] = [torch.empty(2, 0, KV_HEADS, d) for d in self.dims]

    def layer(self, plan, layer, windowed, active, counts, variant) -> None:
        tokens = sum(counts)
        key, value = (torch.randn(KV_HEADS, tokens, d, generator=self.torch) for d in self.dims)
        query = torch.randn(HEADS, tokens, self.dims[0], generator=self.torch)
        sliding = self.window if windowed else None
        out = plan.attend(layer, query, key, value, 0.3, sliding_window=sliding, **variant)
        row = 0
        for n, count in zip(active, counts, strict=True):
            seen = self.seen[windowed][n]
            found = []
            for side, values in enumerate((key, value)):
                grown = torch.cat((seen[side][layer], values[:, row : row + count].transpose(0, 1)))
                found.append(grown)
                if layer == 1:
                    # Both layers of this kind have grown: keep them.
                    first = torch.cat((seen[side][0], self.pending[windowed, n, side]))
                    seen[side] = torch.stack((first, grown))
                else:
                    self.pending[windowed, n, side] = values[:, row : row + count].transpose(0, 1)
            mine = query[:, row : row + count].transpose(0, 1)
            wanted = causal_attention(
                *found,
                mine,
                0.3,
                window=sliding,
                softcap=variant.get("softcap"),
                sinks=variant.get("s_aux"),
            )
            torch.testing.assert_close(out[row : row + count], wanted, rtol=1e-4, atol=1e-5)
            row += count


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [1, 2, 7, 40])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (8, 12)])
def test_any_order_of_chunks_and_tokens(seed, window, dims) -> None:
    world = World(seed, window=window, dim=dims[0], value_dim=dims[1])
    variants = [
        {},
        {"softcap": 0.7},
        {"s_aux": torch.randn(HEADS)},
        {"softcap": 0.7, "s_aux": torch.randn(HEADS)},
    ]
    for turn in range(10):
        world.step(**variants[turn % 4])


@pytest.mark.parametrize("window", [None, 1, 3, 7, 200])
@pytest.mark.parametrize("length", [2, 5, 130, 300])
def test_blocks_show_each_row_its_keys_and_no_other(window, length) -> None:
    for earlier in (0, 1, 2, 6, 50):
        if window is not None and earlier > window - 1:
            continue
        blocks = blocks_of(earlier, length, window, torch.empty(0))
        assert [row for block in blocks for row in range(block.first, block.last)] == list(range(length))
        for block in blocks:
            for row in range(block.first, block.last):
                shown = (block.mask[row - block.first] == 0).nonzero()[:, 0] + block.low
                own = earlier + row
                first = 0 if window is None else max(0, own + 1 - window)
                assert shown.tolist() == list(range(first, own + 1))


def test_a_window_that_no_ring_has() -> None:
    world = World(0, window=7, dim=8, value_dim=8)
    key = torch.zeros(KV_HEADS, 1, 8)
    query = torch.zeros(HEADS, 1, 8)
    plan = StepPlan(world.pool, [Slice([3], 0, 1, 0)], torch.float32, world.rings)
    with pytest.raises(ValueError, match="a window of 9 tokens, and there are rings of 7"):
        plan.attend(0, query, key, key, 1.0, sliding_window=9)
    plan = StepPlan(world.pool, [Slice([3], 0, 1)], torch.float32)
    with pytest.raises(ValueError, match="there are none"):
        plan.attend(0, query, key, key, 1.0, sliding_window=7)


def test_the_reference_over_pages_is_the_reference() -> None:
    pool = torch.randn(5, 2, 2, 4, KV_HEADS, 8)
    query = torch.randn(3, HEADS, 8)
    keys, values = (torch.cat([pool[p, 1, side] for p in (4, 0, 2)])[:10] for side in (0, 1))
    found = paged_attention(pool, 1, [4, 0, 2], query, 7, 0.5)
    torch.testing.assert_close(found, causal_attention(keys, values, query, 0.5))
