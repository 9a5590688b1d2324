# SPDX-License-Identifier: Apache-2.0
"""Pages go back to the PagePool only when nothing that was given to the device can still touch them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrail.runtime.device import Compute


class LateCompute(Compute):
    """As a stream that gets nothing done until somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = 0

    @contextlib.contextmanager
    def queue(self) -> Iterator[int]:
        self._issued += 1
        yield self._issued

    def _wait(self) -> None:
        self.waits += 1

    @property
    def done(self) -> int:
        return self._done


def _late(rig: Any) -> LateCompute:
    """Let the rig's work be late, and fail where pages with queued work on them go back."""
    compute = LateCompute()
    rig.engine._compute = rig.engine._memory.compute = compute
    release, allocate, rename = rig.pool.release, rig.pool.allocate, rig.pool.rename
    forward = rig.engine._model.forward
    last_work: dict[int, int] = {}

    def checked_release(owner: str) -> None:
        held = [] if owner not in rig.pool.owners() else rig.pool.pages_of(owner)
        late = [page for page in held if last_work.get(page, 0) > compute.done]
        assert not late, f"{owner} gave back pages {late} with work queued on them"
        release(owner)

    def noted_allocate(owner: str, count: int, **more: Any) -> list[int]:
        pages = allocate(owner, count, **more)
        if owner != "ticket":
            # What takes pages zeroes them: the next work.
            last_work.update(dict.fromkeys(pages, compute._issued + 1))
        return pages

    def noted_rename(owner: str, new_owner: str) -> None:
        # The tail of an adopted page is zeroed, too.
        last_work.update(dict.fromkeys(rig.pool.pages_of(owner), compute._issued + 1))
        rename(owner, new_owner)

    def noted_forward(pool: Any, tokens: Any, slices: Any, wanted: Any, rings: Any, stored: Any) -> Any:
        for part in slices:
            last_work.update(dict.fromkeys(part.pages, compute._issued))
        return forward(pool, tokens, slices, wanted, rings, stored)

    rig.pool.release, rig.pool.allocate, rig.pool.rename = checked_release, noted_allocate, noted_rename
    # The model is shared with other tests.
    model = rig.engine._model
    rig.engine._model = SimpleNamespace(
        forward=noted_forward, vocab_size=model.vocab_size, device=model.device, layout=model.layout
    )
    return compute


def test_only_what_samples_or_gives_pages_back_is_waited_for(models, prompt, greedy) -> None:
    rig = models.rig(max_num_batched_tokens=16, prefix_cache=False)
    compute = _late(rig)
    rig.engine.add("p", prompt(50), greedy(3), prefill_only=True)
    for _ in range(3):
        rig.step()
    assert (compute.waits, compute.done) == (0, 0)
    rig.step()
    assert compute.done == compute._issued, "a sampled token has come back"
    rig.engine.release("p")
    assert compute.waits == 0
    rig.engine.add("q", prompt(50), greedy(3), prefill_only=True)
    rig.engine.add("r", prompt(50), greedy(3), prefill_only=True)
    rig.step()
    rig.engine.abort("r")
    assert compute.waits == 0, "nothing of r was given to the device"
    rig.engine.abort("q")
    assert compute.waits == 1
    rig.assert_idle()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(models, prompt, greedy, seed) -> None:
    """Chunks, preemption, aborts, failures and adoptions in any order."""
    rng = random.Random(seed)
    rig = models.rig(
        pages=rng.choice([8, 14, 40]), max_num_batched_tokens=rng.choice([16, 40]), max_num_seqs=5
    )
    compute = _late(rig)
    names = []
    for turn in range(60):
        choice, name = rng.random(), f"r{turn}"
        one, sampling = (
            prompt(rng.randint(1, 70), rng.randint(0, 3)),
            greedy(rng.choice([1, 5, 30]), n=rng.choice([1, 1, 3])),
        )
        if choice < 0.3:
            rig.engine.add(name, one, sampling, prefill_only=rng.random() < 0.4)
            names.append(name)
        elif choice < 0.4 and rig.pool.available >= rig.model.layout.pages_for(len(one)):
            rig.pool.allocate("ticket", rig.model.layout.pages_for(len(one)))
            rig.engine.adopt(
                name,
                one,
                sampling,
                owner="ticket",
                first_tokens=dict.fromkeys(range(sampling.n), 9),
                cached_tokens=0,
            )
            names.append(name)
        elif choice < 0.6 and names:
            rig.engine.abort(rng.choice(names))
        elif rig.engine.has_work:
            rig.engine.step()
        rig.pool.check()
    for name in names:
        rig.engine.abort(name)
    while rig.engine.has_work:
        rig.engine.step()
    rig.assert_idle()
    rig.engine.close()
    assert compute.done == compute._issued
