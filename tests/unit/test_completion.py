# SPDX-License-Identifier: Apache-2.0
"""Who gets a ticket when, and what becomes of one that is lost."""

from __future__ import annotations

import pytest

from kit.completion_bench import OTHER, A, B, Bench
from kvrail.runtime.messages import Abort, Deferred, Failed, Granted, PrefillFailed
from kvrail.transfer.link_events import Received
from kvrail.transfer.wire import Beat, Doorbell, TicketBeat


def test_a_used_up_share_holds_up_its_own_link_only() -> None:
    bench = Bench()
    for request, peer in (("a1", A), ("a2", A), ("a3", A), ("b1", B)):
        bench.submit(request, peer, 10 if request != "a3" else 2)
    assert bench.granted() == ["a1", "b1"], "a3 would fit, but a2 came first"
    bench.role.handle(2, Abort(request_id="a2"))
    assert bench.granted() == ["a3"]


def test_small_requests_do_not_overtake_one_that_waits_for_the_pool() -> None:
    bench = Bench()
    bench.submit("a1", A, 16)
    bench.submit("b1", B, 14)
    assert bench.granted() == ["a1", "b1"]
    bench.receiver.link_up(0, OTHER, 1, "worker")
    bench.submit("large", OTHER, 8)
    bench.submit("small", OTHER, 2)
    assert bench.granted() == [], "6 pages are left for tickets"


def test_seats_hold_up_everybody_in_order() -> None:
    bench = Bench(seats=1)
    bench.submit("a1", A, 1)
    bench.submit("b1", B, 1)
    assert bench.granted() == ["a1"]
    bench.role.handle(2, Abort(request_id="a1"))
    assert bench.granted() == ["b1"]


def test_who_waited_for_a_share_in_vain_is_prefilled_here() -> None:
    bench = Bench()
    bench.submit("a1", A, 16)
    bench.submit("a2", A, 1)
    bench.submit("a3", A, 1, fallback=False)
    assert bench.granted() == ["a1"]
    bench.role.tick(29)
    assert bench.local == []
    tickets = [TicketBeat(item.ticket, 1) for item in bench.receiver.beat_tickets(A)]
    bench.receiver.on_beat(29, A, Beat(steps=1, state="serving", tickets=tickets))
    bench.role.tick(31)
    assert bench.local == ["a2"]
    (failed,) = [message for message in bench.sent if isinstance(message, Failed)]
    assert (failed.request_id, failed.status) == ("a3", 503)


def test_who_may_not_be_prefilled_here_waits_for_a_silent_peer() -> None:
    bench = Bench()
    bench.receiver.link_suspect(0, A)
    for request, peer, fallback in (("a2", A, True), ("a1", A, False), ("b1", B, False)):
        bench.submit(request, peer, 1, fallback=fallback)
    assert bench.granted() == ["b1"], "who waits for a silent peer holds up nobody else"
    assert bench.local == ["a2"]
    bench.role.handle(2, Abort(request_id="b1"))
    bench.receiver.link_recovered(A)
    assert bench.granted(now=20) == ["a1"]
    bench.receiver.link_suspect(21, A)
    bench.submit("a3", A, 1, fallback=False)
    bench.submit("a4", A, 1, fallback=False)
    bench.role.tick(29)
    assert bench.sent == []
    bench.role.tick(31)
    failed = {message.request_id: message.status for message in bench.sent if isinstance(message, Failed)}
    assert failed == {"a3": 503, "a4": 503}, "a1 has a ticket, which lives on"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lost_ticket_waits_for_what_the_front_says(cancelled: bool) -> None:
    """A client leaves during a long step: the prefill engine gives its ticket up, and that is heard first."""
    bench = Bench()
    bench.submit("a1", A, 1)
    assert bench.granted() == ["a1"]
    (ticket,) = bench.receiver.beat_tickets(A)
    failed = Doorbell(ticket=ticket.ticket, epoch=1, status="failed", reason="cancelled by the client")
    bench.role.on_link(1, Received(A, failed))
    bench.role.on_step(1, [])
    if cancelled:
        bench.role.handle(1, Abort(request_id="a1"))
    bench.role.tick(1)
    assert bench.local == ([] if cancelled else ["a1"])


