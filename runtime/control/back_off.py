# SPDX-License-Identifier: Apache-2.0
"""When to ask again somebody who is full: soon at first, then ever less often, and never in step with others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

__all__ = ["BackOff"]


class BackOff:
    """The waits of one caller, from now on for `within_s` seconds.

    Each is drawn evenly between nothing and a bound that doubles from `first_s` up to `most_s` ("full jitter"), on top
    of what the other side has asked for. `clock` in seconds; `draw(a, b)`: a number between.
    """

    def __init__(
        self,
        within_s: float,
        *,
        first_s: float = 0.1,
        most_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._until = clock() + within_s
        self._bound_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._draw = draw

    def next(self, retry_after_s: float | None = None) -> float | None:
        """How many seconds to wait before the next try; None: the time is up. The last try is at its very end."""
        left = self._until - self._clock()
        if left <= 0:
            return None
        wait = (retry_after_s or 0.0) + self._draw(0.0, self._bound_s)
        self._bound_s = min(self._most_s, 2 * self._bound_s)
        return min(wait, left)
