# SPDX-License-Identifier: Apache-2.0
"""Clients that hang up: both legs stop, and the others never notice."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kit.asking import Asking, make_prompt
from kit.breakable import Breakable, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]


def test_client_leaves_during_prefill(split: Breakable) -> None:
    """The prefill is not run to its end for nobody."""
    pe = split.pe()
    for ce in (split.ce, split.ce_tcp):
        asking = split.begin_push(ce, length=1200)
        tokens = pe.metric("kvrail_first_tokens_total")
        asking.hang_up()
        wait_idle(pe, ce)
        assert asking.tokens == []
        assert pe.metric("kvrail_first_tokens_total") == tokens


def test_client_leaves_during_decode(split: Breakable) -> None:
    """The sequence stops at once and frees its pages."""
    pe = split.pe()
    for ce in (split.ce, split.ce_tcp):
        asking = Asking(ce, make_prompt(50), max_tokens=2000)
        assert asking.first_token.wait(30)
        asking.hang_up()
        wait_idle(pe, ce)
        assert len(asking.tokens) < 2000
        assert not asking.error


def test_abort_storm(split: Breakable) -> None:
    """Forty clients leave at random moments; then ten that stay get the single engine's answers."""
    pe = split.pe()
    ces = (split.ce, split.ce_tcp)

    def come_and_go(number: int) -> None:
        asking = Asking(
            ces[number % 2], make_prompt(random.randrange(1, 300)), max_tokens=random.randrange(1, 12)
        )
        time.sleep(random.uniform(0, 1.5))
        asking.hang_up()

    visitors = [threading.Thread(target=come_and_go, args=(number,)) for number in range(40)]
    for visitor in visitors:
        visitor.start()
        time.sleep(0.05)
    for visitor in visitors:
        visitor.join(60)
    staying = [Asking(ces[number % 2], make_prompt(20 + 13 * number)) for number in range(10)]
    for asking in staying:
        split.check(asking.wait())
        assert asking.route == "remote"
    wait_idle(pe, *ces)
