# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: continuous batching of transformers models over pages that a PagePool owns.

Which sequences wait and run is the Roster's business (roster.py); here is the engine protocol, and what a step does:
plan, compute, draw. Several answers to one prompt (Sampling.n) are one sequence up to its end and then one each, over
shared pages. On a GPU a step that samples nothing returns while its work is still queued.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvrail.runtime.batch import Batch
from kvrail.runtime.device import Compute, out_of_memory
from kvrail.runtime.engine_protocol import SequenceState, StepOutput, StepWatcher
from kvrail.runtime.errors import BadRequest
from kvrail.runtime.grammar import Grammars
from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.layer_parts import Stored
from kvrail.runtime.messages import CACHE_USED, CacheUse, Sampling
from kvrail.runtime.model import PagedModel, pool_tensor, ring_tensor
from kvrail.runtime.prefix_caches import PrefixCaches
from kvrail.runtime.ready import check_prompt, ready_sequences
from kvrail.runtime.roster import Roster
from kvrail.runtime.sampling import check_sampling
from kvrail.runtime.scheduler import LEAST_CHUNK, Pending, Turn, plan_step
from kvrail.runtime.sequence import EngineSequence
from kvrail.runtime.sequence_memory import SequenceMemory
from kvrail.transfer.pages import PagePool

__all__ = ["EmbeddedEngine"]

_log = logging.getLogger(__name__)
# Tokens of a prompt in a step when the logits of all of them are wanted.
_LOGITS_CHUNK = 128
# The last chunk of a long prompt whose pages are pushed has at most this part of the token budget, and no more than
# this many tokens: its pages are soon over. Fewer would cost more than they save: a GPU is slower with few at a time.
_TAIL_SHARE = 4
_TAIL_TOKENS = 2048
# How long a step that can do nothing else waits for a copy.
_COPY_WAIT_S = 0.002


