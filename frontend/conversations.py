# SPDX-License-Identifier: Apache-2.0
"""Growing conversations for tools that measure prefix caching, and one streamed greedy turn of them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Conversation", "Turn", "take_turn"]

_WORDS = [
    *(
        "harbour",
        "lantern",
        "gravel",
        "sixteen",
        "window",
        "copper",
        "yesterday",
        "slowly",
        "between",
        "orchard",
    ),
    *(
        "signal",
        "paper",
        "river",
        "under",
        "engine",
        "morning",
        "quiet",
        "seven",
        "ladder",
        "bridge",
        "winter",
    ),
    *("answer", "before", "yellow", "market", "stone", "follow", "garden", "number", "light"),
]


@dataclass
class Turn:
    """One answer: its tokens by name, its text, what its usage says, and when its first token came."""

    tokens: list[str] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0

    @property
    def computed(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


class Conversation:
    """Messages that grow by a question and an answer a turn, behind a first message of some length.

    `shared_words` words of the first message are the same for all seeds, `own_words` are not.
    """

    def __init__(self, seed: int, *, shared_words: int, own_words: int, question_words: int) -> None:
        self._draw = random.Random(f"conversation {seed}")
        self._question_words = question_words
        beginning = [*_words(random.Random("shared"), shared_words), *_words(self._draw, own_words)]
        self.messages: list[dict[str, str]] = [{"role": "system", "content": " ".join(beginning)}]

    def ask(self) -> None:
        """The next question."""
        self.messages.append(
            {"role": "user", "content": " ".join(_words(self._draw, self._question_words)) + "?"}
        )

    def answered(self, text: str) -> None:
        """What the model said to it."""
        self.messages.append({"role": "assistant", "content": text})


def _words(draw: random.Random, count: int) -> list[str]:
    return [draw.choice(_WORDS) for _ in range(count)]


async def take_turn(
    client: httpx.AsyncClient, messages: list[dict[str, str]], max_tokens: int, **fields: Any
) -> Turn:
    """Stream one greedy chat answer; raises RuntimeError on anything but a whole answer."""
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    turn, whole, started = Turn(), False, time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"HTTP {response.status_code}: {text[:300]}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                whole = True
            elif line.startswith("data: "):
                _take_event(turn, json.loads(line[6:]), started)
    if not whole:
        raise RuntimeError("the answer ended in the middle")
    return turn


def _take_event(turn: Turn, event: dict[str, Any], started: float) -> None:
    if "error" in event:
        raise RuntimeError(event["error"]["message"])
    if event.get("usage"):
        turn.prompt_tokens = event["usage"]["prompt_tokens"]
        turn.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    for choice in event["choices"]:
        content = (choice.get("logprobs") or {}).get("content") or []
        if content and not turn.tokens:
            turn.first_token_s = time.perf_counter() - started
        turn.tokens += [note["token"] for note in content]
        turn.text += choice["delta"].get("content") or ""
