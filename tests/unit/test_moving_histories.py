# SPDX-License-Identifier: Apache-2.0
"""Random histories of requests that move between prefill engines: each ends once, and nothing of it is left.

At most three engines are asked, none twice, and what the user has been told stays, whatever the engines do meanwhile
(kit/moving_world.py).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kit.moving_world import MovingWorld

PLACE = st.integers(0, 4)
PICK = st.integers(0, 1000)
LINK = ["cut", "down", "dies", "silent", "speaks", "up", "proof"]
WORDS = ["first", "first", "first", "landed", "landed summed", "failed", "quiesced"]
WRONG = ["landed damaged", "first nonsense", "landed nonsense"]
SILENT = ["nobody", "engines", "front and engines"]
ENDS = [0, 0, 0, 1, 2, 7]


class Histories(RuleBasedStateMachine):
    @initialize(seats=st.sampled_from([3, 6]), silent=st.sampled_from(SILENT), up=st.integers(1, 5))
    def begin(self, seats: int, silent: Any, up: int) -> None:
        """`silent`: who does not answer at the end."""
        self.world, self.silent = MovingWorld(seats), silent
        for place in range(up):
            self.world.link(place, "up")

    @rule(
        place=PLACE,
        pages=st.sampled_from([1, 2, 6, 16, 17]),
        n=st.integers(1, 3),
        fallback=st.booleans(),
        ahead=st.booleans(),
        late=st.sampled_from([False, False, True]),
    )
    def submit(self, place: int, pages: int, n: int, fallback: bool, ahead: bool, late: bool) -> None:
        if sum(bool(one.open) for one in self.world.requests.values()) < 12:
            self.world.submit(place, pages, n, fallback, ahead, late)

    @rule(place=PLACE, pick=PICK, word=st.sampled_from(WORDS + WRONG), token=PICK, ends=st.sampled_from(ENDS))
    def peer_speaks(self, place: int, pick: int, word: str, token: int, ends: int) -> None:
        self.world.peer_speaks(place, pick, word, token, ends)

    @rule(place=PLACE, what=st.sampled_from(LINK))
    def link(self, place: int, what: str) -> None:
        self.world.link(place, what)

    @rule(pick=PICK)
    def call_fails(self, pick: int) -> None:
        self.world.call_fails(pick)

    @rule(pick=PICK, which=PICK)
    def answer(self, pick: int, which: int) -> None:
        self.world.answer(pick, which)

    @rule(pick=PICK, choice=st.none() | st.integers(0, 2))
    def leave(self, pick: int, choice: int | None) -> None:
        self.world.leave(pick, choice)

    @rule(pick=PICK, finish=st.sampled_from([None, "stop", "length"]))
    def step(self, pick: int, finish: str | None) -> None:
        self.world.step(pick, finish)

    @rule()
    def checksums(self) -> None:
        self.world.checks.run()

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 4, 12, 31]))
    def turn(self, seconds: float) -> None:
        self.world.turn(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle(self.silent)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def walk(seed: int, steps: int) -> MovingWorld:
    """A long history with much under way and engines that fail often; its world, settled."""
    chance = random.Random(seed)
    machine = Histories()
    machine.begin(chance.choice([3, 8]), chance.choice(SILENT), 5)

    def some(limit: int = 5) -> int:
        return chance.randrange(limit)

    def submit() -> None:
        fallback, ahead, late = (chance.random() < odds for odds in (0.6, 0.7, 0.2))
        machine.submit(some(), 1 + some(6), 1 + some(3), fallback, ahead, late)

    def speaks(words: list[str]) -> None:
        machine.peer_speaks(some(), some(99), chance.choice(words), some(9), chance.choice(ENDS))

    moves = [
        (2.5, submit),
        (8, lambda: speaks(WORDS)),
        (1, lambda: speaks(WRONG)),
        (2, lambda: machine.link(some(), chance.choice(LINK))),
        (4, lambda: machine.link(some(), "up")),
        (2, lambda: machine.link(some(), "speaks")),
        (0.7, lambda: machine.call_fails(some(99))),
        (3, lambda: machine.answer(some(99), some(99))),
        (0.7, lambda: machine.leave(some(99), chance.choice([None, 0, 1]))),
        (2, lambda: machine.step(some(99), chance.choice([None, None, "stop", "length"]))),
        (2, machine.checksums),
        (6, lambda: machine.turn(chance.choice([0, 0.01, 0.3, 3]))),
    ]
    weights = [weight for weight, _ in moves]
    for _ in range(steps):
        chance.choices(moves, weights)[0][1]()
    machine.teardown()
    return machine.world


def test_long_walks_reach_everything() -> None:
    seen = sum((walk(seed, 250).seen for seed in range(100)), Counter[str]())
    expected = {
        "requests_submitted": 800,
        "granted as called for": 50,
        "asked 2": 300,
        "asked 3": 200,
        "stranded behind a first token": 40,
        "resumed here": 12,
        "prefilled here": 200,
        "adopted": 200,
        "done": 400,
        "left": 200,
        "failed": 150,
        "fenced": 200,
        "ticket_late_first_tokens": 80,
        "ticket_late_doorbells": 80,
        "ticket_failed_doorbells": 40,
        "ticket_unproven_answers": 5,
        "ticket_expired": 400,
        "bad_hand_offs": 12,
        "checksum_mismatches": 10,
    }
    rare = {what: seen[what] for what, least in expected.items() if seen[what] < least}
    assert not rare, f"the walks no longer reach this often enough to mean anything: {rare}"
