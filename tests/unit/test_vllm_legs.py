# SPDX-License-Identifier: Apache-2.0
"""One request on two engines, in every order of events: the client sees each token once, in order, or an error."""

from __future__ import annotations

import random

import pytest

from kvrail.runtime.vllm.legs import Attempt, Split


class Hands:
    """Writes down what is asked for."""

    def __init__(self) -> None:
        self.calling = False
        self.inside: dict[int, Attempt] = {}
        self.log: list[str] = []

    def call_prefill(self) -> None:
        self.calling = True

    def drop_prefill(self) -> None:
        self.calling = False

    def submit(self, number: int, attempt: Attempt) -> None:
        self.inside[number] = attempt
        self.log.append(attempt)

    def withdraw(self, number: int) -> None:
        self.inside.pop(number, None)

    def failure(self, reason: str) -> str:
        return f"error: {reason}"

    def note(self, what: str, reason: str) -> None:
        self.log.append(what)


def begun(*, may_fall_back: bool = True, only_token_1: bool = False) -> tuple[Split[str], Hands]:
    hands = Hands()
    split: Split[str] = Split(hands, may_fall_back=may_fall_back)
    split.start(only_token_1=only_token_1)
    return split, hands


def test_both_legs_begin_at_once() -> None:
    split, hands = begun()
    assert hands.calling
    assert hands.inside == {1: "handoff"}
    assert split.token_1("1", final=False) == ["1"]
    assert split.core(1, "2", "no") == ["2"]
    assert split.core(1, "3", "end") == ["3"]
    assert split.done
    assert hands.log == ["handoff", "remote"]


def test_the_core_never_overtakes_token_1() -> None:
    split, _ = begun()
    assert split.core(1, "2", "no") == []
    assert split.core(1, "3", "end") == []
    assert not split.done
    assert split.token_1("1", final=False) == ["1", "2", "3"]
    assert split.done


def test_an_answer_of_one_token_needs_no_core() -> None:
    split, hands = begun(only_token_1=True)
    assert hands.inside == {}
    assert split.token_1("1", final=True) == ["1"]
    assert split.done
    split, hands = begun(only_token_1=True)
    assert split.prefill_failed("gone") == []
    assert hands.inside == {1: "prompt"}
    assert split.core(1, "1", "end") == ["1"]


def test_token_1_ends_the_answer() -> None:
    split, hands = begun()
    assert split.core(1, "2", "no") == []
    assert split.token_1("1", final=True) == ["1"]
    assert split.done
    assert hands.inside == {}
    assert split.core(1, "3", "end") == []


def test_the_call_fails_before_token_1() -> None:
    split, hands = begun()
    assert split.core(1, "2", "no") == []
    assert split.prefill_failed("gone") == []
    assert hands.inside == {2: "prompt"}
    assert split.core(1, "3", "no") == [], "of the attempt that was given up"
    assert split.token_1("late", final=False) == []
    assert split.core(2, "1", "no") == ["1"]
    assert split.core(2, "2", "end") == ["2"]
    assert split.done


def test_the_kv_is_lost_before_token_1() -> None:
    split, hands = begun()
    assert split.core(1, "lost", "error") == []
    assert not hands.calling
    assert hands.inside == {2: "prompt"}
    assert split.prefill_failed("late word of the same call") == []
    assert hands.log == ["handoff", "fallback", "prompt"]


def test_the_kv_is_lost_behind_token_1() -> None:
    split, hands = begun()
    assert split.token_1("1", final=False) == ["1"]
    assert split.core(1, "lost", "error") == []
    assert hands.inside == {2: "behind token 1"}
    assert split.core(2, "2", "no") == ["2"]
    assert split.core(2, "broken", "error") == ["broken"], "nothing is left to try"
    assert split.done


def test_an_error_after_the_hand_over_is_an_error() -> None:
    split, hands = begun()
    assert split.token_1("1", final=False) + split.core(1, "2", "no") == ["1", "2"]
    assert split.core(1, "broken", "error") == ["broken"]
    assert split.done
    assert hands.log == ["handoff", "remote"]
    split, hands = begun()
    assert split.core(1, "2", "no") == []
    assert split.token_1("1", final=False) == ["1", "2"]
    assert split.core(1, "broken", "error") == ["broken"]


def test_what_was_held_back_is_dropped_with_its_attempt() -> None:
    split, hands = begun()
    assert split.core(1, "2", "end") == []
    assert split.prefill_failed("gone") == []
    assert not split.done
    assert hands.inside == {2: "prompt"}
    assert split.core(2, "1", "no") == ["1"]
    assert not split.done


@pytest.mark.parametrize("begins", [False, True])
def test_without_a_fall_back_a_lost_leg_is_an_error(begins: bool) -> None:
    split, hands = begun(may_fall_back=False)
    if begins:
        split.token_1("1", final=False)
        assert split.core(1, "lost", "error") == ["error: the KV of the prompt did not arrive"]
    else:
        assert split.prefill_failed("gone") == ["error: gone"]
    assert split.done
    assert hands.inside == {}
    assert not hands.calling


@pytest.mark.parametrize("when", ["at once", "after token 1", "after token 2", "after a fall back"])
def test_a_client_leaves(when: str) -> None:
    split, hands = begun()
    if when.startswith("after token"):
        split.token_1("1", final=False)
    if when == "after token 2":
        split.core(1, "2", "no")
    if when == "after a fall back":
        split.prefill_failed("gone")
    split.abort()
    split.abort()
    assert split.done
    assert hands.inside == {}
    assert split.core(1, "x", "no") + split.core(2, "x", "no") + split.token_1("x", final=False) == []
    assert split.prefill_failed("late") == []


@pytest.mark.parametrize("seed", range(300))
def test_any_order(seed: int) -> None:
    """Whatever comes when: no token twice, none out of order, none missing; no request left in the core."""
    rng = random.Random(seed)
    length = rng.randint(1, 5)
    split, hands = begun(only_token_1=length == 1)
    seen: list[str] = []
    made: dict[int, int] = {}
    lost: set[int] = set()
    answered = False
    while not split.done:
        choices = []
        if hands.calling and not answered:
            choices += ["token 1", "call fails"]
        choices += [f"core {number}" for number in hands.inside]
        event = rng.choice(choices)
        if event == "token 1":
            answered = True
            seen += split.token_1("1", final=length == 1)
        elif event == "call fails":
            answered = True
            seen += split.prefill_failed("gone")
        else:
            number = int(event.split()[1])
            attempt = hands.inside[number]
            if attempt == "handoff" and number not in made and rng.random() < 0.3:
                del hands.inside[number]
                lost.add(number)
                seen += split.core(number, "lost", "error")
                continue
            token = made.get(number, 0 if attempt == "prompt" else 1) + 1
            made[number] = token
            if token == length:
                del hands.inside[number]
            seen += split.core(number, str(token), "end" if token == length else "no")
    assert seen == [str(n + 1) for n in range(length)]
    assert hands.inside == {}
