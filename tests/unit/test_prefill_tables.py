# SPDX-License-Identifier: Apache-2.0
"""Tables of a short step with chunks of prompts: every token has its place, and the rows too many touch no page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrail.kernels.prefill_tables import PREFILL_SEQUENCES, PrefillTables
from kvrail.kernels.step_parts import Slice

LAYERS, PAGE_TOKENS = 3, 16
POOL = torch.Size((400, LAYERS, 2, PAGE_TOKENS, 2, 8))


def _slices(rng: np.random.Generator, count: int) -> list[Slice]:
    pages = rng.permutation(POOL[0]).tolist()
    made = []
    for _ in range(count):
        start = int(rng.choice([0, 0, 1, 15, 16, 17, 40]))
        length = int(rng.choice([1, 1, 2, 15, 16, 17, 33]))
        # A sequence may hold more pages than it has come to.
        need = -(-(start + length) // PAGE_TOKENS) + int(rng.integers(2))
        made.append(Slice([pages.pop() for _ in range(need)], start, length))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_found_and_the_others_are_nowhere(seed) -> None:
    rng = np.random.default_rng(seed)
    made = PrefillTables(torch.device("cpu"), 600, 200)
    # Tables of the step before must leave nothing behind.
    for _ in range(3):
        count = int(rng.integers(0, PREFILL_SEQUENCES + 1))
        slices = _slices(rng, count)
        real = sum(part.length for part in slices)
        rows = real + int(rng.integers(0 if real else 1, 20))
        tokens = rng.integers(1, 997, real)
        wanted = sorted(rng.choice(real, min(real, int(rng.integers(0, 17))), replace=False).tolist())
        assert made.fill(POOL, tokens, slices, wanted, rows)
        for side in (made.host(rows), made.device(rows)):
            assert side.tokens.tolist() == [*tokens.tolist(), *[0] * (rows - real)]
            assert side.read[: len(wanted)].tolist() == wanted
            assert bool((side.read[len(wanted) :] == 0).all())
            queries, indptr = side.queries.tolist(), side.indptr.tolist()
            assert len(queries) == len(indptr) == PREFILL_SEQUENCES + 2
            assert (queries[0], queries[count], queries[-1]) == (0, real, rows)
            assert queries[count:-1] == [real] * (PREFILL_SEQUENCES + 1 - count)
            for n, part in enumerate(slices):
                end = part.start + part.length
                assert queries[n + 1] - queries[n] == part.length
                pages = side.indices[indptr[n] : indptr[n + 1]].tolist()
                assert pages == part.pages[: -(-end // PAGE_TOKENS)]
                assert side.lengths[n] == end
                assert (len(pages) - 1) * PAGE_TOKENS + int(side.last[n]) == end
                for row in range(part.length):
                    position = part.start + row
                    place = pages[position // PAGE_TOKENS] * LAYERS * 2 * PAGE_TOKENS + position % PAGE_TOKENS
                    assert side.positions[queries[n] + row] == position
                    assert side.places[queries[n] + row] == place
            assert side.places[real:].tolist() == [-1] * (rows - real)
            assert side.positions[real:].tolist() == [0] * (rows - real)
            assert indptr[count:] == [indptr[count]] * (PREFILL_SEQUENCES + 2 - count)
            assert not side.lengths[count:].any()
            assert not side.last[count:].any()


def test_what_there_is_no_room_for_changes_nothing() -> None:
    made = PrefillTables(torch.device("cpu"), 64, 3)
    assert made.fill(POOL, np.array([5, 6]), [Slice([7], 3, 2)], [1], 32)
    before = [one.clone() for one in made.device(64)]
    many = [Slice([n], 0, 1) for n in range(PREFILL_SEQUENCES + 1)]
    assert not made.fill(POOL, np.arange(17), many, [0], 32)
    assert not made.fill(POOL, np.arange(20), [Slice([1, 2], 0, 20)], list(range(17)), 32)
    assert not made.fill(POOL, np.arange(50), [Slice([1, 2, 3, 4], 0, 50)], [49], 64)
    assert all(map(torch.equal, before, made.device(64)))


def test_tables_stay_where_they_are() -> None:
    made = PrefillTables(torch.device("cpu"), 64, 9)
    where = [one.data_ptr() for one in made.device(32)]
    assert made.fill(POOL, np.arange(20), [Slice([1, 2], 0, 20)], [19], 64)
    assert [one.data_ptr() for one in made.device(64)] == where
