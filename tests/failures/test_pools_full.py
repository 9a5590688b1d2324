# SPDX-License-Identifier: Apache-2.0
"""More than fits: requests wait for room or are refused with Retry-After; nothing hangs and nothing is lost."""

from __future__ import annotations

import pytest

from kit.asking import Asking, ask, make_prompt
from kit.breakable import LONG, PAGE_TOKENS, Breakable, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]


def test_pe_pool_full(split: Breakable) -> None:
    """Its pool holds two of these prompts at a time: the others wait for their turn there."""
    pe = split.pe()
    askings = [Asking((split.ce, split.ce_tcp)[n % 2], make_prompt(LONG), max_tokens=2) for n in range(5)]
    for asking in askings:
        split.check(asking.wait(120))
        assert asking.route == "remote"
    wait_idle(pe, split.ce, split.ce_tcp)


def test_prompt_larger_than_the_pe_pool(split: Breakable) -> None:
    """The PE refuses it; the CE, which has room, prefills it."""
    pe = split.pe()
    answer = ask(
        split.ce, make_prompt(int(pe.metric("kvrail_pages_capacity")) * PAGE_TOKENS + 1), max_tokens=2
    )
    split.check(answer)
    assert answer.route == "local"
    wait_idle(pe, split.ce)


def test_ce_pool_and_queue_full(split: Breakable) -> None:
    """Four at a time, twelve in its rank, three in the queue; the rest is refused, and told when to come back."""
    ce = split.small()
    askings = [Asking(ce, make_prompt(150), max_tokens=12) for _ in range(30)]
    for asking in askings:
        asking.wait(120)
    good = [asking for asking in askings if asking.status == 200]
    refused = [asking for asking in askings if asking.status != 200]
    assert len(good) >= 12, [asking.summary for asking in askings]
    assert refused
    for asking in refused:
        assert asking.status in (429, 503), asking.summary
        assert asking.retry_after, asking.summary
        assert int(asking.retry_after) >= 1
    assert any(asking.status == 429 for asking in refused)
    for asking in good[:4]:
        split.check(asking)
    assert all(len(asking.tokens) == 12 and not asking.error and not asking.torn for asking in good)
    wait_idle(split.pe(), ce)


def test_prompt_larger_than_a_link_may_hold(split: Breakable) -> None:
    """Where the CE must not prefill, such a prompt can never be served: no answer that invites to try again."""
    ce = split.small()
    answer = ask(ce, make_prompt(45 * PAGE_TOKENS))
    assert (answer.status, answer.retry_after) == (400, None), answer.summary
    assert "--link-share" in answer.error
    wait_idle(ce)


def test_answers_outgrow_the_ce_pool(split: Breakable) -> None:
    """Four answers that together need more pages than there are: some are set back, all come to their end."""
    ce = split.small()
    askings = [Asking(ce, make_prompt(150), max_tokens=150) for _ in range(4)]
    for asking in askings:
        split.check(asking.wait(120))
    wait_idle(split.pe(), ce)


def test_a_small_pe_under_two_bursts(split: Breakable) -> None:
    """Two seats at the PE, two CEs that must not prefill: who cannot start there yet waits, and nobody is refused."""
    pe = split.pe("--max-num-seqs", "2")
    ces = [split.start_ce("--pe-url", pe.url, "--local-prefill", "never") for _ in range(2)]
    for ce in ces:
        split.wait_linked(ce.wait_ready())
    askings = [Asking(ces[n % 2], make_prompt(100), max_tokens=8) for n in range(24)]
    for asking in askings:
        split.check(asking.wait(120))
        assert asking.route == "remote"
    wait_idle(pe, *ces)
    for ce in ces:
        ce.stop()
