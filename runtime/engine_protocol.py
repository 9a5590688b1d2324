# SPDX-License-Identifier: Apache-2.0
"""The narrow face that an engine shows to the rank process, so that other engines can plug in beside ours."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrail.runtime.messages import CACHE_USED, CacheUse, FinishReason, Sampling
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.prefill_ticket import CachedPages
from kvrail.transfer.wire import TokenLogprob

__all__ = ["Engine", "SequenceState", "StepOutput"]


class StepOutput(NamedTuple):
    """What one step did for one sequence.

    `computed`: prompt tokens whose KV now stands in the sequence's pages. `token`: the token sampled in this
    step, or None (a prefill chunk that was not the last). After `finish_reason` is set the engine holds no
    pages of the sequence any more, except for a prefill-only sequence: see Engine.add. A prefill-only sequence
    is done when `token` (or a finish reason) is set; its finish reason is the one that the whole request ends
    with at token 1, or None when it goes on elsewhere. `error` says why when `finish_reason` is "abort".
    """

    sequence_id: str
    computed: int
    token: int | None
    finish_reason: FinishReason | None
    cached_tokens: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class SequenceState(NamedTuple):
    """A snapshot of one sequence: its page table (pool indices in token order) and how far it is computed.

    `host_pages`: those that stand in the host cache as well, and stay there until the sequence is released. They may
    be there before they are in the pool: whoever reads pages that were not computed in a step reads these.
    `state_slot`: where the state of its sliding-window layers lies, or -1. Unlike pages it changes with every token
    that is computed, so it is final only when the whole prompt is.
    """

    pages: list[int]
    computed: int
    cached_tokens: int
    state_slot: int = -1
    host_pages: CachedPages | None = None


class Engine(Protocol):
    """One model on one device, one thread. Page ownership goes through the PagePool given at construction."""

    layout: PageLayout
    max_model_len: int

    def add(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        prefill_only: bool = False,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """Queue a prompt. Raises TooLong when it can never run here.

        A prompt of which a cache has a part may give an output before it has run: `computed` covers that part.
        `prefill_only`: stop after the first token and **keep the pages** until `release` (they are being
        pushed). Pages of finished chunks are final: the engine never writes to them again.
        """

    def adopt(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        owner: str,
        first_token: int,
        cached_tokens: int,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """Decode a sequence whose prompt KV stands complete in the pages that the pool holds for `owner`.

        First the shared pages that it reads, then those that it writes, each in token order. The engine takes over
        the pages (PagePool owner becomes `sequence_id`). `first_token` was sampled
        elsewhere and has been emitted already. Goes straight into the running batch.
        """

    def resume(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        first_token: int,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """The fallback of a lost prefill whose first token is out: prefill prompt + token 1, sample from token 2."""

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence in any state and free its pages; unknown ids are ignored."""

    def release(self, sequence_id: str) -> None:
        """Free the pages of a finished prefill-only sequence (its pushes are locally complete)."""

    def sequence(self, sequence_id: str) -> SequenceState | None:
        """The state of a live sequence."""

    def prefix_keys(self, tokens: npt.NDArray[np.uint32], cache: CacheUse) -> list[bytes]:
        """The names of a prompt's full pages in the pool's prefix cache; none when it takes no part in that."""

    def flush_cache(self) -> tuple[int, int]:
        """Forget every cached page that nobody uses just now: how many of the pool, and of the host cache."""

    def step(self) -> list[StepOutput]:
        """Run one batch. Never blocks when there is nothing to do; never raises for one sequence's fault."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    @property
    def load(self) -> dict[Literal["running", "waiting", "waiting_tokens"], int]:
        """Sequences in the batch, in the queue, and prompt tokens still to compute."""
