# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse, preemption, prefill-only, adoption and resumption: none of them may change a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrail.kernels.reference import gather_pages, scatter_pages
from kvrail.runtime.model import pool_tensor


def test_prefix_hit_equals_uncached(models, prompt, greedy) -> None:
    rig = models.rig()
    first = prompt(70)
    longer = np.concatenate([first, prompt(9, 1)])
    other = np.concatenate([first[:40], prompt(30, 2)])
    expected = [models.expected(one, 10) for one in (first, first, longer, other)]
    found = [rig.generate([one], greedy(10))[0] for one in (first, first, longer, other)]
    assert found == expected
    # The same prompt of 70 tokens hits 4 pages of 16; one that shares 40 tokens hits 2.
    assert [rig.finished[name].cached_tokens for name in rig.finished] == [0, 64, 64, 32]
    rig.assert_idle()
    assert rig.pool.cached > 0


def test_hit_leaves_a_token_to_compute(models, prompt, greedy) -> None:
    rig = models.rig()
    one = prompt(64)
    assert rig.generate([one], greedy(4)) == rig.generate([one], greedy(4)) == [models.expected(one, 4)]
    assert [output.cached_tokens for output in rig.finished.values()] == [0, 48]


def test_answers_are_reused_in_the_next_turn(models, prompt, greedy) -> None:
    rig = models.rig()
    one = prompt(30)
    answer = rig.generate([one], greedy(40))[0]
    turn = np.concatenate([one, np.array(answer, dtype=np.uint32), prompt(5, 3)])
    assert rig.generate([turn], greedy(6)) == [models.expected(turn, 6)]
    # 69 of the 70 tokens have KV: the last token of an answer is never computed.
    assert list(rig.finished.values())[-1].cached_tokens == 64


def test_same_prompt_side_by_side(models, prompt, greedy) -> None:
    rig = models.rig(max_num_batched_tokens=48)
    one = prompt(50)
    assert rig.generate([one] * 4, greedy(8)) == [models.expected(one, 8)] * 4
    rig.assert_idle()


def test_preemption_equals(models, prompt, greedy) -> None:
    """Five sequences that need 5 pages each at their end, in a pool of 12 pages."""
    rig = models.rig(pages=12)
    prompts = [prompt(20 + n, n) for n in range(5)]
    preempted = 0
    for n, one in enumerate(prompts):
        rig.engine.add(f"r{n}", one, greedy(50))
    while rig.engine.has_work:
        before = rig.engine.load["waiting"]
        rig.step()
        preempted += rig.engine.load["waiting"] > before
    assert preempted, "the pool was large enough: nothing was tested"
    assert [rig.tokens[f"r{n}"] for n in range(5)] == [models.expected(one, 50) for one in prompts]
    rig.assert_idle()


def test_preemption_without_cache_and_with_sampling(models, prompt, greedy) -> None:
    sampled = greedy(50, temperature=0.8, top_p=0.9)
    prompts = [prompt(20 + n, n) for n in range(5)]
    wide = models.rig(pages=64).generate(prompts, sampled)
    narrow = models.rig(pages=12, prefix_cache=False)
    assert narrow.generate(prompts, sampled) == wide
    narrow.assert_idle()


