# SPDX-License-Identifier: Apache-2.0
"""Who has computed which prefixes, as far as one front has seen: a guess that costs nothing when it is wrong.

Ranks evict without telling. What turns out to be gone is forgotten here when an answer says so; the rest is bounded
by age. A rank that was restarted has another incarnation, so nothing is ever expected of it that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrail.runtime.control.routing import PeerKey

__all__ = ["PrefixDirectory"]


class PrefixDirectory:
    """Holders of prefixes by page key (see runtime/prefix.py); the newest `limit` keys are kept."""

    def __init__(self, limit: int = 1 << 18) -> None:
        self._limit = limit
        self._holders: dict[bytes, set[PeerKey]] = {}

    def longest(self, keys: Sequence[bytes]) -> dict[PeerKey, int]:
        """How many pages of `keys`, from the first on, each holder is thought to have (only those with any)."""
        found: dict[PeerKey, int] = {}
        left: set[PeerKey] | None = None
        for place, key in enumerate(keys):
            holders = self._holders.get(key, set())
            left = set(holders) if left is None else left & holders
            if not left:
                break
            found.update(dict.fromkeys(left, place + 1))
        return found

    def note(self, keys: Sequence[bytes], holder: PeerKey) -> None:
        """`holder` has computed all of `keys`."""
        for key in reversed(keys):
            # Taken out and put in again: the newest stand at the end, and the start of a prefix behind its end.
            holders = self._holders.pop(key, set())
            holders.add(holder)
            self._holders[key] = holders
        while len(self._holders) > self._limit:
            del self._holders[next(iter(self._holders))]

    def correct(self, keys: Sequence[bytes], holder: PeerKey, pages: int) -> None:
        """`holder` turned out to have only the first `pages` of `keys`."""
        for key in keys[pages:]:
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(holder)
                if not holders:
                    del self._holders[key]
