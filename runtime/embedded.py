# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: continuous batching of transformers models over pages that a PagePool owns.

A sequence is waiting (no pages), running (pages for all its tokens; prefilling or decoding), or held (a finished
prefill whose pages are being pushed). When a running sequence cannot grow, the youngest goes back to waiting and is
computed again later; a prefill-only sequence never does, because its pages may be on their way already.

Several answers to one prompt (Sampling.n) are one sequence up to its end and then one each, over shared pages. On a GPU
a step that samples nothing returns while its work is still queued.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvrail.runtime.batch import Batch, Drawn
from kvrail.runtime.device import Compute, out_of_memory
from kvrail.runtime.engine_protocol import SequenceState, StepOutput
from kvrail.runtime.errors import BadRequest
from kvrail.runtime.grammar import Grammars
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.messages import CACHE_USED, CacheUse, Sampling
from kvrail.runtime.model import PagedModel, pool_tensor, ring_tensor
from kvrail.runtime.prefix_caches import PrefixCaches
from kvrail.runtime.ready import check_prompt, ready_sequences
from kvrail.runtime.sampling import check_sampling
from kvrail.runtime.scheduler import LEAST_CHUNK, Pending, Turn, plan_step, victim
from kvrail.runtime.sequence import EngineSequence
from kvrail.runtime.sequence_memory import SequenceMemory
from kvrail.transfer.errors import NoPages
from kvrail.transfer.pages import PagePool

__all__ = ["EmbeddedEngine"]

_log = logging.getLogger(__name__)
# Tokens of a prompt in a step when the logits of all of them are wanted.
_LOGITS_CHUNK = 128
# How long a step that can do nothing else waits for a copy.
_COPY_WAIT_S = 0.002


