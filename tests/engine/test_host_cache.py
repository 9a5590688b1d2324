# SPDX-License-Identifier: Apache-2.0
"""The host prefix cache under an engine: whatever is evicted, copied, shared or cancelled, no token changes."""

from __future__ import annotations

import numpy as np
import pytest

from kit.host_memory import SlowCopier
from kit.tiny_families import FAMILIES, WINDOWED
from kvrail.runtime.messages import CacheUse


def flushed(rig) -> None:
    """Nothing is left in the engine's own pool, so that a hit can only come from the host."""
    rig.pool.flush_cache()
    assert rig.pool.free == rig.pool.pages
    rig.poison_free_pages()


def last(rig):
    return list(rig.finished.values())[-1]


@pytest.mark.parametrize("kind", [name for name in FAMILIES if name not in WINDOWED])
def test_a_hit_of_the_host_equals_uncached(models, prompt, greedy, kind) -> None:
    rig = models.rig(kind, host_pages=40, max_num_batched_tokens=32)
    first = prompt(70)
    longer = np.concatenate([first, prompt(9, 1)])
    other = np.concatenate([first[:40], prompt(30, 2)])
    hits = []
    for one in (first, first, longer, other):
        assert rig.generate([one], greedy(10)) == [models.expected(one, 10, kind)]
        hits.append(last(rig).cached_tokens)
        rig.assert_idle()
        flushed(rig)
    assert hits == [0, 64, 64, 32]
    assert rig.host.counters()["hicache_hit_tokens"] == 160


@pytest.mark.parametrize("page_tokens", [16, 128])
def test_random_prefixes_under_eviction_pressure(models, prompt, greedy, page_tokens) -> None:
    """Both caches hold a few pages only, four prompts run at a time, and all of them share beginnings."""
    length = 150 if page_tokens == 16 else 400
    rig = models.rig(
        page_tokens=page_tokens, pages=34 if page_tokens == 16 else 14, host_pages=12 if page_tokens == 16 else 5,
        max_num_batched_tokens=page_tokens * 2 + 5,
    )  # fmt: skip
    random = np.random.default_rng(page_tokens)
    roots = [prompt(length, seed) for seed in range(3)]
    found = 0
    for _ in range(12):
        prompts = []
        for _ in range(int(random.integers(1, 4))):
            root = roots[int(random.integers(3))][: int(random.integers(1, length))]
            prompts.append(
                np.concatenate([root, prompt(int(random.integers(1, 20)), int(random.integers(99)))])
            )
        assert rig.generate(prompts, greedy(4)) == [models.expected(one, 4) for one in prompts]
        rig.assert_idle()
        if random.random() < 0.7:
            flushed(rig)
        found = rig.host.counters()["hicache_hit_tokens"]
    counters = rig.host.counters()
    assert found > 0
    assert counters["hicache_evicted_pages"] > 0
    assert rig.host.index.used <= rig.host.index.pages


def test_the_second_of_two_prompts_right_behind_each_other_hits(models, prompt, greedy) -> None:
    """Written through at each chunk: before the first prompt is through, the second finds what is done of it."""
    rig = models.rig(host_pages=20, max_num_batched_tokens=32, max_num_seqs=1)
    one = prompt(100)
    rig.engine.add("a", one, greedy(2))
    rig.step()
    rig.step()
    rig.engine.abort("a")
    while rig.host.busy:
        rig.step()
    flushed(rig)
    assert rig.generate([one], greedy(4)) == [models.expected(one, 4)]
    assert last(rig).cached_tokens == 64


def test_without_prefix_cache_nothing_is_looked_up_or_stored(models, prompt, greedy) -> None:
    rig = models.rig(host_pages=20)
    one = prompt(70)
    expected = models.expected(one, 3)

    def run(name: str, cache: CacheUse) -> int:
        rig.engine.add(name, one, greedy(3), cache=cache)
        rig.drain()
        assert rig.tokens[name] == expected
        return rig.finished[name].cached_tokens

    assert run("off", CacheUse(use=False)) == 0
    assert (rig.host.index.used, rig.pool.cached) == (0, 0)
    assert run("first", CacheUse()) == 0
    assert run("off again", CacheUse(use=False)) == 0
    assert run("salted", CacheUse(salt="s")) == 0
    assert run("salted again", CacheUse(salt="s")) == 64
    flushed(rig)
    assert run("salted from the host", CacheUse(salt="s")) == 64
    assert run("other salt", CacheUse(salt="t")) == 0
    rig.assert_idle()


def test_a_sequence_that_is_cancelled_while_it_loads(models, prompt, greedy) -> None:
    """The copy goes on, so its pages are nobody else's until it is done."""
    copier = SlowCopier()
    rig = models.rig(pages=16, host_pages=20, copier=copier)
    one, other = prompt(100), prompt(120, 5)
    rig.engine.add("a", one, greedy(2))
    for _ in range(30):
        rig.step()
        copier.run()
        if not rig.engine.has_work:
            break
    flushed(rig)
    rig.engine.add("b", one, greedy(2), prefill_only=True)
    outputs = rig.step()
    assert [(o.sequence_id, o.computed, o.token) for o in outputs] == [("b", 96, None)]
    state = rig.engine.sequence("b")
    assert state.host_pages.first == 0
    assert len(state.host_pages.slots) == 6
    rig.step()
    assert "b" not in rig.tokens, "it must not run before its pages are there"
    loading = set(state.pages[:6])
    rig.engine.abort("b")
    assert rig.engine.has_work
    assert rig.pool.owned >= 6
    rig.engine.add("c", other, greedy(2))
    rig.step()
    assert not loading & set(rig.engine.sequence("c").pages)
    for _ in range(30):
        copier.run()
        rig.step()
        if not rig.engine.has_work:
            break
    assert rig.tokens["c"] == models.expected(other, 2)
    rig.assert_idle()


