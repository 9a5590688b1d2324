# SPDX-License-Identifier: Apache-2.0
"""Which requests can be split: a table of what a request may say, and why it is right on two engines.

Split means: token 1 is sampled elsewhere, and for the engine that goes on it is the last token of the prompt. Whatever
counts or remembers *output* tokens would then miss one. What this table does not know goes to one engine alone: a
setting that a later vLLM adds costs speed at first, and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ENGINE_LIMITS", "why_unsplit", "why_whole"]

# Fields of vLLM's SamplingParams that mean the same on both engines, whatever their value.
_SAMPLING_CARRIED = {
    "n": "several answers are one request each by the time they are split",
    "temperature": "no state",
    "top_p": "no state",
    "top_k": "no state",
    "min_p": "no state",
    "repetition_penalty": "looks at prompt and output alike, so it does not matter which of them token 1 is",
    "logit_bias": "no state",
    "allowed_token_ids": "no state",
    "stop": "looked for in the text, which one detokenizer makes of all tokens",
    "include_stop_str_in_output": "as stop",
    "output_text_buffer_length": "as stop",
    "stop_token_ids": "looked for in each token alone",
    "_all_stop_token_ids": "as stop_token_ids",
    "_eos_token_id": "as stop_token_ids",
    "ignore_eos": "as stop_token_ids",
    "max_tokens": "reduced by one for the engine that goes on",
    "min_tokens": "reduced by one for the engine that goes on",
    "logprobs": "those of token 1 come with it",
    "logprob_token_ids": "as logprobs",
    "flat_logprobs": "a form of the answer",
    "detokenize": "a form of the answer",
    "skip_special_tokens": "a form of the answer",
    "spaces_between_special_tokens": "a form of the answer",
    "output_kind": "a form of the answer",
    "stream_interval": "a form of the answer",
    "skip_clone": "says who owns the struct",
    "skip_reading_prefix_cache": "each engine heeds it by itself",
    "watermarking": "engines that watermark are not split at all",
    "_watermarking_skipped": "as watermarking",
}

# Fields that can be split with some values: (name, whether this value can, why not).
_SAMPLING_WITH: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    (
        "seed",
        lambda seed, params: params.temperature == 0,
        "a seeded generator draws once for each token, and only one engine can hold it",
    ),
    (
        "_bad_words_token_ids",
        lambda words, params: all(len(word) == 1 for word in words),
        "bad_words of several tokens look back at the output",
    ),
    ("bad_words", lambda words, params: True, ""),
    (
        "extra_args",
        lambda extra, params: not extra.keys() - {"kv_transfer_params"},
        "extra arguments may steer a logits processor that keeps state",
    ),
)

_SAMPLING_WHY = {
    "presence_penalty": "presence_penalty counts output tokens",
    "frequency_penalty": "frequency_penalty counts output tokens",
    "prompt_logprobs": "the logits of a prompt do not travel",
    "prompt_logprob_token_ids": "the logits of a prompt do not travel",
    "prompt_logprob_start": "the logits of a prompt do not travel",
    "structured_outputs": "a grammar must see every token of the answer",
    "thinking_token_budget": "a thinking budget counts output tokens",
    "repetition_detection": "repetition detection looks back at the output",
    "trace_decode_token_ids": "a replayed trace counts output tokens",
}

# Fields of vLLM's EngineCoreRequest with which a request can be split, whatever their value.
_REQUEST_CARRIED = frozenset(
    {
        "request_id",
        "external_req_id",
        "prompt_token_ids",
        "sampling_params",
        "arrival_time",
        "cache_salt",
        "client_index",
        "current_wave",
        "priority",
        "trace_headers",
        "session_id",
        # Both only matter to grammars and thinking budgets, which are not split.
        "reasoning_ended",
        "reasoning_parser_kwargs",
    }
)

_REQUEST_WHY = {
    "pooling_params": "pooling has no second token",
    "mm_features": "images, audio and video are processed where they came in",
    "prompt_embeds": "embeddings instead of tokens do not travel",
    "lora_request": "LoRA adapters are loaded for each engine alone",
    "resumable": "the input is a stream",
    "data_parallel_rank": "the request names a rank",
}

# Settings of an engine with which it splits nothing: (path in VllmConfig, why).
ENGINE_LIMITS = (
    ("speculative_config", "the draft model would need its own KV of the prompt"),
    ("watermark_config", "a watermark depends on the tokens before"),
    ("model_config.logits_processors", "logits processors may keep state"),
    ("model_config.enable_return_routed_experts", "the experts of a prompt do not travel"),
    ("cache_config.kv_sharing_fast_prefill", "layers that share KV skip part of the prompt"),
)

# 0 is not among them: a seed of 0 is a seed.
_EMPTY: tuple[Any, ...] = (None, False, (), [], {}, set(), "")


def why_whole(request: Any, defaults: Any) -> str:
    """Why this request cannot be split, or "". `defaults`: SamplingParams of which nothing has been set."""
    for name in request.__struct_fields__:
        if name not in _REQUEST_CARRIED and not _is_empty(getattr(request, name)):
            return _REQUEST_WHY.get(name, f"{name} is not known to be right on two engines")
    params = request.sampling_params
    if params is None or not request.prompt_token_ids:
        return "there are no tokens to sample from"
    conditions = {name: (holds, why) for name, holds, why in _SAMPLING_WITH}
    for name in params.__struct_fields__:
        if name in _SAMPLING_CARRIED:
            continue
        value = getattr(params, name)
        if _is_empty(value) or value == getattr(defaults, name, None):
            continue
        if name not in conditions:
            return _SAMPLING_WHY.get(name, f"{name} is not known to be right on two engines")
        holds, why = conditions[name]
        if not holds(value, params):
            return why
    return ""


def why_unsplit(config: Any, limits: Iterable[tuple[str, str]] = ENGINE_LIMITS) -> str:
    """Why an engine with this VllmConfig splits no request, or ""."""
    for path, why in limits:
        value = config
        for part in path.split("."):
            value = getattr(value, part, None)
        if not _is_empty(value):
            return f"{path.rpartition('.')[2]} is set: {why}"
    return ""


def _is_empty(value: Any) -> bool:
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in _EMPTY)
