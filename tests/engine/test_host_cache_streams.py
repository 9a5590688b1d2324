# SPDX-License-Identifier: Apache-2.0
"""Copies of the host cache in the order of streams, as on a GPU: usable before they are done, and no token changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kit.host_memory import StreamCopier
from kit.tiny_families import FAMILIES, WINDOWED


def stored(rig: Any, copier: StreamCopier, prompt: Any, greedy: Any) -> None:
    """The prompt's pages are in the host cache, and nowhere else."""
    rig.engine.add("first", prompt, greedy(1))
    finish(rig, copier)
    rig.pool.flush_cache()
    assert rig.pool.free == rig.pool.pages
    rig.poison_free_pages()


def finish(rig: Any, copier: StreamCopier) -> None:
    for _ in range(200):
        rig.step()
        copier.run()
        if not rig.engine.has_work:
            rig.step()
            return
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_a_sequence_runs_right_behind_its_copy(models, prompt, greedy, kind) -> None:
    """Nobody waits on the host: its first step is queued while the copy is under way."""
    copier = StreamCopier()
    rig = models.rig(kind, host_pages=40, copier=copier, max_num_batched_tokens=48)
    one = prompt(100)
    stored(rig, copier, one, greedy)
    rig.engine.add("b", one, greedy(4))
    rig.step()
    assert rig.engine._prefixes.loading(rig.engine._roster["b"])
    assert len(rig.tokens["b"]) == 1
    finish(rig, copier)
    assert rig.tokens["b"] == models.expected(one, 4, kind)
    assert rig.finished["b"].cached_tokens == 96
    rig.assert_idle()


def test_others_do_not_wait_for_a_copy(models, prompt, greedy) -> None:
    copier = StreamCopier()
    rig = models.rig(host_pages=40, copier=copier)
    one, other = prompt(100), prompt(20, 5)
    stored(rig, copier, one, greedy)
    rig.engine.add("decoding", other, greedy(6))
    rig.step()
    copier.run()
    rig.engine.add("b", one, greedy(2))
    for count in range(2, 5):
        rig.step()
        assert len(rig.tokens["decoding"]) == count
        assert "b" not in rig.tokens
    copier.run()
    rig.step()
    assert len(rig.tokens["b"]) == 1
    finish(rig, copier)
    assert rig.tokens["b"] == models.expected(one, 2)
    assert rig.tokens["decoding"] == models.expected(other, 6)
    rig.assert_idle()


def test_of_many_copies_only_the_first_is_waited_for_on_the_gpu(models, prompt, greedy) -> None:
    copier = StreamCopier()
    rig = models.rig(host_pages=40, copier=copier)
    one, two = prompt(100), prompt(100, 1)
    for each in (one, two):
        stored(rig, copier, each, greedy)
        del rig.finished["first"], rig.tokens["first"]
    rig.engine.add("b", one, greedy(2))
    rig.engine.add("c", two, greedy(2))
    rig.step()
    assert (len(rig.tokens["b"]), "c" in rig.tokens) == (1, False)
    finish(rig, copier)
    assert [rig.tokens["b"], rig.tokens["c"]] == [models.expected(one, 2), models.expected(two, 2)]
    rig.assert_idle()


@pytest.mark.parametrize("ran", [False, True])
def test_pages_of_a_sequence_that_leaves_are_nobodys_until_the_copy_is_done(
    models, prompt, greedy, ran
) -> None:
    copier = StreamCopier()
    rig = models.rig(pages=16, host_pages=20, copier=copier)
    one, other = prompt(100), prompt(120, 5)
    stored(rig, copier, one, greedy)
    rig.engine.add("b", one, greedy(2), prefill_only=True)
    if ran:
        rig.step()
    else:
        rig.engine._roster.admit(1000)
    loading = set(rig.engine.sequence("b").pages[:6])
    rig.engine.release("b")
    rig.engine.add("c", other, greedy(2))
    rig.step()
    assert not loading & set(rig.engine.sequence("c").pages)
    finish(rig, copier)
    assert rig.tokens["c"] == models.expected(other, 2)
    rig.assert_idle()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_choices_inherit_pages_whose_copy_is_not_done(models, prompt, greedy, kind) -> None:
    """First tokens are given, so that nothing is sampled and nothing comes back from the device before they branch."""
    copier = StreamCopier()
    rig = models.rig(kind, host_pages=20, copier=copier)
    one = prompt(100)
    stored(rig, copier, one, greedy)
    firsts = {0: 11, 1: 12, 2: 13}
    rig.engine.resume("b", one, greedy(4, n=3), first_tokens=firsts)
    rig.step()
    assert any(not load.done for load in rig.host._loads.values())
    found: dict[int, list[int]] = {}
    for _ in range(20):
        for output in rig.engine.step():
            if output.token is not None:
                found.setdefault(output.choice, [firsts[output.choice]]).append(output.token)
        rig.pool.check()
        copier.run()
        if not rig.engine.has_work:
            break
    expected = {
        choice: [first, *models.expected(np.append(one, np.uint32(first)), 3, kind)]
        for choice, first in firsts.items()
    }
    assert found == expected
    rig.assert_idle()


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_state_is_kept_as_it_was_at_its_page_boundary(models, prompt, greedy, kind) -> None:
    """The ring is written on before what was taken of it has left for the host."""
    copier = StreamCopier()
    rig = models.rig(kind, host_pages=60, host_states=20, copier=copier, max_num_batched_tokens=48)
    one = prompt(150)
    rig.engine.add("a", one, greedy(6))
    while rig.engine._roster.running or not rig.finished:
        rig.step()
    copier.run()
    rig.step()
    for tokens in (64, 100, 150):
        rig.pool.flush_cache()
        rig.poison_free_pages()
        longer = np.concatenate([one[:tokens], prompt(12, tokens)])
        rig.engine.add(f"t{tokens}", longer, greedy(4))
        finish(rig, copier)
        assert rig.tokens[f"t{tokens}"] == models.expected(longer, 4, kind)
        assert rig.finished[f"t{tokens}"].cached_tokens == tokens // 16 * 16
    rig.assert_idle()


def test_pages_that_are_pushed_ahead_are_those_of_the_pool(models, prompt, greedy) -> None:
    copier = StreamCopier()
    rig = models.rig(host_pages=20, copier=copier)
    one = prompt(100)
    stored(rig, copier, one, greedy)
    rig.engine.add("b", one, greedy(1), prefill_only=True)
    rig.engine._roster.admit(1000)
    state = rig.engine.sequence("b")
    assert state.host_pages.first == 0
    assert state.host_pages.slots.tolist() == state.pages[:6]
    behind = rig.host.behind_loads()
    assert not behind.done()
    copier.run()
    assert behind.done()
    rig.engine.release("b")
    finish(rig, copier)
    rig.assert_idle()
