# SPDX-License-Identifier: Apache-2.0
"""Several answers to one prompt: equal to as many requests with those seeds, over shared pages, each freed once."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvrail.kernels.reference import gather_pages, scatter_pages
from kvrail.runtime.model import pool_tensor
from kvrail.runtime.sampler import choice_seed


class Told:
    """What the engine says of one request, by choice."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, str] = {}

    def take(self, outputs: Any, sequence_id: str) -> None:
        for output in outputs:
            if output.sequence_id == sequence_id:
                assert output.choice not in self.reasons, "a choice goes on behind its end"
                if output.token is not None:
                    self.tokens[output.choice].append(output.token)
                if output.finish_reason is not None:
                    self.reasons[output.choice] = output.finish_reason

    @property
    def answers(self) -> list[list[int]]:
        return [self.tokens[choice] for choice in sorted(self.tokens)]


def run(rig: Any, sequence_id: str, until: Any = lambda: False) -> Told:
    told = Told()
    while rig.engine.has_work and not until():
        told.take(rig.engine.step(), sequence_id)
        rig.pool.check()
    return told


def alone(models: Any, one: Any, sampling: Any, kind: str = "llama") -> list[list[int]]:
    """The choices as requests of their own."""
    return [
        models.rig(kind).generate(
            [one], msgspec.structs.replace(sampling, n=1, seed=choice_seed(sampling.seed, choice))
        )[0]
        for choice in range(sampling.n)
    ]


@pytest.mark.parametrize("length", [1, 15, 16, 33, 64])
@pytest.mark.parametrize("cache", [True, False])
def test_equal_to_requests_of_their_own(models, prompt, greedy, length, cache) -> None:
    one, sampling = prompt(length), greedy(20, n=4, temperature=1.0, top_p=0.95)
    expected = alone(models, one, sampling)
    assert len({tuple(answer) for answer in expected}) > 1, "equal answers would prove little"
    for _ in "12":  # the second time the prompt comes from the cache
        rig = models.rig(prefix_cache=cache)
        rig.engine.add("r", one, sampling)
        told = run(rig, "r")
        assert told.answers == expected
        assert set(told.reasons.values()) == {"length"}
        rig.assert_idle()


@pytest.mark.parametrize("kind", ["gemma3", "mistral-window"])
@pytest.mark.parametrize("slots", [8, 2])
def test_rings_are_copied(models, prompt, greedy, kind, slots) -> None:
    """Each choice writes a ring of its own; one for which there is no slot waits and is computed anew."""
    one, sampling = prompt(45), greedy(20, n=4, temperature=1.0)
    expected = alone(models, one, sampling, kind)
    rig = models.rig(kind, slots=slots)
    rig.engine.add("r", one, sampling)
    assert run(rig, "r").answers == expected
    rig.assert_idle()


def test_the_prompt_is_computed_once_and_its_pages_are_shared(models, prompt, greedy) -> None:
    rig = models.rig(pages=16, prefix_cache=False)
    rig.engine.add("r", prompt(40), greedy(60, n=4, temperature=1.0))
    first = rig.step()
    assert [output.choice for output in first] == [0, 1, 2, 3]
    # Two full pages that all read; the third, half full, is one for each.
    assert (rig.pool.shared, rig.pool.owned) == (2, 4)
    assert rig.engine.load["running"] == 4
    rig.engine.abort("r")
    rig.assert_idle()
    assert rig.pool.free == 16


def test_a_copied_page_is_not_written_by_others(models, prompt, greedy) -> None:
    """Each choice goes on alone behind the half page; a shared one would mix their tokens."""
    rig = models.rig(prefix_cache=False)
    sampling = greedy(12, n=3, temperature=1.5)
    rig.engine.add("r", prompt(20), sampling)
    rig.step()
    pages = [one.pages[1] for one in rig.engine._roster.running]
    assert len(set(pages)) == 3
    assert run(rig, "r").answers == [answer[1:] for answer in alone(models, prompt(20), sampling)]


def test_choices_wait_for_seats_and_pages(models, prompt, greedy) -> None:
    sampling = greedy(40, n=6, temperature=1.0)
    expected = alone(models, prompt(20), sampling)
    for options in ({"max_num_seqs": 2}, {"pages": 7}, {"pages": 5, "prefix_cache": False}):
        rig = models.rig(**options)
        rig.engine.add("r", prompt(20), sampling)
        assert run(rig, "r").answers == expected, options
        rig.assert_idle()


def test_preempted_choices_equal(models, prompt, greedy) -> None:
    """Others grow at the same time, so that choices are preempted again and again."""
    sampling = greedy(50, n=3, temperature=0.9)
    expected = alone(models, prompt(30), sampling)
    rig = models.rig(pages=12)
    for number in range(3):
        rig.engine.add(f"o{number}", prompt(20, number), greedy(50))
    rig.engine.add("r", prompt(30), sampling)
    waited = 0
    told = Told()
    while rig.engine.has_work:
        before = rig.engine.load["waiting"]
        told.take(rig.engine.step(), "r")
        waited += rig.engine.load["waiting"] > before
        rig.pool.check()
    assert waited, "the pool was large enough: nothing was tested"
    assert told.answers == expected
    rig.assert_idle()


