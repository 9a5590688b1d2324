# SPDX-License-Identifier: Apache-2.0
"""A peer that stands still for ten seconds (SIGSTOP), on several lanes; a cancel that overtakes its call."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kit.asking import Asking, ask, make_prompt
from kit.breakable import LONG, SMALL_LONGEST, Breakable, wait_idle
from kit.cluster import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

FROZEN_S = 10.0


def check_recovered(split: Breakable) -> None:
    """Links work again, prompts go to the PE again, nothing is held."""
    for ce in split.ces:
        split.wait_linked(ce)
        answer = ask(ce, make_prompt(100))
        split.check(answer)
        assert answer.route == "remote"
    wait_idle(split.pe(), *split.ces)


@pytest.mark.parametrize("lane", ["shm", "put/tcp", "stream"])
def test_pe_freezes_mid_push(split: Breakable, lane: str) -> None:
    """The CEs answer by themselves while it stands still; what it writes when it wakes up hits nobody."""
    pe = split.pe()
    first, second = split.over(lane), split.ce_tcp if lane == "shm" else split.ce
    # The PE computes one prompt after the other: of the second nothing has been pushed.
    askings = [split.begin_push(first), Asking(second, make_prompt(LONG))]
    started = time.monotonic()
    pe.freeze()
    try:
        # New ones as well, into pages next to those that the frozen PE may still write.
        askings += [Asking(ce, make_prompt(100)) for ce in (first, second)]
        for asking in askings:
            asking.wait()
            assert asking.route == "local"
        time.sleep(max(0.0, started + FROZEN_S - time.monotonic()))
    finally:
        pe.thaw()
    for asking in askings:
        split.check(asking)
    check_recovered(split)


def test_a_late_pe_fails_nobody_where_the_ce_never_prefills(split: Breakable) -> None:
    """It stands still for longer than heartbeats may be missing, as on a starved machine, then goes on."""
    ce = split.small()
    pe = split.pe()
    askings = [split.begin_push(ce, length=400, longest=SMALL_LONGEST)]
    pe.freeze()
    try:
        # One that has its ticket, one that was let in before the silence was noticed, one that came later.
        askings.append(Asking(ce, make_prompt(50)))
        wait_until(
            lambda: [link["state"] for link in split.links(ce)] == ["suspect"], 10, "the PE is missed", ce
        )
        askings.append(Asking(ce, make_prompt(50)))
        time.sleep(2.0)
        assert not any(asking.ended for asking in askings)
    finally:
        pe.thaw()
    for asking in askings:
        split.check(asking.wait())
        assert asking.route == "remote"
    wait_idle(pe, ce)
    check_recovered(split)


@pytest.mark.parametrize("lane", ["put/tcp", "stream"])
def test_ces_freeze_mid_push(split: Breakable, lane: str) -> None:
    """The PE stays able to serve; the CEs finish what they had when they wake up."""
    pe, far = split.pe(), split.over(lane)
    ces = (split.ce, far)
    # Both are pushed while nobody is there to receive them: the first in part, the second as a whole.
    askings = [
        split.begin_push(split.ce, max_tokens=20),
        Asking(far, make_prompt(LONG), max_tokens=20),
    ]
    wait_until(lambda: far.metric("kvrail_tickets") == 1, 20, "both have tickets", far)
    for ce in ces:
        ce.freeze()
    try:
        time.sleep(FROZEN_S)
        assert pe.http.get("/ready").status_code == 200
    finally:
        for ce in ces:
            ce.thaw()
    for asking in askings:
        split.check(asking.wait())
    check_recovered(split)


def test_cancel_overtakes_its_prefill_call(split: Breakable) -> None:
    """The PE's front stands still, its rank does not: the cancel comes by link before the call comes by HTTP."""
    pe = split.pe()
    front = pe.process.pid
    granted = split.ce.metric("kvrail_ticket_granted_total")
    os.kill(front, signal.SIGSTOP)
    try:
        asking = Asking(split.ce, make_prompt(200))
        wait_until(
            lambda: split.ce.metric("kvrail_ticket_granted_total") > granted,
            20,
            "a ticket is granted",
            split.ce,
        )
        asking.hang_up()
        # The pages come back although the call is still on its way.
        wait_idle(split.ce)
    finally:
        os.kill(front, signal.SIGCONT)
    check_recovered(split)
