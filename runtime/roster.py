# SPDX-License-Identifier: Apache-2.0
"""The sequences of an engine: who waits, who runs, who is held, and how one becomes the other.

    queue ──▶ waiting ──admit──▶ running ──emit──▶ (finished) or, after prefill only, held until it is dropped
                 ▲──preemption────┘  └──branch──▶ one sequence for each choice, running or waiting

A sequence is waiting (no pages), running (pages for all its tokens; prefilling or decoding), or held (a finished
prefill whose pages are being pushed). When a running sequence cannot grow, the youngest goes back to waiting and is
computed again later; a prefill-only sequence never does, because its pages may be on their way already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from kvrail.runtime.batch import Drawn
from kvrail.runtime.engine_protocol import StepOutput
from kvrail.runtime.scheduler import LEAST_CHUNK, Turn, victim
from kvrail.runtime.sequence import EngineSequence
from kvrail.runtime.sequence_memory import SequenceMemory
from kvrail.transfer.errors import NoPages
from kvrail.transfer.pages import PagePool

__all__ = ["Roster"]


class Roster:
    """The live sequences of one engine over `pool` and `memory`, and what is to be told of them.

    At most `max_num_seqs` run together, and none becomes longer than `max_model_len` tokens.
    """

    def __init__(
        self, pool: PagePool, memory: SequenceMemory, *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._prefixes = memory.prefixes
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._sequences: dict[str, EngineSequence] = {}
        # The live choices of each request for several, once its prompt is computed.
        self._families: dict[str, list[EngineSequence]] = {}
        self._waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.outputs: list[StepOutput] = []
        # The situation in which the head of the queue found too few pages; the same again means no work.
        self._stuck: tuple[object, ...] | None = None

    def __contains__(self, sequence_id: str) -> bool:
        """Whether a live sequence, or request for several choices, has this name."""
        return sequence_id in self._sequences or sequence_id in self._families

    def get(self, sequence_id: str) -> EngineSequence | None:
        """A live sequence."""
        return self._sequences.get(sequence_id)

    def __getitem__(self, sequence_id: str) -> EngineSequence:
        """A sequence that is known to live."""
        return self._sequences[sequence_id]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self.running or self.outputs:
            return True
        return bool(self._waiting) and self._situation() != self._stuck

    @property
    def load(self) -> dict[Literal["running", "waiting", "waiting_tokens"], int]:
        """Sequences in the batch, in the queue, and prompt tokens still to compute."""
        todo = [s.remaining for s in (*self._waiting, *self.running) if s.remaining > 1]
        return {"running": len(self.running), "waiting": len(self._waiting), "waiting_tokens": sum(todo)}

    def take_outputs(self) -> list[StepOutput]:
        """What is to be told, once."""
        outputs, self.outputs = self.outputs, []
        return outputs

    # --- who comes ------------------------------------------------------------------------------------------------

    def queue(self, sequence: EngineSequence) -> None:
        """A sequence without pages: behind all that wait."""
        self._sequences[sequence.sequence_id] = sequence
        self._waiting.append(sequence)
        self._stuck = None

    def run(self, sequence: EngineSequence) -> None:
        """A sequence whose pages are there, with KV of all its tokens."""
        self._sequences[sequence.sequence_id] = sequence
        self.running.append(sequence)

    def ended(self, sequence: EngineSequence) -> bool:
        """Whether a first token made elsewhere ends the sequence: then the next step just says so."""
        reason = sequence.finish_reason(self._max_model_len)
        if reason is not None:
            self.outputs.append(sequence.output(finish_reason=reason))
        return reason is not None

    def admit(self, token_budget: int) -> None:
        """Move waiting sequences into the batch while there are seats, tokens in the budget, and pages."""
        budget = token_budget - sum(s.remaining for s in self.running)
        if all(s.remaining == 1 for s in self.running):
            budget = max(budget, LEAST_CHUNK)
        while self._waiting and len(self.running) < self._max_num_seqs and budget > 0:
            sequence = self._waiting[0]
            # Each decoding sequence may want a page soon: admitting into the very last pages only causes preemption.
            reserve = sum(not s.prefill_only for s in self.running)
            if not self._memory.place(sequence, reserve):
                if self._hopeless():
                    self._waiting.popleft()
                    self.fail(
                        sequence, f"needs more than the {self._pool.available} pages that can ever be free"
                    )
                    continue
                self._stuck = self._situation()
                return
            self._waiting.popleft()
            self.running.append(sequence)
            budget -= sequence.remaining
            if sequence.prefill_only and self._prefixes.host_pages(sequence.sequence_id):
                # Whoever pushes them need not wait until they are in the pool as well.
                self.outputs.append(sequence.output())

    def _hopeless(self) -> bool:
        """Whether nobody is left who could give pages back.

        What is in quarantine comes back in a moment, or never: how long to wait for it is the caller's to say.
        """
        pool = self._pool
        held = pool.owned + pool.shared + pool.quarantined + pool.state_slots - pool.free_states
        return not self.running and held == 0

    def _situation(self) -> tuple[object, ...]:
        head = self._waiting[0].sequence_id if self._waiting else None
        pool = self._pool
        held = (pool.available, pool.owned, pool.free_states)
        return (head, *held, len(self.running), len(self._sequences))

    # --- a step ---------------------------------------------------------------------------------------------------

    def with_pages(self, turns: list[Turn]) -> list[Turn]:
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
            [(s.sequence_id, not s.prefill_only and not self._prefixes.loading(s)) for s in self.running]
        )
        assert chosen is not None, "the sequence that wants to grow may itself be preempted"
        sequence = self._sequences[chosen]
        self.running.remove(sequence)
        self._memory.release(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)

    def emit(self, sequence: EngineSequence, drawn: list[Drawn]) -> None:
        """Tell the next token of the sequence, or the first ones of its choices."""
        going: dict[int, int] = {}
        for choice, token, logprob in drawn:
            choice.append(token)
            reason = choice.finish_reason(self._max_model_len)
            self.outputs.append(choice.output(token, reason, logprob))
            if reason is None:
                going[choice.choice] = token
        if sequence.prefill_only:
            self.running.remove(sequence)
        elif sequence.to_branch:
            self.branch(sequence, going)
        elif not going:
            self.drop(sequence)

    def branch(self, parent: EngineSequence, firsts: Mapping[int, int]) -> None:
        """The prompt is computed: go on with one sequence for each choice, over the same pages.

        A choice for which there is no seat or page waits, and is computed anew, like a preempted one.
        """
        going: list[EngineSequence] = []
        for one in parent.branch(firsts):
            if not self.ended(one):
                going.append(one)
                self._sequences[one.sequence_id] = one
        del self._sequences[parent.sequence_id]
        place = self.running.index(parent)
        self.running.remove(parent)
        if not going:
            self._memory.release(parent)
            return
        self._families[parent.request_id] = list(going)
        started, late = going[:1], list[EngineSequence]()
        for one in going[1:]:
            seats = self._max_num_seqs - len(self.running) - len(started)
            (started if seats > 0 and self._memory.share(parent, one) else late).append(one)
        self._memory.inherit(parent, going[0])
        self.running[place:place] = started
        for one in late:
            one.restart()
        self._waiting.extendleft(reversed(late))
        self._stuck = None

    # --- who leaves -----------------------------------------------------------------------------------------------

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
                self.drop(one)

    def fail(self, sequence: EngineSequence, why: str) -> None:
        """The sequence cannot go on."""
        self.outputs.append(sequence.output(finish_reason="abort", error=why))
        if sequence.prefill_only and sequence.placed:
            self.running.remove(sequence)
        else:
            self.drop(sequence)

    def drop(self, sequence: EngineSequence) -> None:
        """The sequence is over: it gives everything back."""
        del self._sequences[sequence.sequence_id]
        family = self._families.get(sequence.request_id, [])
        if sequence in family:
            family.remove(sequence)
            if not family:
                del self._families[sequence.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
        self._memory.release(sequence)
