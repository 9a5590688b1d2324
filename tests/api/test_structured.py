# SPDX-License-Identifier: Apache-2.0
"""Prescribed forms of an answer: which field becomes which grammar, and what is refused before a rank hears of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kit.fake_rank import answers
from kit.tiny_model import END, byte_level_tokenizer
from kvrail.frontend import structured
from kvrail.runtime.errors import BadRequest, Unavailable
from kvrail.runtime.grammar import Grammars
from kvrail.runtime.messages import Submit

TOKENIZER = byte_level_tokenizer()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "left" | "right"'


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(TOKENIZER.to_str(), eos_token=[END]), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in ids(text)) and matcher.is_accepting()


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        '{"a": 1}',
        '{"b": 1}',
    ),
    ({"guided_json": SCHEMA}, '{"a":1}', "{}"),
    ({"guided_json": '{"type": "boolean"}'}, "true", "1"),
    ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
    ({"guided_choice": ["yes", 'n"o\n', "é"]}, 'n"o\n', "maybe"),
    ({"guided_grammar": 'start: "x" start | "y"'}, "xxy", "xx"),
    ({"guided_grammar": GBNF}, "right", "up"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a":1}', "{}"),
    ({"structured_outputs": {"regex": "a+"}}, "aaa", "b"),
    ({"structured_outputs": {"choice": ["one"]}}, "one", "two"),
    ({"structured_outputs": {"grammar": GBNF}}, "left", "up"),
    ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
]


@pytest.mark.parametrize("place", range(len(FORMS)))
def test_forms(stand: Any, place: int) -> None:
    asked, good, bad = FORMS[place]
    at = stand(answers(ids("c")))
    for path, body in ((CHAT, HI), (TEXT, {"prompt": "x"})):
        response = at.client.post(path, json={**body, **asked})
        assert response.status_code == 200, response.text
    for submit in at.rank.wait_for(Submit, 2):
        assert submit.sampling.eos_ids == [0, END]
        assert accepts(submit.sampling.grammar, good)
        assert not accepts(submit.sampling.grammar, bad)


@pytest.mark.parametrize("asked", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_no_form(stand: Any, asked: dict[str, Any]) -> None:
    at = stand(answers(ids("c")))
    assert at.client.post(CHAT, json={**HI, **asked}).status_code == 200
    assert at.rank.wait_for(Submit)[0].sampling.grammar == ""


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "[0-9"}, "guided_regex", "regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar", ""),
    ({"guided_json": {"type": "banana"}}, "guided_json", "banana"),
    ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "not"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
    ({"guided_json": [1]}, "guided_json", "JSON schema"),
    ({"guided_grammar": "a" * 200_000}, "guided_grammar", "at most"),
    ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex", "at most"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": [""]}, "guided_choice[0]", "at least 1"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "only one"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "not a known field",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "'text'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no"}}}},
        "response_format",
        "no",
    ),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not a known field"),
]


def test_what_is_refused(stand: Any) -> None:
    at = stand(answers(ids("c")))
    for asked, param, says in REFUSED:
        response = at.client.post(CHAT, json={**HI, **asked})
        assert response.status_code == 400, (asked, response.text)
        error = response.json()["error"]
        assert error["param"] == param, error
        assert says in error["message"], error
        assert "<state>" not in error["message"]
    assert not [message for message in at.rank.received if isinstance(message, Submit)]


def test_who_gives_up_waiting_for_a_grammar_spoils_it_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def load() -> str:
        assert go.wait(20)
        return TOKENIZER.to_str()

    grammars = Grammars(load, 300)
    first, second = (LLMatcher.grammar_from_regex(text) for text in ("a+", "b+"))

    async def story() -> None:
        monkeypatch.setattr(structured, "_COMPILE_WITHIN_S", 0.05)
        # The one that compiles, and one that has not begun.
        with pytest.raises(BadRequest, match="too long"):
            await structured.check_grammar(grammars, first, [END], "guided_regex")
        with pytest.raises(Unavailable, match="other grammars"):
            await structured.check_grammar(grammars, second, [END], "guided_regex")
        go.set()
        monkeypatch.setattr(structured, "_COMPILE_WITHIN_S", 20.0)
        for grammar in (first, second):
            await structured.check_grammar(grammars, grammar, [END], "guided_regex")

    try:
        asyncio.run(story())
    finally:
        go.set()
        grammars.close()
