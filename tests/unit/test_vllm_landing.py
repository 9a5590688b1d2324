# SPDX-License-Identifier: Apache-2.0
"""What a completion engine's worker tells vLLM of loads that end in unusual company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrail.runtime.vllm.given_blocks import GivenBlocks
from kvrail.runtime.vllm.landing import Landing
from kvrail.runtime.vllm.meta import Load, StepFacts
from kvrail.runtime.vllm.results import Outcome, Results
from kvrail.transfer.layout import BlockLayout
from kvrail.transfer.link_events import LinkKey, LinkUp
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import Quiesced

A = LinkKey(b"a" * 16, 0)
UP, DOWN = ("127.0.0.1", 1), ("127.0.0.1", 2)


def landing(links: Any, *, by_request: bool) -> tuple[Landing, Receiver, Results]:
    layout = BlockLayout(page_tokens=16, groups=1, unit_bytes=256, ranges=(1,), order="tensor", facts={})
    blocks, results = GivenBlocks(), Results()
    receiver = Receiver(
        blocks, layout, incarnation=b"c" * 16, rank=0, link_share=1.0, ttl_s=10.0, answer_s=5.0
    )
    role = Landing(
        links=links,
        receiver=receiver,
        blocks=blocks,
        results=results,
        peers=(UP, DOWN),
        offset=0,
        by_request=by_request,
    )
    lane: Any = SimpleNamespace(fence="process", card_writes_gpu=False)
    role.on_link(0.0, LinkUp(A, 1, lane))
    return role, receiver, results


def quiet_links() -> Any:
    return SimpleNamespace(
        connect_at=lambda *_: None,
        who_at=lambda host, port: A,
        send=lambda *_: None,
        fence=lambda *_: None,
    )


def test_a_load_that_fails_does_not_hide_the_end_of_another() -> None:
    """One without pages is over at the very moment at which another one finds no link."""
    links = quiet_links()
    role, receiver, results = landing(links, by_request=False)
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


def test_a_lost_load_is_over_at_once_and_its_blocks_are_held() -> None:
    """One answer of the PE, and so one proof, is due for each; a request of the same name may load again meanwhile."""
    role, receiver, results = landing(quiet_links(), by_request=True)
    for name, at in ((b"a" * 16, 0.0), (b"b" * 16, 20.0)):
        role.handle(at, StepFacts(loads=[Load("r", name, UP, 0, 32, [3, 4])]))
        role.tick(at + 10.0)
        told = results.take()
        assert (told.failed, told.received) == ({"r"}, {"r"})
        assert told.news.held == {f"{name.hex()}/0": [3, 4]}
        # Nobody waits for it any more.
        role.handle(at + 10.0, StepFacts(cancelled=["r"]))
    assert role.gauges()["blocks_held_for"] == 2
    receiver.on_message(30.0, A, Quiesced(ticket=b"a" * 16, epoch=1, proven=True))
    role.tick(30.0)
    told = results.take()
    assert (told.received, told.news.quiet) == (set(), {f"{(b'a' * 16).hex()}/0"})
    receiver.link_down(31.0, A, 1, "gone", proof="process")
    role.tick(31.0)
    assert results.take().news.quiet == {f"{(b'b' * 16).hex()}/0"}
    assert not any(role.gauges().values())


def test_before_0_31_a_request_without_its_first_token_waits() -> None:
    """vLLM would compute it, with its placeholder, in blocks into which a peer may still write."""
    role, receiver, results = landing(quiet_links(), by_request=False)
    role.handle(0.0, StepFacts(loads=[Load("r", b"a" * 16, UP, 0, 16, [3], hand_off=True, recompute=True)]))
    role.tick(10.0)
    assert results.take() == Outcome()
    role.handle(11.0, StepFacts(cancelled=["r"]))
    receiver.link_down(12.0, A, 1, "gone", proof="process")
    role.tick(12.0)
    assert results.take().received == {"r"}
