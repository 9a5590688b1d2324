# SPDX-License-Identifier: Apache-2.0
"""A peer that dies: whoever asked gets the single engine's answer or a clear error, and nothing is held afterwards."""

from __future__ import annotations

import time

import pytest

from kit.asking import Asking, ask, make_prompt
from kit.breakable import LONG, SMALL_LONGEST, Breakable, wait_idle
from kit.cluster import Server

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("lane", ["put/tcp", "stream"])
def test_pe_killed_mid_push(split: Breakable, lane: str) -> None:
    """Pushed over tcp, with a request for the other lane behind it: local answers; a new PE serves at once."""
    pe, far = split.pe(), split.over(lane)
    fallbacks = far.metric("kvrail_prefill_fallbacks_total")
    # The PE computes one prompt after the other: of the second nothing has been pushed.
    askings = [split.begin_push(far), Asking(split.ce, make_prompt(LONG))]
    pe.kill()
    for asking in askings:
        split.check(asking.wait())
        assert asking.route == "local"
    assert far.metric("kvrail_prefill_fallbacks_total") == fallbacks + 1
    wait_idle(split.ce, far)
    new = split.pe()
    for ce in (split.ce, far):
        answer = ask(ce, make_prompt(100))
        split.check(answer)
        assert answer.route == "remote"
    wait_idle(new, split.ce, far)


def test_pe_restarted_while_requests_run(split: Breakable) -> None:
    """A stream of requests across a restart on the same port: each is whole; the new PE takes over."""
    pe = split.pe()
    # This time it is lane shm that is being pushed.
    running = [split.begin_push(split.ce), Asking(split.ce_tcp, make_prompt(LONG))]
    pe.kill()
    split.wait_unlinked()
    pe = split.replace_pe()
    while pe.process.poll() is None and not (split.linked(split.ce) and split.linked(split.ce_tcp)):
        running += [Asking(ce, make_prompt(40), max_tokens=3) for ce in (split.ce, split.ce_tcp)]
        time.sleep(0.5)
    for asking in running:
        split.check(asking.wait())
    for ce in (split.ce, split.ce_tcp):
        answer = ask(ce, make_prompt(100))
        split.check(answer)
        assert answer.route == "remote"
    wait_idle(pe, split.ce, split.ce_tcp)


@pytest.mark.parametrize("lane", ["put/tcp", "stream"])
def test_pe_lost_between_first_token_and_doorbell(split: Breakable, lane: str) -> None:
    """The first token stays, the second is computed here, and none is given twice."""
    # One step for the whole prompt, so that all its pages travel after the first token.
    pe, ce = split.pe("--max-num-batched-tokens", "2048"), split.over(lane)
    before = ce.metric("kvrail_prefill_fallbacks_total")

    # A PE that freezes there and comes back: its doorbell is too late.
    asking = freeze_before_doorbell(split, ce)
    split.check(asking.wait())
    assert asking.route == "remote"
    assert ce.metric("kvrail_prefill_fallbacks_total") == before + 1
    pe.thaw()
    wait_idle(pe, split.ce, split.ce_tcp)

    split.wait_linked(ce)
    asking = freeze_before_doorbell(split, ce)
    pe.kill()
    split.check(asking.wait())
    assert asking.route == "remote"
    assert ce.metric("kvrail_prefill_fallbacks_total") == before + 2
    wait_idle(split.ce, split.ce_tcp)


def freeze_before_doorbell(split: Breakable, ce: Server) -> Asking:
    """A request whose first token is out while its doorbell is not; the PE stands still."""
    pe = split.pe("--max-num-batched-tokens", "2048")
    for _ in range(8):
        asking = Asking(ce, make_prompt(2 * LONG))
        assert asking.first_token.wait(60)
        landed = ce.metric("kvrail_ticket_landed_total")
        pe.freeze()
        time.sleep(0.4)  # the CE's counters are at most a quarter of a second old
        if ce.metric("kvrail_ticket_landed_total") == landed and not asking.tokens[1:]:
            return asking
        pe.thaw()
        split.check(asking.wait())
    raise AssertionError("the doorbell was always faster")


@pytest.mark.parametrize("lane", ["shm", "stream"])
def test_ce_killed_mid_push(split: Breakable, lane: str) -> None:
    """The PE lets go of everything, and serves the other CEs meanwhile and afterwards."""
    small, pe = split.small(lane), split.pe()
    dying = split.begin_push(small, longest=SMALL_LONGEST)
    other = Asking(split.ce, make_prompt(LONG))
    small.kill()
    assert dying.wait(10).torn
    split.check(other.wait())
    assert other.route == "remote"
    wait_idle(pe, split.ce)
    assert pe.metric("kvrail_target_pages") == 0


def test_without_a_pe_and_without_local_prefill(split: Breakable) -> None:
    """--local-prefill never: requests under way and new ones end at once with 503 and the reason."""
    small, pe = split.small(), split.pe()
    dying = [split.begin_push(small, longest=SMALL_LONGEST), Asking(small, make_prompt(100))]
    pe.kill()
    for asking in dying:
        asking.wait(20)
        assert asking.status == 503, asking.summary
        assert asking.retry_after, asking.summary
        assert "prefill" in asking.error
    refused = ask(small, make_prompt(20), within_s=10)
    assert (refused.status, bool(refused.retry_after)) == (503, True), refused.summary
    assert "--local-prefill" in refused.error
    ready = small.http.get("/ready")
    assert ready.status_code == 503
    assert "no link" in ready.text
    wait_idle(small)
    small = split.small()  # with a new PE
    answer = ask(small, make_prompt(100))
    split.check(answer)
    assert answer.route == "remote"
