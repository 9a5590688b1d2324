# SPDX-License-Identifier: Apache-2.0
"""Which requests are split: the table against requests that look as vLLM's do. With vLLM itself: tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.runtime.vllm.carried import why_unsplit, why_whole

_SAMPLING: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "_bad_words_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "structured_outputs": None,
    "extra_args": None,
    "thinking_token_budget": None,
}
_REQUEST: dict[str, Any] = {
    "request_id": "r",
    "prompt_token_ids": [1, 2, 3],
    "mm_features": None,
    "sampling_params": None,
    "pooling_params": None,
    "arrival_time": 1.0,
    "lora_request": None,
    "cache_salt": None,
    "data_parallel_rank": None,
    "resumable": False,
    "priority": 3,
}


def struct(fields: dict[str, Any], **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**fields, **changes}, __struct_fields__=tuple({**fields, **changes}))


def why(sampling: dict[str, Any] | None = None, **request: Any) -> str:
    params = struct(_SAMPLING, **(sampling or {}))
    return why_whole(struct(_REQUEST, **{"sampling_params": params, **request}), struct(_SAMPLING))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0, "seed": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"stop": ["x"], "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 4, "max_tokens": 1},
        {"logprobs": 5, "logit_bias": {3: 1.0}, "repetition_penalty": 1.3},
        {"bad_words": ["a"], "_bad_words_token_ids": [[7], [8]]},
        {"extra_args": {"kv_transfer_params": {}}},
    ],
)
def test_split(sampling: dict[str, Any]) -> None:
    assert why(sampling) == ""
    assert why(sampling, cache_salt="s") == ""


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"seed": 0}, "seeded"),
        ({"seed": 7, "temperature": 0.1}, "seeded"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"prompt_logprobs": 0}, "logits of a prompt"),
        ({"structured_outputs": object()}, "grammar"),
        ({"bad_words": ["a b"], "_bad_words_token_ids": [[7], [8, 9]]}, "bad_words"),
        ({"thinking_token_budget": 0}, "thinking budget"),
        ({"extra_args": {"my_processor": 1}}, "extra arguments"),
        ({"invented_later": 1}, "invented_later is not known"),
    ],
)
def test_whole_by_sampling(sampling: dict[str, Any], reason: str) -> None:
    assert reason in why(sampling)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"mm_features": [object()]}, "images"),
        ({"lora_request": object()}, "LoRA"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "stream"),
        ({"data_parallel_rank": 0}, "names a rank"),
        ({"prompt_token_ids": None}, "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"invented_later": "x"}, "invented_later is not known"),
    ],
)
def test_whole_by_request(request_: dict[str, Any], reason: str) -> None:
    assert reason in why(None, **request_)


def test_engines_that_split_nothing() -> None:
    model = SimpleNamespace(logits_processors=None, enable_return_routed_experts=False)
    config = SimpleNamespace(model_config=model, speculative_config=None)
    assert why_unsplit(config) == ""
    config.speculative_config = object()
    assert why_unsplit(config).startswith("speculative_config is set")
    config.speculative_config = None
    model.logits_processors = ["mine"]
    assert "logits_processors" in why_unsplit(config)
