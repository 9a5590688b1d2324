# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a grammar: in each of the engine's ways to go on with one, and whatever else runs beside them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from kit.tiny_model import END, byte_level_tokenizer
from kvrail.runtime.errors import BadRequest
from kvrail.runtime.grammar import Grammars

TOKENIZER = byte_level_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
NUMBER = LLMatcher.grammar_from_regex(r"[0-9]{3,6}")
TALK = LLMatcher.grammar_from_regex(r"(yes|no)[!?]")


def text(tokens: list[int]) -> str:
    return str(TOKENIZER.decode([token for token in tokens if token != END]))


@pytest.fixture
def grammars() -> Any:
    made = Grammars(TOKENIZER.to_str, 997)
    yield made
    made.close()


def asked(greedy: Callable[..., Any], grammar: str, tokens: int = 60, **more: Any) -> Any:
    return greedy(tokens, grammar=grammar, eos_ids=[END], **{"stop_token_ids": [END], **more})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_their_grammars_side_by_side(models, prompt, greedy, grammars, temperature) -> None:
    rig = models.rig(grammars=grammars)
    compact = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    rig.engine.add("json", prompt(20), asked(greedy, compact, temperature=temperature))
    rig.engine.add("number", prompt(21), asked(greedy, NUMBER, temperature=temperature))
    rig.engine.add("talk", prompt(5), asked(greedy, TALK, temperature=temperature))
    rig.engine.add("free", prompt(30), greedy(30))
    rig.drain()
    found = json.loads(text(rig.tokens["json"]))
    assert found["kind"] in ("cat", "dog")
    assert 0 <= found["legs"] <= 99
    assert re.fullmatch(r"[0-9]{3,6}", text(rig.tokens["number"]))
    assert text(rig.tokens["talk"]) in ("yes!", "yes?", "no!", "no?")
    assert rig.tokens["free"] == models.expected(prompt(30), 30)
    reasons = {name: output.finish_reason for name, output in rig.finished.items()}
    assert reasons == {"json": "stop", "number": "stop", "talk": "stop", "free": "length"}
    # What cannot go on ends without an end token, so that one is not needed.
    assert END not in rig.tokens["talk"]
    rig.assert_idle()


def test_it_ends_without_end_tokens(models, prompt, greedy, grammars) -> None:
    rig = models.rig(grammars=grammars)
    rig.engine.add("r", prompt(9), asked(greedy, TALK, stop_token_ids=[]))
    rig.drain()
    assert rig.finished["r"].finish_reason == "stop"
    assert text(rig.tokens["r"]) in ("yes!", "yes?", "no!", "no?")


def test_min_tokens_hold_back_the_end(models, prompt, greedy, grammars) -> None:
    for least in (0, 5):
        rig = models.rig(grammars=grammars)
        bias = [(END, 50.0)]
        rig.engine.add("r", prompt(9), asked(greedy, NUMBER, min_tokens=least, logit_bias=bias))
        rig.drain()
        assert len(text(rig.tokens["r"])) == max(3, least)


@pytest.mark.parametrize("way", ["adopt", "resume", "preempt", "choices"])
def test_it_goes_on_from_the_tokens_that_are_out(models, prompt, greedy, grammars, way) -> None:
    one = prompt(16)
    sampling = asked(greedy, NUMBER, temperature=1.0)
    whole = models.rig(grammars=grammars)
    whole.engine.add("r", one, sampling)
    whole.drain()
    expected = whole.tokens["r"]
    rig = models.rig(pages=6 if way == "preempt" else 40, grammars=grammars)
    if way == "choices":
        rig.engine.add("r", one, asked(greedy, NUMBER, temperature=1.0, n=3))
        answers: dict[int, list[int]] = {}
        while rig.engine.has_work:
            for output in rig.engine.step():
                if output.token is not None:
                    answers.setdefault(output.choice, []).append(output.token)
        assert answers[0] == expected
        assert all(re.fullmatch(r"[0-9]{3,6}", text(answer)) for answer in answers.values())
        assert len({tuple(answer) for answer in answers.values()}) == 3
    elif way == "preempt":
        rig.engine.add("other", prompt(30), greedy(40))
        rig.engine.add("r", one, sampling)
        rig.drain()
        assert rig.tokens["r"] == expected
    else:
        if way == "resume":
            rig.engine.resume("r", one, sampling, first_tokens={0: expected[0]})
        else:
            rig.pool.allocate("ticket", 1)
            rig.engine.adopt(
                "r", one, sampling, owner="ticket", first_tokens={0: expected[0]}, cached_tokens=0
            )
        rig.drain()
        # (Adopted pages are empty here, so only the form of the answer is known.)
        assert re.fullmatch(r"[0-9]{3,6}", text([expected[0], *rig.tokens["r"]]))
        assert way == "adopt" or rig.tokens["r"] == expected[1:]
    rig.assert_idle()


def test_a_first_token_that_the_grammar_forbids_fails_the_request(models, prompt, greedy, grammars) -> None:
    rig = models.rig(grammars=grammars)
    wrong = TOKENIZER.token_to_id("x")
    rig.engine.resume("r", prompt(9), asked(greedy, NUMBER), first_tokens={0: wrong})
    rig.drain()
    assert rig.finished["r"].finish_reason == "abort"
    assert "no token" in (rig.finished["r"].error or "")
    rig.assert_idle()


def test_others_go_on_while_a_grammar_is_compiled(models, prompt, greedy) -> None:
    may_load = threading.Event()

    def load() -> str:
        assert may_load.wait(30)
        return str(TOKENIZER.to_str())

    grammars = Grammars(load, 997)
    rig = models.rig(grammars=grammars)
    rig.engine.add("slow", prompt(9), asked(greedy, TALK))
    rig.engine.add("free", prompt(30), greedy(10))
    for _ in range(12):
        rig.step()
    assert rig.tokens == {"free": models.expected(prompt(30), 10)}
    # Alone, it neither spins nor blocks for long.
    assert rig.engine.has_work
    assert rig.step() == []
    may_load.set()
    rig.drain()
    assert text(rig.tokens["slow"]) in ("yes!", "yes?", "no!", "no?")
    grammars.close()


@pytest.mark.parametrize("prefill_only", [False, True])
def test_what_does_not_compile_fails_its_request_alone(
    models, prompt, greedy, grammars, prefill_only
) -> None:
    rig = models.rig(grammars=grammars)
    rig.engine.add("bad", prompt(9), asked(greedy, "start: nothing"), prefill_only=prefill_only)
    rig.engine.add("free", prompt(30), greedy(10))
    rig.drain()
    assert rig.finished["bad"].finish_reason == "abort"
    assert 'unknown name: "nothing"' in (rig.finished["bad"].error or "")
    assert rig.tokens["free"] == models.expected(prompt(30), 10)
    rig.engine.release("bad")
    rig.assert_idle()


def test_an_engine_without_grammars_says_so(models, prompt, greedy) -> None:
    with pytest.raises(BadRequest, match="no grammars"):
        models.rig().engine.add("r", prompt(9), asked(greedy, TALK))


def test_grammars_are_compiled_once(grammars) -> None:
    first = grammars.begin(TALK, [END])
    assert grammars.begin(TALK, [END]) is first
    first.result(30)
    for number in range(70):
        grammars.begin(LLMatcher.grammar_from_regex(f"a{number}"), [END])
    assert grammars.begin(TALK, [END]) is not first, "the oldest are forgotten"


def test_a_model_without_end_tokens_has_no_grammars(grammars) -> None:
    with pytest.raises(BadRequest, match="no end token"):
        grammars.begin(TALK, []).result(30)
