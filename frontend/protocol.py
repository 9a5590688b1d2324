# SPDX-License-Identifier: Apache-2.0
"""The OpenAI request shapes that are supported, and no others: an unknown field or a wrong type is refused by name.

Nothing here can steer a transfer: ranks, peers and tickets are chosen by the server alone.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvrail.frontend.chat_shapes import Message, Shape, Tool, ToolChoice
from kvrail.frontend.template import Conversation
from kvrail.runtime.errors import TooLong
from kvrail.runtime.messages import Sampling

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest"]

_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_MOST_TOOLS = 128


def _neutral(*allowed: Any) -> AfterValidator:
    """For a field that clients send by default but that is not implemented: only its neutral values pass."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(f"is not supported; leave it out, or give {allowed[0]!r}")
        return value

    return AfterValidator(check)


def _stops(stop: Any) -> Any:
    """`stop` as a list without duplicates."""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"at most {_MOST_STOPS} stop strings")
    return list(dict.fromkeys(stops))


def _prompt(prompt: Any) -> Any:
    """One prompt: a string, a list of one string, token ids, or a list of one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    # type() and not isinstance: True is no token id.
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise ValueError("must be one string or one list of token ids")
    if not prompt:
        raise ValueError("must not be empty")
    return prompt


class _StreamOptions(Shape):
    include_usage: bool = False


class GenerationRequest(Shape):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    # As much as a message to a rank can carry; what exceeds the vocabulary cuts nothing.
    top_k: int | None = Field(None, ge=-1, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    n: Annotated[Any, _neutral(1)] = None
    frequency_penalty: Annotated[Any, _neutral(0, 0.0)] = None
    presence_penalty: Annotated[Any, _neutral(0, 0.0)] = None
    repetition_penalty: Annotated[Any, _neutral(1, 1.0)] = None
    logit_bias: Annotated[Any, _neutral({})] = None
    min_tokens: Annotated[Any, _neutral(0)] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def wanted_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None: no log-probabilities."""
        raise NotImplementedError

    def answer_limit(self, room: int) -> int:
        """The most tokens of the answer, given how many the model's length leaves."""
        raise NotImplementedError

    def sampling(self, prompt_tokens: int, max_model_len: int, eos_ids: list[int]) -> Sampling:
        """Every default resolved. Raises TooLong when prompt and answer do not fit together."""
        room = max_model_len - prompt_tokens
        if room < 1:
            raise TooLong(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together are limited to {max_model_len}",
                param="messages" if isinstance(self, ChatRequest) else "prompt",
            )
        wanted = self.answer_limit(room)
        if wanted > room:
            raise TooLong(
                f"the prompt has {prompt_tokens} tokens and the answer may have {wanted}; together they are limited "
                f"to {max_model_len}",
                param="max_tokens",
            )
        return Sampling(
            max_tokens=wanted,
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**64,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=[] if self.ignore_eos else eos_ids,
            logprobs=self.wanted_logprobs(),
        )


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if self.tool_choice in ("required",) and not names:
            raise ValueError("tool_choice: there are no tools to choose from")
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
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    # As the OpenAI API has it: an answer of 16 tokens unless more is asked for.
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)
    best_of: Annotated[Any, _neutral(1)] = None
    echo: Annotated[Any, _neutral(False)] = None
    suffix: Annotated[Any, _neutral("")] = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def answer_limit(self, room: int) -> int:
        return self.max_tokens or min(16, room)
