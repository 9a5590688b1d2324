# SPDX-License-Identifier: Apache-2.0
"""Tokens that nobody reads are left out of the last layer behind their K and V, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kit.tiny_families import FAMILIES
from kvrail.kernels.step_parts import Slice
from kvrail.runtime.last_layer import read_rows

SLICES = [Slice([1], 3, 1), Slice([2], 0, 5), Slice([3, 4], 14, 4)]


def test_the_end_of_each_slice_is_read() -> None:
    # Rows 0; 1 … 5; 6 … 9.
    read = read_rows(SLICES, [0, 5, 9], single=True, least=1)
    assert read is not None
    assert read.slices == [Slice([1], 3, 1), Slice([2], 4, 1), Slice([3, 4], 17, 1)]
    assert (read.rows.tolist(), read.wanted.tolist()) == ([0, 5, 9], [0, 1, 2])


def test_other_rows_bring_along_those_behind_them() -> None:
    read = read_rows(SLICES, [9, 3, 7, 7], single=False, least=1)
    assert read is not None
    assert read.slices == [Slice([2], 2, 3), Slice([3, 4], 15, 3)]
    assert read.rows.tolist() == [3, 4, 5, 7, 8, 9]
    assert read.rows[read.wanted].tolist() == [9, 3, 7, 7]
    assert read_rows(SLICES, [9, 3, 7, 7], single=True, least=1) is None


def test_one_row_is_computed_where_none_is_wanted() -> None:
    read = read_rows(SLICES, [], single=True, least=1)
    assert read is not None
    assert (read.slices, read.rows.tolist(), read.wanted.tolist()) == ([Slice([3, 4], 17, 1)], [9], [])


@pytest.mark.parametrize(("wanted", "least"), [(range(10), 1), ([0, 5, 9], 8), ([1, 6], 2), ([0], 10)])
def test_few_spared_rows_are_not_worth_it(wanted, least) -> None:
    assert read_rows(SLICES, list(wanted), single=False, least=least) is None


@contextmanager
def _unspared(model: Any) -> Iterator[None]:
    before, model._least_spared = model._least_spared, 1 << 40
    try:
        yield
    finally:
        model._least_spared = before


@pytest.mark.parametrize("wanted", ["ends", "none", "some"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_memory_are_as_with_all_rows(models, kind, wanted) -> None:
    """A chunk behind 20 tokens, one from the start, one that is cut again, and a single token."""
    model = models.load(kind)
    layout = model.layout
    lengths, starts = (40, 17, 50, 1), (20, 0, 3, 30)
    rng = np.random.default_rng(5)
    tables = np.arange(20).reshape(4, 5).tolist()
    before = [rng.integers(4, 997, count) for count in starts if count]
    tokens = rng.integers(4, 997, sum(lengths))
    ends = (np.cumsum(lengths) - 1).tolist()
    asked = {"ends": ends, "none": [], "some": [37, 38, 39, 56, 100, 107]}[wanted]
    found = []
    for least in (1 << 40, 1):
        pool = torch.zeros(20, *layout.shape)
        rings = torch.zeros(4, *layout.ring_shape) if layout.window_layers else None
        earlier = [Slice(tables[n], 0, count, n) for n, count in enumerate(starts) if count]
        slices = [Slice(tables[n], starts[n], lengths[n], n) for n in range(4)]
        with _unspared(model):
            model.forward(pool, np.concatenate(before), earlier, [0], rings)
            model._least_spared = least
            rows, handle = [], []
            handle.append(
                model._model.get_decoder().norm.register_forward_hook(
                    lambda _, args, __, rows=rows: rows.append(args[0].shape[1])
                )
            )
            logits = model.forward(pool, tokens, slices, asked, rings)
            handle[0].remove()
        found.append((logits.clone(), pool, rings, rows))
    (expected, *memory, every), (logits, *memory_too, few) = found
    windowed = model._ends_in_window and wanted == "some"
    assert every == [108]
    assert few == [108 if windowed else {"ends": 4, "none": 1, "some": 3 + 1 + 8}[wanted]]
    assert logits.shape == expected.shape == (len(asked), model.vocab_size)
    if asked:
        assert float((logits - expected).abs().max()) <= 1e-4 * float(expected.std())
    for one, other in zip(memory, memory_too, strict=True):
        if one is not None:
            assert torch.allclose(one, other, rtol=0, atol=1e-4)


def test_prompt_logprobs_read_what_they_need(models, prompt, greedy) -> None:
    one = prompt(150)
    found = []
    for spared in (True, False):
        rig = models.rig(max_num_batched_tokens=64, prefix_cache=False)
        with _unspared(rig.model):
            if spared:
                rig.model._least_spared = 1
            rig.engine.add("a", one, greedy(3, logprobs=1, prompt_logprobs=2))
            rig.engine.add("b", prompt(90), greedy(5))
            rig.drain()
        noted = [n.logprob for step in rig.steps for o in step for n in o.prompt_logprobs]
        assert len(noted) == 149
        found.append((noted, rig.tokens))
    assert found[0][1] == found[1][1]
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
