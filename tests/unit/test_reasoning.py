# SPDX-License-Identifier: Apache-2.0
"""Thinking is told from the answer however the text is cut; what does not think is left as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.frontend.reading import Reading
from kvrail.frontend.reasoning import REASONING, ReasoningReader, reasoning_of_template
from kvrail.frontend.tool_calls import ToolCall
from kvrail.frontend.tool_formats import FORMATS


def split(pieces: list[str], *, inside: bool, name: str = "qwen3") -> tuple[str, str]:
    reader = ReasoningReader(REASONING[name], inside=inside)
    out = [reader.feed(piece) for piece in pieces] + [reader.flush()]
    return "".join(part[0] for part in out), "".join(part[1] for part in out)


@pytest.mark.parametrize(
    ("text", "inside", "wanted"),
    [
        ("<think>\nHm, 2 < 3.\n</think>\n\nYes.", False, ("Hm, 2 < 3.", "Yes.")),
        ("Hm.\n</think>\n\nYes. <think>", True, ("Hm.", "Yes. <think>")),
        ("No thoughts at all", False, ("", "No thoughts at all")),
        ("<thin air", False, ("", "<thin air")),
        ("<thi", False, ("", "<thi")),
        ("Cut off in tho", True, ("Cut off in tho", "")),
        ("half a mark </th", True, ("half a mark </th", "")),
        ("\n</think>\n\n", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_however_the_text_is_cut(text: str, inside: bool, wanted: tuple[str, str]) -> None:
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]], inside=inside) == wanted
    assert split(list(text), inside=inside) == wanted


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "/", " ", "\n", "a"])), st.booleans()
)
def test_cuts_never_matter(pieces: list[str], inside: bool) -> None:
    assert split(pieces, inside=inside) == split(["".join(pieces)], inside=inside)


def test_thoughts_go_out_at_once() -> None:
    reader = ReasoningReader(REASONING["mistral"], inside=False)
    assert reader.feed("[THINK]So") == ("So", "")
    assert reader.feed(" it is[/THI") == (" it is", "")
    assert reader.feed("NK] Done") == ("", "Done")


def test_a_call_in_a_thought_is_a_thought() -> None:
    reading = Reading(REASONING["qwen3"], thinking=True, tools=FORMATS["hermes"], schemas={"now": {}})
    reader = reading.reader()
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    delta = reader.feed(f"perhaps {call}</think>\n\nWell: {call}")
    assert (delta.reasoning, delta.content) == (f"perhaps {call}", "Well:")
    assert delta.calls == [ToolCall("now", "{}")]
    assert reader.flush().calls == []


def test_templates_say_whether_their_model_thinks() -> None:
    assert reasoning_of_template("{{ '<think>\\n\\n</think>' }}") == "deepseek_r1"
    assert reasoning_of_template("[THINK]x[/THINK]") == "mistral"
    assert reasoning_of_template("plain") == "none"
