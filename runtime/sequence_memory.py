# SPDX-License-Identifier: Apache-2.0
"""Pages and state slots of sequences: taken, zeroed, shared, and given back.

On a GPU, work on them may be queued when a call returns. They go back to the PagePool only when nothing queued can
touch them any more: `release` waits.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrail.kernels.upload import upload
from kvrail.runtime.device import Compute
from kvrail.runtime.prefix_caches import PrefixCaches
from kvrail.runtime.sequence import EngineSequence
from kvrail.transfer.errors import NoPages
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool

__all__ = ["SequenceMemory"]


class SequenceMemory:
    """What sequences of one engine hold of `pages` and `rings` (None where no layer has a window)."""

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        pages: torch.Tensor,
        rings: torch.Tensor | None,
        compute: Compute,
        prefixes: PrefixCaches,
    ) -> None:
        self.pages, self.rings, self.compute = pages, rings, compute
        self._pool = pool
        self._layout = layout
        self.prefixes = prefixes

    def close(self) -> None:
        """Let go of the memory, once nothing is queued on it."""
        self.compute.settle()
        self.prefixes.close()
        self.pages, self.rings = torch.empty(0), None

    def place(self, sequence: EngineSequence, reserve: int) -> bool:
        """A state slot if there are any, and pages for all tokens so far: cached ones for the longest known prefix,
        new ones for the rest. False, with nothing taken, when fewer than `reserve` pages would be left.
        """
        if self.rings is not None and not self._pool.free_states:
            return False
        cached, found = self.prefixes.match(sequence)
        missing = self._layout.pages_for(len(sequence)) - len(cached)
        if missing and missing > self._pool.available - reserve:
            self.prefixes.release(sequence.sequence_id)
            return False
        sequence.pages = cached + self._pool.allocate(sequence.sequence_id, missing)
        # Pages that are loaded are overwritten whole.
        sequence.clean = found
        sequence.state_slot = self._new_slot(sequence, loaded=found > 0)
        sequence.placed = True
        sequence.indexed = len(cached)
        sequence.computed = found * self._layout.page_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self.prefixes.load(sequence, sequence.pages[len(cached) : found])
        return True

    def grow(self, sequence: EngineSequence, tokens: int) -> None:
        """Pages for so many tokens in all, fit to be written and read. Raises NoPages, with nothing taken.

        Only what the next step touches is zeroed: all pages of a long prompt at once would delay whoever decodes.
        """
        needed = self._layout.pages_for(tokens)
        if needed > len(sequence.pages):
            sequence.pages += self._pool.allocate(sequence.sequence_id, needed - len(sequence.pages))
        if needed > sequence.clean:
            self._zero(sequence, sequence.pages[sequence.clean : needed])
            sequence.clean = needed

    def adopt(self, sequence: EngineSequence, owner: str) -> None:
        """Take over what the pool holds for `owner`: KV of all tokens of the sequence. ValueError on a wrong call."""
        tokens = len(sequence)
        shared = self._pool.reads_of(owner)
        pages = shared + self._pool.pages_of(owner)
        if len(pages) != self._layout.pages_for(tokens):
            raise ValueError(f"{owner} holds {len(pages)} pages, not those of {tokens} tokens")
        slot = self._pool.state_slot_of(owner)
        if (slot >= 0) != (self.rings is not None):
            raise ValueError(f"{owner} holds state slot {slot}; states have {self._layout.state_bytes} bytes")
        self._pool.rename(owner, sequence.sequence_id)
        sequence.placed, sequence.pages, sequence.state_slot = True, pages, slot
        sequence.clean = len(pages)
        sequence.computed, sequence.indexed = tokens, len(shared)
        # Whatever else came with the last page or the ring must not reach attention, not even times zero.
        used = tokens % self._layout.page_tokens
        with self.compute.queue() as sequence.queued:
            if used and pages:
                self.pages[pages[-1], :, :, used:] = 0
            if self.rings is not None:
                self.rings[slot, :, :, tokens:] = 0

    def share(self, parent: EngineSequence, one: EngineSequence) -> bool:
        """Let `one` read the full pages of `parent`, and write copies of its last page and its ring.

        False, with nothing taken, when there is no page or state slot left.
        """
        if self.rings is not None and not self._pool.free_states:
            return False
        full = parent.computed // self._layout.page_tokens
        try:
            own = self._pool.allocate(one.sequence_id, len(parent.pages) - full)
        except NoPages:
            return False
        one.state_slot = self._new_slot(one)
        with self.compute.queue() as one.queued:
            if own:
                self.pages[own[0]].copy_(self.pages[parent.pages[full]])
            if self.rings is not None:
                self.rings[one.state_slot].copy_(self.rings[parent.state_slot])
        # What was copied from is read by this work, too.
        parent.queued = one.queued
        self._pool.fork(parent.sequence_id, one.sequence_id, parent.pages[:full])
        one.placed, one.pages, one.indexed = True, parent.pages[:full] + own, full
        one.clean = full + len(own[:1])
        return True

    def inherit(self, parent: EngineSequence, heir: EngineSequence) -> None:
        """Give all that `parent` holds to `heir`."""
        self.prefixes.inherit(parent.sequence_id, heir.sequence_id)
        heir.placed, heir.pages, heir.state_slot = True, parent.pages, parent.state_slot
        heir.indexed, heir.queued, heir.clean = parent.indexed, parent.queued, parent.clean

    def release(self, sequence: EngineSequence) -> None:
        """Give everything back, once nothing that is queued can touch it."""
        self.compute.settle(sequence.queued)
        self.prefixes.release(sequence.sequence_id)

    def _zero(self, sequence: EngineSequence, pages: list[int]) -> None:
        # What an earlier owner left (NaN, at worst) must not reach attention, not even times zero.
        with self.compute.queue() as sequence.queued:
            (index,) = upload(self.pages.device, (np.asarray(pages, dtype=np.int64),))
            # Eight bytes at a time: on a GPU this takes as long as there are elements.
            self.pages.view(len(self.pages), -1).view(torch.int64).index_fill_(0, index, 0)

    def _new_slot(self, sequence: EngineSequence, *, loaded: bool = False) -> int:
        """A slot; `loaded`: about to be overwritten whole, by a copy that is not in the order of this work."""
        slot = self._pool.allocate_state(sequence.sequence_id)
        if self.rings is not None and not loaded:
            with self.compute.queue() as sequence.queued:
                self.rings[slot] = 0
        return slot
