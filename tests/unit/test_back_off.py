# SPDX-License-Identifier: Apache-2.0
"""The schedule by which somebody full is asked again, on a clock and with draws of the test's own."""

from __future__ import annotations

import pytest

from kvrail.runtime.control.back_off import BackOff


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.bounds: list[float] = []

    def clock(self) -> float:
        return self.now

    def waits(self, share: float, asked: float | None = None, within_s: float = 10.0) -> list[float]:
        """All waits of one caller whose draws are that share of their bounds."""

        def draw(low: float, high: float) -> float:
            assert low == 0.0, "full jitter draws from nothing on"
            self.bounds.append(high)
            return share * high

        back_off = BackOff(within_s, clock=self.clock, draw=draw)
        found = []
        while (wait := back_off.next(asked)) is not None:
            assert wait >= 0
            found.append(wait)
            self.now += wait + 0.01  # the call itself
            assert len(found) < 2000
        return found


def test_bounds_double_up_to_the_largest() -> None:
    time = Time()
    waits = time.waits(1.0)
    assert time.bounds[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert time.now == pytest.approx(110.0, abs=0.05), "the last try is at the end, and none behind it"


@pytest.mark.parametrize("asked", [0.5, 1.0, 3.0])
def test_what_the_other_side_asks_for_is_the_least(asked: float) -> None:
    time = Time()
    waits = time.waits(0.5, asked)
    assert all(wait >= asked for wait in waits[:-1])
    assert waits[0] == pytest.approx(asked + 0.05)
    assert time.now <= 110.05


def test_a_long_wait_that_is_asked_for_ends_with_one_try_in_time() -> None:
    time = Time()
    assert time.waits(0.5, 3600.0) == [10.0]


def test_draws_of_nothing_end_as_well() -> None:
    time = Time()
    assert set(time.waits(0.0)) == {0.0}
    assert time.now == pytest.approx(110.0, abs=0.05)


def test_two_callers_do_not_keep_step() -> None:
    first, second = (BackOff(10.0, clock=lambda: 0.0) for _ in range(2))
    assert [first.next() for _ in range(8)] != [second.next() for _ in range(8)]