def test_choices_end_one_by_one(models, prompt, greedy) -> None:
    sampling = greedy(12, n=4, temperature=1.2)
    answers = alone(models, prompt(9), sampling)
    # The first token of one ends it at once, a later one of another in the middle.
    stops = [answers[1][0], answers[2][5]]
    rig = models.rig()
    rig.engine.add("r", prompt(9), msgspec.structs.replace(sampling, stop_token_ids=stops))
    told = run(rig, "r")
    for choice, answer in enumerate(answers):
        ends = [place for place, token in enumerate(answer) if token in stops]
        assert told.tokens[choice] == (answer[: ends[0] + 1] if ends else answer)
        assert told.reasons[choice] == ("stop" if ends else "length")
    rig.assert_idle()


def test_one_choice_is_dropped(models, prompt, greedy) -> None:
    sampling = greedy(12, n=3, temperature=1.0)
    expected = alone(models, prompt(40), sampling)
    for steps in (0, 1, 4):  # while the prompt waits, when it has just branched, and in the middle
        rig = models.rig()
        rig.engine.add("r", prompt(40), sampling)
        told = Told()
        for _ in range(steps):
            told.take(rig.engine.step(), "r")
        rig.engine.abort("r", 1)
        while rig.engine.has_work:
            told.take(rig.engine.step(), "r")
            rig.pool.check()
        assert (told.tokens[0], told.tokens[2]) == (expected[0], expected[2])
        assert told.tokens[1] == expected[1][:steps]
        assert 1 not in told.reasons
        rig.assert_idle()


def test_dropping_all_choices_drops_the_request(models, prompt, greedy) -> None:
    rig = models.rig()
    rig.engine.add("r", prompt(40), greedy(9, n=2))
    rig.engine.abort("r", 0)
    rig.engine.abort("r", 1)
    rig.assert_idle()


@pytest.mark.parametrize("length", [16, 33])
def test_across_the_split(models, prompt, greedy, length) -> None:
    """One engine prefills and gives every first token; the other one decodes them over its copy of the pages."""
    one, sampling = prompt(length), greedy(15, n=3, temperature=1.0, presence_penalty=0.5)
    expected = alone(models, one, sampling)
    prefill, decode = models.rig(max_num_batched_tokens=16), models.rig()
    prefill.engine.add("p", one, sampling, prefill_only=True)
    firsts = run(prefill, "p").tokens
    assert [firsts[choice] for choice in range(3)] == [answer[:1] for answer in expected]
    state = prefill.engine.sequence("p")
    assert state is not None
    pages = decode.pool.allocate("ticket", len(state.pages))
    source = pool_tensor(prefill.memory, prefill.pool.pages, prefill.model.layout)
    target = pool_tensor(decode.memory, decode.pool.pages, decode.model.layout)
    scatter_pages(target, torch.tensor(pages), gather_pages(source, torch.tensor(state.pages)))
    prefill.engine.release("p")
    going = {choice: tokens[0] for choice, tokens in firsts.items() if choice != 1}
    decode.engine.adopt("d", one, sampling, owner="ticket", first_tokens=going, cached_tokens=0)
    told = run(decode, "d")
    assert told.tokens == {choice: expected[choice][1:] for choice in going}
    # The same behind a prefill that was lost.
    decode.engine.resume("s", one, sampling, first_tokens=going)
    told = run(decode, "s")
    assert told.tokens == {choice: expected[choice][1:] for choice in going}
    for rig in (prefill, decode):
        rig.assert_idle()


@pytest.mark.parametrize("seed", range(6))
def test_random_ends_leave_nothing_held(models, prompt, greedy, seed) -> None:
    rng = random.Random(seed)
    rig = models.rig(
        pages=rng.choice([10, 16, 40]),
        max_num_batched_tokens=rng.choice([16, 40, 2048]),
        max_num_seqs=rng.choice([3, 9]),
        prefix_cache=rng.random() < 0.7,
    )
    live: list[str] = []
    for turn in range(80):
        dice = rng.random()
        if dice < 0.3:
            live.append(f"r{turn}")
            sampling = greedy(rng.randint(1, 30), temperature=1.0, n=rng.randint(1, 5))
            one = prompt(rng.randint(1, 50), rng.randint(0, 2))
            if rng.random() < 0.7:
                rig.engine.add(live[-1], one, sampling)
            else:
                firsts = {choice: 7 + choice for choice in range(sampling.n)}
                rig.engine.resume(live[-1], one, sampling, first_tokens=firsts)
        elif dice < 0.45 and live:
            rig.engine.abort(rng.choice(live), rng.choice([None, 0, 1, 2]))
        elif rig.engine.has_work:
            rig.step_quietly()
        rig.pool.check()
    for name in live:
        if rng.random() < 0.5:
            rig.engine.abort(name)
    for _ in range(3000):
        if not rig.engine.has_work:
            break
        rig.step_quietly()
    rig.assert_idle()


def test_prompt_logprobs(models, prompt, greedy) -> None:
    """In chunks of any size, told once, also when the sequence is computed twice."""
    one = prompt(300)
    logits = models.reference("llama")(torch.from_numpy(one.astype(np.int64))[None]).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[range(299), one[1:].astype(np.int64)].tolist()
    for options in ({}, {"max_num_batched_tokens": 24}, {"pages": 20}):
        rig = models.rig(**options)
        found: list[Any] = []
        rig.engine.add("r", one, greedy(3, n=2, prompt_logprobs=2))
        while rig.engine.has_work:
            for output in rig.engine.step():
                found += output.prompt_logprobs
        assert [round(note.logprob, 3) for note in found] == pytest.approx(wanted, abs=2e-3)
        assert [note.top[0][0] for note in found] == logits[:-1].argmax(-1).tolist()
        rig.assert_idle()
