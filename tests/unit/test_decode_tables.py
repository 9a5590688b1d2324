# SPDX-License-Identifier: Apache-2.0
"""Tables of a decoding step that is filled up to a round number of rows: the rows too many touch no page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrail.kernels.decode_tables import DecodeTables
from kvrail.kernels.reference import store_tokens
from kvrail.kernels.step_parts import Slice
from kvrail.runtime.step_graphs import batch_sizes

LAYERS, PAGE_TOKENS, KV_HEADS, DIM = 3, 16, 2, 8
POOL = torch.Size((40, LAYERS, 2, PAGE_TOKENS, KV_HEADS, DIM))


def _slices(rng: np.random.Generator, count: int) -> list[Slice]:
    pages = rng.permutation(POOL[0]).tolist()
    made = []
    for _ in range(count):
        start = int(rng.choice([0, 1, 14, 15, 16, 17, 30, 31, 32, 33]))
        # A sequence may hold more pages than it has come to.
        table = [pages.pop() for _ in range(start // PAGE_TOKENS + 1 + int(rng.integers(2)))]
        made.append(Slice(table, start, 1))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_real_rows_are_found_and_the_others_are_nowhere(seed) -> None:
    rng = np.random.default_rng(seed)
    made = DecodeTables(torch.device("cpu"), 16, 60)
    for _ in range(3):
        count = int(rng.integers(0, 9))
        rows = count + int(rng.integers(0 if count else 1, 8))
        slices, tokens = _slices(rng, count), rng.integers(0, 997, count)
        assert made.fill(POOL, tokens, slices, [], rows)
        for side in (made.host(rows), made.device(rows)):
            assert side.tokens.tolist() == [*tokens.tolist(), *[0] * (rows - count)]
            indptr = side.indptr.tolist()
            assert len(indptr) == rows + 1
            for row, part in enumerate(slices):
                pages = side.indices[indptr[row] : indptr[row + 1]].tolist()
                assert pages == part.pages[: part.start // PAGE_TOKENS + 1]
                assert side.positions[row] == part.start
                assert side.lengths[row] == part.start + 1
                assert (len(pages) - 1) * PAGE_TOKENS + int(side.last[row]) == part.start + 1
                place = pages[-1] * LAYERS * 2 * PAGE_TOKENS + part.start % PAGE_TOKENS
                assert side.places[row] == place
            for row in range(count, rows):
                assert indptr[row] == indptr[row + 1] == indptr[count]
                assert (side.places[row], side.lengths[row]) == (-1, 0)


def test_only_the_new_tokens_are_stored() -> None:
    rng = np.random.default_rng(7)
    slices = _slices(rng, 5)
    made = DecodeTables(torch.device("cpu"), 8, 60)
    assert made.fill(POOL, np.arange(5), slices, [], 8)
    pool = torch.zeros(POOL)
    key, value = torch.rand(2, 8, KV_HEADS, DIM) + 1
    store_tokens(pool, 1, key, value, made.device(8).places)
    for row, part in enumerate(slices):
        page, token = part.pages[part.start // PAGE_TOKENS], part.start % PAGE_TOKENS
        for side, values in enumerate((key, value)):
            assert torch.equal(pool[page, 1, side, token], values[row])
            pool[page, 1, side, token] = 0
    assert not pool.any()


def test_too_many_pages_change_nothing() -> None:
    made = DecodeTables(torch.device("cpu"), 4, 3)
    assert made.fill(POOL, np.array([5]), [Slice([7], 3, 1)], [], 2)
    before = [one.clone() for one in made.device(4)]
    assert not made.fill(POOL, np.array([5, 6]), [Slice([1, 2], 20, 1), Slice([3, 4], 20, 1)], [], 2)
    assert all(map(torch.equal, before, made.device(4)))


def test_tables_stay_where_they_are() -> None:
    made = DecodeTables(torch.device("cpu"), 4, 9)
    where = [one.data_ptr() for one in made.device(2)]
    assert made.fill(POOL, np.array([5]), [Slice([7], 3, 1)], [], 2)
    assert made.fill(POOL, np.array([5, 6]), [Slice([1, 2], 20, 1), Slice([3, 4], 20, 1)], [], 4)
    assert [one.data_ptr() for one in made.device(2)] == where


@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 9, 64, 65, 256, 1000, 1024])
def test_every_batch_has_a_size(sequences) -> None:
    sizes = batch_sizes(sequences)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] >= sequences
    assert len(sizes) <= 18
    for count in range(1, sequences + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= max(8, 2 * count)


def test_the_largest_batches_have_no_graph() -> None:
    assert batch_sizes(3000) == batch_sizes(1024)
