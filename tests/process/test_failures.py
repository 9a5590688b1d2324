# SPDX-License-Identifier: Apache-2.0
"""A peer that dies: whoever asked gets the single engine's answer or a clear error, and nothing is held afterwards."""

from __future__ import annotations

import time

import pytest

from kit.asking import Asking, ask, make_prompt
from kit.cluster import Server, wait_until
from kit.split import Split, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

# Thirty pages, in steps of one page.
LONG = 480


def begin_push(pe: Server, ce: Server, length: int = LONG) -> Asking:
    """A request of which some pages have been pushed, and more are to come."""
    before = pe.metric("kvrail_link_pages_total")
    asking = Asking(ce, make_prompt(length))
    wait_until(lambda: pe.metric("kvrail_link_pages_total") > before, 30, "pages are pushed", pe, ce)
    return asking


def test_pe_killed_mid_push(split: Split) -> None:
    """Both lanes, with requests running and waiting: local answers; a new PE on the port serves at once."""
    pe = split.pe()
    fallbacks = {ce: ce.metric("kvrail_prefill_fallbacks_total") for ce in (split.ce, split.ce_tcp)}
    askings = [begin_push(pe, ce) for ce in fallbacks] + [Asking(ce, make_prompt(200)) for ce in fallbacks]
    pe.kill()
    for asking in askings:
        split.check(asking.wait(60))
        assert asking.route == "local"
    for ce, before in fallbacks.items():
        assert ce.metric("kvrail_prefill_fallbacks_total") > before
    wait_idle(split.ce, split.ce_tcp)
    new = split.pe()
    for ce in fallbacks:
        answer = ask(ce, make_prompt(100))
        split.check(answer)
        assert answer.route == "remote"
    wait_idle(new, split.ce, split.ce_tcp)


def test_pe_killed_between_first_token_and_doorbell(split: Split) -> None:
    """The first token stays, the second is computed here, and none is given twice."""
    # One step for the whole prompt, so that all its pages travel after the first token.
    pe, ce = split.pe("--max-num-batched-tokens", "2048"), split.ce_tcp
    before = ce.metric("kvrail_prefill_fallbacks_total")
    for _ in range(8):
        asking = Asking(ce, make_prompt(LONG))
        assert asking.first_token.wait(60)
        pe.freeze()
        time.sleep(0.4)  # the CE's gauges are at most a quarter of a second old
        if ce.metric("kvrail_tickets"):
            break
        pe.thaw()
        split.check(asking.wait())
    else:
        pytest.fail("the doorbell was always faster")
    pe.kill()
    split.check(asking.wait())
    assert asking.route == "remote"
    assert ce.metric("kvrail_prefill_fallbacks_total") == before + 1
    wait_idle(split.ce, split.ce_tcp)
