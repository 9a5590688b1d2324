# SPDX-License-Identifier: Apache-2.0
"""Says in the log (at debug) which turns of a step loop took longer than their step, and where: what delays tokens."""

from __future__ import annotations

import logging
import time

__all__ = ["TurnWatch"]

_log = logging.getLogger(__name__)
# Beside the step. Most turns need a tenth of that.
_LONG_S = 0.001
# A step is long beside the average of so many before it.
_STEPS, _TIMES = 16, 1.5


class TurnWatch:
    """`begin` a turn, `lap` behind each of its parts, `end` it. Costs a few tenths of a microsecond a part."""

    def __init__(self) -> None:
        self._on = _log.isEnabledFor(logging.DEBUG)
        self._last = 0.0
        self._laps: dict[str, float] = {}
        self._usual_s = 0.0

    def begin(self) -> None:
        """A turn begins."""
        if self._on:
            self._laps.clear()
            self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last call was this part of the turn; "step" is the model's."""
        if self._on:
            now = time.perf_counter()
            self._laps[part] = self._laps.get(part, 0.0) + now - self._last
            self._last = now

    def end(self) -> None:
        """The turn is over."""
        if not self._on or "step" not in self._laps:
            return
        step = self._laps["step"]
        beside = sum(self._laps.values()) - step
        if beside > _LONG_S or step > _TIMES * self._usual_s > 0:
            parts = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in self._laps.items())
            _log.debug("a long turn, ms: %s (a step: %.2f on average)", parts, 1e3 * self._usual_s)
        self._usual_s += (step - self._usual_s) / _STEPS if self._usual_s else step
