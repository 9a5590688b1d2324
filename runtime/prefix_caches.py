# SPDX-License-Identifier: Apache-2.0
"""What an engine does about prefixes: which pages a sequence need not compute, and which of its pages others may read.

Two caches stand behind it: the engine's own pool, where a page is found in place, and the host cache, from where it is
copied. A model with state (rings of sliding windows) can only go on where a state was kept, which the host cache does;
the pages of its pool are found by tickets all the same, as those bring the state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrail.runtime.host_cache import HostPrefixCache
from kvrail.runtime.messages import CacheUse
from kvrail.runtime.prefix import extend_keys, namespace
from kvrail.runtime.sequence import EngineSequence
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool
from kvrail.transfer.prefill_ticket import CachedPages

__all__ = ["PrefixCaches"]


class PrefixCaches:
    """The prefix caches of one engine. `enabled` False: nothing is looked up or kept, for no sequence."""

    def __init__(
        self, layout: PageLayout, pool: PagePool, host: HostPrefixCache | None, *, enabled: bool = True
    ) -> None:
        self._page_tokens = layout.page_tokens
        self._fingerprint = layout.fingerprint
        self._stateful = layout.state_bytes > 0
        # Some models keep all in their states: their pages are names only.
        self._paged = layout.layers > 0
        self._enabled = enabled
        self._pool = pool
        self._host = host if enabled else None

    def keys(self, tokens: npt.NDArray[np.uint32], cache: CacheUse) -> list[bytes]:
        """The names of a prompt's full pages in the pool; none when it takes no part in caching."""
        keys: list[bytes] = []
        if self._enabled and self._paged and cache.use:
            extend_keys(keys, namespace(self._fingerprint, salt=cache.salt), tokens, self._page_tokens)
        return keys

    # --- a sequence ---------------------------------------------------------------------------------------------

    def match(self, sequence: EngineSequence) -> tuple[list[int], int]:
        """(pages that the pool has of the sequence, pages that both caches have together); pinned for it.

        At least one token is left to compute: something must give the next token's logits. `load` or `release`
        must follow.
        """
        if not self._used(sequence) or sequence.wants_prompt_logprobs:
            return [], 0
        keys = self._keys(sequence, (len(sequence) - 1) // self._page_tokens)
        pages = self._pool.match(sequence.sequence_id, keys)
        found = len(pages)
        if self._host is not None:
            found = self._host.match(sequence.sequence_id, keys, found)
        elif self._stateful:
            found = 0
        # Behind the place where a state was kept the pool's pages are of no use: they would be written again.
        self._pool.release_pages(sequence.sequence_id, pages[found:])
        return pages[:found], found

    def load(self, sequence: EngineSequence, pages: list[int]) -> None:
        """Begin to copy what the host cache has: into `pages`, and into the sequence's state slot."""
        if self._host is not None:
            self._host.load(sequence.sequence_id, pages, sequence.state_slot)

    def ready(
        self, running: list[EngineSequence]
    ) -> tuple[list[EngineSequence], list[tuple[EngineSequence, str]]]:
        """(who can run; those whose copies failed, and why).

        Nobody who is just being copied in, lest everybody waits for that copy. When there is nobody else, the first
        whose pages can be used behind their copy. What came from the host cache is shared in the pool from here on.
        """
        if self._host is None or not self._host.loads:
            return running, []
        here = [sequence for sequence in running if self._host.loaded(sequence.sequence_id)]
        here = here or [sequence for sequence in running if not self._host.loading(sequence.sequence_id)][:1]
        told = "pages of the host cache could not be copied"
        faulty = [(one, f"{told}: {why}") for one in here if (why := self._host.fault(one.sequence_id))]
        ready = [sequence for sequence in here if not self._host.fault(sequence.sequence_id)]
        for sequence in ready:
            self._host.use(sequence.sequence_id)
            self.index(sequence)
        return ready, faulty

    def loading(self, sequence: EngineSequence) -> bool:
        """Whether its pages are just being copied in: it must not lose them yet."""
        return self._host is not None and not self._host.loaded(sequence.sequence_id)

    def chunk(self, sequence: EngineSequence, count: int) -> int:
        """How many of `count` tokens to compute now, so that chunks end where a state is to be kept."""
        if self._host is None or not self._host.stateful or count <= 1 or not self._used(sequence):
            return count
        page, start = self._page_tokens, sequence.computed
        every = self._host.state_interval * page
        stops = [start + count, (start // every + 1) * every]
        last = (len(sequence) - 1) // page * page
        if start < last:
            # The next turn of a conversation goes on here.
            stops.append(last)
        return min(stops) - start

    def index(self, sequence: EngineSequence) -> None:
        """Offer pages that have become full to the caches. They are never written again."""
        full = sequence.computed // self._page_tokens
        if full <= sequence.indexed or not self._used(sequence):
            return
        keys = self._keys(sequence, full)
        if self._paged:
            fresh = slice(sequence.indexed, full)
            self._pool.share(sequence.sequence_id, sequence.pages[fresh], keys[fresh])
        sequence.indexed = full
        if self._host is None:
            return
        at_end = sequence.state_slot >= 0 and sequence.computed == full * self._page_tokens
        self._host.save(keys, state=(full - 1, sequence.state_slot) if at_end else None)

    def inherit(self, sequence_id: str, heir: str) -> None:
        """`heir` takes over all that the sequence holds in the pool and in the host cache."""
        if self._host is not None:
            self._host.inherit(sequence_id, heir)
        self._pool.rename(sequence_id, heir)

    def release(self, sequence_id: str) -> None:
        """Give back what the sequence holds in the pool and in the host cache."""
        # In this order: what a copy is still writing into goes to the host cache's keeping first.
        if self._host is not None:
            self._host.let_go(sequence_id)
        self._pool.release(sequence_id)

    def host_pages(self, sequence_id: str) -> CachedPages | None:
        """Pages of a sequence that can be pushed before it runs (see HostPrefixCache.pages_of)."""
        pages = self._host.pages_of(sequence_id) if self._host is not None else None
        return pages if pages is not None and len(pages.slots) else None

    # --- the step loop ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether copies are under way, so that `poll` is wanted."""
        return self._host is not None and self._host.busy

    def poll(self) -> None:
        """Settle the copies that are done."""
        if self._host is not None:
            self._host.poll()

    def wait(self, timeout_s: float) -> None:
        """Wait for a copy, for there is nothing else to do."""
        if self._host is not None:
            self._host.wait(timeout_s)

    def flush(self) -> tuple[int, int]:
        """Forget every page that nobody uses just now: how many of the pool, and of the host cache."""
        return self._pool.flush_cache(), self._host.flush() if self._host is not None else 0

    def close(self) -> None:
        """Finish the copies: the engine's memory is about to go."""
        if self._host is not None:
            self._host.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _used(self, sequence: EngineSequence) -> bool:
        return self._enabled and sequence.cache.use

    def _keys(self, sequence: EngineSequence, full: int) -> list[bytes]:
        first = namespace(self._fingerprint, salt=sequence.cache.salt)
        return sequence.page_keys(first, self._page_tokens, full)
