# SPDX-License-Identifier: Apache-2.0
"""How answers are read: a model's formats for tool calls and thinking, chosen once, applied to each request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrail.frontend.protocol import ChatRequest
from kvrail.frontend.reading import Reading
from kvrail.frontend.reasoning import REASONING, reasoning_of_template
from kvrail.frontend.render import Renderer
from kvrail.frontend.tool_formats import FORMATS, forced_format, format_of_template
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import BadRequest

__all__ = ["ChatRules", "schema_of_calls"]


# Nobody sees the white space of a call, and a model may write it without end.
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


class ChatRules:
    """The formats of one model: by --tool-call-parser and --reasoning-parser, else by its chat template."""

    def __init__(self, config: LaunchConfig, renderer: Renderer) -> None:
        tools = config.tool_call_parser
        marks = config.reasoning_parser
        self._format = FORMATS.get(format_of_template(renderer.source) if tools == "auto" else tools)
        self._marks = REASONING.get(reasoning_of_template(renderer.source) if marks == "auto" else marks)
        self._takes_tools = renderer.takes_tools

    def check(self, body: ChatRequest) -> None:
        """Refuse, before anything is rendered, tools that this model could not call."""
        if not body.usable_tools:
            return
        if not self._takes_tools:
            raise BadRequest("tools: the chat template of this model has no place for tools", param="tools")
        if self._format is None and not _is_forced(body):
            raise BadRequest(
                "tools: how this model writes tool calls is not known; the server needs --tool-call-parser",
                param="tools",
            )

    def reading(self, body: ChatRequest, tail: str) -> Reading:
        """How the answer to `body` is read, whose prompt ends with `tail`."""
        # A grammar holds from the first token on: no thinking comes before.
        marks = None if body.prescribed else self._marks
        thinking = False
        if marks is not None:
            if body.continue_final_message:
                thinking = tail.rfind(marks.begin) > tail.rfind(marks.end)
            else:  # only what the template wrote counts: a message may hold any mark
                thinking = tail.rstrip().endswith(marks.begin)
            if not thinking and (body.continue_final_message or tail.rstrip().endswith(marks.end)):
                marks = None  # the thinking is over: what comes is the answer
        reading = Reading(marks, thinking=thinking)
        if not body.usable_tools:
            return reading
        forced = _is_forced(body)
        named = body.tool_choice[0] if isinstance(body.tool_choice, tuple) else None
        return replace(
            reading,
            # A grammar holds from the first token on: no thinking comes before.
            marks=None if forced else reading.marks,
            tools=forced_format(named) if forced else self._format,
            schemas={tool.function.name: tool.schema_of_parameters for tool in body.usable_tools},
            most_calls=1 if body.parallel_tool_calls is False else None,
        )


def schema_of_calls(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of an answer that must call tools; None when it need not."""
    if isinstance(body.tool_choice, tuple):
        named = next(tool for tool in body.usable_tools if tool.function.name == body.tool_choice[0])
        return {**named.schema_of_parameters, **_COMPACT}
    if body.tool_choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": tool.schema_of_parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in body.usable_tools
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most, **_COMPACT}


def _is_forced(body: ChatRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, tuple)
