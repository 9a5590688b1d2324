# SPDX-License-Identifier: Apache-2.0
"""One sequence inside the engine: its tokens, its page table, how far it is computed, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvrail.runtime.engine_protocol import SequenceState, StepOutput
from kvrail.runtime.messages import CACHE_USED, CacheUse, FinishReason, Sampling
from kvrail.runtime.prefix import extend_keys
from kvrail.runtime.sampler import check_sampling
from kvrail.transfer.wire import TokenLogprob

__all__ = ["EngineSequence"]


class EngineSequence:
    """`tokens` are the prompt and every token emitted so far; KV stands for the first `computed` of them.

    `pages[i]` holds tokens i * page_tokens … of the sequence. `keys` names its full pages (grows on demand),
    of which the first `indexed` were offered to the prefix cache or came from it. `state_slot` is where its rings lie
    (-1: none). `placed`: it has all the memory that its tokens need (which may be no page at all). `cache`: whether
    and under which salt it takes part in prefix caching.
    """

    __slots__ = (
        "_prompt",
        "cache",
        "cached_tokens",
        "computed",
        "emitted",
        "indexed",
        "keys",
        "pages",
        "placed",
        "prefill_only",
        "prompt_tokens",
        "sampling",
        "sequence_id",
        "state_slot",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: str,
        prompt: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        emitted: Iterable[int] = (),
        prefill_only: bool = False,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        check_sampling(sampling)
        self.sequence_id = sequence_id
        self.tokens: list[int] = [*prompt.tolist(), *emitted]
        self.prompt_tokens = len(prompt)
        self._prompt = prompt
        self.emitted = len(self.tokens) - len(prompt)
        self.sampling = sampling
        self.prefill_only = prefill_only
        self.cache = cache
        self.placed = False
        self.pages: list[int] = []
        self.state_slot = -1
        self.keys: list[bytes] = []
        self.indexed = 0
        self.computed = 0
        # Unknown until the first match; a sequence that is computed anew keeps its first answer.
        self.cached_tokens: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet (1: the next step samples)."""
        return len(self.tokens) - self.computed

    @property
    def state(self) -> SequenceState:
        """The snapshot that the engine shows."""
        return SequenceState(list(self.pages), self.computed, self.cached_tokens or 0, self.state_slot)

    def page_keys(self, first: bytes, page_tokens: int, full_pages: int) -> list[bytes]:
        """Keys of the first `full_pages` pages; `first` is the namespace."""
        if len(self.keys) < full_pages:
            known, wanted = len(self.keys) * page_tokens, full_pages * page_tokens
            # Of a long prompt the array, which is there already, is hashed several times faster than the list.
            inside = wanted <= self.prompt_tokens
            fresh = (
                self._prompt[known:wanted] if inside else np.array(self.tokens[known:wanted], dtype=np.uint32)
            )
            extend_keys(self.keys, first, fresh, page_tokens)
        return self.keys[:full_pages]

    def restart(self) -> None:
        """Its memory is gone: everything is to be computed again (nothing is emitted again)."""
        self.placed, self.pages, self.state_slot = False, [], -1
        self.computed, self.indexed = 0, 0

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Whether the sequence ends with its last token."""
        if self.emitted and self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        if self.emitted >= self.sampling.max_tokens:
            return "length"
        # How long a prefill-only sequence may grow is for the engine to say that decodes it.
        if not self.prefill_only and len(self.tokens) >= max_model_len:
            return "length"
        return None

    def output(
        self,
        token: int | None = None,
        finish_reason: FinishReason | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
    ) -> StepOutput:
        """What this step did for the sequence."""
        computed = min(self.computed, self.prompt_tokens)
        return StepOutput(
            self.sequence_id, computed, token, finish_reason, self.cached_tokens or 0, logprob, error
        )
