# SPDX-License-Identifier: Apache-2.0
"""A request whose prefill engine is lost, silent or refuses is asked of another, a bounded number of times."""

from __future__ import annotations

from typing import Any

import pytest

from kit.completion_bench import OTHER, A, B, Bench
from kvrail.runtime.messages import Abort, Failed, Granted, Move, Outputs, PrefillFailed, Stranded
from kvrail.transfer.link_events import LinkDown, LinkKey, Received, Recovered, Suspect
from kvrail.transfer.wire import Doorbell, FirstToken, HandOff, LinkMessage

FIRST = HandOff(first_token=7, seed=1, next_position=17)
C, D = (LinkKey(name * 16, 0) for name in (b"x", b"y"))


def asked_of(bench: Bench, request: str, peer: LinkKey, **options: Any) -> bytes:
    """The ticket of a request of one page for `peer`."""
    bench.submit(request, peer, 1, **options)
    (granted,) = [one for one in bench.told() if isinstance(one, Granted)]
    return bytes(granted.ticket)


def stranded(messages: list[Any]) -> Stranded:
    (found,) = [one for one in messages if isinstance(one, Stranded)]
    return found


def hear(bench: Bench, link: LinkKey, message: LinkMessage) -> None:
    bench.role.on_link(1, Received(link, message))


def lose(bench: Bench, ticket: bytes, how: str, link: LinkKey = A) -> None:
    match how:
        case "link down":
            bench.role.on_link(1, LinkDown(link, 2, "the peer has ended"))
        case "silent":
            bench.role.on_link(1, Suspect(link))
        case "failed":
            hear(bench, link, Doorbell(ticket=ticket, epoch=2, status="failed", reason="no room"))
        case "refused":
            bench.role.handle(1, PrefillFailed(request_id="r", ticket=ticket, reason="HTTP 503"))


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("how", ["link down", "silent", "failed", "refused"])
def test_a_lost_prefill_is_asked_of_another_engine(how: str, fallback: bool) -> None:
    bench = Bench()
    bench.link_up(A, B)
    old = asked_of(bench, "r", A, fallback=fallback)
    lose(bench, old, how)
    told = bench.told()
    assert stranded(told).others == [B]
    assert not [one for one in told if isinstance(one, Failed | Granted)]
    bench.role.handle(2, Move(request_id="r", peer=tuple(B)))
    (granted,) = bench.told(2)
    assert isinstance(granted, Granted)
    assert granted.ticket != old
    assert [item.ticket for item in bench.receiver.beat_tickets(B)] == [granted.ticket]
    hear(bench, B, Doorbell(ticket=granted.ticket, epoch=2, status="landed", token_end=16, hand_off=FIRST))
    assert bench.adopted == [("r", {0: 7})]
    assert (bench.local, bench.resumed) == ([], [])


@pytest.mark.parametrize("to", ["another", "none"])
def test_a_first_token_that_is_out_stays(to: str) -> None:
    """The next engine samples one, too: nobody sees that, and decoding goes on behind the one that was told."""
    bench = Bench()
    bench.link_up(A, B)
    old = asked_of(bench, "r", A)
    hear(bench, A, FirstToken(ticket=old, epoch=2, hand_off=FIRST))
    lose(bench, old, "link down")
    told = bench.told()
    (first,) = [item for one in told if isinstance(one, Outputs) for item in one.items]
    assert first.tokens == b"\7\0\0\0"
    assert stranded(told).others == [B]
    if to == "none":
        bench.role.handle(2, Move(request_id="r", peer=None))
        assert (bench.resumed, bench.told()) == ([("r", {0: 7})], [])
        return
    bench.role.handle(2, Move(request_id="r", peer=tuple(B)))
    (granted,) = bench.told(2)
    again = HandOff(first_token=9, seed=1, next_position=17)
    hear(bench, B, FirstToken(ticket=granted.ticket, epoch=2, hand_off=again))
    hear(bench, B, Doorbell(ticket=granted.ticket, epoch=2, status="landed", token_end=16, hand_off=again))
    assert bench.adopted == [("r", {0: 7})]
    assert bench.told(3) == [], "no token is told twice"


@pytest.mark.parametrize("by", ["first token", "doorbell"])
def test_an_engine_that_ends_the_answer_instead_does_not_hang_it(by: str) -> None:
    """Of two tokens as likely as each other it chose the one that ends: it pushes nothing. (No engine of ours rings for
    an answer that has ended, but who knows what a peer does: the engine must not get the request twice.)
    """
    bench = Bench()
    bench.link_up(A, B)
    old = asked_of(bench, "r", A)
    hear(bench, A, FirstToken(ticket=old, epoch=2, hand_off=FIRST))
    lose(bench, old, "link down")
    bench.told()
    bench.role.handle(2, Move(request_id="r", peer=tuple(B)))
    (granted,) = bench.told(2)
    ended = HandOff(first_token=2, finish_reason="stop", seed=1, next_position=17)
    if by == "first token":
        hear(bench, B, FirstToken(ticket=granted.ticket, epoch=2, hand_off=ended))
    else:
        bell = Doorbell(ticket=granted.ticket, epoch=2, status="landed", token_end=16, hand_off=ended)
        hear(bench, B, bell)
        assert bench.receiver.held(B) == 0
    assert (bench.resumed, bench.adopted) == ([("r", {0: 7})], [])