@pytest.mark.parametrize("length", [1, 16, 33, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_adopt_equals_the_single_engine(models, prompt, greedy, length, temperature) -> None:
    """Prefill in one engine, copy the pages to scattered pages of another one's pool, decode there."""
    one = prompt(length)
    sampling = greedy(24, temperature=temperature)
    expected = models.rig().generate([one], sampling)[0]

    prefill, decode = models.rig(max_num_batched_tokens=16), models.rig()
    prefill.engine.add("p", one, sampling, prefill_only=True)
    prefill.drain()
    assert prefill.tokens["p"] == expected[:1]
    state = prefill.engine.sequence("p")
    assert state is not None
    assert (state.computed, len(state.pages)) == (length, -(-length // 16))

    layout = prefill.model.layout
    decode.pool.allocate("gap", 1)
    pages = decode.pool.allocate("ticket", len(state.pages))
    source = pool_tensor(prefill.memory, prefill.pool.pages, layout)
    target = pool_tensor(decode.memory, decode.pool.pages, layout)
    target[pages[-1]] = torch.nan
    slab = gather_pages(source, torch.tensor(state.pages))
    used = length % 16 or 16
    scatter_pages(target, torch.tensor(pages[:-1], dtype=torch.int64), slab[:-1])
    target[pages[-1], :, :, :used] = slab[-1, :, :, :used]
    decode.pool.release("gap")
    decode.engine.adopt("d", one, sampling, owner="ticket", first_tokens={0: expected[0]}, cached_tokens=0)
    prefill.engine.release("p")
    decode.drain()
    assert decode.tokens["d"] == expected[1:]
    # The received prompt serves a later prompt, too.
    again = decode.generate([one], sampling)[0]
    assert again == expected
    assert list(decode.finished.values())[-1].cached_tokens == (length - 1) // 16 * 16
    for rig in (prefill, decode):
        rig.assert_idle()


def test_prefill_only_keeps_pages_and_never_writes_them_again(models, prompt, greedy) -> None:
    rig = models.rig(pages=8, max_num_batched_tokens=16)
    rig.engine.add("p", prompt(40), greedy(5), prefill_only=True)
    rig.step()
    state = rig.engine.sequence("p")
    assert state is not None
    assert state.computed == 16
    pool = pool_tensor(rig.memory, 8, rig.model.layout)
    first = pool[state.pages[0]].clone()
    rig.drain()
    frozen = pool[state.pages].clone()
    # Two others take the other five pages, are preempted, and end; the pushed pages stay as they are.
    others = [prompt(20, 1), prompt(21, 2)]
    assert rig.generate(others, greedy(30)) == [models.expected(one, 30) for one in others]
    assert (pool[state.pages] == frozen).all()
    assert (frozen[0] == first).all()
    assert rig.engine.sequence("p") == state._replace(computed=40)
    rig.engine.release("p")
    rig.assert_idle()


def test_a_prefix_hit_does_not_cut_a_short_prompt(models, prompt, greedy) -> None:
    """Only prompts that a step cannot hold end in a short chunk: a hit must cost no step, and change no rounding."""
    rig = models.rig(max_num_batched_tokens=64)
    one = prompt(60)
    rig.generate([one[:20]], greedy(1))
    begun = len(rig.steps)
    rig.engine.add("p", one, greedy(1), prefill_only=True)
    rig.drain()
    assert rig.finished["p"].cached_tokens == 16
    assert len(rig.steps) - begun == 1
    rig.engine.release("p")
    rig.assert_idle()


def test_first_token_that_ends_the_request(models, prompt, greedy) -> None:
    one = prompt(12)
    token = models.expected(one, 1)[0]
    for sampling, reason in ((greedy(1), "length"), (greedy(5, stop_token_ids=[token]), "stop")):
        rig = models.rig()
        rig.engine.add("p", one, sampling, prefill_only=True)
        rig.engine.add("s", one, sampling)
        rig.drain()
        assert [(o.token, o.finish_reason) for o in rig.finished.values()] == [(token, reason)] * 2
        assert rig.engine.sequence("p") is not None
        assert rig.engine.sequence("s") is None
        rig.engine.release("p")
        rig.assert_idle()
        rig.engine.resume("r", one, sampling, first_tokens={0: token})
        rig.drain()
        assert (rig.finished["r"].token, rig.finished["r"].finish_reason) == (None, reason)
        rig.pool.allocate("ticket", 1)
        rig.engine.adopt("a", one, sampling, owner="ticket", first_tokens={0: token}, cached_tokens=0)
        rig.drain()
        assert (rig.finished["a"].token, rig.finished["a"].finish_reason) == (None, reason)
        rig.assert_idle()


def test_resume_continues_behind_the_first_token(models, prompt, greedy) -> None:
    one = prompt(31)
    for sampling in (greedy(9), greedy(9, temperature=1.0, top_k=20)):
        expected = models.rig().generate([one], sampling)[0]
        rig = models.rig()
        rig.engine.resume("r", one, sampling, first_tokens={0: expected[0]})
        rig.drain()
        assert rig.tokens["r"] == expected[1:]
        rig.assert_idle()
