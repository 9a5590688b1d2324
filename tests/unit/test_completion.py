# SPDX-License-Identifier: Apache-2.0
"""Who gets a ticket when: requests for one link do not wait behind another link's share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrail.runtime.completion import Completion
from kvrail.runtime.messages import Abort, Failed, Granted, Sampling, Submit
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LinkKey
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import Beat, TicketBeat, pack_u32

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=16)
A, B, OTHER = (LinkKey(name * 16, 0) for name in (b"a", b"b", b"o"))
SAMPLING = Sampling(max_tokens=4, seed=1)


class Bench:
    """A real ledger over a pool of 40 pages (16 a link, 4 kept back); the engine and the links only take notes."""

    def __init__(self, seats: int = 8) -> None:
        self.sent: list[Any] = []
        self.local: list[str] = []
        pool = PagePool(40, growth_reserve=4)
        self.receiver = Receiver(pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=0.4)
        for key in (A, B):
            self.receiver.link_up(0, key, 1, "worker")
        engine: Any = SimpleNamespace(
            layout=LAYOUT,
            add=lambda request, tokens, sampling, cache: self.local.append(request),
            abort=lambda request: None,
            prefix_keys=lambda tokens, cache: [],
            has_work=True,
        )
        links: Any = SimpleNamespace(send=lambda key, message: None)
        self.role = Completion(
            engine=engine,
            pool=pool,
            pools=SimpleNamespace(),  # type: ignore[arg-type]
            links=links,
            receiver=self.receiver,
            send=self.sent.append,
            verify_share=0.0,
            seats=seats,
            largest_ticket=16,
        )

    def submit(self, request: str, peer: LinkKey, pages: int, *, fallback: bool = True) -> None:
        tokens = pack_u32([1] * (pages * 16))
        self.role.handle(
            0,
            Submit(request_id=request, tokens=tokens, sampling=SAMPLING, peer=tuple(peer), fallback=fallback),
        )

    def granted(self, now: float = 1) -> list[str]:
        self.role.tick(now)
        found = [message.request_id for message in self.sent if isinstance(message, Granted)]
        self.sent[:] = [message for message in self.sent if not isinstance(message, Granted)]
        return found


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
