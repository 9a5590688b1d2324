# SPDX-License-Identifier: Apache-2.0
"""The narrow face that an engine shows to the rank process, so that other engines can plug in beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrail.runtime.messages import CACHE_USED, CacheUse, FinishReason, Sampling
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.prefill_ticket import CachedPages
from kvrail.transfer.wire import TokenLogprob

__all__ = ["Engine", "SequenceState", "StepOutput", "StepWatcher"]


class StepOutput(NamedTuple):
    """What one step did for one sequence, or for one choice of a request for several (Sampling.n).

    `computed`: prompt tokens whose KV now stands in the sequence's pages. `token`: the token sampled in this
    step, or None (a prefill chunk that was not the last). After `finish_reason` is set the engine holds no
    pages of the sequence any more, except for a prefill-only sequence: see Engine.add. A prefill-only sequence
    is done when `token` (or a finish reason) is set; its finish reason is the one that the whole request ends
    with at token 1, or None when it goes on elsewhere. `error` says why when `finish_reason` is "abort".

    A request for several choices gives all its first tokens in one step, in order. An "abort" ends all of them when
    no first token is out yet. `prompt_logprobs`: see Sampling; those of the tokens that this step computed.
    """

    sequence_id: str
    computed: int
    token: int | None
    finish_reason: FinishReason | None
    cached_tokens: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    choice: int = 0
    prompt_logprobs: Sequence[TokenLogprob] = ()


class SequenceState(NamedTuple):
    """A snapshot of one sequence: its page table (pool indices in token order) and how far it is computed.

    `host_pages`: those that come from the host cache and can be read before the sequence runs, until it is released
    (see HostPrefixCache.pages_of). Whoever reads pages that were not computed in a step reads these.
    `state_slot`: where the state of its sliding-window layers lies, or -1. Unlike pages it changes with every token
    that is computed, so it is final only when the whole prompt is.
    """

    pages: list[int]
    computed: int
    cached_tokens: int
    state_slot: int = -1
    host_pages: CachedPages | None = None


class StepWatcher(Protocol):
    """Who wants to know, while a step is queued on a stream, what of the prefill-only prompts in it is.

    Called by the engine inside `step`, on its thread: none of its methods may be called meanwhile but `sequence`.
    """

    def step_begins(self, ending: Mapping[str, int]) -> Sequence[int]:
        """A step is going to be queued with which these prompts end: so many tokens of each are still to compute.

        Returns after how many full layers `layers_queued` is to be called, rising.
        """

    def layers_queued(self, layers: int) -> None:
        """All work so far stores KV of this step's tokens in the first `layers` full layers, which are not all.

        Of a step that is one CUDA graph nothing is told.
        """

    def step_queued(self, computed: Mapping[str, int]) -> None:
        """All that writes KV in this step is queued: so many tokens of these sequences will then be computed.

        Its StepOutput follows, and takes nothing of that back but with "abort".
        """


class Engine(Protocol):
    """One model on one device, one thread. Page ownership goes through the PagePool given at construction."""

    layout: PageLayout
    max_model_len: int
    # Token ids are below this.
    vocab_size: int

    @property
    def stream(self) -> int | None:
        """Address of the CUDA stream on which KV is written; None when KV is there as soon as `step` returns."""

    def watch(self, watcher: StepWatcher) -> None:
        """From now on `watcher` is told of steps; only to be called where there is a `stream`."""

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
        first_tokens: Mapping[int, int],
        cached_tokens: int,
        cache: CacheUse = CACHE_USED,
        keys: Sequence[bytes] = (),
    ) -> None:
        """Decode a sequence whose prompt KV stands complete in the pages that the pool holds for `owner`.

        First the shared pages that it reads, then those that it writes, each in token order. The engine takes over the
        pages. `first_tokens` were sampled elsewhere and have been emitted already: one for each choice that goes on (at
        least one). `keys`: what `prefix_keys` said of these tokens, if it was asked. Goes straight into the running
        batch.
        """

    def resume(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        first_tokens: Mapping[int, int],
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """The fallback of a lost prefill whose first token is out: prefill prompt + token 1, sample from token 2."""

    def abort(self, sequence_id: str, choice: int | None = None) -> None:
        """Drop a sequence in any state and free its pages, or drop one choice; unknown ids are ignored."""

    def release(self, sequence_id: str) -> None:
        """Free the pages of a finished prefill-only sequence (its pushes are locally complete)."""

    def sequence(self, sequence_id: str) -> SequenceState | None:
        """The state of a live sequence."""

    def prefix_keys(self, tokens: npt.NDArray[np.uint32], cache: CacheUse) -> list[bytes]:
        """The names of a prompt's full pages in the pool's prefix cache; none when it takes no part in that."""

    def flush_cache(self) -> tuple[int, int]:
        """Forget every cached page that nobody uses just now: how many of the pool, and of the host cache."""

    def step(self) -> list[StepOutput]:
        """Run one batch. Never blocks when there is nothing to do; never raises for one sequence's fault.

        Where there is a `stream`, a step that sampled nothing may return before its KV is written: whoever pushes
        pages orders that behind the stream. Pages that go back to the pool have nothing queued on them.
        """

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    @property
    def load(self) -> dict[Literal["running", "waiting", "waiting_tokens"], int]:
        """Sequences in the batch, in the queue, and prompt tokens still to compute."""
