# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests with prompts of a given length, each of them new to every cache, the same for every server."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

__all__ = ["Prompts", "TextLength", "read_vocab"]

# Common enough to be one or two tokens each in any vocabulary.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house"
)


def read_vocab(text: str) -> tuple[int, int]:
    """From FIRST:END, the token ids that prompts are drawn from. Raises ValueError."""
    low, high = (int(part) for part in text.split(":"))
    if not 0 <= low < high:
        raise ValueError(f"{text}: no token ids")
    return low, high


@dataclass(frozen=True)
class TextLength:
    """How a server counts: a text of n words has `fixed + n * a_word` tokens."""

    fixed: float
    a_word: float

    @staticmethod
    def from_counts(few: tuple[int, int], many: tuple[int, int]) -> TextLength:
        """From (words, tokens) of two texts."""
        a_word = (many[1] - few[1]) / (many[0] - few[0])
        return TextLength(few[1] - a_word * few[0], a_word)

    def words(self, tokens: int) -> int:
        """Words of a text with about that many tokens."""
        return max(1, round((tokens - self.fixed) / self.a_word))


@dataclass(frozen=True)
class Prompts:
    """Makes the request of any number. Token ids are drawn from [vocab[0], vocab[1]); `text`: words instead."""

    model: str
    vocab: tuple[int, int]
    seed: int = 0
    chat: bool = False
    text: TextLength | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        """Where the requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def words(self, count: int, number: int) -> str:
        """A text that no other number has."""
        draw = random.Random(f"{self.seed}/{number}")
        return " ".join(draw.choices(_WORDS.split(), k=count))

    def body(self, tokens_in: int, tokens_out: int, number: int) -> bytes:
        """JSON of a streamed, greedy request that writes exactly `tokens_out` tokens, whatever they are."""
        prompt: Any
        if self.text is not None:
            prompt = self.words(self.text.words(tokens_in), number)
        else:
            draw = np.random.default_rng((self.seed, number))
            prompt = draw.integers(*self.vocab, tokens_in).tolist()
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return msgspec.json.encode(
            {
                "model": self.model,
                **what,
                "max_tokens": tokens_out,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **dict(self.extra),
            }
        )
