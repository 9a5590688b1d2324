# SPDX-License-Identifier: Apache-2.0
"""Rings of sliding-window layers: handed over, lost, given again, poisoned and short; no token may change."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kit.tiny_families import WINDOW
from kvrail.kernels.attention import StepPlan
from kvrail.kernels.ring_kv import RingKV
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.model import PagedModel, pool_tensor, ring_tensor
from kvrail.transfer.pages import PagePool

# Without pages, with sinks and pages, with two kinds of rotary embedding.
KINDS = ("mistral-window", "gpt_oss", "gemma3")


def rings_of(rig) -> torch.Tensor:
    return ring_tensor(rig.state, rig.pool.state_slots, rig.model.layout)


def hand_over(prefill, decode, name: str) -> None:
    """What a ticket carries: pages and the state slot of a held prefill, into memory of `decode`'s "ticket".

    Whatever came of the ring beyond the prompt is poison.
    """
    layout = prefill.model.layout
    state = prefill.engine.sequence(name)
    source, target = (pool_tensor(rig.memory, rig.pool.pages, layout) for rig in (prefill, decode))
    pages = decode.pool.allocate("ticket", len(state.pages))
    slot = decode.pool.allocate_state("ticket")
    for there, here in zip(pages, state.pages, strict=True):
        target[there] = source[here]
    rings_of(decode)[slot] = rings_of(prefill)[state.state_slot]
    if state.computed < layout.window:
        rings_of(decode)[slot, :, :, state.computed :] = torch.nan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
def test_adopt_equals_the_single_engine(models, prompt, greedy, kind, length) -> None:
    one = prompt(length)
    expected = models.expected(one, 40, kind)
    prefill, decode = models.rig(kind, max_num_batched_tokens=24), models.rig(kind)
    prefill.engine.add("p", one, greedy(40), prefill_only=True)
    prefill.drain()
    assert prefill.tokens["p"] == expected[:1]
    decode.pool.allocate_state("gap")
    # Beside a full ring, the whole of a short one is read.
    decode.engine.add("other", prompt(60), greedy(60))
    decode.step()
    hand_over(prefill, decode, "p")
    decode.pool.release("gap")
    decode.engine.adopt("d", one, greedy(40), owner="ticket", first_tokens={0: expected[0]}, cached_tokens=0)
    prefill.engine.release("p")
    decode.drain()
    assert decode.tokens["d"] == expected[1:]
    assert decode.tokens["other"] == models.expected(prompt(60), 60, kind)
    for rig in (prefill, decode):
        rig.assert_idle()


def test_a_held_prefill_does_not_write_its_ring_again(models, prompt, greedy) -> None:
    rig = models.rig("gemma3", slots=3, max_num_batched_tokens=16)
    rig.engine.add("p", prompt(70), greedy(9), prefill_only=True)
    while "p" not in rig.tokens:
        rig.step()
    state = rig.engine.sequence("p")
    frozen = rings_of(rig)[state.state_slot].clone()
    others = [prompt(40 + n, n) for n in range(4)]
    assert rig.generate(others, greedy(30)) == [models.expected(one, 30, "gemma3") for one in others]
    assert torch.equal(rings_of(rig)[state.state_slot], frozen)
    assert rig.engine.sequence("p") == state
    rig.engine.release("p")
    rig.assert_idle()


def test_adopt_without_a_slot_is_refused_and_changes_nothing(models, prompt, greedy) -> None:
    rig = models.rig("gemma3")
    rig.pool.allocate("ticket", 2)
    with pytest.raises(ValueError, match="state slot -1"):
        rig.engine.adopt("a", prompt(17), greedy(4), owner="ticket", first_tokens={0: 5}, cached_tokens=0)
    assert rig.pool.pages_of("ticket")
    assert rig.engine.sequence("a") is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_earlier_owner_left_is_gone(models, prompt, greedy, kind) -> None:
    rig = models.rig(kind, slots=2)
    rings_of(rig)[:] = torch.nan
    prompts = [prompt(length, 7) for length in (1, 5, 40, 33)]
    assert rig.generate(prompts, greedy(40)) == [models.expected(one, 40, kind) for one in prompts]
    rig.assert_idle()


def test_nan_in_one_ring_fails_only_its_sequence(models, prompt, greedy) -> None:
    rig = models.rig("mistral-window", slots=2)
    rig.engine.add("bad", prompt(40), greedy(30))
    rig.engine.add("good", prompt(41), greedy(30))
    rig.step()
    rings_of(rig)[rig.engine.sequence("bad").state_slot] = torch.nan
    rig.drain()
    assert rig.finished["bad"].finish_reason == "abort"
    assert rig.tokens["good"] == models.expected(prompt(41), 30, "mistral-window")
    prompts = [prompt(50, n) for n in range(4)]
    assert rig.generate(prompts, greedy(4)) == [models.expected(one, 4, "mistral-window") for one in prompts]
    rig.assert_idle()


def test_preemption_equals(models, prompt, greedy) -> None:
    """Too few pages for all: who is preempted gives its slot back, and computes its ring again in another one."""
    rig = models.rig("gemma3", pages=16, slots=5)
    prompts = [prompt(20 + n, n) for n in range(5)]
    preempted = 0
    for n, one in enumerate(prompts):
        rig.engine.add(f"r{n}", one, greedy(60))
    while rig.engine.has_work:
        before = rig.engine.load["waiting"]
        rig.step()
        preempted += rig.engine.load["waiting"] > before
    assert preempted, "the pool was large enough: nothing was tested"
    assert [rig.tokens[f"r{n}"] for n in range(5)] == [models.expected(one, 60, "gemma3") for one in prompts]
    rig.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_wait_for_a_slot(models, prompt, greedy, kind) -> None:
    rig = models.rig(kind, slots=2)
    rig.pool.allocate_state("ticket")
    prompts = [prompt(40 + n, n) for n in range(3)]
    for n, one in enumerate(prompts):
        rig.engine.add(f"r{n}", one, greedy(5))
    rig.step()
    assert rig.engine.load["running"] == 1
    rig.drain()
    assert [rig.tokens[f"r{n}"] for n in range(3)] == [models.expected(one, 5, kind) for one in prompts]
    rig.pool.allocate_state("other")
    rig.engine.add("late", prompts[0], greedy(5))
    assert rig.step() == []
    assert not rig.engine.has_work, "it would spin until somebody else gives a slot back"
    assert not rig.finished.keys() & {"late"}
    rig.pool.release("other")
    assert rig.engine.has_work
    rig.drain()
    assert rig.tokens["late"] == models.expected(prompts[0], 5, kind)
    rig.pool.release("ticket")
    rig.assert_idle()


def test_resume_continues_behind_the_first_token(models, prompt, greedy) -> None:
    one = prompt(75)
    expected = models.expected(one, 40, "gpt_oss")
    rig = models.rig("gpt_oss", max_num_batched_tokens=16)
    rig.engine.resume("r", one, greedy(40), first_tokens={0: expected[0]})
    rig.drain()
    assert rig.tokens["r"] == expected[1:]
    rig.assert_idle()


def test_pages_are_not_reused_without_the_rings_that_belong_to_them(models, prompt, greedy) -> None:
    """A hit would leave the rings empty at its end. The same engine without windows does hit."""
    one = np.concatenate([prompt(90), prompt(9, 1)])
    for kind, cached in (("gemma3", 0), ("qwen2-window", 0), ("mistral-window", 0), ("qwen2", 96)):
        rig = models.rig(kind, prefix_cache=True)
        expected = models.expected(one, 12, kind)
        assert rig.generate([one], greedy(12)) == rig.generate([one], greedy(12)) == [expected]
        assert list(rig.finished.values())[-1].cached_tokens == cached
        # Kept all the same: a ticket brings the ring, so it need not bring pages that are here.
        assert (rig.pool.cached > 0) is (kind != "mistral-window")
        rig.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_random_times_leave_nothing_held(models, prompt, greedy, kind, seed) -> None:
    rng = random.Random(seed)
    rig = models.rig(kind, pages=24, slots=4, max_num_batched_tokens=rng.choice([16, 40]), max_num_seqs=5)
    layout = rig.model.layout
    live: dict[str, np.ndarray] = {}
    for turn in range(60):
        choice, name, one = rng.random(), f"r{turn}", prompt(rng.randint(1, 80), rng.randint(0, 3))
        if choice < 0.3:
            rig.engine.add(name, one, greedy(12), prefill_only=rng.random() < 0.4)
            live[name] = one
        elif choice < 0.4 and rig.pool.free_states and rig.pool.available >= layout.pages_for(len(one)):
            rig.pool.allocate("ticket", layout.pages_for(len(one)))
            rig.pool.allocate_state("ticket")
            rig.engine.adopt(name, one, greedy(12), owner="ticket", first_tokens={0: 9}, cached_tokens=0)
        elif choice < 0.6 and live:
            gone = rng.choice(sorted(live))
            del live[gone]
            rig.engine.abort(gone)
        elif rig.engine.has_work:
            rig.step()
    for name, one in live.items():
        # What came out until now is right, whoever had the slot before.
        wanted = models.expected(one, 12, kind)
        found = rig.tokens.get(name, [])
        assert found == wanted[: len(found)]
    for turn in range(60):
        rig.engine.abort(f"r{turn}")
    rig.drain()
    rig.assert_idle()


def test_a_model_without_full_layers_has_no_pages(models, prompt, greedy) -> None:
    rig = models.rig("mistral-window", slots=3)
    layout = rig.model.layout
    assert (layout.layers, layout.page_bytes, layout.pages_for(1000)) == (0, 0, 0)
    assert layout.state_bytes == 2 * 2 * WINDOW * 2 * 16 * 4
    assert rig.engine.max_model_len == 640
    one = prompt(600)
    assert rig.generate([one], greedy(100)) == [models.expected(one, 40, "mistral-window")]
    assert {output.finish_reason for output in rig.finished.values()} == {"length"}
    rig.assert_idle()


def test_state_memory_must_be_there(models) -> None:
    model = models.load("gemma3")
    with pytest.raises(ValueError, match="0 state slots"):
        EmbeddedEngine(model, PagePool(4), bytearray(4 * model.layout.page_bytes))


class TestTheSelfCheckSeesTheWindow:
    """A model whose window is done wrongly must not start, however long its real window is."""

    @pytest.mark.parametrize("kind", ["mistral-window", "gemma3", "gpt_oss"])
    @pytest.mark.parametrize("by", [-1, 1])
    def test_chunks_that_see_one_token_too_many_or_too_few(self, models, monkeypatch, kind, by) -> None:
        import kvrail.kernels.ring_kv as module

        right = module.blocks_of
        monkeypatch.setattr(
            module,
            "blocks_of",
            lambda earlier, length, window, like: right(earlier, length, window + by, like),
        )
        with pytest.raises(ConfigError, match="self-check failed"):
            PagedModel.load(models.checkpoint(kind), "float32", 16)

    @pytest.mark.parametrize("kind", ["mistral-window", "gemma3"])
    def test_a_ring_that_is_not_written(self, models, monkeypatch, kind) -> None:
        monkeypatch.setattr(RingKV, "store", lambda self, layer, key, value: None)
        with pytest.raises(ConfigError, match="self-check failed"):
            PagedModel.load(models.checkpoint(kind), "float32", 16)

    @pytest.mark.parametrize(("kind", "left_out"), [("gpt_oss", "s_aux"), ("gemma2", "softcap")])
    def test_sinks_and_softcap(self, models, monkeypatch, kind, left_out) -> None:
        right = StepPlan.attend
        monkeypatch.setattr(StepPlan, "attend", lambda *a, **more: right(*a, **(more | {left_out: None})))
        with pytest.raises(ConfigError, match="self-check failed"):
            PagedModel.load(models.checkpoint(kind), "float32", 16)

    def test_the_real_window_is_back_afterwards(self, models) -> None:
        model = models.load("gemma3")
        assert model._model.config.sliding_window == WINDOW
        windows = [layer.self_attn.sliding_window for layer in model._model.model.layers]
        assert windows == [WINDOW, None, WINDOW]
