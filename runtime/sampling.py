# SPDX-License-Identifier: Apache-2.0
"""Which sampling parameters mean something. Fronts ask before anything is reserved, engines ask for what peers send."""

from __future__ import annotations

import math

from kvrail.runtime.errors import BadRequest
from kvrail.runtime.messages import Sampling

__all__ = ["check_sampling"]


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise BadRequest for parameters that mean nothing, or that name tokens from `vocabulary` on."""

    def need(holds: bool, param: str, what: str) -> None:
        if not holds:
            raise BadRequest(f"{param} must be {what}", param=param)

    need(sampling.max_tokens >= 1, "max_tokens", "at least 1")
    need(sampling.n >= 1, "n", "at least 1")
    need(0.0 <= sampling.temperature < math.inf, "temperature", "a number from 0 up")
    need(0.0 < sampling.top_p <= 1.0, "top_p", "above 0 and at most 1")
    need(sampling.top_k >= 0, "top_k", "at least 0 (0: all tokens)")
    need(0.0 <= sampling.min_p <= 1.0, "min_p", "from 0 to 1")
    need(math.isfinite(sampling.presence_penalty), "presence_penalty", "a number")
    need(math.isfinite(sampling.frequency_penalty), "frequency_penalty", "a number")
    need(0.0 < sampling.repetition_penalty < math.inf, "repetition_penalty", "above 0")
    need(0 <= sampling.min_tokens <= sampling.max_tokens, "min_tokens", "from 0 to max_tokens")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        need(count is None or count >= 0, name, "at least 0")
    need(all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "made of numbers")
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        need(
            all(0 <= token < vocabulary for token in tokens), name, f"of token ids from 0 to {vocabulary - 1}"
        )
    need(
        len(dict(sampling.logit_bias)) == len(sampling.logit_bias), "logit_bias", "one number for each token"
    )
