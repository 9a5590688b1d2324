# SPDX-License-Identifier: Apache-2.0
"""The step policy: decoding first, chunks within the budget, nobody starves; and the names of pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrail.runtime.prefix import extend_keys
from kvrail.runtime.scheduler import LEAST_CHUNK, Pending, Turn, plan_step, victim


def test_decoding_first_then_chunks_in_order() -> None:
    running = [Pending("a", 100), Pending("b", 1), Pending("c", 50), Pending("d", 1)]
    assert plan_step(running, token_budget=32) == [Turn("b", 1), Turn("d", 1), Turn("a", 30)]
    assert plan_step(running, token_budget=120) == [
        Turn("b", 1),
        Turn("d", 1),
        Turn("a", 100),
        Turn("c", 18),
    ]


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 16)), max_size=12), st.integers(1, 64))
def test_budget_and_progress(remaining: list[tuple[int, int]], budget: int) -> None:
    running = [Pending(str(n), *counts) for n, counts in enumerate(remaining)]
    turns = plan_step(running, token_budget=budget)
    wanted = {one.sequence_id: one.remaining for one in running}
    assert all(1 <= turn.tokens <= wanted[turn.sequence_id] for turn in turns)
    assert len({turn.sequence_id for turn in turns}) == len(turns)
    decoding = [one.sequence_id for one in running if one.remaining == 1]
    assert [turn.sequence_id for turn in turns[: len(decoding)]] == decoding
    assert sum(turn.tokens for turn in turns) <= max(budget, len(decoding) + min(budget, LEAST_CHUNK))
    assert bool(turns) == bool(running)
    # The oldest prompt gets on in every step, however many decode.
    prompts = [one.sequence_id for one in running if one.remaining > 1]
    assert prompts[:1] == [turn.sequence_id for turn in turns[len(decoding) :]][:1]


def test_the_youngest_that_may_is_the_victim() -> None:
    assert victim([("a", True), ("b", True), ("c", False)]) == "b"
    assert victim([("a", False)]) is None


def test_page_names_chain() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    keys: list[bytes] = []
    extend_keys(keys, b"model", tokens[:32], 16)
    extend_keys(keys, b"model", tokens[32:], 16)
    whole: list[bytes] = []
    extend_keys(whole, b"model", tokens, 16)
    assert keys == whole
    assert len(set(keys)) == 4

    changed = tokens.copy()
    changed[20] += 1
    other: list[bytes] = []
    extend_keys(other, b"model", changed, 16)
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, False, False, False]
    elsewhere: list[bytes] = []
    extend_keys(elsewhere, b"other", tokens, 16)
    assert elsewhere[0] != keys[0]
    none: list[bytes] = []
    extend_keys(none, b"model", tokens[:15], 16)
    assert none == [], "only full pages have names"


def test_the_last_chunk_of_a_long_prompt_is_short() -> None:
    chunks = []
    left = 96
    while left:
        (turn,) = plan_step([Pending("a", left, 8)], token_budget=32)
        chunks.append(turn.tokens)
        left -= turn.tokens
    assert chunks == [32, 32, 24, 8]
    # What it leaves goes to the next one.
    assert plan_step([Pending("a", 32, 8), Pending("b", 50)], token_budget=32) == [
        Turn("a", 24),
        Turn("b", 8),
    ]
    assert plan_step([Pending("a", 8, 8)], token_budget=32) == [Turn("a", 8)]
