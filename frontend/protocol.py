# SPDX-License-Identifier: Apache-2.0
"""The OpenAI request shapes that are supported, and no others: an unknown field or a wrong type is refused by name.

Nothing here can steer a transfer: ranks, peers and tickets are chosen by the server alone.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvrail.runtime.errors import TooLong
from kvrail.runtime.messages import CacheUse, Sampling

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message"]

_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_LONGEST_SALT = 256


def _neutral(*allowed: Any) -> AfterValidator:
    """For a field that clients send by default but that is not implemented: only its neutral values pass."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(f"is not supported; leave it out, or give {allowed[0]!r}")
        return value

    return AfterValidator(check)


def _text(content: Any) -> Any:
    """A message's content as one string: a string already, or text parts, joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must be a string, or a list of parts {"type": "text", "text": "…"}')
    return "\n".join(part["text"] for part in content)


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


def _without_nulls(message: Any) -> Any:
    """Clients send an assistant's message back as they got it, with null for all that it did not have."""
    if isinstance(message, dict):
        return {key: value for key, value in message.items() if value is not None}
    return message


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _MessageShape(_Shape):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None


Message = Annotated[_MessageShape, BeforeValidator(_without_nulls)]


class _StreamOptions(_Shape):
    include_usage: bool = False


class _TemplateOptions(_Shape):
    enable_thinking: bool | None = None


class GenerationRequest(_Shape):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    # As much as a message to a rank can carry; what exceeds the vocabulary cuts nothing.
    top_k: int | None = Field(None, ge=-1, lt=2**63)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    # Whether prefixes of this prompt are looked up and kept; only requests of one salt share them.
    prefix_cache: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=_LONGEST_SALT)
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

    @property
    def cache_use(self) -> CacheUse:
        """How the request takes part in prefix caching."""
        return CacheUse(use=self.prefix_cache is not False, salt=self.cache_salt or "")

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
    chat_template_kwargs: _TemplateOptions | None = None
    tools: Annotated[Any, _neutral([])] = None
    tool_choice: Annotated[Any, _neutral("none", "auto")] = None
    response_format: Annotated[Any, _neutral({"type": "text"})] = None

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
