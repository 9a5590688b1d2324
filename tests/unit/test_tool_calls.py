# SPDX-License-Identifier: Apache-2.0
"""Each family's tool calls are found however the text is cut, and what is no call stays text to the last character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.frontend.tool_calls import ToolCall
from kvrail.frontend.tool_formats import FORMATS, ToolFormat, forced_format, format_of_template

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("weather", {"city": "Köln", "days": 2})
NOW = ("now", {})
T, S = "｜", "▁"

GOOD = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>',
        [WEATHER],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 2}"}</tool_call>',
        ["Let me see.", NOW, WEATHER],
    ),
    # Ended instead of closed.
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', [NOW]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        [WEATHER],
    ),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', [NOW, NOW]),
    ("pythonic", '[weather(city="Köln", days=2), now()]', [WEATHER, NOW]),
    ("pythonic", "<|python_tag|>[now()]", [NOW]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln", "days": 2}}, {"name": "now"}]',
        [WEATHER, NOW],
    ),
    (
        "mistral",
        'So:[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        ["So:", WEATHER, NOW],
    ),
    (
        "deepseek_v3",
        f"<{T}tool{S}calls{S}begin{T}><{T}tool{S}call{S}begin{T}>function<{T}tool{S}sep{T}>weather\n```json\n"
        f'{{"city": "Köln", "days": 2}}\n```<{T}tool{S}call{S}end{T}><{T}tool{S}calls{S}end{T}>',
        [WEATHER],
    ),
    (
        "deepseek_v3",
        f"<{T}tool{S}calls{S}begin{T}><{T}tool{S}call{S}begin{T}>now<{T}tool{S}sep{T}>{{}}<{T}tool{S}call{S}end{T}>"
        f"<{T}tool{S}calls{S}end{T}>",
        [NOW],
    ),
    (
        "deepseek_v32",
        f'<{T}DSML{T}function_calls>\n<{T}DSML{T}invoke name="weather">\n'
        f'<{T}DSML{T}parameter name="city" string="true">Köln</{T}DSML{T}parameter>\n'
        f'<{T}DSML{T}parameter name="days" string="false">2</{T}DSML{T}parameter>\n'
        f"</{T}DSML{T}invoke>\n</{T}DSML{T}function_calls>",
        [WEATHER],
    ),
]
# Looks like a call, and is none.
BAD = [
    ("hermes", 'a <tool_call>{"name": "weather", "arguments": {"city": </tool_call> b'),
    ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("hermes", "<tool_call></tool_call> <tool_"),
    ("qwen3_coder", "<function=weather"),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\nKö"),
    ("llama3_json", '{"name": "Ada", "age": 36}'),
    ("llama3_json", '{"colour": "red"}'),
    ("llama3_json", "Plain words {"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[weather('Köln')]"),
    ("pythonic", "[" * 5000),
    ("mistral", "[TOOL_CALLS] weather?"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("hermes", "<tool_call>0"),
    ("hermes", '<tool_call>["now"]</tool_call>'),
    ("deepseek_v3", f"<{T}tool{S}call{S}begin{T}>now"),
    ("deepseek_v32", f'<{T}DSML{T}invoke name="weather'),
]


def read(form: ToolFormat, pieces: list[str]) -> list[Any]:
    """The parts, with neighbouring texts joined and arguments parsed."""
    reader = form.reader(SCHEMAS)
    parts: list[Any] = []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.flush():
        if isinstance(part, ToolCall):
            parts.append((part.name, json.loads(part.arguments)))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


@pytest.mark.parametrize(("name", "text", "wanted"), GOOD)
def test_calls_are_found_however_the_text_is_cut(name: str, text: str, wanted: list[Any]) -> None:
    assert read(FORMATS[name], [text]) == wanted
    assert read(FORMATS[name], list(text)) == wanted
    for cut in range(len(text)):
        assert read(FORMATS[name], [text[:cut], text[cut:]]) == wanted, text[:cut]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert "".join(read(FORMATS[name], [text])) == text
    if len(text) < 1000:
        assert "".join(read(FORMATS[name], list(text))) == text


PIECES = st.lists(
    st.sampled_from(
        [
            *(marker for form in FORMATS.values() for marker in form.markers),
            *'{}[]()"=:, \nname\\',
            '{"name": "now"',
            "weather",
            "<parameter=city>",
            "<function=",
            "[now(",
        ]
    )
    | st.text(max_size=5),
    max_size=20,
)


@given(st.sampled_from(sorted(FORMATS)), PIECES)
def test_no_text_breaks_a_reader(name: str, pieces: list[str]) -> None:
    whole, cut = read(FORMATS[name], ["".join(pieces)]), read(FORMATS[name], pieces)
    assert whole == cut
    for part in whole:
        if not isinstance(part, str):
            assert part[0] in SCHEMAS


def test_text_goes_out_before_the_answer_ends() -> None:
    for name in FORMATS:
        reader = FORMATS[name].reader(SCHEMAS)
        assert reader.feed("A word") == ["A word"]
        assert reader.feed(" more") == [" more"]
    # An object that cannot be a call any more is not held back to its end.
    assert FORMATS["llama3_json"].reader(SCHEMAS).feed('{"answer": 4') == ['{"answer": 4']


def test_what_a_grammar_forces() -> None:
    assert read(forced_format("weather"), ['{"city": "Köln",', ' "days": 2}']) == [WEATHER]
    assert read(forced_format(None), ['[{"name": "now", "parameters": {}}', "]"]) == [NOW]
    # Cut by its length: no call, but no loss either.
    assert read(forced_format("weather"), ['{"city": "K']) == ['{"city": "K']


def test_a_surrogate_in_arguments_can_be_sent() -> None:
    reader = FORMATS["hermes"].reader(SCHEMAS)
    (call,) = reader.feed('<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert call.arguments.encode() == b'{"city": "\\ud800"}'


def test_templates_say_their_format() -> None:
    assert format_of_template("… {{ '<tool_call>\\n' }} …") == "hermes"
    assert format_of_template("{%- if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert format_of_template("{{ bos_token }}<|python_tag|>") == "llama3_json"
    assert format_of_template("<tool_call>\n<function=x>") == "qwen3_coder"
    assert format_of_template("nothing of the kind") == "none"


def test_ids_are_new_and_what_templates_take() -> None:
    assert FORMATS["hermes"].call_id() != FORMATS["hermes"].call_id()
    assert len(FORMATS["mistral"].call_id()) == 9
    assert FORMATS["mistral"].call_id().isalnum()
