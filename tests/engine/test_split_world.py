# SPDX-License-Identifier: Apache-2.0
"""Everything at once, at random: caches on both sides, choices, windows, preemption, cancels, links that break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kit.host_memory import SlowCopier, StreamCopier
from kit.split_world import PE, SplitWorld
from kvrail.runtime import embedded
from kvrail.runtime.messages import CacheUse
from kvrail.runtime.sampler import choice_seed

MAX_TOKENS = 22


class Expected:
    def __init__(self, models: Any, kind: str) -> None:
        self.rig = models.rig(kind, prefix_cache=False)
        self.known: dict[tuple[bytes, int, float], list[int]] = {}

    def __call__(self, prompt: Any, sampling: Any, choice: int) -> list[int]:
        seed = choice_seed(sampling.seed, choice) if sampling.n > 1 else sampling.seed
        key = prompt.tobytes(), seed, sampling.temperature
        if key not in self.known:
            one = msgspec.structs.replace(sampling, n=1, seed=seed)
            (self.known[key],) = self.rig.generate([prompt], one)
        return self.known[key]


@pytest.mark.parametrize("queued", [False, True], ids=["", "queued"])
@pytest.mark.parametrize("copies", [SlowCopier, StreamCopier])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral-window"])
def test_whatever_happens_no_token_changes_and_nothing_is_kept(
    models, prompt, greedy, kind, copies, queued, monkeypatch
) -> None:
    random = np.random.default_rng(len(kind))
    copier = copies()
    ce = models.rig(kind, pages=20, slots=6, max_num_seqs=6, max_num_batched_tokens=64)
    ce.pool.growth_reserve = min(2, ce.pool.pages)
    pe = models.rig(
        kind, pages=30, slots=5, host_pages=24, host_states=4, state_interval=2, copier=copier,
        max_num_batched_tokens=40, max_num_seqs=5,
    )  # fmt: skip
    expected = Expected(models, kind)
    world = SplitWorld(ce, pe, random, lose_calls=0.06, queued=queued)
    monkeypatch.setattr("kvrail.runtime.prefilling.time", SimpleNamespace(monotonic=lambda: world.now))
    draw, pushed, shortages = embedded.Batch.draw, [0], [0]

    def drawing(batch: Any, logits: Any) -> Any:
        pushed[0] += any(one.prefill_only for one, _ in batch._ends)
        if queued and pushed[0] == 5:
            pushed[0] = 0
            shortages[0] += 1
            raise torch.OutOfMemoryError("of a test")
        return draw(batch, logits)

    monkeypatch.setattr(embedded.Batch, "draw", drawing)
    monkeypatch.setattr(embedded, "out_of_memory", lambda *_: "no memory")
    roots = [prompt(150, 900 + number) for number in range(3)]
    prompts: dict[str, Any] = {}
    number = 0
    for _ in range(700):
        if len(world.open) < 9 and random.random() < 0.12:
            root = roots[int(random.integers(3))]
            one = root[: int(random.choice([5, 16, 40, 64, 90, 128, 144]))]
            if random.random() < 0.2:
                one = np.concatenate([one, prompt(3, int(random.integers(2)))])
            n = int(random.choice([1, 1, 1, 2, 3]))
            sampling = greedy(
                int(random.choice([1, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS])),
                n=n,
                temperature=float(random.choice([0.0, 0.9])),
            )
            cache = CacheUse(use=random.random() < 0.9, salt="s" if random.random() < 0.15 else "")
            name = f"r{number}"
            number += 1
            prompts[name] = one
            world.submit(
                name, one, sampling, cache=cache, peer=tuple(PE) if random.random() < 0.85 else None,
                fallback=random.random() < 0.8,
            )  # fmt: skip
        if world.open and random.random() < 0.025:
            world.cancel(str(random.choice(list(world.open))))
        if world.open and random.random() < 0.02:
            name = str(random.choice(list(world.open)))
            n = world.open[name].sampling.n
            free = set(range(n)) - world.closed[name] - world.reasons[name].keys()
            if n > 1 and free:
                world.close_choice(name, int(random.choice(sorted(free))))
        if random.random() < 0.01:
            world.break_link()
        if random.random() < 0.02:
            # Most often the pool only, so that the host cache is asked.
            (pe.pool.flush_cache if random.random() < 0.7 else ce.engine.flush_cache)()
            for rig in (pe, ce):
                rig.poison_free_pages()
        if random.random() < 0.006:
            # Nobody hears of anything for a while: tickets and deadlines run out.
            world.now += float(random.choice([6.0, 16.0, 31.0]))
        if random.random() < 0.01:
            copier.run(error="no such memory")
        world.act(copier)
    world.settle(copier)
    world.assert_idle()
    complete = 0
    for name, submit in world.submits.items():
        for choice, tokens in world.tokens[name].items():
            full = expected(
                prompts[name], msgspec.structs.replace(submit.sampling, max_tokens=MAX_TOKENS), choice
            )
            assert tokens == full[: len(tokens)], f"{name} choice {choice} {world.routes[name]}"
            if choice in world.reasons[name]:
                complete += 1
                assert len(tokens) == submit.sampling.max_tokens
        if name in world.cached:
            assert 0 <= world.cached[name] < len(prompts[name])
            assert world.cached[name] % 16 == 0
            assert submit.cache.use or not world.cached[name]
        if name in world.failed:
            assert world.failed[name].status == 503, world.failed[name]
    assert complete > 10
    assert world.ahead, "no call was made ahead of its grant"
    assert bool(shortages[0]) == queued
    assert bool(world.parts) == (queued and ce.model.layout.layers > 1)
    counters = pe.host.counters() | world.completion._counters | world.receiver.counters
    for happened in (
        "hicache_hits",
        "prefills_remote",
        "prefills_local",
        "requests_aborted",
        "landed",
        "lost",
    ):
        assert counters[happened] > 0, happened


def test_what_is_computed_here_after_all_was_in_no_cache_elsewhere(models, prompt, greedy) -> None:
    """The first token came, with a hit of the prefill engine; then its link broke, and with it went that hit."""
    ce, pe = models.rig(pages=40, max_num_seqs=6), models.rig(pages=30, host_pages=20)
    world = SplitWorld(ce, pe, np.random.default_rng(0))
    one = prompt(70)
    pe.generate([one], greedy(2))
    world.submit("r", one, greedy(5), peer=tuple(PE))
    world.completion.tick(0)
    world.call()
    world.hear_pe()
    while world.step(pe, world.prefilling):
        pass
    world.hear_ce()
    world.completion.tick(0)
    assert (world.cached["r"], world.routes["r"]) == (64, "remote")
    world.break_link()
    world.settle()
    assert (world.cached["r"], world.routes["r"]) == (0, "local")
    assert world.tokens["r"][0] == models.expected(one, 5)
    world.assert_idle()
