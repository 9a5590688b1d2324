# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: continuous batching of transformers models over pages that a PagePool owns.

A sequence is waiting (no pages), running (pages for all its tokens; prefilling or decoding), or held (a finished
prefill whose pages are being pushed). When a running sequence cannot grow, the youngest goes back to waiting and is
computed again later; a prefill-only sequence never does, because its pages may be on their way already.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvrail.kernels.attention import Slice
from kvrail.runtime.engine_protocol import SequenceState, StepOutput
from kvrail.runtime.errors import BadRequest, TooLong
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.messages import CACHE_USED, CacheUse, Sampling
from kvrail.runtime.model import PagedModel, pool_tensor, ring_tensor
from kvrail.runtime.prefix_caches import PrefixCaches
from kvrail.runtime.sampler import sample
from kvrail.runtime.scheduler import LEAST_CHUNK, Pending, Turn, plan_step, victim
from kvrail.runtime.sequence import EngineSequence
from kvrail.transfer.errors import NoPages
from kvrail.transfer.pages import PagePool

__all__ = ["EmbeddedEngine"]

# How long a step that can do nothing else waits for a copy.
_COPY_WAIT_S = 0.002


class EmbeddedEngine:
    """Implements engine_protocol.Engine on one CPU.

    `memory` is a writable buffer of at least pool.pages * layout.page_bytes bytes; it must outlive the engine. So must
    `state_memory`, of pool.state_slots * layout.state_bytes bytes, which only models with sliding-window layers need.
    `max_model_len` is cut to what the model and the pool can hold.
    """

    def __init__(
        self,
        model: PagedModel,
        pool: PagePool,
        memory: Any,
        *,
        state_memory: Any = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        prefix_cache: bool = True,
        host_cache: HostPrefixCache | None = None,
    ) -> None:
        self.layout = model.layout
        if bool(self.layout.state_bytes) != bool(pool.state_slots and state_memory is not None):
            raise ValueError(
                f"{pool.state_slots} state slots for a model with {self.layout.state_bytes} bytes of state"
            )
        capacity = pool.pages * self.layout.page_tokens if self.layout.layers else model.max_model_len
        self.max_model_len = min(max_model_len or model.max_model_len, model.max_model_len, capacity)
        self._model = model
        self._pool = pool
        self._memory = pool_tensor(memory, pool.pages, self.layout)
        self._max_num_seqs = max_num_seqs
        self._token_budget = max_num_batched_tokens
        self._rings = ring_tensor(state_memory, pool.state_slots, self.layout) if pool.state_slots else None
        self._prefixes = PrefixCaches(self.layout, pool, host_cache, enabled=prefix_cache)
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: deque[EngineSequence] = deque()
        self._running: list[EngineSequence] = []
        self._outputs: list[StepOutput] = []
        # The situation in which the head of the queue found too few pages; the same again means no work.
        self._stuck: tuple[object, ...] | None = None

    # --- the engine protocol ------------------------------------------------------------------------------------

    def add(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        prefill_only: bool = False,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """Queue a prompt. Raises TooLong or BadRequest, with nothing changed."""
        self._check_prompt(sequence_id, tokens)
        self._queue(EngineSequence(sequence_id, tokens, sampling, prefill_only=prefill_only, cache=cache))

    def resume(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        first_token: int,
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """Queue a prompt whose first token is out already; the first token that a step gives is the second."""
        self._check_prompt(sequence_id, tokens)
        sequence = EngineSequence(sequence_id, tokens, sampling, emitted=(first_token,), cache=cache)
        if not self._finished_before(sequence):
            self._queue(sequence)

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
        """Decode over what the pool holds for `owner`. Raises (with nothing changed) on a wrong call."""
        self._check_prompt(sequence_id, tokens)
        sequence = EngineSequence(sequence_id, tokens, sampling, emitted=(first_token,), cache=cache)
        sequence.cached_tokens = cached_tokens
        shared = self._pool.reads_of(owner)
        pages = shared + self._pool.pages_of(owner)
        if len(pages) != self.layout.pages_for(len(tokens)):
            raise ValueError(f"{owner} holds {len(pages)} pages, not those of {len(tokens)} tokens")
        slot = self._pool.state_slot_of(owner)
        if (slot >= 0) != (self._rings is not None):
            raise ValueError(f"{owner} holds state slot {slot}; states have {self.layout.state_bytes} bytes")
        self._pool.rename(owner, sequence_id)
        sequence.placed, sequence.pages, sequence.state_slot = True, pages, slot
        sequence.computed, sequence.indexed = len(tokens), len(shared)
        # Whatever else came with the last page or the ring must not reach attention, not even times zero. (A last
        # page that others read is full: nothing is left over in it.)
        used = len(tokens) % self.layout.page_tokens
        if used and pages:
            self._memory[pages[-1], :, :, used:] = 0
        if self._rings is not None:
            self._rings[slot, :, :, len(tokens) :] = 0
        if self._finished_before(sequence):
            self._pool.release(sequence_id)
            return
        self._sequences[sequence_id] = sequence
        self._running.append(sequence)
        self._prefixes.index(sequence)

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence in any state and free its pages; unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            self._drop(sequence)

    def release(self, sequence_id: str) -> None:
        """Free the pages of a finished prefill-only sequence; the same as `abort` for any other."""
        self.abort(sequence_id)

    def sequence(self, sequence_id: str) -> SequenceState | None:
        """The state of a live sequence (waiting, running, or held after prefill only)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        return sequence.state._replace(host_pages=self._prefixes.host_pages(sequence_id))

    def prefix_keys(self, tokens: npt.NDArray[np.uint32], cache: CacheUse) -> list[bytes]:
        """The names of a prompt's full pages in the pool's prefix cache; none when it takes no part in that."""
        return self._prefixes.keys(tokens, cache)

    def flush_cache(self) -> tuple[int, int]:
        """Forget every cached page that nobody uses just now: how many of the pool, and of the host cache."""
        return self._prefixes.flush()

    def close(self) -> None:
        """Let go of `memory`, so that its owner can unmap it. The engine is of no use afterwards."""
        self._prefixes.close()
        self._memory = torch.empty(0)
        self._rings = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        if self._running or self._outputs or self._prefixes.busy:
            return True
        return bool(self._waiting) and self._situation() != self._stuck

    @property
    def load(self) -> dict[Literal["running", "waiting", "waiting_tokens"], int]:
        """Sequences in the batch, in the queue, and prompt tokens still to compute."""
        todo = [s.remaining for s in (*self._waiting, *self._running) if s.remaining > 1]
        return {"running": len(self._running), "waiting": len(self._waiting), "waiting_tokens": sum(todo)}

    def step(self) -> list[StepOutput]:
        """Run one batch and tell what it did for each sequence in it."""
        self._prefixes.poll()
        self._admit()
        ready = [Pending(s.sequence_id, s.remaining) for s in self._loaded()]
        turns = self._with_pages(plan_step(ready, token_budget=self._token_budget))
        if turns:
            self._run(turns)
        elif not self._outputs:
            self._prefixes.wait(_COPY_WAIT_S)
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- queue ----------------------------------------------------------------------------------------------------

    def _check_prompt(self, sequence_id: str, tokens: npt.NDArray[np.uint32]) -> None:
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id} exists already")
        if len(tokens) == 0:
            raise BadRequest("the prompt is empty", param="prompt")
        if len(tokens) >= self.max_model_len:
            raise TooLong(
                f"the prompt has {len(tokens)} tokens; at most {self.max_model_len - 1} fit "
                f"(max_model_len {self.max_model_len}, and one token of answer)",
                param="prompt",
            )
        if int(tokens.max()) >= self._model.vocab_size:
            raise BadRequest(f"token ids must be below {self._model.vocab_size}", param="prompt")

    def _queue(self, sequence: EngineSequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        self._waiting.append(sequence)
        self._stuck = None

    def _finished_before(self, sequence: EngineSequence) -> bool:
        """Whether a first token made elsewhere ends the sequence: then the next step just says so."""
        reason = sequence.finish_reason(self.max_model_len)
        if reason is not None:
            self._outputs.append(sequence.output(finish_reason=reason))
        return reason is not None

    def _situation(self) -> tuple[object, ...]:
        head = self._waiting[0].sequence_id if self._waiting else None
        pool = self._pool
        held = (pool.available, pool.owned, pool.free_states)
        return (head, *held, len(self._running), len(self._sequences))

    def _admit(self) -> None:
        """Move waiting sequences into the batch while there are seats, tokens in the budget, and pages."""
        budget = self._token_budget - sum(s.remaining for s in self._running)
        if all(s.remaining == 1 for s in self._running):
            budget = max(budget, LEAST_CHUNK)
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            sequence = self._waiting[0]
            if not self._place(sequence):
                if self._hopeless():
                    self._waiting.popleft()
                    self._fail(
                        sequence, f"needs more than the {self._pool.available} pages that can ever be free"
                    )
                    continue
                self._stuck = self._situation()
                return
            self._waiting.popleft()
            self._running.append(sequence)
            budget -= sequence.remaining

    def _place(self, sequence: EngineSequence) -> bool:
        """A state slot if there are any, and pages for all tokens so far: cached ones for the longest known prefix,
        new ones for the rest.
        """
        if self._rings is not None and not self._pool.free_states:
            return False
        cached, found = self._prefixes.match(sequence)
        missing = self.layout.pages_for(len(sequence.tokens)) - len(cached)
        # Each decoding sequence may want a page soon: admitting into the very last pages only causes preemption.
        if missing and missing > self._pool.available - sum(not s.prefill_only for s in self._running):
            self._prefixes.release(sequence.sequence_id)
            return False
        loaded = found - len(cached)
        sequence.pages = cached + self._new_pages(sequence, missing, loaded)
        sequence.state_slot = self._new_slot(sequence)
        sequence.placed = True
        sequence.indexed = len(cached)
        sequence.computed = found * self.layout.page_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self._prefixes.load(sequence, sequence.pages[len(cached) : found])
        if loaded and sequence.prefill_only:
            # Whoever pushes them need not wait until they are in the pool as well.
            self._outputs.append(sequence.output())
        return True

    def _new_pages(self, sequence: EngineSequence, count: int, loaded: int = 0) -> list[int]:
        """`count` pages; the first `loaded` are about to be overwritten whole."""
        pages = self._pool.allocate(sequence.sequence_id, count)
        if not pages:
            return pages
        # What an earlier owner left (NaN, at worst) must not reach attention, not even times zero.
        self._memory.index_fill_(0, torch.tensor(pages[loaded:], dtype=torch.int64), 0)
        return pages

    def _loaded(self) -> list[EngineSequence]:
        """Who can run: sequences that are not just being copied in. What came from the host is shared from here on."""
        if not self._prefixes.loads:
            return self._running
        for sequence in list(self._running):
            if not self._prefixes.loading(sequence) and (fault := self._prefixes.fault(sequence)):
                self._fail(sequence, f"pages of the host cache could not be copied: {fault}")
        ready = [sequence for sequence in self._running if not self._prefixes.loading(sequence)]
        for sequence in ready:
            self._prefixes.index(sequence)
        return ready

    def _new_slot(self, sequence: EngineSequence) -> int:
        slot = self._pool.allocate_state(sequence.sequence_id)
        if self._rings is not None:
            self._rings[slot] = 0
        return slot

    def _hopeless(self) -> bool:
        """Whether nobody is left who could give pages back.

        What is in quarantine comes back in a moment, or never: how long to wait for it is the caller's to say.
        """
        pool = self._pool
        held = pool.owned + pool.shared + pool.quarantined + pool.state_slots - pool.free_states
        return not self._running and held == 0

    # --- a step ---------------------------------------------------------------------------------------------------

    def _with_pages(self, turns: list[Turn]) -> list[Turn]:
        """The turns that have pages for their tokens, after growth and, where it must be, preemption."""
        for turn in turns:
            while (sequence := self._sequences[turn.sequence_id]).placed:
                missing = self.layout.pages_for(sequence.computed + turn.tokens) - len(sequence.pages)
                try:
                    sequence.pages += self._new_pages(sequence, missing) if missing > 0 else []
                    break
                except NoPages:
                    self._preempt_one()
        return [turn for turn in turns if self._sequences[turn.sequence_id].placed]

    def _preempt_one(self) -> None:
        chosen = victim(
            [(s.sequence_id, not s.prefill_only and not self._prefixes.loading(s)) for s in self._running]
        )
        assert chosen is not None, "the sequence that wants to grow may itself be preempted"
        sequence = self._sequences[chosen]
        self._running.remove(sequence)
        self._prefixes.release(chosen)
        sequence.restart()
        self._waiting.appendleft(sequence)

    def _run(self, turns: list[Turn]) -> None:
        batch = [self._sequences[turn.sequence_id] for turn in turns]
        counts = [self._prefixes.chunk(s, turn.tokens) for s, turn in zip(batch, turns, strict=True)]
        tokens: list[int] = []
        slices: list[Slice] = []
        wanted: list[int] = []
        sampled: list[EngineSequence] = []
        for sequence, count in zip(batch, counts, strict=True):
            tokens += sequence.tokens[sequence.computed : sequence.computed + count]
            slices.append(Slice(sequence.pages, sequence.computed, count, sequence.state_slot))
            if count == sequence.remaining:
                wanted.append(len(tokens) - 1)
                sampled.append(sequence)
        logits = self._model.forward(self._memory, np.asarray(tokens), slices, wanted, self._rings)
        for sequence, count in zip(batch, counts, strict=True):
            sequence.computed += count
            self._prefixes.index(sequence)
            if sequence.remaining:
                self._outputs.append(sequence.output())
        if sampled:
            # The position of a token is the number of tokens before it, wherever those were computed.
            drawn = sample(logits, [(s.sampling, len(s.tokens)) for s in sampled])
            for sequence, choice in zip(sampled, drawn, strict=True):
                if choice is None:
                    self._fail(sequence, "the model gave logits that are not numbers")
                else:
                    self._emit(sequence, *choice)

    def _emit(self, sequence: EngineSequence, token: int, logprob: Any) -> None:
        sequence.tokens.append(token)
        sequence.emitted += 1
        reason = sequence.finish_reason(self.max_model_len)
        self._outputs.append(sequence.output(token, reason, logprob))
        if sequence.prefill_only:
            self._running.remove(sequence)
        elif reason is not None:
            self._drop(sequence)

    def _fail(self, sequence: EngineSequence, why: str) -> None:
        self._outputs.append(sequence.output(finish_reason="abort", error=why))
        if sequence.prefill_only and sequence.placed:
            self._running.remove(sequence)
        else:
            self._drop(sequence)

    def _drop(self, sequence: EngineSequence) -> None:
        del self._sequences[sequence.sequence_id]
        if sequence in self._running:
            self._running.remove(sequence)
        self._prefixes.release(sequence.sequence_id)
