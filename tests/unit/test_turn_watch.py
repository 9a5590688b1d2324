# SPDX-License-Identifier: Apache-2.0
"""Long turns are told, with their parts; usual ones are not."""

from __future__ import annotations

import logging
import time

import pytest

from kvrail.runtime.turn_watch import TurnWatch


def turn(watch: TurnWatch, *, links_s: float = 0.0, step_s: float = 0.004) -> None:
    watch.begin()
    time.sleep(links_s)
    watch.lap("links")
    time.sleep(step_s)
    watch.lap("step")
    watch.end()


def test_what_delays_tokens_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvrail")
    watch = TurnWatch()
    for _ in range(3):
        turn(watch)
    caplog.clear()
    turn(watch, links_s=0.002)
    (record,) = [one for one in caplog.records if "links 2." in one.message or "links 3." in one.message]
    assert "a long turn, ms: links" in record.message
    caplog.clear()
    turn(watch, step_s=0.4)
    assert "step 4" in caplog.text
    caplog.clear()
    # Nothing was computed: nobody's token was late.
    watch.begin()
    time.sleep(0.002)
    watch.lap("links")
    watch.end()
    assert not caplog.text


def test_usual_turns_and_other_levels_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrail")
    turn(TurnWatch(), links_s=0.002)
    assert not caplog.text