def test_a_copy_that_fails_fails_its_request_and_stores_nothing(models, prompt, greedy) -> None:
    copier = SlowCopier()
    rig = models.rig(host_pages=20, copier=copier)
    one = prompt(60)
    rig.engine.add("a", one, greedy(1))
    rig.step()
    copier.run(error="no such memory")
    rig.drain()
    assert rig.host.index.used == 0
    rig.engine.add("b", prompt(61), greedy(1))
    rig.step()
    copier.run()
    rig.drain()
    flushed(rig)
    rig.engine.add("c", prompt(61), greedy(1))
    rig.step()
    copier.run(error="no such memory")
    rig.step()
    assert rig.finished["c"].finish_reason == "abort"
    assert "no such memory" in rig.finished["c"].error
    rig.assert_idle()


def test_preemption_with_a_host_cache_equals(models, prompt, greedy) -> None:
    """What a preempted sequence had computed comes back from the host."""
    rig = models.rig(pages=12, host_pages=40)
    prompts = [prompt(20 + n, n) for n in range(5)]
    assert rig.generate(prompts, greedy(50)) == [models.expected(one, 50) for one in prompts]
    assert rig.host.counters()["hicache_hit_tokens"] > 0
    rig.assert_idle()


def test_flush_keeps_what_is_in_use(models, prompt, greedy) -> None:
    rig = models.rig(host_pages=20)
    one = prompt(50)
    rig.generate([one], greedy(2))
    flushed(rig)
    rig.engine.add("p", one, greedy(2), prefill_only=True)
    rig.drain()
    assert rig.engine.flush_cache() == (0, 0)
    rig.engine.release("p")
    assert rig.engine.flush_cache() == (3, 3)
    assert rig.host.index.used == 0
    rig.assert_idle()


# --- models with sliding windows: a hit ends where a state was kept ------------------------------------------------


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_hit_with_a_state_equals_uncached(models, prompt, greedy, kind) -> None:
    """Well beyond the window of 32; hits come from the host, and from pages of the pool with the host's state."""
    # Room for every state of a prompt: on a busy machine one that is still being written gives no place to the next.
    rig = models.rig(kind, host_pages=60, host_states=12, max_num_batched_tokens=48)
    first = prompt(150)
    longer = np.concatenate([first, prompt(9, 1)])
    other = np.concatenate([first[:100], prompt(60, 2)])
    hits = []
    for flush, one in ((1, first), (1, first), (0, longer), (1, other), (0, other)):
        assert rig.generate([one], greedy(8)) == [models.expected(one, 8, kind)]
        hits.append(last(rig).cached_tokens)
        rig.assert_idle()
        if flush:
            flushed(rig)
    assert hits == [0, 144, 144, 96, 144]


def test_states_are_kept_at_intervals_and_at_the_end(models, prompt, greedy) -> None:
    rig = models.rig("gemma3", host_pages=60, state_interval=3, max_num_batched_tokens=500)
    first = prompt(150)
    rig.generate([first], greedy(2))
    assert rig.host.counters()["hicache_stored_states"] == 3  # at 48, 96 and 144
    flushed(rig)
    for tokens, hit in ((60, 48), (100, 96), (143, 96), (145, 144)):
        one = np.concatenate([first[:tokens], prompt(20, 3)])
        assert rig.generate([one], greedy(4)) == [models.expected(one, 4, "gemma3")]
        assert last(rig).cached_tokens == hit


def test_windows_under_eviction_pressure(models, prompt, greedy) -> None:
    """Few pages, fewer states, four prompts at a time that share beginnings."""
    rig = models.rig(
        "olmo3", pages=40, host_pages=20, host_states=3, state_interval=2, slots=4, max_num_batched_tokens=60
    )
    random = np.random.default_rng(5)
    roots = [prompt(150, seed) for seed in range(3)]
    for _ in range(10):
        prompts = []
        for _ in range(int(random.integers(1, 4))):
            root = roots[int(random.integers(3))][: int(random.integers(1, 150))]
            prompts.append(
                np.concatenate([root, prompt(int(random.integers(1, 20)), int(random.integers(99)))])
            )
        assert rig.generate(prompts, greedy(4)) == [models.expected(one, 4, "olmo3") for one in prompts]
        rig.assert_idle()
        if random.random() < 0.5:
            flushed(rig)
    counters = rig.host.counters()
    assert counters["hicache_hit_tokens"] > 0
    assert counters["hicache_evicted_states"] > 0


def test_a_model_with_windows_and_no_host_cache_computes_all(models, prompt, greedy) -> None:
    rig = models.rig("gemma2")
    one = prompt(100)
    for _ in range(2):
        assert rig.generate([one], greedy(4)) == [models.expected(one, 4, "gemma2")]
        assert last(rig).cached_tokens == 0
    rig.assert_idle()


def test_choices_of_a_prompt_that_the_host_has(models, prompt, greedy) -> None:
    """What was copied in belongs to the prompt; its choices go on over the same pages, and nothing stays pinned."""
    one, sampled = prompt(70), greedy(8, n=3, temperature=0.9)

    def run(rig) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        rig.engine.add("r", one, sampled)
        while rig.engine.has_work:
            for output in rig.engine.step():
                if output.token is not None:
                    found.setdefault(output.choice, []).append(output.token)
        return found

    expected = run(models.rig(prefix_cache=False))
    assert len(expected) == 3
    rig = models.rig(host_pages=20)
    assert run(rig) == expected
    flushed(rig)
    assert run(rig) == expected
    assert rig.host.counters()["hicache_hit_tokens"] == 64
    rig.assert_idle()
