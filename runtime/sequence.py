# SPDX-License-Identifier: Apache-2.0
"""One sequence inside the engine: its tokens, its page table, how far it is computed, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from kvrail.runtime.engine_protocol import SequenceState, StepOutput
from kvrail.runtime.grammar import Grammars, GrammarState
from kvrail.runtime.messages import CACHE_USED, CacheUse, FinishReason, Sampling
from kvrail.runtime.prefix import extend_keys
from kvrail.runtime.processors import Row, TokenHistory
from kvrail.runtime.sampler import choice_seed
from kvrail.transfer.wire import TokenLogprob

__all__ = ["EngineSequence"]


class EngineSequence:
    """Its tokens are the prompt and the `answer` so far; KV stands for the first `computed` of them.

    The prompt stays the array that it came as: it may have a hundred thousand tokens, and nobody needs each by itself.
    `pages[i]` holds tokens i * page_tokens … of the sequence. `keys` names its full pages (grows on demand),
    of which the first `indexed` are never written again: they were offered to the prefix cache, came from it, or
    are shared with other choices. `state_slot` is where its rings lie (-1: none). `placed`: it has all the memory that
    its tokens need (which may be no page at all). `cache`: whether, and under which salt, it shares prefixes.

    A request for several choices is one sequence up to the end of its prompt, and then one for each (`branch`).
    `firsts`: the first tokens of its choices when those were sampled elsewhere. `closed`: choices that nobody wants
    any more.
    """

    __slots__ = (
        "_prompt",
        "answer",
        "cache",
        "cached_tokens",
        "choice",
        "clean",
        "closed",
        "compiling",
        "computed",
        "firsts",
        "grammar",
        "history",
        "indexed",
        "keys",
        "noted",
        "pages",
        "placed",
        "prefill_only",
        "prompt_tokens",
        "queued",
        "request_id",
        "sampling",
        "sequence_id",
        "state_slot",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        prefill_only: bool = False,
        cache: CacheUse = CACHE_USED,
        request_id: str = "",
        choice: int = 0,
        grammars: Grammars | None = None,
        keys: Sequence[bytes] = (),
    ) -> None:
        self.sequence_id = sequence_id
        self.request_id = request_id or sequence_id
        self.choice = choice
        self.prompt_tokens = len(prompt)
        self._prompt = prompt
        self.answer: list[int] = []
        self.sampling = sampling
        self.prefill_only = prefill_only
        self.cache = cache
        self.firsts: Mapping[int, int] | None = None
        self.closed: set[int] = set()
        self.history: TokenHistory | None = None
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self.history = TokenHistory(prompt)
        # What the answer must follow: until it is compiled, nothing can be sampled.
        self.compiling: Future[LLMatcher] | None = None
        self.grammar: GrammarState | None = None
        if sampling.grammar and grammars is not None:
            self.compiling = grammars.begin(sampling.grammar, sampling.eos_ids)
        self.placed = False
        self.pages: list[int] = []
        # The first so many pages hold nothing that steps must not read; those behind them, whatever was there before.
        self.clean = 0
        self.state_slot = -1
        self.keys: list[bytes] = list(keys)
        self.indexed = 0
        self.computed = 0
        # The last work on its pages that was given to the device (see device.Compute).
        self.queued = 0
        # Tokens of the prompt whose log-probabilities were told (the first has none).
        self.noted = 1
        # Unknown until the first match; a sequence that is computed anew keeps its first answer.
        self.cached_tokens: int | None = None

    def __len__(self) -> int:
        """How many tokens there are, of prompt and answer together."""
        return self.prompt_tokens + len(self.answer)

    def token(self, place: int) -> int:
        """The token at that place."""
        behind = place - self.prompt_tokens
        return int(self._prompt[place]) if behind < 0 else self.answer[behind]

    def tokens(self, first: int, last: int) -> npt.NDArray[np.uint32]:
        """The tokens from place `first` up to, but not including, `last`."""
        prompt = self._prompt[first:last]
        if last <= self.prompt_tokens:
            return prompt
        answer = self.answer[max(0, first - self.prompt_tokens) : last - self.prompt_tokens]
        return np.concatenate([prompt, np.array(answer, dtype=np.uint32)])

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet (1: the next step samples)."""
        return len(self) - self.computed

    @property
    def state(self) -> SequenceState:
        """The snapshot that the engine shows."""
        return SequenceState(list(self.pages), self.computed, self.cached_tokens or 0, self.state_slot)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be told: its logits are needed then, not only KV."""
        return self.sampling.prompt_logprobs is not None and self.noted < self.prompt_tokens

    def page_keys(self, first: bytes, page_tokens: int, full_pages: int) -> list[bytes]:
        """Keys of the first `full_pages` pages; `first` is the namespace."""
        if len(self.keys) < full_pages:
            known, wanted = len(self.keys) * page_tokens, full_pages * page_tokens
            extend_keys(self.keys, first, self.tokens(known, wanted), page_tokens)
        return self.keys[:full_pages]

    def restart(self) -> None:
        """Its memory is gone: everything is to be computed again (nothing is emitted again)."""
        self.placed, self.pages, self.state_slot = False, [], -1
        self.computed, self.indexed = 0, 0

    # --- choices --------------------------------------------------------------------------------------------------

    @property
    def to_branch(self) -> bool:
        """Whether this is the common prompt of several choices."""
        return self.sampling.n > 1

    def choices(self) -> list[EngineSequence]:
        """What stands behind the prompt, before the first token: the sequence itself, or each of its choices."""
        if not self.to_branch:
            return [self]
        return [self._choice(number) for number in range(self.sampling.n) if number not in self.closed]

    def branch(self, firsts: Mapping[int, int]) -> list[EngineSequence]:
        """The choices that go on behind their first tokens. They have no pages yet."""
        branches = [self._choice(number) for number in firsts if number not in self.closed]
        for one in branches:
            one.append(firsts[one.choice])
        return branches

    def _choice(self, number: int) -> EngineSequence:
        one = EngineSequence(
            f"{self.sequence_id}#{number}",
            self.tokens(0, len(self)),
            msgspec.structs.replace(self.sampling, n=1, seed=choice_seed(self.sampling.seed, number)),
            prefill_only=self.prefill_only,
            request_id=self.request_id,
            choice=number,
            cache=self.cache,
        )
        one.keys, one.cached_tokens, one.noted = list(self.keys), self.cached_tokens, self.noted
        one.computed, one.compiling = self.computed, self.compiling
        return one

    # --- grammar --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it can be sampled: there is no grammar, or it is compiled."""
        return self.compiling is None or self.compiling.done()

    def _follow(self) -> GrammarState | None:
        """Where the answer stands in its grammar; None without any, or while it is being compiled."""
        if self.grammar is None and self.compiling is not None and self.compiling.done():
            self.grammar = GrammarState(self.compiling.result(), self.answer)
        return self.grammar

    # --- tokens ---------------------------------------------------------------------------------------------------

    def row(self) -> Row:
        """What the sampler needs to know for the next token."""
        # The position of a token is the number of tokens before it, wherever those were computed.
        grammar = self._follow()
        mask = None if grammar is None else grammar.mask()
        return Row(self.sampling, len(self), len(self.answer), self.history, mask)

    def append(self, token: int) -> None:
        """One more token of the answer."""
        self.answer.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Whether the sequence ends with its last token."""
        if self.answer and self.answer[-1] in self.sampling.stop_token_ids:
            return "stop"
        if self.answer and (grammar := self._follow()) is not None and grammar.ended:
            return "stop"
        if len(self.answer) >= self.sampling.max_tokens:
            return "length"
        # How long a prefill-only sequence may grow is for the engine to say that decodes it.
        if not self.prefill_only and len(self) >= max_model_len:
            return "length"
        return None

    def output(
        self,
        token: int | None = None,
        finish_reason: FinishReason | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
    ) -> StepOutput:
        """What this step did for the sequence."""
        computed = min(self.computed, self.prompt_tokens)
        return StepOutput(
            self.request_id,
            computed,
            token,
            finish_reason,
            self.cached_tokens or 0,
            logprob,
            error,
            self.choice,
            prompt_logprobs or [],
        )
