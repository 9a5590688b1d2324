# SPDX-License-Identifier: Apache-2.0
"""A fake rank that says given texts, a chat template with tools and thinking, and a tool: for tests of clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.fake_rank import FakeRank, output
from kit.tiny_model import END, byte_level_tokenizer
from kvrail.runtime.messages import Submit, ToFront, ToRank
from kvrail.transfer.wire import unpack_u32

__all__ = ["CALL", "TEMPLATE", "WEATHER", "ids", "prompts", "says"]

TOKENIZER = byte_level_tokenizer()
TEMPLATE = (
    "{% if tools %}TOOLS {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n{% else %}<think></think>\n"
    "{% endif %}{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def says(*texts: str) -> Any:
    """One answer after the other, three tokens a step."""
    left = list(texts)

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            tokens = [*ids(left.pop(0) if len(left) > 1 else left[0]), END]
            for place in range(0, len(tokens), 3):
                step = tokens[place : place + 3]
                yield output(message.request_id, step, "stop" if step[-1] == END else None)

    return behave


def prompts(at: Any) -> list[str]:
    return [
        TOKENIZER.decode(unpack_u32(m.tokens).tolist()) for m in at.rank.received if isinstance(m, Submit)
    ]
