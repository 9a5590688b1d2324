# SPDX-License-Identifier: Apache-2.0
"""The OpenAI request shapes that are supported, and no others: an unknown field or a wrong type is refused by name.

Nothing here can steer a transfer: ranks, peers and tickets are chosen by the server alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from kvrail.frontend.chat_shapes import Message, Shape, Tool, ToolChoice
from kvrail.frontend.sampling_fields import MOST_LOGPROBS
from kvrail.frontend.structured import StructuredFields
from kvrail.frontend.template import Conversation
from kvrail.runtime.messages import CacheUse

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest"]

_MOST_TOOLS = 128
_MOST_PROMPTS = 128
_MOST_ANSWERS = 256
_LONGEST_SALT = 256


def _prompts(prompt: Any) -> Any:
    """A string, a list of strings, token ids, or a list of lists of token ids: always as a list of prompts."""
    several = isinstance(prompt, list) and bool(prompt) and not _token_ids(prompt)
    prompts = prompt if several else [prompt]
    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"at most {_MOST_PROMPTS} prompts")
    for one in prompts:
        if not isinstance(one, str) and not _token_ids(one):
            raise ValueError("must be a string, token ids, or a list of either")
        if not one:
            raise ValueError("must not be empty")
    if len({type(one) for one in prompts}) > 1:
        raise ValueError("must be all strings or all token ids")
    return prompts


def _token_ids(prompt: Any) -> bool:
    """Whether this is a list of integers (True is none). They may be a hundred thousand, so no Python looks at each."""
    try:
        msgspec.convert(prompt, list[int])
    except msgspec.ValidationError:
        return False
    return isinstance(prompt, list)


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# As clients write it: one prompt or several.
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": _MOST_PROMPTS},
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": _MOST_PROMPTS},
    ]
}


class _StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(StructuredFields):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Clients send these to the OpenAI API; they change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    # Whether prefixes of this prompt are looked up and kept; only requests of one salt share them.
    prefix_cache: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=_LONGEST_SALT)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: goes with stream: true only")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def cache_use(self) -> CacheUse:
        """How the request takes part in prefix caching."""
        return CacheUse(use=self.prefix_cache is not False, salt=self.cache_salt or "")


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if self.tool_choice in ("required",) and not names:
            raise ValueError("tool_choice: there are no tools to choose from")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs: true only")
        if isinstance(self.tool_choice, tuple) and self.tool_choice[0] not in names:
            raise ValueError(f"tool_choice: no tool is called {self.tool_choice[0]!r}")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message: excludes add_generation_prompt")
            if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
                raise ValueError("continue_final_message: the last message must be text of the assistant")
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def conversation(self) -> Conversation:
        """What the chat template is given."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.for_template() for tool in self.usable_tools],
            options={**effort, **(self.chat_template_kwargs or {})},
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final=bool(self.continue_final_message),
        )

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer_limit(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or room


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `prompt` is a list of prompts, each with `n` answers."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    # As the OpenAI API has it: an answer of 16 tokens unless more is asked for.
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be greater than 0, unless the prompt is wanted back (echo)")
        if self.best_of not in (None, self.choices):
            raise ValueError(f"best_of: must be n ({self.choices}): all answers are returned")
        if len(self.prompt) * self.choices > _MOST_ANSWERS:
            raise ValueError(f"n: at most {_MOST_ANSWERS} answers (prompts times n)")
        return self

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is wanted back, and no answer."""
        return self.max_tokens == 0

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def answer_limit(self, room: int) -> int:
        # Even where no answer is wanted one token is sampled, and left out.
        return max(1, min(16, room) if self.max_tokens is None else self.max_tokens)
