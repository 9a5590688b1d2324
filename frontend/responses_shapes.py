# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`, stateless: its request, which becomes a chat request of the same meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, Field, ValidationError

from kvrail.frontend.chat_shapes import Shape
from kvrail.frontend.protocol import ChatRequest
from kvrail.runtime.errors import BadRequest

__all__ = ["ResponsesRequest"]


# Chat has them under the same names; it checks them, too.
_AS_IN_CHAT = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prefix_cache",
    "cache_salt",
    "stream",
    "chat_template_kwargs",
    "user",
)


def _only(*allowed: Any) -> AfterValidator:
    """For what needs a state that this server does not keep, or is not implemented."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError("is not supported; leave it out")
        return value

    return AfterValidator(check)


class _Tool(Shape):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(Shape):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Reasoning(Shape):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Shape):
    """What is taken of the Responses API. Nothing is stored: `store` is accepted and comes back as false."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    prefix_cache: bool | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    include: Annotated[list[str] | None, _only([], ["reasoning.encrypted_content"])] = None
    truncation: Annotated[str | None, _only("disabled")] = None
    background: Annotated[bool | None, _only(False)] = None
    previous_response_id: Annotated[str | None, _only()] = None

    def as_chat(self) -> ChatRequest:
        """The chat request of the same meaning. Raises what a wrong request raises, naming fields of this one."""
        messages, items = _messages(self.instructions, self.input)
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tool_choice": self._tool_choice(),
        }
        for name in _AS_IN_CHAT:
            chat[name] = getattr(self, name)
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ]
        if self.text and self.text.format and self.text.format.get("type") != "text":
            chat["response_format"] = _response_format(self.text.format)
        try:
            return ChatRequest.model_validate(
                {key: value for key, value in chat.items() if value is not None}
            )
        except ValidationError as error:
            raise RequestValidationError(
                [{**one, "loc": ("body", *_here(one["loc"], items))} for one in error.errors()]
            ) from None

    def _tool_choice(self) -> Any:
        match self.tool_choice:
            case {"type": "function", "name": str(name)}:
                return {"type": "function", "function": {"name": name}}
        return self.tool_choice


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """Chat puts a schema one level deeper."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


# What chat calls otherwise than this API does.
_HERE = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_content": "content",
    "reasoning_effort": "reasoning.effort",
}


def _here(place: tuple[int | str, ...], items: list[int]) -> list[int | str]:
    """A field of the chat request as one of this request. `items`: the first item of each message."""
    found: list[int | str] = []
    for part in place:
        if isinstance(part, int):
            found.append(items[part] if found == ["input"] and part < len(items) else part)
        else:
            found += _HERE.get(part, part).split(".")
    return found


def _messages(
    instructions: str | None, given: str | list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Input items as chat messages: what an assistant thought, said and called is one message again.

    Beside them, for each message the place of the first item that it is made of.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = [0] * len(messages)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*items, 0]
    for place, item in enumerate(given):
        match item:
            case {
                "type": "function_call",
                "call_id": str(call),
                "name": str(name),
                "arguments": str(arguments),
            }:
                function = {"name": name, "arguments": arguments}
                calls = _assistant(messages).setdefault("tool_calls", [])
                calls.append({"id": call, "type": "function", "function": function})
            case {"type": "function_call_output", "call_id": str(call), "output": said}:
                messages.append({"role": "tool", "tool_call_id": call, "content": _text(said)})
            case {"type": "reasoning"}:
                thoughts = _text(item.get("content") or [])
                if thoughts:
                    messages.append({"role": "assistant", "reasoning_content": thoughts})
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                message = {"role": role, "content": _text(content)}
                if role == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}:
                    messages[-1] |= message
                else:
                    messages.append(message)
            case _:
                raise BadRequest(
                    f"input[{place}]: must be a message, function_call, function_call_output or reasoning item",
                    param=f"input[{place}]",
                )
        items += [place] * (len(messages) - len(items))
    return messages, items


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that a call belongs to."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any) -> Any:
    """Parts of any kind of text, as chat knows them; anything else is left for the checks of chat to refuse."""
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
    ]
    return "\n".join(texts) if len(texts) == len(content) else content
