# SPDX-License-Identifier: Apache-2.0
"""A completion engine with two prefill engines, fronts only: whoever refuses or is lost, the other one is asked."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import msgspec
import pytest

from kit.fake_rank import FakeRank, output
from kit.live_server import TOKEN
from kit.tiny_model import byte_level_tokenizer
from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.control.calls import PrefillCall
from kvrail.runtime.messages import (
    Accepted,
    Connect,
    Granted,
    Move,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Sampling,
    Stranded,
    Submit,
    ToFront,
    ToRank,
)
from kvrail.transfer.wire import pack_u32

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


class Completing:
    """A CE's rank: a call that fails strands its request, and a move brings a new ticket."""

    def __init__(self) -> None:
        self.peers: list[tuple[bytes, int]] = []
        self.tickets = 0
        self.asked: dict[str, set[tuple[bytes, int]]] = {}

    def __call__(self, rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        match message:
            case Submit(request_id=name, peer=peer) if peer is not None:
                self.asked[name] = {peer}
                yield self.granted(name)
            case PrefillFailed(request_id=name, reason=reason):
                others = [peer for peer in self.peers if peer not in self.asked[name]]
                if others:
                    yield Stranded(request_id=name, reason=reason, others=others)
                else:
                    yield output(name, ids("local"), "length")
            case Move(request_id=name, peer=None):
                yield output(name, ids("local"), "length")
            case Move(request_id=name, peer=peer):
                assert peer is not None
                self.asked[name].add(peer)
                yield self.granted(name)
            case _:
                pass

    def granted(self, name: str) -> Granted:
        self.tickets += 1
        return Granted(request_id=name, ticket=b"%016d" % self.tickets)


@pytest.fixture
def trio(stand: Any) -> Callable[..., tuple[Any, list[Any]]]:
    """trio(behaviours of the PEs' ranks, …) → (ce, [pe, pe]), linked."""

    def make(*behave: Any, limits: tuple[int, ...] = (8, 8), **settings: Any) -> tuple[Any, list[Any]]:
        pes = [stand(act, role="pe", queue_limit=limit) for act, limit in zip(behave, limits, strict=True)]
        for pe in pes:
            pe.server.wait_ready()
        completing = Completing()
        urls = tuple(pe.server.url for pe in pes)
        ce = stand(completing, role="ce", pe_url=urls, ready=False, **settings)
        ce.rank.send(ce.rank.ready)
        ce.rank.wait_for(Connect, len(pes))
        completing.peers = [(pe.rank.incarnation, 0) for pe in pes]
        for pe in pes:
            ce.rank.link(pe.rank)
        ce.server.wait_until("/lanes", lambda r: len(r.json()["links"]) == len(pes))
        return ce, pes

    return make


def serving(ces: list[Any]) -> Callable[[FakeRank, ToRank], Iterable[ToFront]]:
    """A prefill rank that takes everything, and whose pages arrive at the CE in `ces`."""

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Prefill):
            yield Accepted(request_id=message.request_id)
            name = message.request_id.partition("/")[0]
            ces[0].rank.send(output(name, ids("ok"), "length", route="remote"))
            yield PrefillDone(request_id=message.request_id, ok=True)

    return behave


