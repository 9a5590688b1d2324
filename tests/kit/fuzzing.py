# SPDX-License-Identifier: Apache-2.0
"""Request bodies that are nearly right, for every route that takes text."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kit.answering import WEATHER

__all__ = ["BODIES", "CALM"]

# The same examples each time, and none of them too slow.
CALM = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

WORDS = st.sampled_from(
    ["", "a", "stop", "text", "function", "auto", "weather", "\x00", "é🙂", "\ud800", "user"]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": WORDS | JUNK},
    optional={"tool_calls": JUNK, "tool_call_id": WORDS, "name": WORDS, "reasoning_content": WORDS},
)
FIELDS: dict[str, Any] = {
    "stream": st.booleans(),
    "max_tokens": st.integers(-1, 10) | JUNK,
    "temperature": st.floats(-1, 3) | JUNK,
    "top_p": st.floats(-1, 2),
    "top_k": st.integers(-2, 2**70),
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.lists(WORDS, max_size=3) | WORDS | JUNK,
    "stream_options": st.just({"include_usage": True}) | JUNK,
    "tools": st.just([WEATHER]) | JUNK,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | JUNK,
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(WORDS, JUNK, max_size=2) | JUNK,
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "response_format": st.just({"type": "json_object"}) | JUNK,
    "n": st.integers(0, 3) | JUNK,
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "logit_bias": st.dictionaries(WORDS | st.just("5"), st.floats(-200, 200), max_size=2),
    "min_tokens": st.integers(-1, 5) | JUNK,
    "echo": st.booleans(),
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": st.lists(MESSAGE, max_size=3)},
    "/v1/completions": {"prompt": WORDS | JUNK | st.lists(st.integers(0, 300), max_size=5)},
    "/v1/responses": {"input": WORDS | st.lists(MESSAGE | JUNK, max_size=3)},
    "/tokenize": {"prompt": WORDS | JUNK},
    "/detokenize": {"tokens": st.lists(st.integers(-1, 300)) | JUNK},
}
BODIES = st.sampled_from(sorted(PATHS)).flatmap(
    lambda path: st.tuples(st.just(path), st.fixed_dictionaries(PATHS[path], optional=FIELDS))
)