class EmbeddedEngine:
    """Implements engine_protocol.Engine on one CPU or GPU: the model's.

    `memory`, on the same device, holds at least pool.pages * layout.page_bytes bytes (see model.pool_tensor) and must
    outlive the engine. So must `state_memory`, of pool.state_slots * layout.state_bytes bytes, which only models with
    sliding-window layers need. `grammars`: None where answers are not to follow any.
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
        grammars: Grammars | None = None,
    ) -> None:
        self.layout = model.layout
        self.vocab_size = model.vocab_size
        if bool(self.layout.state_bytes) != bool(pool.state_slots and state_memory is not None):
            raise ValueError(
                f"{pool.state_slots} state slots for a model with {self.layout.state_bytes} bytes of state"
            )
        capacity = pool.pages * self.layout.page_tokens if self.layout.layers else model.max_model_len
        self.max_model_len = min(max_model_len or model.max_model_len, model.max_model_len, capacity)
        self._model = model
        self._pool = pool
        self._compute = Compute(model.device)
        self._memory = SequenceMemory(
            pool,
            self.layout,
            pool_tensor(memory, pool.pages, self.layout),
            ring_tensor(state_memory, pool.state_slots, self.layout) if pool.state_slots else None,
            self._compute,
            PrefixCaches(self.layout, pool, host_cache, enabled=prefix_cache),
        )
        model.prepare_decoding(self._memory.pages, max_num_seqs, self.layout.pages_for(self.max_model_len))
        self._prefixes = self._memory.prefixes
        self._max_num_seqs = max_num_seqs
        self._token_budget = max_num_batched_tokens
        self._grammars = grammars
        self._sequences: dict[str, EngineSequence] = {}
        # The live choices of each request for several, once its prompt is computed.
        self._families: dict[str, list[EngineSequence]] = {}
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
        self._check(sequence_id, tokens, sampling)
        sequence = EngineSequence(
            sequence_id, tokens, sampling, prefill_only=prefill_only, cache=cache, grammars=self._grammars
        )
        self._queue(sequence)

    def resume(
        self,
        sequence_id: str,
        tokens: npt.NDArray[np.uint32],
        sampling: Sampling,
        *,
        first_tokens: Mapping[int, int],
        cache: CacheUse = CACHE_USED,
    ) -> None:
        """Queue a prompt whose first token is out already; the first token that a step gives is the second."""
        self._check(sequence_id, tokens, sampling)
        sequence = EngineSequence(sequence_id, tokens, sampling, cache=cache, grammars=self._grammars)
        if sequence.to_branch:
            sequence.firsts = first_tokens
        else:
            sequence.append(first_tokens[0])
            if self._finished_before(sequence):
                return
        self._queue(sequence)

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
    ) -> None:
        """Decode over what the pool holds for `owner`. Raises (with nothing changed) on a wrong call."""
        self._check(sequence_id, tokens, sampling)
        sequence = EngineSequence(sequence_id, tokens, sampling, cache=cache, grammars=self._grammars)
        sequence.cached_tokens = cached_tokens
        self._memory.adopt(sequence, owner)
        self._sequences[sequence_id] = sequence
        self._running.append(sequence)
        self._prefixes.index(sequence)
        if sequence.to_branch:
            self._branch(sequence, first_tokens)
        else:
            sequence.append(first_tokens[0])
            if self._finished_before(sequence):
                self._drop(sequence)

    def abort(self, sequence_id: str, choice: int | None = None) -> None:
        """Drop a sequence in any state and free its pages, or drop one choice; unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.to_branch and choice is not None:
            sequence.closed.add(choice)
            if len(sequence.closed) < sequence.sampling.n:
                return
        family = [sequence] if sequence is not None else list(self._families.get(sequence_id, ()))
        for one in family:
            if choice is None or one.to_branch or one.choice == choice:
                if one in self._waiting:
                    self._waiting.remove(one)
                self._drop(one)

    def release(self, sequence_id: str) -> None:
        """Free the pages of a finished prefill-only sequence; the same as `abort` for any other."""
        self.abort(sequence_id)

    def sequence(self, sequence_id: str) -> SequenceState | None:
        """The state of a live sequence (waiting, running, or held after prefill only)."""
        sequence = self._sequences.get(sequence_id)
        host_pages = self._prefixes.host_pages(sequence_id)
        return None if sequence is None else sequence.state._replace(host_pages=host_pages)

    def prefix_keys(self, tokens: npt.NDArray[np.uint32], cache: CacheUse) -> list[bytes]:
        """The names of a prompt's full pages in the pool's prefix cache; none when it takes no part in that."""
        return self._prefixes.keys(tokens, cache)

    def flush_cache(self) -> tuple[int, int]:
        """Forget every cached page that nobody uses just now: how many of the pool, and of the host cache."""
        return self._prefixes.flush()

    def close(self) -> None:
        """Let go of `memory`, so that its owner can unmap it. The engine is of no use afterwards."""
        self._memory.close()

    @property
    def stream(self) -> int | None:
        """Address of the CUDA stream on which KV is written; None on a CPU."""
        return self._compute.stream

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
        ready, faulty = ready_sequences(self._running, self._prefixes)
        for sequence, fault in faulty:
            self._fail(sequence, fault)
        pending = [Pending(s.sequence_id, s.remaining) for s in ready]
        turns = self._with_pages(plan_step(pending, token_budget=self._token_budget))
        turns = [self._cut(turn) for turn in turns]
        if turns:
            self._run(turns)
        elif not self._outputs:
            self._prefixes.wait(_COPY_WAIT_S)
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- queue ----------------------------------------------------------------------------------------------------

    def _check(self, sequence_id: str, tokens: npt.NDArray[np.uint32], sampling: Sampling) -> None:
        check_sampling(sampling, self.vocab_size)
        if sampling.grammar and self._grammars is None:
            raise BadRequest("this engine has no grammars", param="response_format")
        if sequence_id in self._sequences or sequence_id in self._families:
            raise ValueError(f"sequence {sequence_id} exists already")
        check_prompt(tokens, self.max_model_len, self.vocab_size)

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

    def _branch(self, parent: EngineSequence, firsts: Mapping[int, int]) -> None:
        """The prompt is computed: go on with one sequence for each choice, over the same pages.

        A choice for which there is no seat or page waits, and is computed anew, like a preempted one.
        """
        going: list[EngineSequence] = []
        for one in parent.branch(firsts):
            if not self._finished_before(one):
                going.append(one)
                self._sequences[one.sequence_id] = one
        del self._sequences[parent.sequence_id]
        place = self._running.index(parent)
        self._running.remove(parent)
        if not going:
            self._memory.release(parent)
            return
        self._families[parent.request_id] = list(going)
        started, late = going[:1], list[EngineSequence]()
        for one in going[1:]:
            seats = self._max_num_seqs - len(self._running) - len(started)
            (started if seats > 0 and self._memory.share(parent, one) else late).append(one)
        self._memory.inherit(parent, going[0])
        self._running[place:place] = started
        for one in late:
            one.restart()
        self._waiting.extendleft(reversed(late))
        self._stuck = None

    def _situation(self) -> tuple[object, ...]:
        head = self._waiting[0].sequence_id if self._waiting else None
        held = (self._pool.available, self._pool.owned, self._pool.free_states)
        return (head, *held, len(self._running), len(self._sequences))

    def _admit(self) -> None:
        """Move waiting sequences into the batch while there are seats, tokens in the budget, and pages."""
        budget = self._token_budget - sum(s.remaining for s in self._running)
        if all(s.remaining == 1 for s in self._running):
            budget = max(budget, LEAST_CHUNK)
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            sequence = self._waiting[0]
            # Each decoding sequence may want a page soon: admitting into the very last pages only causes preemption.
            reserve = sum(not s.prefill_only for s in self._running)
            if not self._memory.place(sequence, reserve):
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
            if sequence.prefill_only and self._prefixes.host_pages(sequence.sequence_id):
                # Whoever pushes them need not wait until they are in the pool as well.
                self._outputs.append(sequence.output())

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
                try:
                    self._memory.grow(sequence, sequence.computed + turn.tokens)
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
        self._memory.release(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)

    def _cut(self, turn: Turn) -> Turn:
        """Few tokens where the (large) logits of all of them are wanted; and chunks end where a state is to be kept."""
        sequence = self._sequences[turn.sequence_id]
        most = min(turn.tokens, _LOGITS_CHUNK) if sequence.wants_prompt_logprobs else turn.tokens
        return turn._replace(tokens=self._prefixes.chunk(sequence, most))

    def _run(self, turns: list[Turn]) -> None:
        parts = [(self._sequences[turn.sequence_id], turn.tokens) for turn in turns]
        batch = Batch(parts)
        before = [sequence.computed for sequence, _ in parts]
        try:
            with self._compute.queue() as number:
                for sequence, _ in parts:
                    sequence.queued = number
                logits = self._model.forward(
                    self._memory.pages,
                    np.asarray(batch.tokens),
                    batch.slices,
                    batch.wanted,
                    self._memory.rings,
                )
                for sequence, count in parts:
                    sequence.computed += count
                drawn = batch.draw(logits)
                noted = batch.prompt_logprobs(logits)
        except torch.OutOfMemoryError:
            for (sequence, _), computed in zip(parts, before, strict=True):
                sequence.computed = computed
            self._shrink(parts)
            return
        # Whatever came back was behind all of it.
        if noted or any(found for _, found in drawn):
            self._compute.waited()
        else:
            self._compute.pace()
        for sequence, logprobs in noted:
            self._outputs.append(sequence.output(prompt_logprobs=logprobs))
        for sequence, _ in parts:
            self._prefixes.index(sequence)
            if sequence.remaining:
                self._outputs.append(sequence.output())
        for sequence, found in drawn:
            if isinstance(found, str):
                self._fail(sequence, found)
            elif sequence.firsts is not None:
                self._branch(sequence, sequence.firsts)
            else:
                self._emit(sequence, found)

    def _shrink(self, parts: list[tuple[EngineSequence, int]]) -> None:
        """The device lacks memory for this batch: smaller ones from now on, or, where that is not it, fewer.

        Nothing has been counted as computed, so the same tokens come again.
        """
        torch.cuda.empty_cache()
        counts = [count for _, count in parts]
        remedy = "lower --max-num-batched-tokens, --max-num-seqs or the memory of the pool"
        told = out_of_memory(self._model.device, f"computing {sum(counts)} tokens", remedy)
        if max(counts) > 1 and self._token_budget > LEAST_CHUNK:
            self._token_budget = max(LEAST_CHUNK, min(self._token_budget, sum(counts)) // 2)
            _log.error("%s (steps have at most %d tokens from now on)", told, self._token_budget)
        else:
            _log.error("%s (the youngest sequence of the batch fails)", told)
            self._fail(parts[-1][0], told)

    def _emit(self, sequence: EngineSequence, drawn: list[Drawn]) -> None:
        """Tell the next token of the sequence, or the first ones of its choices."""
        going: dict[int, int] = {}
        for choice, token, logprob in drawn:
            choice.append(token)
            reason = choice.finish_reason(self.max_model_len)
            self._outputs.append(choice.output(token, reason, logprob))
            if reason is None:
                going[choice.choice] = token
        if sequence.prefill_only:
            self._running.remove(sequence)
        elif sequence.to_branch:
            self._branch(sequence, going)
        elif not going:
            self._drop(sequence)

    def _fail(self, sequence: EngineSequence, why: str) -> None:
        self._outputs.append(sequence.output(finish_reason="abort", error=why))
        if sequence.prefill_only and sequence.placed:
            self._running.remove(sequence)
        else:
            self._drop(sequence)

    def _drop(self, sequence: EngineSequence) -> None:
        del self._sequences[sequence.sequence_id]
        family = self._families.get(sequence.request_id, [])
        if sequence in family:
            family.remove(sequence)
            if not family:
                del self._families[sequence.request_id]
        if sequence in self._running:
            self._running.remove(sequence)
        self._memory.release(sequence)
