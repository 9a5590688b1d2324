# SPDX-License-Identifier: Apache-2.0
"""Grammars that answers must follow: compiled by llguidance in a thread, walked along by each sequence.

A grammar is one string (as llguidance writes grammars: Lark, or JSON around it) and travels with the request; its
state does not travel: whoever goes on with an answer feeds the tokens that are out to the grammar.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from kvrail.runtime.errors import BadRequest

__all__ = ["GrammarState", "Grammars", "tokenizer_text"]

_REMEMBERED = 64
_LONGEST = 1 << 20


def tokenizer_text(folder: Path) -> str:
    """The tokenizer.json of a model folder; an older tokenizer is converted by transformers (slow to import)."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file.read_text("utf-8")
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


class GrammarState:
    """Where one answer stands in its grammar. `tokens` are those that are out already."""

    def __init__(self, matcher: LLMatcher, tokens: Iterable[int] = ()) -> None:
        self._matcher = matcher.deep_copy()
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        """One more token. One that the grammar does not allow leaves nothing allowed behind it."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> npt.NDArray[np.uint8]:
        """The allowed tokens, one bit each, the lowest first: none behind a token that was not allowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.zeros_like(bits) if self._matcher.is_error() else bits


class Grammars:
    """Grammars over one tokenizer; the newest stay compiled. `load` gives the text of its tokenizer.json.

    `begin` may be called by one thread; what it starts runs on another, one grammar at a time.
    """

    def __init__(self, load: Callable[[], str], vocabulary: int) -> None:
        self._load = load
        self._vocabulary = vocabulary
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._known: OrderedDict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar")

    def begin(self, grammar: str, eos_ids: Sequence[int]) -> Future[LLMatcher]:
        """Compile; the future raises BadRequest for what cannot be. `eos_ids` end an answer where the grammar may."""
        key = grammar, tuple(eos_ids)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._thread.submit(self._compile, *key)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, eos_ids: tuple[int, ...]) -> LLMatcher:
        if len(grammar) > _LONGEST:
            raise BadRequest(f"the grammar is longer than {_LONGEST} characters")
        if not eos_ids:
            raise BadRequest("this model has no end token, so an answer by a grammar would never end")
        tokenizer = self._tokenizers.get(eos_ids)
        if tokenizer is None:
            try:
                text = _without_padding(self._load())
                tokenizer = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=list(eos_ids))
            except Exception as error:  # the library raises what its parts raise
                raise BadRequest(f"grammars cannot be used with this model's tokenizer: {error}") from None
            self._tokenizers[eos_ids] = tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            # The first mask builds most of the automaton; it is as much a part of compiling as the parsing.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise BadRequest(f"the grammar cannot be used: {_first_words(matcher.get_error())}")
        return matcher


def _without_padding(text: str) -> str:
    content = json.loads(text)
    content["padding"] = content["truncation"] = None
    return json.dumps(content)


def _first_words(error: str) -> str:
    """An error of the library without the state of its parser."""
    return " ".join(error.split("<state>")[0].split())[:400]
