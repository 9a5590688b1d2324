# SPDX-License-Identifier: Apache-2.0
"""What a request may say about how its answers are sampled and where they end, and what that means with defaults."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvrail.frontend.chat_shapes import Shape
from kvrail.runtime.errors import TooLong
from kvrail.runtime.messages import Sampling

__all__ = ["MOST_LOGPROBS", "SamplingFields"]

MOST_LOGPROBS = 20
_MOST_STOPS = 16
# Characters of one: all of what may be its beginning is held back, and compared again with each token.
_LONGEST_STOP = 1024
_MOST_STOP_IDS = 64
_MOST_CHOICES = 128
_MOST_BIASES = 1024


def _stops(stop: Any) -> Any:
    """`stop` as a list without duplicates."""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"at most {_MOST_STOPS} stop strings")
    if any(len(one) > _LONGEST_STOP for one in stops):
        raise ValueError(f"a stop string has at most {_LONGEST_STOP} characters")
    return list(dict.fromkeys(stops))


def _biases(bias: Any) -> Any:
    """{"token id": number from -100 to 100} as pairs."""
    if bias is None:
        return []
    if not isinstance(bias, dict) or len(bias) > _MOST_BIASES:
        raise ValueError(f'must be an object {{"token id": bias, …}} of at most {_MOST_BIASES} tokens')
    pairs = []
    for name, value in bias.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError(f"{str(name)[:40]!r} is no token id")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise ValueError(f"the bias of token {name} must be a number from -100 to 100")
        pairs.append((int(name), float(value)))
    return pairs


class SamplingFields(Shape):
    """The fields that chat and completions have in common. Null is the same as leaving a field out."""

    n: int | None = Field(None, ge=1, le=_MOST_CHOICES)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    # As much as a message to a rank can carry; what exceeds the vocabulary cuts nothing.
    top_k: int | None = Field(None, ge=-1, lt=2**63)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    logit_bias: Annotated[list[tuple[int, float]], BeforeValidator(_biases)] = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stop_token_ids: list[int] | None = Field(None, max_length=_MOST_STOP_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def choices(self) -> int:
        """How many answers to one prompt."""
        return self.n or 1

    def wanted_logprobs(self) -> int | None:
        """How many alternatives to report for each token; None: no log-probabilities."""
        raise NotImplementedError

    def wanted_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    def answer_limit(self, room: int) -> int:
        """The most tokens of the answer, given how many the model's length leaves."""
        raise NotImplementedError

    def sampling(self, prompt_tokens: int, max_model_len: int, eos_ids: list[int], *, param: str) -> Sampling:
        """Every default resolved. Raises TooLong when prompt (field `param`) and answer do not fit together."""
        room = max_model_len - prompt_tokens
        if room < 1:
            raise TooLong(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together are limited to {max_model_len}",
                param=param,
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
            n=self.choices,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=self.logit_bias,
            stop_token_ids=sorted({*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_ids)}),
            min_tokens=self.min_tokens or 0,
            logprobs=self.wanted_logprobs(),
            prompt_logprobs=self.wanted_prompt_logprobs(),
        )
