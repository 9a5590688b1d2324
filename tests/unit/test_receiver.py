# SPDX-License-Identifier: Apache-2.0
"""The CE's ledger: pages leave a ticket to its sequence on a good doorbell, or to free after proof, and never else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrail.transfer.errors import LinkLost, LinkSilent, NoPages, ShareUsed
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.tickets import (
    CE_MOVES,
    CeState,
    Fence,
    FenceMode,
    FirstTokenReady,
    Landed,
    LinkKey,
    Lost,
    Send,
    moved,
)
from kvrail.transfer.wire import (
    Beat,
    Cancel,
    Doorbell,
    FirstToken,
    Grant,
    HandOff,
    Quiesced,
    SelfTestResult,
    TicketBeat,
    unpack_u32,
)

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=4)
PE: LinkKey = (b"p" * 16, 0)
OTHER: LinkKey = (b"q" * 16, 0)
TOKEN = HandOff(first_token=7, seed=1, next_position=10)


class Bench:
    """A receiver with one link up (epoch 1), and the effects sorted by type."""

    def __init__(self, fence: FenceMode = "worker", pages: int = 40, slots: int = 0, **options: Any) -> None:
        self.pool = PagePool(pages, slots, growth_reserve=2)
        options.setdefault("link_share", 0.5)
        self.ledger = Receiver(
            self.pool, LAYOUT, incarnation=b"c" * 16, rank=3, ttl_s=30, answer_s=5, **options
        )
        self.ledger.link_up(0, PE, 1, fence)

    def grant(self, tokens: int = 10, now: float = 0, request: str = "r", **options: Any) -> bytes:
        ticket = self.ledger.grant(now, request, PE, tokens, **options).id
        self.take(Send)
        return ticket

    def take(self, *kinds: type) -> list[Any]:
        effects = self.ledger.take_effects()
        assert all(isinstance(effect, kinds) for effect in effects), effects
        self.pool.check()
        return effects

    def say(self, message: Any, now: float = 1, link: LinkKey = PE) -> None:
        self.ledger.on_message(now, link, message)

    def idle(self) -> bool:
        return self.pool.free == self.pool.pages and not any(self.ledger.gauges().values())


def bell(ticket: bytes, end: int = 10, **changes: Any) -> Doorbell:
    whole: dict[str, Any] = {
        "ticket": ticket,
        "epoch": 1,
        "status": "landed",
        "token_end": end,
        "hand_off": TOKEN,
    }
    return Doorbell(**(whole | changes))


def quiesced(ticket: bytes, proven: bool = True, epoch: int = 1) -> Quiesced:
    return Quiesced(ticket=ticket, epoch=epoch, proven=proven, reason="because")


def first(ticket: bytes, hand_off: HandOff = TOKEN, epoch: int = 1) -> FirstToken:
    return FirstToken(ticket=ticket, epoch=epoch, hand_off=hand_off)


def test_a_grant_names_pages_ranks_epoch_and_range() -> None:
    bench = Bench(slots=4)
    ticket = bench.ledger.grant(0, "r", PE, 10, verify=True)
    (send,) = bench.take(Send)
    grant: Grant = send.message
    assert send.link == PE
    assert unpack_u32(grant.pages).tolist() == bench.pool.pages_of(ticket.owner) == [0, 1, 2]
    assert (grant.ce, grant.ce_rank, grant.pe, grant.pe_rank) == (b"c" * 16, 3, *PE)
    assert (grant.epoch, grant.token_start, grant.token_end, grant.ttl_s, grant.verify) == (
        1,
        0,
        10,
        30,
        True,
    )
    assert grant.state_slot == ticket.state_slot >= 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=Grant) == grant


def shared(bench: Bench, keys: list[bytes]) -> list[int]:
    """Pages that an earlier request has left in the prefix cache."""
    pages = bench.pool.allocate("earlier", len(keys))
    for page, key in zip(pages, keys, strict=True):
        bench.pool.share("earlier", [page], [key])
    bench.pool.release("earlier")
    return pages


def test_a_ticket_asks_only_for_what_the_pool_lacks() -> None:
    bench = Bench()
    known = shared(bench, [b"0", b"1"])
    part = bench.ledger.grant(0, "r", PE, 11, keys=[b"0", b"?"])
    assert (part.token_start, part.token_end, len(part.pages)) == (4, 11, 2)
    # All of it: nothing is to be pushed, and still a doorbell must come.
    whole = bench.ledger.grant(0, "s", PE, 8, keys=[b"0", b"1"])
    assert (whole.token_start, whole.token_end, len(whole.pages)) == (8, 8, 0)
    assert [unpack_u32(send.message.pages).tolist() for send in bench.take(Send)] == [part.pages.tolist(), []]
    assert (bench.pool.shared, bench.pool.cached, bench.ledger.held(PE)) == (2, 0, 2)
    bench.say(bell(whole.id, token_start=8, end=8))
    (landed,) = bench.take(Landed)
    assert (landed.pages.tolist(), bench.pool.reads_of(landed.owner)) == ([], known)
    bench.pool.rename(landed.owner, "s")
    bench.ledger.cancel(1, part.id, "client left")
    # What it read nobody writes: only what it was to be written into is in quarantine.
    assert (bench.pool.reads_of("s"), bench.pool.quarantined, bench.pool.shared) == (known, 2, 2)
    bench.say(quiesced(part.id))
    bench.pool.release("s")
    assert (bench.pool.cached, bench.pool.free) == (2, 38)
    with pytest.raises(ValueError, match="do not fill"):
        bench.ledger.grant(0, "r", PE, 7, keys=[b"0", b"1"])


def test_what_a_grant_matched_is_not_evicted_for_what_it_lacks() -> None:
    bench = Bench(pages=10, link_share=1.0)
    known = shared(bench, [b"0", b"1"])
    bench.pool.allocate("other", 6)
    with pytest.raises(NoPages):
        bench.ledger.grant(0, "r", PE, 12, keys=[b"0", b"1"])
    assert (bench.pool.cached, bench.pool.owners()) == (2, ["other"]), "a grant that fails keeps nothing"
    bench.pool.release("other")
    ticket = bench.ledger.grant(0, "r", PE, 32, keys=[b"0", b"1"])
    assert not set(known) & set(ticket.pages.tolist())
    assert bench.pool.free == 2


def test_a_good_doorbell_gives_the_pages_to_the_caller_once() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.say(first(ticket))
    assert bench.take(FirstTokenReady) == [FirstTokenReady("r", ticket, TOKEN)]
    bench.say(bell(ticket, hand_off=None))
    (landed,) = bench.take(Landed)
    assert (landed.request_id, landed.hand_off, landed.pages.tolist()) == ("r", TOKEN, [0, 1, 2])
    bench.pool.rename(landed.owner, "sequence")
    for late in (bell(ticket), bell(ticket, status="failed"), quiesced(ticket), first(ticket)):
        bench.say(late)
    bench.take()
    assert bench.ledger.counters["unknown_tickets"] == 4
    assert bench.pool.pages_of("sequence") == [0, 1, 2]
    bench.ledger.link_down(2, PE, 1, "gone")
    bench.ledger.proven(2, PE, 1, "worker")
    bench.take()
    assert bench.pool.pages_of("sequence") == [0, 1, 2]


def test_the_first_token_of_the_link_is_final() -> None:
    bench = Bench()
    ticket = bench.grant()
    other = HandOff(first_token=8, seed=1, next_position=10)
    bench.say(first(ticket))
    bench.say(first(ticket, other))
    bench.say(bell(ticket, hand_off=other))
    ready, landed = bench.take(FirstTokenReady, Landed)
    assert ready.hand_off == landed.hand_off == TOKEN
    assert bench.ledger.counters["late_first_tokens"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_end": 9}, "covers tokens 0 to 9"),
        ({"token_start": 4}, "covers tokens 4 to 10"),
        ({"hand_off": None}, "without a first token"),
        ({"checksums": b"x" * 16}, "2 checksums for 3 pages"),
        ({"status": "failed", "reason": "out of memory"}, "out of memory"),
    ],
)
def test_a_bad_doorbell_frees_the_pages_and_loses_the_request(changes: dict[str, Any], reason: str) -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.say(bell(ticket, **changes))
    (lost,) = bench.take(Lost)
    assert reason in lost.reason
    assert lost.hand_off is None
    assert bench.idle()


@pytest.mark.parametrize("changes", [{}, {"checksums": b"x" * 24}])
def test_checksums_that_were_asked_for_must_come(changes: dict[str, Any]) -> None:
    bench = Bench(slots=4)
    ticket = bench.grant(verify=True)
    bench.say(bell(ticket, **changes))
    (lost,) = bench.take(Lost)
    assert "though the grant asked" in lost.reason
    ticket = bench.grant(verify=True)
    bench.say(bell(ticket, checksums=b"x" * 24, state_checksum=5))
    (landed,) = bench.take(Landed)
    assert landed.bell.state_checksum == 5


def test_a_lost_prefill_keeps_the_first_token_for_the_fallback() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.say(first(ticket))
    bench.take(FirstTokenReady)
    bench.ledger.link_down(2, PE, 1, "process died")
    lost, _ = bench.take(Lost, Fence)
    assert (lost.request_id, lost.hand_off) == ("r", TOKEN)
    assert (bench.pool.quarantined, bench.pool.owned) == (3, 0)
    bench.ledger.proven(3, PE, 1, "worker")
    assert bench.idle()


def test_a_finished_first_token_needs_no_pages() -> None:
    bench = Bench()
    ticket = bench.grant()
    done = HandOff(first_token=7, seed=1, next_position=10, finish_reason="length")
    bench.say(first(ticket, done))
    ready, cancel = bench.take(FirstTokenReady, Send)
    assert ready.hand_off.finish_reason == "length"
    assert cancel.message.reason == "finished"
    assert bench.pool.quarantined == 3
    bench.say(bell(ticket, status="failed", reason="finished"))
    bench.take()
    assert bench.idle()


# --- cancel -----------------------------------------------------------------------------------------------------


def test_cancel_keeps_the_pages_until_quiesced() -> None:
    bench = Bench()
    ticket = bench.grant()
    assert bench.ledger.cancel(1, ticket, "client left")
    (send,) = bench.take(Send)
    assert send.message == Cancel(ticket=ticket, epoch=1, reason="client left")
    assert (bench.pool.quarantined, bench.pool.owned, bench.ledger.held(PE)) == (3, 0, 3)
    assert not bench.ledger.cancel(1, ticket, "again")
    bench.ledger.reap(5.9)
    bench.take()
    assert bench.pool.quarantined == 3
    bench.say(quiesced(ticket))
    bench.take()
    assert bench.idle()


@pytest.mark.parametrize("status", ["landed", "failed"])
def test_a_doorbell_that_crosses_the_cancel_is_proof_and_nothing_else(status: str) -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.ledger.cancel(1, ticket, "client left")
    bench.take(Send)
    bench.say(first(ticket))
    bench.say(bell(ticket, status=status))
    bench.take()
    assert bench.idle()
    assert (bench.ledger.counters["late_doorbells"], bench.ledger.counters["late_first_tokens"]) == (1, 1)


def test_an_unproven_answer_fences_the_link_and_loses_its_other_requests() -> None:
    bench = Bench()
    ticket = bench.grant()
    bystander = bench.grant(4, request="bystander")
    bench.ledger.cancel(1, ticket, "client left")
    bench.take(Send)
    bench.say(quiesced(ticket, proven=False))
    fence, lost = bench.take(Fence, Lost)
    assert (fence.link, fence.epoch, lost.request_id) == (PE, 1, "bystander")
    with pytest.raises(LinkLost):
        bench.ledger.grant(2, "r2", PE, 4)
    bench.say(bell(bystander, end=4))
    assert bench.pool.quarantined == 3, "a late doorbell proved the bystander quiet"
    bench.ledger.link_down(2, PE, 1, "fenced")
    bench.take()
    assert bench.pool.quarantined == 3
    bench.ledger.proven(2, PE, 1, "worker")
    assert bench.idle()


def test_an_unanswered_cancel_fences_after_its_deadline_and_frees_nothing_by_itself() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.ledger.cancel(1, ticket, "client left")
    bench.take(Send)
    assert bench.ledger.next_deadline() == 6
    bench.ledger.reap(6)
    bench.take(Fence)
    assert bench.ledger.next_deadline() is None
    bench.ledger.reap(1e9)
    bench.take()
    assert (bench.pool.quarantined, bench.ledger.gauges()["unproven_tickets"]) == (3, 1)
    bench.ledger.link_down(1e9, PE, 1, "fenced")
    bench.ledger.proven(1e9, PE, 1, "worker")
    assert bench.idle()


def test_a_cancel_waits_longer_for_a_peer_that_is_only_busy() -> None:
    bench = Bench(busy_s=20)
    bench.ledger.cancel(1, bench.grant(), "client left")
    bench.ledger.cancel(1, bench.grant(), "client left")
    bench.take(Send)
    bench.ledger.reap(25)
    bench.take()
    bench.ledger.link_suspect(4, PE)
    assert bench.ledger.next_deadline() == 9, "a peer whose heart stands still is not busy"
    bench.ledger.reap(9)
    bench.take(Fence)


def test_a_share_that_is_used_up_is_told_apart_from_a_full_pool() -> None:
    bench = Bench(pages=40)  # 20 a link, 2 kept back
    bench.ledger.link_up(0, OTHER, 1, "worker")
    bench.grant(4 * 20)
    with pytest.raises(ShareUsed):
        bench.ledger.grant(1, "r2", PE, 4)
    bench.ledger.grant(1, "r3", OTHER, 4 * 18)
    with pytest.raises(NoPages) as full:
        bench.ledger.grant(1, "r4", OTHER, 4)
    assert type(full.value) is NoPages


def test_nobody_waits_for_a_share_that_is_in_quarantine_for_good() -> None:
    bench = Bench("process")
    ticket = bench.grant(4 * 18)
    bench.ledger.cancel(1, ticket, "client left")
    bench.say(quiesced(ticket, proven=False))
    bench.take(Send)
    bench.grant(8)
    with pytest.raises(LinkLost, match="18 of the link's 20 pages are in quarantine"):
        bench.ledger.grant(2, "r2", PE, 12)
    bench.say(quiesced(ticket))
    bench.grant(12)


def test_nobody_waits_for_more_than_a_link_may_ever_hold() -> None:
    """Cached pages that made a prompt small enough for a ticket can be evicted before it gets one."""
    bench = Bench()
    with pytest.raises(LinkLost, match="21 pages asked for, the link may hold 20"):
        bench.ledger.grant(0, "r", PE, 4 * 21)
    assert bench.pool.owners() == []


def test_the_pe_may_give_up_by_itself() -> None:
    bench = Bench()
    proven, unproven = bench.grant(), bench.grant()
    bench.say(quiesced(proven))
    bench.take(Lost)
    assert bench.pool.owned == 3
    bench.say(quiesced(unproven, proven=False))
    assert [type(effect) for effect in bench.take(Lost, Fence)] == [Lost, Fence]
    assert bench.pool.quarantined == 3


def test_a_failed_prefill_call_loses_the_request_and_cancels() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.ledger.give_up(1, ticket, "connection refused")
    bench.ledger.give_up(1, ticket, "connection refused")
    lost, send = bench.take(Lost, Send)
    assert (lost.reason, type(send.message)) == ("connection refused", Cancel)
    bench.say(quiesced(ticket))
    assert bench.idle()


# --- links ------------------------------------------------------------------------------------------------------


def test_a_silent_peer_loses_its_requests_at_once_but_not_its_pages() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.ledger.link_suspect(1, PE)
    lost, send = bench.take(Lost, Send)
    assert (lost.ticket, type(send.message)) == (ticket, Cancel)
    with pytest.raises(LinkLost):
        bench.ledger.grant(1, "r2", PE, 4)
    assert bench.pool.quarantined == 3
    bench.ledger.link_recovered(PE)
    bench.grant(4)
    bench.say(quiesced(ticket))
    assert (bench.pool.quarantined, bench.pool.owned) == (0, 1)


def test_who_has_no_other_way_waits_for_a_silent_peer() -> None:
    """Its ticket lives on, by the same time to live; others are lost at once."""
    bench = Bench()
    patient, other = bench.grant(patient=True), bench.grant(request="r2")
    bench.ledger.link_suspect(1, PE)
    lost, _ = bench.take(Lost, Send)
    assert lost.ticket == other
    assert bench.ledger.next_deadline() == 6, "only the cancelled ticket waits for an answer"
    with pytest.raises(LinkSilent):
        bench.ledger.grant(1, "r3", PE, 4, patient=True)
    bench.ledger.link_recovered(PE)
    bench.say(bell(patient), now=25)
    (landed,) = bench.take(Landed)
    assert landed.ticket == patient


def test_patience_ends_with_the_ticket_and_with_the_link() -> None:
    bench = Bench()
    late = bench.grant(patient=True)
    bench.ledger.link_suspect(1, PE)
    bench.ledger.reap(29)
    bench.take()
    bench.ledger.reap(30)
    lost, send = bench.take(Lost, Send)
    assert (lost.ticket, type(send.message)) == (late, Cancel)
    bench.ledger.link_recovered(PE)
    dead = bench.grant(patient=True, now=31)
    bench.ledger.link_suspect(32, PE)
    bench.ledger.link_down(33, PE, 1, "its process ended")
    assert [effect.ticket for effect in bench.take(Lost, Fence) if isinstance(effect, Lost)] == [dead]
    with pytest.raises(LinkLost) as gone:
        bench.ledger.grant(34, "r3", PE, 4, patient=True)
    assert type(gone.value) is LinkLost


def test_where_only_the_process_end_proves_a_frozen_peer_is_not_fenced() -> None:
    bench = Bench("process")
    ticket = bench.grant()
    bench.ledger.link_suspect(1, PE)
    bench.take(Lost, Send)
    bench.ledger.reap(100)
    bench.take()
    assert bench.ledger.gauges()["unproven_tickets"] == 1
    bench.ledger.link_recovered(PE)
    bench.say(quiesced(ticket), now=101)
    assert bench.idle()
    bench.grant(4)


def test_a_destroyed_worker_proves_nothing_past_which_a_process_can_write() -> None:
    bench = Bench("process")
    bench.grant()
    bench.ledger.link_down(1, PE, 1, "connection broke")
    bench.take(Lost)
    bench.ledger.proven(1, PE, 1, "worker")
    assert (bench.pool.quarantined, bench.ledger.counters["proofs_refused"]) == (3, 1)
    bench.ledger.link_up(2, PE, 2, "process")
    bench.grant(4)
    bench.ledger.proven(3, PE, 2, "process")
    (lost,) = bench.take(Lost)
    assert lost.request_id == "r"
    assert bench.idle(), "the end of the process proves every epoch"


def test_the_worker_of_one_epoch_proves_only_that_epoch() -> None:
    bench = Bench()
    bench.grant()
    bench.ledger.link_up(1, PE, 2, "worker")
    bench.take(Lost, Fence)
    new = bench.grant(4)
    assert bench.ledger.held(PE) == 4
    bench.say(bell(new, end=4, epoch=1))
    bench.take()
    assert bench.ledger.counters["stale_epochs"] == 1
    bench.ledger.link_down(2, PE, 1, "late news of the old epoch")
    bench.take()
    bench.ledger.proven(2, PE, 1, "worker")
    assert (bench.pool.quarantined, bench.pool.owned) == (0, 1)
    bench.say(bell(new, end=4, epoch=2))
    bench.take(Landed)
    with pytest.raises(ValueError, match="does not rise"):
        bench.ledger.link_up(3, PE, 2, "worker")


def test_bytes_of_a_dead_process_may_still_sit_in_our_worker() -> None:
    bench = Bench("worker")
    bench.grant()
    bench.ledger.proven(1, PE, 1, "process")
    bench.take(Lost, Fence)
    assert (bench.pool.quarantined, bench.ledger.counters["proofs_refused"]) == (3, 1)
    bench.ledger.proven(1, PE, 1, "worker")
    assert bench.idle()


def test_a_restarted_peer_is_another_peer() -> None:
    bench = Bench()
    ticket = bench.grant()
    bench.ledger.link_down(1, PE, 1, "process died")
    bench.take(Lost, Fence)
    bench.ledger.link_up(2, OTHER, 1, "worker")
    bench.say(bell(ticket), link=OTHER)
    bench.say(quiesced(ticket), link=OTHER)
    bench.ledger.proven(2, OTHER, 1, "process")
    bench.take()
    assert bench.pool.quarantined == 3
    bench.ledger.proven(3, PE, 1, "worker")
    assert bench.idle()


def test_one_link_gets_only_its_share() -> None:
    bench = Bench(pages=40, link_share=0.25)
    first_ticket = bench.grant(24)
    bench.grant(16)
    with pytest.raises(NoPages, match="the link holds 10 of at most 10"):
        bench.ledger.grant(0, "r", PE, 1)
    bench.ledger.cancel(1, first_ticket, "left")
    bench.take(Send)
    with pytest.raises(NoPages):
        bench.ledger.grant(1, "r", PE, 1)
    bench.ledger.link_up(0, OTHER, 1, "worker")
    bench.ledger.grant(1, "r", OTHER, 40)
    bench.take(Send)
    bench.say(quiesced(first_ticket))
    bench.grant(24)


def test_the_reserve_for_growth_and_the_last_state_slot_are_kept() -> None:
    bench = Bench(pages=10, slots=2, link_share=1.0)
    with pytest.raises(NoPages, match="kept for running sequences"):
        bench.ledger.grant(0, "r", PE, 36)
    bench.grant(4)
    bench.grant(4)
    with pytest.raises(NoPages, match="state slots"):
        bench.ledger.grant(0, "r", PE, 4)
    bench.take()
    assert bench.pool.owned == 2, "nothing stays behind of a grant that failed"


def test_slots_that_nobody_can_prove_quiet_send_requests_elsewhere() -> None:
    bench = Bench("process", slots=4, link_share=0.5)
    tickets = [bench.grant(4), bench.grant(4)]
    with pytest.raises(ShareUsed, match="2 of 4 state slots"):
        bench.ledger.grant(0, "r", PE, 4)
    for ticket in tickets:
        bench.ledger.cancel(1, ticket, "left")
        bench.say(quiesced(ticket, proven=False))
    bench.take(Send)
    # Pages of the share are left, and waiting for a slot would be in vain.
    with pytest.raises(LinkLost, match="2 state slots"):
        bench.ledger.grant(2, "r", PE, 4)
    bench.say(quiesced(tickets[0]))
    assert bench.pool.free_states == 3
    bench.grant(4)


def test_a_ticket_without_pages_holds_its_slot_until_proof() -> None:
    bench = Bench("process", slots=4)
    shared(bench, [b"0", b"1"])
    ticket = bench.ledger.grant(0, "r", PE, 8, keys=[b"0", b"1"])
    bench.take(Send)
    bench.ledger.cancel(1, ticket.id, "left")
    bench.take(Send)
    bench.say(quiesced(ticket.id, proven=False))
    assert bench.pool.quarantined_state_of(ticket.owner) == ticket.state_slot
    bench.say(quiesced(ticket.id))
    assert bench.pool.free_states == 4


# --- time -------------------------------------------------------------------------------------------------------


def test_progress_renews_a_ticket_and_its_absence_ends_it() -> None:
    bench = Bench()
    ticket = bench.grant(now=0)

    def beat(now: float, progress: int, link: LinkKey = PE) -> None:
        bench.ledger.on_beat(
            now, link, Beat(steps=1, state="serving", tickets=[TicketBeat(ticket, progress)])
        )

    beat(20, 1)
    bench.ledger.reap(45)
    bench.take()
    beat(45, 1)
    beat(45, 99, OTHER)
    bench.ledger.reap(50)
    lost, send = bench.take(Lost, Send)
    assert "no progress for 30 s" in lost.reason
    assert type(send.message) is Cancel
    assert bench.pool.quarantined == 3
    beat(51, 5)
    bench.ledger.reap(55)
    bench.take(Fence)
    assert bench.pool.quarantined == 3


def test_our_beats_name_the_tickets_that_are_still_wanted() -> None:
    bench = Bench()
    one, two = bench.grant(), bench.grant()
    bench.ledger.cancel(1, one, "left")
    assert [item.ticket for item in bench.ledger.beat_tickets(PE)] == [two]
    assert bench.ledger.beat_tickets(OTHER) == []


# --- the odd ones -----------------------------------------------------------------------------------------------


def test_strange_messages_are_counted_no_ops() -> None:
    bench = Bench()
    ticket = bench.grant()
    for message in (
        quiesced(b"?" * 16),
        quiesced(ticket, epoch=9),
        first(ticket, epoch=0),
        SelfTestResult(epoch=1, ok=True),
        Cancel(ticket=ticket, epoch=1, reason="wrong way"),
    ):
        bench.say(message)
    bench.say(bell(ticket), link=OTHER)
    bench.ledger.link_down(1, OTHER, 1, "never seen")
    bench.ledger.proven(1, OTHER, 1, "process")
    bench.ledger.give_up(1, b"?" * 16, "never seen")
    bench.take()
    assert bench.ledger.counters == {
        "granted": 1,
        "unknown_tickets": 2,
        "stale_epochs": 2,
        "unexpected_messages": 2,
        "stale_link_events": 1,
    }
    assert bench.pool.owned == 3


def test_states_only_move_as_the_table_says() -> None:
    assert set(CE_MOVES) == set(CeState)
    with pytest.raises(AssertionError, match="from landed to freed"):
        moved(CE_MOVES, CeState.LANDED, CeState.FREED)
