# SPDX-License-Identifier: Apache-2.0
"""Stop strings over text that comes in pieces: nothing that belongs to a match, or may yet, is let out."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Feed it text; it gives back what is safe to emit. The answer ends before the match that is complete first.

    How the text is cut into pieces makes no difference: of two matches the one that *ends* first counts (and of two
    that end together the longer one), as if each character came alone. `include`: the match is part of the answer.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._stops = list(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may be emitted now; after a match, what stood before it, and later nothing."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        text = self._held + text
        ends = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            _, place, self.matched = min(ends)
            self._held = ""
            return text[: place + len(self.matched)] if self._include else text[:place]
        hold = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The answer has ended without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        return next(
            (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
        )
