# SPDX-License-Identifier: Apache-2.0
"""The PE's ledger: every ticket ends in exactly one message, every call in one answer, sources are freed in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvrail.transfer.layout import PageLayout
from kvrail.transfer.sender import Sender
from kvrail.transfer.ticket_memory import TicketMemory
from kvrail.transfer.tickets import (
    PE_MOVES,
    AbortPrefill,
    DropWriter,
    LinkKey,
    OpenWriter,
    PeState,
    PrefillEnded,
    Push,
    ReleaseSource,
    RenewWriter,
    Ring,
    Send,
    StartPrefill,
    StopWriter,
)
from kvrail.transfer.wire import (
    Beat,
    Cancel,
    Doorbell,
    FirstToken,
    Grant,
    HandOff,
    Quiesced,
    SelfTest,
    TicketBeat,
    pack_u32,
)

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=4)
STATEFUL = PageLayout(
    model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=4, state_bytes=8
)
CE: LinkKey = (b"c" * 16, 3)
OTHER: LinkKey = (b"d" * 16, 3)
TOKEN = HandOff(first_token=7, seed=1, next_position=10, cached_tokens=4)
T = b"t" * 16


def grant(ticket: bytes = T, **changes: Any) -> Grant:
    whole: dict[str, Any] = {
        "ticket": ticket,
        "epoch": 1,
        "ce": CE[0],
        "ce_rank": CE[1],
        "pe": b"p" * 16,
        "pe_rank": 0,
        "token_start": 0,
        "token_end": 10,
        "pages": pack_u32([21, 22, 30]),
        "ttl_s": 30.0,
    }
    return Grant(**(whole | changes))


class Bench:
    """A sender with one link up (epoch 1)."""

    def __init__(self, layout: PageLayout = LAYOUT, **options: Any) -> None:
        self.ledger = Sender(layout, incarnation=b"p" * 16, rank=0, meet_s=15, stop_s=10, **options)
        self.ledger.link_up(0, CE, 1)

    def say(self, message: Any, now: float = 0, link: LinkKey = CE) -> None:
        self.ledger.on_message(now, link, message)

    def cancel(self, ticket: bytes = T, now: float = 1, epoch: int = 1) -> None:
        self.say(Cancel(ticket=ticket, epoch=epoch, reason="client left"), now)

    def take(self, *kinds: type) -> list[Any]:
        effects = self.ledger.take_effects()
        assert [type(effect) for effect in effects] == list(kinds), effects
        return effects

    def started(self, **changes: Any) -> Bench:
        self.say(grant(**changes))
        self.ledger.prefill(0, "r", T)
        self.take(StartPrefill)
        return self

    def pushing(self, **changes: Any) -> Bench:
        self.started(**changes)
        self.ledger.computed(1, T, 6, [5, 6, 7])
        self.take(OpenWriter, Push)
        return self

    def ringing(self) -> Bench:
        self.started()
        self.ledger.first_token(1, T, TOKEN)
        self.ledger.computed(1, T, 10, [5, 6, 7])
        self.take(Send, OpenWriter, Push, Ring)
        return self

    def idle(self) -> bool:
        return not any(self.ledger.gauges().values())


# --- the good way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant_first", [True, False])
def test_grant_and_call_start_a_prefill_in_either_order(grant_first: bool) -> None:
    bench = Bench()
    steps = [lambda: bench.say(grant()), lambda: bench.ledger.prefill(0, "r", T)]
    for step in steps if grant_first else steps[::-1]:
        assert bench.ledger.take_effects() == []
        step()
    assert bench.take(StartPrefill) == [StartPrefill("r", T, 0, 10)]


def test_pages_go_out_when_final_and_the_doorbell_behind_them() -> None:
    bench = Bench().started()
    bench.ledger.computed(1, T, 3, [5])
    bench.take()
    bench.ledger.computed(2, T, 9, [5, 6, 7])
    opened, push = bench.take(OpenWriter, Push)
    assert (opened.link, opened.ttl_s) == (CE, 28)
    assert (push.pool, push.source.tolist(), push.target.tolist()) == (0, [5, 6], [21, 22])
    bench.ledger.computed(2, T, 9, [5, 6, 7])
    bench.take()
    bench.ledger.first_token(3, T, TOKEN)
    (first,) = bench.take(Send)
    assert first.message == FirstToken(ticket=T, epoch=1, hand_off=TOKEN)
    bench.ledger.computed(3, T, 10, [5, 6, 7])
    push, ring = bench.take(Push, Ring)
    assert (push.source.tolist(), push.target.tolist()) == ([7], [30])
    assert (ring.bell.status, ring.bell.token_start, ring.bell.token_end) == ("landed", 0, 10)
    assert (ring.bell.pushed_bytes, ring.bell.hand_off, ring.pages) == (3 * LAYOUT.page_bytes, TOKEN, None)
    bench.ledger.on_progress(4, opened.writer)
    bench.take()
    bench.ledger.on_rung(5, opened.writer)
    assert bench.take(DropWriter, ReleaseSource, PrefillEnded)[1:] == [
        ReleaseSource("r", T),
        PrefillEnded("r", True, cached_tokens=4),
    ]
    assert bench.idle()


def test_only_the_granted_range_is_pushed() -> None:
    bench = Bench().started(token_start=4, pages=pack_u32([21, 22]))
    bench.ledger.computed(1, T, 4, [5])
    bench.take()
    bench.ledger.computed(1, T, 10, [5, 6, 7])
    _, push = bench.take(OpenWriter, Push)
    assert push.source.tolist() == [6, 7]


def test_a_ticket_without_pages_still_rings() -> None:
    bench = Bench().started(token_start=8, token_end=8, pages=b"", verify=True)
    bench.ledger.computed(1, T, 8, [5, 6])
    bench.ledger.first_token(1, T, TOKEN)
    _, opened, ring = bench.take(Send, OpenWriter, Ring)
    assert ring.pages.tolist() == []
    bench.ledger.on_rung(2, opened.writer)
    bench.take(DropWriter, ReleaseSource, PrefillEnded)


def test_checksums_cover_every_page_in_grant_order_and_the_state() -> None:
    bench = Bench(STATEFUL).started(verify=True, state_slot=2)
    bench.ledger.computed(1, T, 4, [5])
    bench.ledger.computed(1, T, 10, [5, 6, 9], state_slot=1)
    bench.ledger.first_token(1, T, TOKEN)
    *_, state, _, ring = bench.take(OpenWriter, Push, Push, Push, Send, Ring)
    assert (state.pool, state.source.tolist(), state.target.tolist()) == (1, [1], [2])
    assert (ring.pages.tolist(), ring.state_slot) == ([5, 6, 9], 1)
    assert ring.bell.pushed_bytes == 3 * STATEFUL.page_bytes + 8


def test_a_model_without_pages_pushes_its_state_once_at_the_end() -> None:
    layout = PageLayout.with_rings(
        model_id="m",
        layers=0,
        kv_heads=1,
        head_dim=1,
        dtype="float32",
        page_tokens=4,
        window_layers=1,
        window=3,
    )
    assert (layout.page_bytes, layout.state_bytes) == (0, 24)
    bench = Bench(layout).started(pages=b"", state_slot=2, verify=True)
    # The ring changes with every chunk: until the last one nothing of it may go out.
    bench.ledger.computed(1, T, 4, [], state_slot=1)
    bench.ledger.computed(1, T, 9, [], state_slot=1)
    bench.take()
    bench.ledger.computed(1, T, 10, [], state_slot=1)
    bench.ledger.first_token(1, T, TOKEN)
    _, push, _, ring = bench.take(OpenWriter, Push, Send, Ring)
    assert (push.pool, push.source.tolist(), push.target.tolist()) == (1, [1], [2])
    assert (ring.pages.tolist(), ring.state_slot, ring.bell.pushed_bytes) == ([], 1, 24)


def test_a_first_token_that_finishes_drops_the_rest() -> None:
    bench = Bench().pushing()
    bench.ledger.first_token(1, T, HandOff(first_token=2, seed=1, next_position=10, finish_reason="stop"))
    first, _, stop = bench.take(Send, AbortPrefill, StopWriter)
    assert first.message.hand_off.finish_reason == "stop"
    bench.ledger.computed(1, T, 10, [5, 6, 7])
    bench.cancel()
    bench.take()
    bench.ledger.on_quiet(2, stop.writer, True)
    bell, _, ended = bench.take(Send, DropWriter, PrefillEnded)
    assert (bell.message.status, bell.message.reason) == ("failed", "finished")
    assert (ended.ok, ended.status) == (True, 200)
    assert bench.idle()


# --- cancel -----------------------------------------------------------------------------------------------------


def test_a_cancel_while_pushing_is_answered_when_the_writer_is_quiet() -> None:
    bench = Bench().pushing()
    bench.cancel()
    abort, stop = bench.take(AbortPrefill, StopWriter)
    assert abort == AbortPrefill("r", T)
    bench.cancel()
    bench.ledger.computed(2, T, 10, [5, 6, 7])
    bench.ledger.first_token(2, T, TOKEN)
    bench.ledger.on_failed(2, stop.writer, "stopped")
    bench.take()
    bench.ledger.on_quiet(3, stop.writer, True)
    answer, _, ended = bench.take(Send, DropWriter, PrefillEnded)
    assert answer.message == Quiesced(ticket=T, epoch=1, proven=True, reason="client left")
    assert (ended.ok, ended.status) == (False, 499)
    bench.ledger.on_quiet(3, stop.writer, True)
    bench.ledger.on_rung(3, stop.writer)
    bench.cancel()
    bench.take()
    assert bench.ledger.counters["late_writer_events"] == 3
    assert bench.ledger.counters["late_cancels"] == 2
    assert bench.idle()


def test_a_writer_that_is_not_quiet_is_never_called_so() -> None:
    bench = Bench().pushing()
    bench.cancel()
    _, stop = bench.take(AbortPrefill, StopWriter)
    bench.ledger.on_quiet(3, stop.writer, False, "a put failed")
    answer, *_ = bench.take(Send, DropWriter, PrefillEnded)
    assert (answer.message.proven, answer.message.reason) == (False, "client left; a put failed")


@pytest.mark.parametrize("late", ["proof", "no proof", "link"])
def test_a_writer_that_does_not_stop_is_unproven_until_a_late_proof(late: str) -> None:
    bench = Bench().pushing()
    bench.cancel(now=1)
    bench.take(AbortPrefill, StopWriter)
    assert bench.ledger.next_deadline() == 11
    bench.ledger.reap(11)
    answer, ended = bench.take(Send, PrefillEnded)
    assert (answer.message.proven, ended.ok) == (False, False)
    assert bench.idle()
    if late == "link":
        bench.ledger.link_down(12, CE, 1, "fenced")
        bench.take(DropWriter)
    bench.ledger.on_quiet(13, 1, late == "proof")
    effects = bench.ledger.take_effects()
    assert [e.message.proven for e in effects if isinstance(e, Send)] == [True] * (late == "proof")
    bench.ledger.on_quiet(13, 1, True)
    bench.take()


def test_a_doorbell_that_is_under_way_answers_the_cancel() -> None:
    bench = Bench().ringing()
    bench.cancel()
    (stop,) = bench.take(StopWriter)
    bench.ledger.on_rung(2, stop.writer)
    *_, ended = bench.take(DropWriter, ReleaseSource, PrefillEnded)
    assert ended.ok
    bench.ledger.on_quiet(2, stop.writer, True)
    bench.take()


def test_a_doorbell_that_was_stopped_in_time_becomes_quiesced() -> None:
    bench = Bench().ringing()
    bench.cancel()
    (stop,) = bench.take(StopWriter)
    bench.ledger.on_quiet(2, stop.writer, True)
    answer, *_ = bench.take(Send, DropWriter, ReleaseSource, PrefillEnded)
    assert answer.message.proven


def test_a_cancel_before_the_call_refuses_the_call() -> None:
    bench = Bench()
    bench.say(grant())
    bench.cancel()
    (answer,) = bench.take(Send)
    assert answer.message.proven
    bench.ledger.prefill(1, "r", T)
    (ended,) = bench.take(PrefillEnded)
    assert (ended.ok, ended.status) == (False, 409)
    assert bench.idle()


@pytest.mark.parametrize("call_first", [True, False])
def test_a_cancel_that_overtakes_grant_and_call_leaves_a_tombstone(call_first: bool) -> None:
    bench = Bench()
    bench.cancel()
    (answer,) = bench.take(Send)
    assert answer.message.proven
    if call_first:
        bench.ledger.prefill(1, "r", T)
        bench.say(grant())
    else:
        bench.say(grant())
        bench.ledger.prefill(1, "r", T)
    bench.take(PrefillEnded)
    bench.cancel()
    bench.take()
    assert bench.idle()


def test_a_cancel_between_call_and_grant_ends_both() -> None:
    bench = Bench()
    bench.ledger.prefill(0, "r", T)
    bench.cancel()
    ended, answer = bench.take(PrefillEnded, Send)
    assert not ended.ok
    assert answer.message.proven
    bench.say(grant())
    bench.take()
    assert bench.idle()


# --- refusals and failures --------------------------------------------------------------------------------------


def test_a_full_queue_refuses_grants_and_calls_once_each() -> None:
    bench = Bench(max_tickets=1)
    bench.say(grant())
    bench.say(grant(b"2" * 16))
    (bell,) = bench.take(Send)
    assert (bell.message.ticket, bell.message.status) == (b"2" * 16, "failed")
    bench.ledger.prefill(0, "r2", b"2" * 16)
    bench.ledger.prefill(0, "r3", b"3" * 16)
    for ended in bench.take(PrefillEnded, PrefillEnded):
        assert (ended.ok, ended.status, ended.retry_after_s) == (False, 429, 1.0)
    bench.say(grant(b"3" * 16))
    (bell,) = bench.take(Send)
    assert (bell.message.ticket, bell.message.status) == (b"3" * 16, "failed")
    bench.say(grant(b"3" * 16))
    bench.take()
    bench.ledger.prefill(0, "r", T)
    bench.take(StartPrefill)


def test_a_prefill_that_the_engine_refuses_ends_in_one_failed_doorbell() -> None:
    bench = Bench().started()
    bench.ledger.prefill_failed(1, T, "too long", status=400)
    bench.ledger.prefill_failed(1, T, "too long", status=400)
    _, bell, ended = bench.take(AbortPrefill, Send, PrefillEnded)
    assert (bell.message.status, bell.message.reason) == ("failed", "too long")
    assert (ended.ok, ended.status, ended.reason) == (False, 400, "too long")
    assert bench.idle()


def test_a_failed_put_ends_in_a_failed_doorbell_only_when_the_rest_is_quiet() -> None:
    for quiet in (True, False):
        bench = Bench().pushing()
        (writer,) = bench.ledger._writers._tickets
        bench.ledger.on_failed(2, writer, "out of bounds")
        bench.take(AbortPrefill, StopWriter)
        bench.ledger.on_quiet(3, writer, quiet, "endpoint failed")
        answer, *_ = bench.take(Send, DropWriter, PrefillEnded)
        assert isinstance(answer.message, Doorbell if quiet else Quiesced)
        assert "out of bounds" in answer.message.reason


def test_the_source_of_a_doorbell_under_way_is_kept_until_it_is_over() -> None:
    bench = Bench().ringing()
    (writer,) = bench.ledger._writers._tickets
    bench.ledger.on_failed(2, writer, "reset")
    bench.take(StopWriter)
    bench.ledger.on_quiet(3, writer, True)
    bench.take(Send, DropWriter, ReleaseSource, PrefillEnded)


def test_a_grant_without_a_call_and_a_call_without_a_grant_do_not_live_for_ever() -> None:
    bench = Bench()
    bench.say(grant())
    bench.ledger.prefill(1, "r2", b"2" * 16)
    assert bench.ledger.next_deadline() == 15
    bench.ledger.reap(14)
    bench.take()
    bench.ledger.reap(16)
    bell, ended = bench.take(Send, PrefillEnded)
    assert (bell.message.status, ended.request_id, ended.status) == ("failed", "r2", 504)
    bench.ledger.prefill(17, "r", T)
    bench.say(grant(b"2" * 16), now=17)
    ended, bell = bench.take(PrefillEnded, Send)
    assert (ended.ok, bell.message.ticket, bell.message.status) == (False, b"2" * 16, "failed")
    assert bench.idle()


def test_a_ticket_that_nobody_renews_ends() -> None:
    bench = Bench().pushing()
    (writer,) = bench.ledger._writers._tickets
    beat = Beat(steps=1, state="serving", tickets=[TicketBeat(T, 0), TicketBeat(b"?" * 16, 0)])
    bench.ledger.on_beat(20, OTHER, beat)
    bench.take()
    bench.ledger.on_beat(20, CE, beat)
    assert bench.take(RenewWriter) == [RenewWriter(CE, writer, 30.0)]
    bench.ledger.reap(49)
    bench.take()
    bench.ledger.reap(50)
    bench.take(AbortPrefill, StopWriter)
    bench.ledger.on_quiet(51, writer, True)
    bell, *_ = bench.take(Send, DropWriter, PrefillEnded)
    assert "did not renew" in bell.message.reason


def test_a_caller_that_goes_away_ends_its_ticket() -> None:
    bench = Bench().started()
    bench.ledger.abort(1, "r", "caller gone")
    bench.ledger.abort(1, "never seen", "caller gone")
    _, bell, ended = bench.take(AbortPrefill, Send, PrefillEnded)
    assert (bell.message.status, ended.status) == ("failed", 499)


def test_a_lost_link_ends_its_tickets_and_no_others() -> None:
    bench = Bench().pushing()
    bench.ledger.link_up(0, OTHER, 7)
    second = grant(b"2" * 16, epoch=7, ce=OTHER[0])
    bench.say(second, link=OTHER)
    bench.ledger.link_down(2, CE, 1, "reset")
    bench.ledger.link_down(2, CE, 1, "reset")
    _, _, ended = bench.take(DropWriter, AbortPrefill, PrefillEnded)
    assert (ended.ok, ended.status, ended.reason) == (False, 503, "reset")
    bench.ledger.prefill(3, "r2", b"2" * 16)
    bench.take(StartPrefill)


def test_a_new_epoch_ends_the_old_one_and_its_messages() -> None:
    bench = Bench().ringing()
    bench.ledger.link_up(2, CE, 2)
    bench.take(DropWriter, PrefillEnded)
    bench.ledger.proven(CE, 2)
    bench.take()
    bench.ledger.proven(CE, 1)
    assert bench.take(ReleaseSource) == [ReleaseSource("r", T)], "its doorbell could still have gone out"
    bench.say(grant(b"2" * 16, epoch=1))
    bench.cancel(epoch=1)
    bench.take()
    assert bench.ledger.counters["stale_epochs"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": pack_u32([1, 2])},
        {"pages": b"xyz"},
        {"token_start": 2},
        {"token_end": -1},
        {"pe": b"o" * 16},
        {"ce_rank": 9},
        {"state_slot": 0},
        {"ttl_s": float("nan")},
    ],
)
def test_a_grant_that_makes_no_sense_fails_at_once(changes: dict[str, Any]) -> None:
    bench = Bench()
    bench.ledger.prefill(0, "r", T)
    bench.say(grant(**changes))
    bell, ended = bench.take(Send, PrefillEnded)
    assert (bell.message.status, ended.status) == ("failed", 400)
    assert "grant" in bell.message.reason
    assert bench.idle()


def test_a_short_page_table_or_a_missing_state_fails_the_prefill() -> None:
    bench = Bench().started()
    bench.ledger.computed(1, T, 10, [5, 6])
    bench.take(AbortPrefill, Send, PrefillEnded)
    bench = Bench(STATEFUL).started(state_slot=1)
    bench.ledger.computed(1, T, 10, [5, 6, 7])
    bench.take(AbortPrefill, Send, PrefillEnded)


def test_duplicates_and_strange_messages_are_counted_no_ops() -> None:
    bench = Bench().started()
    bench.say(grant())
    bench.say(SelfTest(epoch=1, offset=0, nbytes=1, checksum=0))
    bench.ledger.prefill(0, "r", T)
    bench.take()
    bench.ledger.prefill(0, "another", T)
    (ended,) = bench.take(PrefillEnded)
    assert (ended.request_id, ended.status) == ("another", 409)
    bench.ledger.on_quiet(1, 99, True)
    bench.ledger.on_failed(1, 99, "?")
    bench.ledger.on_rung(1, 99)
    bench.ledger.on_progress(1, 99)
    bench.ledger.computed(1, b"?" * 16, 4, [1])
    bench.ledger.first_token(1, b"?" * 16, TOKEN)
    bench.take()
    assert bench.ledger.counters == {
        "duplicate_grants": 1,
        "unexpected_messages": 1,
        "duplicate_calls": 2,
        "late_writer_events": 3,
        "late_engine_results": 2,
    }


def test_progress_rises_while_waiting_only_when_others_get_on() -> None:
    bench = Bench().started()
    bench.say(grant(b"2" * 16))
    assert [item.ticket for item in bench.ledger.beat_tickets(CE)] == [T]
    bench.ledger.prefill(0, "r2", b"2" * 16)
    bench.take(StartPrefill)

    def progress() -> list[int]:
        return [item.progress for item in bench.ledger.beat_tickets(CE)]

    before = progress()
    assert progress() == before
    bench.ledger.computed(1, T, 4, [5])
    assert np.greater(progress(), before).all()
    before = progress()
    bench.ledger.computed(2, b"2" * 16, 4, [9])
    after = progress()
    assert (after[0] == before[0], after[1] > before[1]) == (True, True)
    assert bench.ledger.beat_tickets(OTHER) == []


def test_memory_forgets_the_oldest_but_no_tombstone() -> None:
    memory = TicketMemory(limit=2)
    memory.bury(b"tomb", CE)
    for ticket in (b"1", b"2", b"3"):
        memory.remember(ticket, "answered")
    assert [memory.fate(t) for t in (b"1", b"2", b"3", b"tomb")] == [
        None,
        "answered",
        "answered",
        "tombstone",
    ]
    memory.link_gone(OTHER)
    assert memory.fate(b"tomb") == "tombstone"
    memory.link_gone(CE)
    assert memory.fate(b"tomb") is None


def test_every_state_is_in_the_table_and_the_ends_are_final() -> None:
    assert set(PE_MOVES) == set(PeState)
    assert [s for s in PeState if not PE_MOVES[s]] == [
        PeState.LANDED,
        PeState.FAILED,
        PeState.QUIESCED,
        PeState.UNPROVEN,
        PeState.GONE,
    ]
