# SPDX-License-Identifier: Apache-2.0
"""What the engine refuses, what it waits for, and that aborts at any moment leave nothing held."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrail.runtime.errors import BadRequest, TooLong


def test_refuses_what_can_never_run(models, prompt, greedy) -> None:
    rig = models.rig(pages=4)
    assert rig.engine.max_model_len == 64
    with pytest.raises(TooLong, match="64 tokens; at most 63"):
        rig.engine.add("a", prompt(64), greedy(1))
    with pytest.raises(BadRequest, match="empty"):
        rig.engine.add("a", prompt(0), greedy(1))
    with pytest.raises(BadRequest, match="below 997"):
        rig.engine.add("a", np.array([997], dtype=np.uint32), greedy(1))
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(BadRequest):
            rig.engine.add("a", prompt(3), greedy(1, **wrong))
    with pytest.raises(BadRequest, match="max_tokens"):
        rig.engine.add("a", prompt(3), greedy(0))
    rig.engine.add("a", prompt(3), greedy(1))
    with pytest.raises(ValueError, match="exists already"):
        rig.engine.add("a", prompt(3), greedy(1))
    rig.drain()
    rig.assert_idle()


def test_adopt_refuses_wrong_pages_and_changes_nothing(models, prompt, greedy) -> None:
    rig = models.rig()
    rig.pool.allocate("ticket", 1)
    with pytest.raises(ValueError, match="holds 1 pages"):
        rig.engine.adopt("a", prompt(17), greedy(4), owner="ticket", first_tokens={0: 5}, cached_tokens=0)
    assert rig.pool.pages_of("ticket")
    assert rig.engine.sequence("a") is None


def test_ends_at_max_model_len(models, prompt, greedy) -> None:
    rig = models.rig(max_model_len=40)
    one = prompt(30)
    assert rig.generate([one], greedy(100)) == [models.expected(one, 10)]
    assert [o.finish_reason for o in rig.finished.values()] == ["length"]
    rig.assert_idle()


def test_a_prefill_alone_does_not_end_the_answer_for_its_own_length(models, prompt, greedy) -> None:
    rig = models.rig(max_model_len=40)
    one = prompt(39)
    for count, reason in ((8, None), (1, "length")):
        rig.engine.add("a", one, greedy(count), prefill_only=True)
        last = rig.step()[-1]
        assert (last.token, last.finish_reason) == (models.expected(one, 1)[0], reason)
        rig.engine.release("a")
    rig.assert_idle()


def test_a_prompt_gets_on_while_decoding_fills_the_budget(models, prompt, greedy) -> None:
    rig = models.rig(max_num_batched_tokens=16, max_num_seqs=40)
    for number in range(20):
        rig.pool.allocate("ticket", 1)
        one = prompt(5, number)
        rig.engine.adopt(f"s{number}", one, greedy(40), owner="ticket", first_tokens={0: 9}, cached_tokens=0)
    rig.engine.add("late", prompt(40), greedy(2))
    for _ in range(5):
        rig.step()
    assert rig.tokens["late"] == models.expected(prompt(40), 2)
    assert list(rig.finished) == ["late"]
    rig.drain()
    rig.assert_idle()


def test_fills_the_whole_pool_alone(models, prompt, greedy) -> None:
    rig = models.rig(pages=4)
    one = prompt(10)
    assert rig.generate([one], greedy(100)) == [models.expected(one, 54)]
    rig.assert_idle()


def test_waits_without_work_while_others_hold_the_pages(models, prompt, greedy) -> None:
    rig = models.rig(pages=4)
    rig.pool.allocate("ticket", 2)
    one = prompt(40)
    rig.engine.add("a", one, greedy(3))
    assert rig.engine.has_work
    assert rig.step() == []
    assert not rig.engine.has_work, "it would spin until somebody else gives pages back"
    rig.pool.release("ticket")
    assert rig.engine.has_work
    rig.drain()
    assert rig.tokens["a"] == models.expected(one, 3)
    rig.assert_idle()


def test_waits_for_quarantined_pages_until_its_caller_gives_up(models, prompt, greedy) -> None:
    rig = models.rig(pages=4)
    rig.pool.allocate("ticket", 2)
    rig.pool.quarantine("ticket")
    rig.engine.add("a", prompt(40), greedy(3))
    rig.engine.add("b", prompt(20), greedy(3))
    rig.drain()
    assert not rig.tokens
    assert not rig.finished
    rig.engine.abort("a")
    rig.drain()
    assert rig.tokens == {"b": models.expected(prompt(20), 3)}


def test_grows_when_quarantine_is_over(models, prompt, greedy) -> None:
    rig = models.rig(pages=4)
    rig.pool.allocate("ticket", 2)
    rig.pool.quarantine("ticket")
    rig.engine.add("a", prompt(30), greedy(20))
    rig.drain()
    assert rig.tokens["a"] == models.expected(prompt(30), 3)
    assert not rig.finished
    rig.pool.release_quarantined("ticket")
    rig.drain()
    assert rig.tokens["a"] == models.expected(prompt(30), 20)
    rig.assert_idle()


def test_logits_that_are_not_numbers_fail_only_their_sequence(models, prompt, greedy) -> None:
    import torch

    from kvrail.runtime.model import pool_tensor

    rig = models.rig(prefix_cache=False)
    rig.engine.add("bad", prompt(20), greedy(30))
    rig.engine.add("good", prompt(21), greedy(30))
    rig.step()
    state = rig.engine.sequence("bad")
    assert state is not None
    pool_tensor(rig.memory, rig.pool.pages, rig.model.layout)[state.pages[0]] = torch.nan
    rig.drain()
    assert rig.finished["bad"].finish_reason == "abort"
    assert "not numbers" in (rig.finished["bad"].error or "")
    assert rig.tokens["good"] == models.expected(prompt(21), 30)
    # The poisoned pages may go to anybody now.
    prompts = [prompt(40, n) for n in range(12)]
    assert rig.generate(prompts, greedy(4)) == [models.expected(one, 4) for one in prompts]
    rig.assert_idle()


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_random_times_leave_nothing_held(models, prompt, greedy, seed) -> None:
    rng = random.Random(seed)
    rig = models.rig(
        pages=rng.choice([8, 14, 40]), max_num_batched_tokens=rng.choice([16, 40, 2048]), max_num_seqs=5
    )
    live: set[str] = set()
    for turn in range(60):
        choice = rng.random()
        name = f"r{turn}"
        one = prompt(rng.randint(1, 60), rng.randint(0, 3))
        sampling = greedy(rng.randint(1, 30), temperature=rng.choice([0.0, 1.0]))
        if choice < 0.3:
            rig.engine.add(name, one, sampling, prefill_only=rng.random() < 0.4)
            live.add(name)
        elif choice < 0.4:
            rig.engine.resume(name, one, sampling, first_tokens={0: 7})
            live.add(name)
        elif choice < 0.5 and rig.pool.available >= rig.model.layout.pages_for(len(one)):
            rig.pool.allocate("ticket", rig.model.layout.pages_for(len(one)))
            rig.engine.adopt(name, one, sampling, owner="ticket", first_tokens={0: 9}, cached_tokens=0)
            live.add(name)
        elif choice < 0.7 and live:
            gone = rng.choice(sorted(live))
            live.discard(gone)
            rig.engine.abort(gone)
            rig.engine.abort(gone)
        elif rig.engine.has_work:
            rig.step()
        rig.pool.check()
    for name in live:
        # Some are held prefills, which only their release ends.
        if rng.random() < 0.5 or rig.engine.sequence(name) is not None:
            rig.engine.abort(name)
    rig.drain()
    rig.assert_idle()


def test_a_step_zeroes_the_pages_that_it_touches_and_reads_no_others(models, prompt, greedy) -> None:
    """A long prompt has all of its pages from the start. Beside a running answer it gets on token by token."""
    rig = models.rig(pages=64, max_num_batched_tokens=1)
    long, short = prompt(150, seed=1), prompt(50, seed=2)
    rig.engine.add("short", short, greedy(70))
    while "short" not in rig.tokens:
        rig.step()
    rig.poison_free_pages()
    rig.engine.add("long", long, greedy(4))
    # To the end, both have so many pages that they are read as one batch.
    for step in range(60):
        rig.step()
        sequence = rig.engine._roster["long"]
        needed = rig.model.layout.pages_for(sequence.computed)
        assert len(sequence.pages) == rig.model.layout.pages_for(150)
        left = rig.engine._memory.pages[sequence.pages[needed:]]
        assert left.isnan().all(), f"step {step} zeroed pages that it did not touch"
        assert not rig.engine._memory.pages[sequence.pages[:needed]].isnan().any()
    rig.drain()
    assert rig.tokens["long"] == models.expected(long, 4)
    assert rig.tokens["short"] == models.expected(short, 70)
    rig.assert_idle()