def test_nobody_is_asked_twice_and_not_everybody_is_asked() -> None:
    """A prompt that ends its engine must not end them all."""
    bench = Bench()
    bench.link_up(A, B, C, D)
    asked_of(bench, "r", A)
    gone = [A]
    for following in (B, C):
        bench.role.on_link(1, LinkDown(gone[-1], 2, "the peer has ended"))
        assert set(stranded(bench.told()).others) == {B, C, D} - set(gone)
        bench.role.handle(1, Move(request_id="r", peer=tuple(following)))
        assert isinstance(bench.told()[-1], Granted)
        bench.link_up(gone[-1], epoch=3)
        gone.append(following)
    bench.role.on_link(1, LinkDown(C, 2, "the peer has ended"))
    bench.told()
    assert bench.local == ["r"], "A is back and D was never asked, but three were"


def test_who_waits_for_a_silent_engine_goes_to_one_that_comes() -> None:
    """Of requests that may not be computed here: with a ticket and without one."""
    bench = Bench()
    bench.link_up(A)
    asked_of(bench, "r", A, fallback=False)
    bench.role.on_link(1, Suspect(A))
    bench.submit("late", A, 1, fallback=False)
    told = bench.told()
    assert not [one for one in told if isinstance(one, Stranded | Failed | Granted)], "the only way"
    bench.link_up(B)
    told = bench.told()
    assert {one.request_id: one.others for one in told if isinstance(one, Stranded)} == {
        "r": [B],
        "late": [B],
    }
    for name in ("r", "late"):
        bench.role.handle(2, Move(request_id=name, peer=tuple(B)))
    assert sorted(bench.granted(2)) == ["late", "r"]


def test_a_silent_engine_that_speaks_again_keeps_its_requests() -> None:
    bench = Bench()
    bench.link_up(A)
    ticket = asked_of(bench, "r", A, fallback=False)
    bench.role.on_link(1, Suspect(A))
    bench.role.on_link(2, Recovered(A))
    bench.link_up(B)
    assert not [one for one in bench.told() if isinstance(one, Stranded)]
    assert [item.ticket for item in bench.receiver.beat_tickets(A)] == [ticket]


def test_a_refused_call_ahead_of_the_grant_moves_its_request_once() -> None:
    """The front may answer before this rank has turned: the request must not stand in the queue twice."""
    bench = Bench()
    bench.link_up(A, B)
    bench.submit("a1", A, 1)
    (first,) = bench.told()
    bench.submit("r", A, 1, called=(first.next_ticket, 0.0))
    bench.role.handle(1, PrefillFailed(request_id="r", ticket=first.next_ticket, reason="HTTP 429"))
    assert stranded(bench.sent).others == [B]
    bench.role.handle(1, Move(request_id="r", peer=tuple(B)))
    assert [one.request_id for one in bench.told() if isinstance(one, Granted)] == ["r"]
    assert len(bench.receiver.beat_tickets(B)) == 1


def test_an_answer_of_the_front_that_does_not_come_or_is_late() -> None:
    bench = Bench()
    bench.link_up(A, B)
    lose(bench, asked_of(bench, "r", A), "link down")
    stranded(bench.told(1))
    bench.role.tick(10)
    assert bench.local == []
    bench.role.tick(12)
    assert bench.local == ["r"]
    bench.role.handle(13, Move(request_id="r", peer=tuple(B)))
    bench.role.handle(13, Move(request_id="nobody", peer=tuple(B)))
    assert not [one for one in bench.told(13) if isinstance(one, Granted)]


def test_a_client_that_leaves_a_stranded_request() -> None:
    bench = Bench()
    bench.link_up(A, B)
    lose(bench, asked_of(bench, "r", A), "link down")
    stranded(bench.told())
    bench.role.handle(2, Abort(request_id="r"))
    bench.role.handle(2, Move(request_id="r", peer=tuple(B)))
    assert bench.told(20) == []
    assert bench.receiver.held(B) == 0


def test_the_next_engine_may_be_gone_as_well() -> None:
    bench = Bench()
    bench.link_up(A, B)
    lose(bench, asked_of(bench, "r", A, fallback=False), "link down")
    stranded(bench.told())
    bench.role.handle(2, Move(request_id="r", peer=tuple(OTHER)))
    assert stranded(bench.told(2)).others == [B], "no link to where it was sent"
    bench.role.on_link(2, LinkDown(B, 2, "the peer has ended"))
    bench.role.handle(2, Move(request_id="r", peer=tuple(B)))
    (failed,) = [one for one in bench.told(2) if isinstance(one, Failed)]
    assert failed.status == 503
