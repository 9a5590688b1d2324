# SPDX-License-Identifier: Apache-2.0
"""What a completion engine's worker tells vLLM of loads that end in unusual company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrail.runtime.vllm.given_blocks import GivenBlocks
from kvrail.runtime.vllm.landing import Landing
from kvrail.runtime.vllm.meta import Load, StepFacts
from kvrail.runtime.vllm.results import Results
from kvrail.transfer.layout import BlockLayout
from kvrail.transfer.link_events import LinkKey, LinkUp
from kvrail.transfer.receiver import Receiver

A = LinkKey(b"a" * 16, 0)
UP, DOWN = ("127.0.0.1", 1), ("127.0.0.1", 2)


def test_a_load_that_fails_does_not_hide_the_end_of_another() -> None:
    """One without pages is over at the very moment at which another one finds no link."""
    layout = BlockLayout(page_tokens=16, groups=1, unit_bytes=256, ranges=(1,), order="tensor", facts={})
    blocks, results = GivenBlocks(), Results()
    links: Any = SimpleNamespace(
        connect_at=lambda *_: None,
        who_at=lambda host, port: A,
        send=lambda *_: None,
        fence=lambda *_: None,
    )
    receiver = Receiver(
        blocks, layout, incarnation=b"c" * 16, rank=0, link_share=1.0, ttl_s=10.0, answer_s=5.0
    )
    role = Landing(links=links, receiver=receiver, blocks=blocks, results=results, peers=(UP, DOWN), offset=0)
    lane: Any = SimpleNamespace(fence="process", card_writes_gpu=False)
    role.on_link(0.0, LinkUp(A, 1, lane))
    # All of its KV is here; it waits for its first token only, which never comes.
    role.handle(0.0, StepFacts(loads=[Load("empty", b"e" * 16, UP, 16, 16, [], hand_off=True)]))
    role.tick(10.0)  # given up, and cancelled
    assert results.take().failed == {"empty"}
    links.who_at = lambda host, port: None if port == 2 else A
    role.handle(12.5, StepFacts(loads=[Load("other", b"o" * 16, DOWN, 0, 16, [1], hand_off=True)]))
    # Its link comes up, and is lost for the ledger, when the answer to the cancel is overdue as well.
    links.who_at = lambda host, port: A
    receiver.link_suspect(12.6, A)
    role.tick(15.1)
    role.tick(30.0)
    assert results.take().received == {"empty", "other"}
    assert role.gauges()["loads"] == 0