class EmbeddedEngine:
    """Implements engine_protocol.Engine on one CPU or GPU: the model's.

    `memory`, on the same device, holds at least pool.pages * layout.page_bytes bytes (see model.pool_tensor) and must
    outlive the engine. So must `state_memory`, of pool.state_slots * layout.state_bytes bytes, which only models with
    sliding-window layers need. `grammars`: None where answers are not to follow any.
    `max_model_len` is cut to what the model and the pool can hold. `compute`: the model's device, for who knew its
    stream before (a host cache that copies in its order).
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
        compute: Compute | None = None,
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
        self._compute = compute or Compute(model.device)
        self._memory = SequenceMemory(
            pool,
            self.layout,
            pool_tensor(memory, pool.pages, self.layout),
            ring_tensor(state_memory, pool.state_slots, self.layout) if pool.state_slots else None,
            self._compute,
            PrefixCaches(self.layout, pool, host_cache, enabled=prefix_cache),
        )
        model.prepare_steps(self._memory.pages, max_num_seqs, self.layout.pages_for(self.max_model_len))
        self._prefixes = self._memory.prefixes
        self._roster = Roster(pool, self._memory, max_num_seqs=max_num_seqs, max_model_len=self.max_model_len)
        self._token_budget = max_num_batched_tokens
        self._grammars = grammars
        self._watcher: StepWatcher | None = None

    # --- the engine protocol ------------------------------------------------------------------------------------

    def watch(self, watcher: StepWatcher) -> None:
        """Tell `watcher` of steps while they are queued."""
        self._watcher = watcher

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
        self._roster.queue(sequence)

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
            if self._roster.ended(sequence):
                return
        self._roster.queue(sequence)

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
        """Decode over what the pool holds for `owner`. Raises (with nothing changed) on a wrong call."""
        self._check(sequence_id, tokens, sampling)
        sequence = EngineSequence(
            sequence_id, tokens, sampling, cache=cache, grammars=self._grammars, keys=keys
        )
        sequence.cached_tokens = cached_tokens
        self._memory.adopt(sequence, owner)
        self._roster.run(sequence)
        self._prefixes.index(sequence)
        if sequence.to_branch:
            self._roster.branch(sequence, first_tokens)
        else:
            sequence.append(first_tokens[0])
            if self._roster.ended(sequence):
                self._roster.drop(sequence)

    def abort(self, sequence_id: str, choice: int | None = None) -> None:
        """Drop a sequence in any state and free its pages, or drop one choice; unknown ids are ignored."""
        self._roster.abort(sequence_id, choice)

    def release(self, sequence_id: str) -> None:
        """Free the pages of a finished prefill-only sequence; the same as `abort` for any other."""
        self.abort(sequence_id)

    def sequence(self, sequence_id: str) -> SequenceState | None:
        """The state of a live sequence (waiting, running, or held after prefill only)."""
        sequence = self._roster.get(sequence_id)
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
        return self._roster.has_work or self._prefixes.busy

    @property
    def load(self) -> dict[Literal["running", "waiting", "waiting_tokens"], int]:
        """Sequences in the batch, in the queue, and prompt tokens still to compute."""
        return self._roster.load

    def step(self) -> list[StepOutput]:
        """Run one batch and tell what it did for each sequence in it."""
        self._prefixes.poll()
        self._roster.admit(self._token_budget)
        ready, faulty = ready_sequences(self._roster.running, self._prefixes)
        for sequence, fault in faulty:
            self._roster.fail(sequence, fault)
        pending = [Pending(s.sequence_id, s.remaining, self._tail(s)) for s in ready]
        turns = self._roster.with_pages(plan_step(pending, token_budget=self._token_budget))
        turns = [self._cut(turn) for turn in turns]
        if turns:
            self._run(turns)
        elif not self._roster.outputs:
            self._prefixes.wait(_COPY_WAIT_S)
        return self._roster.take_outputs()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _check(self, sequence_id: str, tokens: npt.NDArray[np.uint32], sampling: Sampling) -> None:
        check_sampling(sampling, self.vocab_size)
        if sampling.grammar and self._grammars is None:
            raise BadRequest("this engine has no grammars", param="response_format")
        if sequence_id in self._roster:
            raise ValueError(f"sequence {sequence_id} exists already")
        check_prompt(tokens, self.max_model_len, self.vocab_size)

    def _tail(self, sequence: EngineSequence) -> int:
        """Of a prompt whose pages are pushed: they leave while the next chunk is computed, but the last one's."""
        # (What a cache had is no chunk: cut for its sake, a short prompt would only take one step more.)
        begun = sequence.computed > (sequence.cached_tokens or 0)
        long = begun or sequence.remaining > self._token_budget
        return min(self._token_budget // _TAIL_SHARE, _TAIL_TOKENS) if sequence.prefill_only and long else 0

    def _cut(self, turn: Turn) -> Turn:
        """Few tokens where the (large) logits of all of them are wanted; and chunks end where a state is to be kept."""
        sequence = self._roster[turn.sequence_id]
        most = min(turn.tokens, _LOGITS_CHUNK) if sequence.wants_prompt_logprobs else turn.tokens
        return turn._replace(tokens=self._prefixes.chunk(sequence, most))

    def _run(self, turns: list[Turn]) -> None:
        parts = [(self._roster[turn.sequence_id], turn.tokens) for turn in turns]
        batch = Batch(parts)
        before = [sequence.computed for sequence, _ in parts]
        told: list[EngineSequence] = []
        try:
            with self._compute.queue() as number:
                for sequence, _ in parts:
                    sequence.queued = number
                logits = self._model.forward(
                    self._memory.pages,
                    batch.tokens,
                    batch.slices,
                    batch.wanted,
                    self._memory.rings,
                    self._stored(parts),
                )
                for sequence, count in parts:
                    sequence.computed += count
                told = self._tell(parts)
                drawn = batch.draw(logits)
                noted = batch.prompt_logprobs(logits)
        except torch.OutOfMemoryError:
            for (sequence, _), computed in zip(parts, before, strict=True):
                sequence.computed = computed
            self._shrink(parts, told)
            return
        # Whatever came back was behind all of it.
        if noted or any(found for _, found in drawn):
            self._compute.waited()
        else:
            self._compute.pace()
        for sequence, logprobs in noted:
            self._roster.outputs.append(sequence.output(prompt_logprobs=logprobs))
        for sequence, _ in parts:
            self._prefixes.index(sequence)
            if sequence.remaining:
                self._roster.outputs.append(sequence.output())
        for sequence, found in drawn:
            if isinstance(found, str):
                self._roster.fail(sequence, found)
            elif sequence.firsts is not None:
                self._roster.branch(sequence, sequence.firsts)
            else:
                self._roster.emit(sequence, found)

    def _stored(self, parts: list[tuple[EngineSequence, int]]) -> Stored | None:
        ending = {s.sequence_id: count for s, count in parts if s.prefill_only and count == s.remaining}
        if self._watcher is None or not ending:
            return None
        ends = self._watcher.step_begins(ending)
        return Stored(ends, self._watcher.layers_queued) if ends else None

    def _tell(self, parts: list[tuple[EngineSequence, int]]) -> list[EngineSequence]:
        """Before anything waits for the step: what of it can be pushed. Returns whose."""
        told = [sequence for sequence, _ in parts if sequence.prefill_only]
        if self._watcher is None or not told:
            return []
        self._watcher.step_queued({sequence.sequence_id: sequence.computed for sequence in told})
        return told

    def _shrink(self, parts: list[tuple[EngineSequence, int]], told: list[EngineSequence]) -> None:
        """The device lacks memory for this batch: smaller ones from now on, or, where that is not it, fewer.

        Nothing has been counted as computed, so the same tokens come again; but not those of which somebody was `told`:
        they may not be written again.
        """
        torch.cuda.empty_cache()
        counts = [count for _, count in parts]
        remedy = "lower --max-num-batched-tokens, --max-num-seqs or the memory of the pool"
        fault = out_of_memory(self._model.device, f"computing {sum(counts)} tokens", remedy)
        smaller = max(counts) > 1 and self._token_budget > LEAST_CHUNK
        if smaller:
            self._token_budget = max(LEAST_CHUNK, min(self._token_budget, sum(counts)) // 2)
            _log.error("%s (steps have at most %d tokens from now on)", fault, self._token_budget)
        failing = told or ([] if smaller else [parts[-1][0]])
        if failing:
            _log.error("%s (%d of the %d sequences in this step fail)", fault, len(failing), len(parts))
        for sequence in failing:
            self._roster.fail(sequence, fault)