# --- calls ahead of the grant -------------------------------------------------------------------------------------


def test_who_is_called_for_ahead_has_its_grant_under_that_id() -> None:
    bench = Bench()
    bench.submit("a1", A, 1)
    (first,) = bench.told()
    assert first.next_ticket not in (b"", first.ticket)
    bench.submit("a2", A, 1, called=(first.next_ticket, 0.0))
    (second,) = bench.told()
    assert (second.request_id, second.ticket) == ("a2", first.next_ticket)
    assert second.next_ticket not in (b"", first.ticket, second.ticket)
    assert {item.ticket for item in bench.receiver.beat_tickets(A)} == {first.ticket, second.ticket}


@pytest.mark.parametrize("why", ["no seat", "no room", "an old call", "an id of nobody"])
def test_a_call_ahead_is_deferred_at_once_when_there_is_no_grant_for_it(why: str) -> None:
    bench = Bench(seats=1 if why == "no seat" else 8)
    bench.submit("a1", A, 10)
    (first,) = bench.told()
    called = (
        b"?" * 16 if why == "an id of nobody" else first.next_ticket,
        -6.0 if why == "an old call" else 0.0,
    )
    bench.submit("a2", A, 10 if why == "no room" else 2, called=called)
    told = bench.told()
    assert told[0] == Deferred(request_id="a2")
    if why in ("no seat", "no room"):
        assert told[1:] == []
        bench.role.handle(2, Abort(request_id="a1"))
        if why == "no room":
            # The pages of a1 are proven free.
            bench.receiver.on_message(2, A, Doorbell(ticket=first.ticket, epoch=1, status="failed"))
        told = bench.told(2)
    granted = told[-1]
    assert isinstance(granted, Granted)
    assert granted.ticket not in (first.ticket, called[0]), "a call is never made twice with one ticket"


def test_as_long_as_somebody_waits_nobody_is_called_for_ahead() -> None:
    bench = Bench()
    bench.submit("a1", A, 8)
    bench.submit("a2", A, 9)
    bench.submit("b1", B, 1)
    granted = bench.told()
    assert [one.request_id for one in granted] == ["a1", "b1"]
    assert not any(one.next_ticket for one in granted), "a2 waits, and so would the next one"
    bench.role.handle(2, Abort(request_id="a2"))
    bench.submit("b2", B, 1)
    (last,) = bench.told(2)
    assert last.next_ticket


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("granted", [True, False])
def test_a_call_ahead_that_fails_loses_its_request_before_and_behind_the_grant(
    granted: bool, fallback: bool
) -> None:
    bench = Bench()
    bench.submit("a1", A, 1)
    (first,) = bench.told()
    bench.submit("a2", A, 1, called=(first.next_ticket, 0.0), fallback=fallback)
    if granted:
        bench.told()
    failed = PrefillFailed(request_id="a2", ticket=first.next_ticket, reason="no route to host")
    bench.role.handle(1, failed)
    bench.role.handle(1, failed)
    told = bench.told()
    assert bench.local == (["a2"] if fallback else [])
    failures = [message for message in told if isinstance(message, Failed)]
    assert [(one.request_id, one.status) for one in failures] == ([] if fallback else [("a2", 503)])
    assert not any(isinstance(message, Granted) for message in told)


def test_a_request_that_goes_another_way_has_its_call_taken_back() -> None:
    bench = Bench()
    bench.submit("a1", A, 1)
    (first,) = bench.told()
    bench.submit("o1", OTHER, 1, called=(first.next_ticket, 0.0))
    assert bench.told() == [Deferred(request_id="o1")], "no link is up to there"
    bench.submit("a2", A, 1)
    (granted,) = bench.told()
    bench.submit("a3", A, 17, called=(granted.next_ticket, 0.0))
    assert bench.told() == [Deferred(request_id="a3")], "more than one link may hold"
    assert bench.local == ["o1", "a3"]