def refusing(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    if isinstance(message, Prefill):
        yield PrefillDone(request_id=message.request_id, ok=False, reason="no room", status=503)


def silent(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    if isinstance(message, Prefill):
        yield Accepted(request_id=message.request_id)


def prefills(pe: Any) -> list[Prefill]:
    return [message for message in pe.rank.received if isinstance(message, Prefill)]


@pytest.mark.parametrize("policy", ["auto", "never"])
def test_what_one_engine_refuses_is_asked_of_the_other(trio: Any, policy: str) -> None:
    ces: list[Any] = []
    ce, (good, bad) = trio(serving(ces), refusing, local_prefill=policy)
    ces.append(ce)
    for number in range(20):  # conversations of both
        body = {**ASK, "messages": [{"role": "user", "content": f"conversation {number}"}]}
        answer = ce.client.post(CHAT, json=body)
        assert (answer.status_code, answer.headers["x-kvrail-prefill"]) == (200, "remote")
        if prefills(bad) and number > 4:
            break
    tickets = [message.ticket for message in (*prefills(good), *prefills(bad))]
    assert prefills(bad), "none was routed there first"
    assert len(set(tickets)) == len(tickets), "a ticket is offered once"
    names = {message.request_id.partition("/")[0] for message in prefills(good)}
    assert all(message.request_id in names for message in prefills(bad))
    # The places at both are free again.
    ce.server.wait_until("/metrics", lambda r: 'outcome="accepted"} ' in r.text)
    assert ce.client.post(CHAT, json=ASK).status_code == 200


def test_of_two_engines_one_that_is_full_is_left_at_once(trio: Any) -> None:
    """Its front answers 429: nothing waits there while the other one has room."""
    ces: list[Any] = []
    ce, (_, full) = trio(serving(ces), silent, limits=(8, 1))
    ces.append(ce)
    url = full.server.url
    occupy(full, 2)
    began = time.monotonic()
    for number in range(12):
        body = {**ASK, "messages": [{"role": "user", "content": f"conversation {number}"}]}
        answer = ce.client.post(CHAT, json=body)
        assert (answer.status_code, answer.headers["x-kvrail-prefill"]) == (200, "remote")
    assert time.monotonic() - began < 6, f"{url} was asked again and again"
    assert len(prefills(full)) == 2, "those of others"
    refused = [m for m in ce.rank.received if isinstance(m, PrefillFailed)]
    assert all("HTTP 429" in one.reason for one in refused)


def test_when_all_are_full_one_is_asked_again(trio: Any) -> None:
    ces: list[Any] = []
    ce, pes = trio(silent, silent, limits=(1, 1), local_prefill="never")
    ces.append(ce)
    for pe in pes:
        occupy(pe, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ce.client.post, CHAT, json=ASK)
        time.sleep(1.0)
        assert not answer.done()
        for pe in pes:
            pe.rank.behave = serving(ces)
            for message in prefills(pe):
                pe.rank.send(PrefillDone(request_id=message.request_id, ok=True))
        assert answer.result(10).headers["x-kvrail-prefill"] == "remote"


def test_a_lost_prefill_moves_with_its_place(trio: Any) -> None:
    """The rank says that a link is lost after the call was taken: the call is cancelled, and another one is made."""
    ces: list[Any] = []
    ce, pes = trio(silent, silent)
    ces.append(ce)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ce.client.post, CHAT, json={**ASK, "stream": True})
        name = ce.rank.wait_for(Submit)[0].request_id
        first = ce.rank.wait_for(Submit)[0].peer
        old, new = pes if first == (pes[0].rank.incarnation, 0) else pes[::-1]
        old.rank.wait_for(Prefill)
        ce.rank.send(
            Stranded(request_id=name, reason="silent", others=[(b"?" * 16, 0), (new.rank.incarnation, 0)])
        )
        assert ce.rank.wait_for(Move)[0].peer == (new.rank.incarnation, 0)
        call = new.rank.wait_for(Prefill)[0]
        assert call.request_id != name, "the first one may still be known somewhere"
        assert call.ticket != prefills(old)[0].ticket
        old.server.wait_until("/metrics", lambda r: "kvrail_cancel_calls_total 1.0" in r.text)
        ce.rank.send(output(name, ids("ok"), "length", route="remote"))
        assert "ok" in answer.result(10).text


def test_nobody_is_known_who_could_take_it(trio: Any) -> None:
    ce, pes = trio(silent, silent)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ce.client.post, CHAT, json=ASK)
        name = ce.rank.wait_for(Submit)[0].request_id
        ce.rank.send(Stranded(request_id=name, reason="silent", others=[(b"?" * 16, 0)]))
        assert ce.rank.wait_for(Move)[0].peer is None
        assert answer.result(10).headers["x-kvrail-prefill"] == "local"
    assert sum(len(prefills(pe)) for pe in pes) <= 1


def occupy(pe: Any, count: int) -> None:
    """Prefills of somebody else, that do not end."""
    for number in range(count):
        call = PrefillCall(
            request_id=f"other{number}",
            ticket=b"o" * 15 + bytes([number]),
            incarnation=pe.rank.incarnation,
            rank=0,
            tokens=pack_u32([5, 6]),
            sampling=Sampling(max_tokens=1, seed=1),
        )
        body, headers = msgspec.msgpack.encode(call), bearer_header(TOKEN)
        url = f"{pe.server.url}/prefill"
        answer = httpx.post(url, content=body, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 202
