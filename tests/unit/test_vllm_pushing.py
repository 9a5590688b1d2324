# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine's worker makes of grants and calls that do not fit each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrail.runtime.vllm.kv_tensors import Geometry, Range
from kvrail.runtime.vllm.layer_parts import Parts
from kvrail.runtime.vllm.meta import Call, Chunk, Finished, StepFacts
from kvrail.runtime.vllm.pushing import Pushing
from kvrail.runtime.vllm.results import Results
from kvrail.transfer.layout import BlockLayout
from kvrail.transfer.link_events import LinkKey, LinkUp, Received
from kvrail.transfer.sender import Sender
from kvrail.transfer.wire import Grant, pack_u32

PE, CE = LinkKey(b"p" * 16, 0), LinkKey(b"c" * 16, 0)


class Links:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, key: LinkKey, message: Any) -> None:
        self.sent.append(message)

    def peer_units(self, key: LinkKey) -> dict[int, int]:
        return {0: 64}

    def writer(self, key: LinkKey, number: int, ttl_s: float) -> Any:
        return SimpleNamespace(
            posted=0, done=0, failed=0, push=lambda *a, **k: None, ring=lambda bell: None, stop=lambda: None
        )

    def set_beat(self, key: LinkKey, beat: Any) -> None:
        pass


@pytest.fixture
def role() -> Pushing:
    layout = BlockLayout(page_tokens=16, groups=1, unit_bytes=256, ranges=(1,), order="tensor", facts={})
    geometry = Geometry(64, 256, "tensor", (Range(4096, 1, (("l0",),)),))
    pools: Any = SimpleNamespace(page_pools=lambda: [(0, SimpleNamespace(address=0))])
    links: Any = Links()
    made = Pushing(
        links=links,
        sender=Sender(layout, incarnation=PE[0], rank=0, max_tickets=4096, meet_s=15.0),
        pools=pools,
        layout=layout,
        parts=Parts(geometry, [["l0"]]),
        results=Results(),
    )
    lane: Any = SimpleNamespace(probes=[], card_writes_gpu=False)
    made.on_link(0.0, LinkUp(CE, 1, lane))
    return made


def grant(ticket: bytes, tokens: int) -> Received:
    pages = pack_u32(range(1, 1 + -(-tokens // 16)))
    return Received(
        CE,
        Grant(
            ticket=ticket, epoch=1, ce=CE[0], ce_rank=0, pe=PE[0], pe_rank=0, token_start=0, token_end=tokens,
            pages=pages, state_slot=-1, ttl_s=30.0, verify=False,
        ),
    )  # fmt: skip


def test_a_second_request_with_the_same_ticket_takes_nothing_from_the_first(role: Pushing) -> None:
    ticket = b"t" * 16
    role.handle(1.0, StepFacts(calls=[Call("a", ticket, 32), Call("b", ticket, 32)]))
    role.on_link(1.0, grant(ticket, 32))
    role.handle(2.0, StepFacts(finished=[Finished("b", 5, 32, [3, 4])]))
    assert role._results.take().sent == {"b"}
    role.handle(3.0, StepFacts(chunks=[Chunk("a", 32, [1, 2])]))
    role.handle(4.0, StepFacts(finished=[Finished("a", 5, 32, [1, 2])]))
    role.tick(5.0)
    assert role.counters["blocks"] == 2


def test_a_grant_that_waits_for_its_call_is_not_forgotten(role: Pushing) -> None:
    """However many grants came whose calls never did."""
    for number in range(4096):
        role.on_link(1.0, grant(number.to_bytes(16, "big"), 32))
    role.tick(20.0)
    for number in range(4096, 8192):
        role.on_link(21.0, grant(number.to_bytes(16, "big"), 32))
    role.tick(40.0)
    ticket = b"t" * 16
    role.on_link(41.0, grant(ticket, 32))
    role.tick(41.0)
    role.handle(42.0, StepFacts(calls=[Call("a", ticket, 32)]))
    role.handle(42.0, StepFacts(chunks=[Chunk("a", 32, [1, 2])]))
    assert role.counters["blocks"] == 2


def test_a_grant_that_cannot_be_read_is_refused(role: Pushing) -> None:
    good = grant(b"t" * 16, 32)
    assert isinstance(good.message, Grant)
    role.handle(1.0, StepFacts(calls=[Call("a", b"t" * 16, 32)]))
    role.on_link(1.0, good._replace(message=msgspec.structs.replace(good.message, pages=b"odd")))
    assert "pages for 32 tokens" in role._links.sent[-1].reason  # type: ignore[attr-defined]
    role.handle(2.0, StepFacts(finished=[Finished("a", 5, 32, [1, 2])]))
    assert role._results.take().sent == {"a"}


def test_a_second_grant_of_a_ticket_changes_nothing(role: Pushing) -> None:
    ticket = b"t" * 16
    first = grant(ticket, 32)
    assert isinstance(first.message, Grant)
    role.handle(1.0, StepFacts(calls=[Call("a", ticket, 32)]))
    role.on_link(1.0, first)
    role.on_link(
        1.0, first._replace(message=msgspec.structs.replace(first.message, token_start=32, pages=b""))
    )
    role.handle(2.0, StepFacts(chunks=[Chunk("a", 32, [1, 2])]))
    assert role.counters["blocks"] == 2
