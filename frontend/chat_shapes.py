# SPDX-License-Identifier: Apache-2.0
"""The shapes of chat messages and tools, checked, and turned into what chat templates expect."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Message", "Shape", "Tool", "ToolChoice"]

_NAME = r"^[A-Za-z0-9_.:-]{1,128}$"


class Shape(BaseModel):
    """What every request shape is: unknown fields and wrong types are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _text(content: Any) -> Any:
    """A message's content as one string: a string already, or text parts, joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must be a string, or a list of parts {"type": "text", "text": "…"}')
    return "\n".join(part["text"] for part in content)


def _without_nulls(message: Any) -> Any:
    """Clients send an assistant's message back as they got it, with null for all that it did not have."""
    if isinstance(message, dict):
        return {key: value for key, value in message.items() if value is not None}
    return message


class _CalledFunction(Shape):
    name: str
    arguments: str

    def parsed(self) -> Any:
        """The arguments as an object where they are one: templates write them down themselves."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments


class _Called(Shape):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None  # streamed calls have one, and clients send it back


class _MessageShape(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text)]
    name: str | None = None
    tool_calls: list[_Called] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _belongs(cls, message: Any) -> Any:
        """Each role has fields that only it has, and needs its own."""
        if isinstance(message, dict):
            role = message.get("role")
            if role != "assistant":
                for name in ("tool_calls", "reasoning_content"):
                    if message.get(name):
                        raise ValueError(f"{name} is for role assistant only")
            if role != "tool" and "tool_call_id" in message:
                raise ValueError("tool_call_id is for role tool only")
            if message.get("tool_calls") or message.get("reasoning_content"):
                message = {"content": None, **message}
        return message

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed()},
                }
                for call in self.tool_calls
            ]
        return message


Message = Annotated[_MessageShape, BeforeValidator(_without_nulls)]


class _Function(Shape):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.function.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.schema_of_parameters,
        }
        return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """ "auto", "none", "required", or {"type": "function", "function": {"name": …}}; a name comes out as (name,)."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return (name,)
    raise ValueError('must be "auto", "none", "required" or {"type": "function", "function": {"name": "…"}}')


ToolChoice = Annotated[str | tuple[str] | None, BeforeValidator(_choice)]
