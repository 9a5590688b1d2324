# SPDX-License-Identifier: Apache-2.0
"""A completion engine and prefill engines, fronts only: grants, /prefill, /cancel, refusals, restarts, the token."""

from __future__ import annotations

import concurrent.futures
import re
import secrets
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
from kvrail.runtime.control.calls import CancelCall, PrefillCall, RanksReply
from kvrail.runtime.messages import (
    Abort,
    Accepted,
    Connect,
    Deferred,
    Disconnect,
    Failed,
    Granted,
    LinkDropped,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Sampling,
    Stats,
    Submit,
    ToFront,
    ToRank,
)
from kvrail.transfer.wire import pack_u32

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}
TICKET = b"t" * 16


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def remote(text: str) -> Callable[[FakeRank, ToRank], Iterable[ToFront]]:
    """A completion rank that answers `text` as if its prompt had come from elsewhere."""

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, ids(text), "length", route="remote")

    return behave


def grants(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """A completion rank: grants; when the prefill fails it answers by itself, or fails when it may not."""
    if isinstance(message, Submit):
        if message.peer is None:
            yield output(message.request_id, ids("local"), "length")
        else:
            yield Granted(request_id=message.request_id, ticket=TICKET)
    if isinstance(message, PrefillFailed):
        yield output(message.request_id, ids("fallback"), "length")


def accepts(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """A prefill rank that takes everything."""
    if isinstance(message, Prefill):
        yield Accepted(request_id=message.request_id)


def refuses(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """A prefill rank that is full."""
    if isinstance(message, Prefill):
        yield PrefillDone(request_id=message.request_id, ok=False, reason="no room", status=503)


@pytest.fixture
def pair(stand: Any) -> Any:
    """pair(ce behaviour, pe behaviour, …settings of the ce) → (ce, pe), linked."""

    def make(ce_behave: Any = grants, pe_behave: Any = accepts, **settings: Any) -> tuple[Any, Any]:
        pe = stand(pe_behave, role="pe", queue_limit=settings.pop("pe_limit", 8))
        pe.server.wait_ready()
        ce = stand(ce_behave, role="ce", pe_url=(pe.server.url,), **settings)
        link(ce, pe)
        return ce, pe

    return make


def link(ce: Any, pe: Any) -> None:
    connect = ce.rank.wait_for(Connect)[-1]
    assert (connect.peer.incarnation, connect.peer.rank) == (pe.rank.incarnation, 0)
    ce.rank.link(pe.rank)
    wait_up(ce, pe)


def wait_up(ce: Any, pe: Any) -> None:
    ce.server.wait_until(
        "/lanes",
        lambda r: any(
            one["peer"] == pe.rank.incarnation.hex() and one["state"] == "up" for one in r.json()["links"]
        ),
    )


def post(url: str, path: str, call: msgspec.Struct, token: bytes = TOKEN) -> httpx.Response:
    return httpx.post(
        url + path,
        content=msgspec.msgpack.encode(call),
        headers=bearer_header(token),
        timeout=30,
        trust_env=False,
    )


def call(pe: Any, request_id: str = "r1", **changes: Any) -> PrefillCall:
    settings: dict[str, Any] = {
        "request_id": request_id,
        "ticket": secrets.token_bytes(16),
        "incarnation": pe.rank.incarnation,
        "rank": 0,
        "tokens": pack_u32([5, 6]),
        "sampling": Sampling(max_tokens=1, seed=1),
        **changes,
    }
    return PrefillCall(**settings)


def test_one_request_through_the_split(pair: Any) -> None:
    seen: list[Prefill] = []

    def pe_behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Prefill):
            seen.append(message)
            yield Accepted(request_id=message.request_id)
            ce.rank.send(output(message.request_id, ids("ok"), "length", route="remote", cached=2))
            yield PrefillDone(request_id=message.request_id, ok=True)

    ce, pe = pair(pe_behave=pe_behave)
    response = ce.client.post(CHAT, json={**ASK, "max_tokens": 2, "seed": 5})
    assert (response.status_code, response.headers["x-kvrail-prefill"]) == (200, "remote")
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "ok"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    submit, prefill = ce.rank.wait_for(Submit)[0], seen[0]
    assert submit.peer == (pe.rank.incarnation, 0)
    assert (prefill.request_id, prefill.ticket) == (submit.request_id, TICKET)
    # Tokenised once: both ranks have the same bytes, and the same sampling.
    assert (prefill.tokens, prefill.sampling) == (submit.tokens, submit.sampling)
    metrics = ce.client.get("/metrics").text
    assert 'kvrail_requests_total{api="chat",outcome="length",route="remote"} 1.0' in metrics
    # The first token may be here before the answer to /prefill is.
    for side in (ce, pe):
        side.server.wait_until(
            "/metrics", lambda r: 'kvrail_prefill_calls_total{outcome="accepted"} 1.0' in r.text
        )
    pe.server.wait_until("/metrics", lambda r: 'kvrail_rank_requests{rank="0"} 0.0' in r.text)


def test_a_prefill_engine_that_refuses_is_told_to_the_rank_once(pair: Any) -> None:
    ce, pe = pair(pe_behave=refuses)
    response = ce.client.post(CHAT, json=ASK)
    assert response.json()["choices"][0]["message"]["content"] == "fallback"
    assert response.headers["x-kvrail-prefill"] == "local"
    failed = ce.rank.wait_for(PrefillFailed)
    assert (len(failed), failed[0].ticket) == (1, TICKET)
    assert "HTTP 503: no room" in failed[0].reason
    assert len([m for m in pe.rank.received if isinstance(m, Prefill)]) == 1
    assert 'kvrail_prefill_calls_total{outcome="refused"} 1.0' in ce.client.get("/metrics").text


def test_what_a_prefill_rank_has_refused_is_not_asked_again(pair: Any) -> None:
    """Its ticket is over there: unlike a front that is full, a rank that is full will refuse it for ever."""

    def full(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Prefill):
            name = message.request_id
            yield PrefillDone(
                request_id=name, ok=False, reason="the queue is full", status=429, retry_after_s=1.0
            )

    ce, pe = pair(pe_behave=full)
    assert ce.client.post(CHAT, json=ASK).headers["x-kvrail-prefill"] == "local"
    assert "HTTP 409: the queue is full" in ce.rank.wait_for(PrefillFailed)[0].reason
    assert len([m for m in pe.rank.received if isinstance(m, Prefill)]) == 1


def test_a_prefill_engine_that_is_gone_is_told_to_the_rank(pair: Any) -> None:
    ce, pe = pair()
    pe.server.stop()
    assert ce.client.post(CHAT, json=ASK).headers["x-kvrail-prefill"] == "local"
    assert "cannot connect" in ce.rank.wait_for(PrefillFailed)[0].reason
    assert ce.client.get("/health").status_code == 200
    ce.rank.link(pe.rank, "down", "no heartbeat")
    ce.server.wait_until("/lanes", lambda r: r.json()["links"][0]["state"] == "down")
    # With no link up the prompt is prefilled here, without asking anybody.
    assert ce.client.post(CHAT, json=ASK).json()["choices"][0]["message"]["content"] == "local"
    assert ce.client.get("/ready").status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_both_legs(pair: Any, streamed: bool) -> None:
    ce, pe = pair()
    with pytest.raises(httpx.ReadTimeout):
        ce.client.post(CHAT, json={**ASK, "stream": streamed}, timeout=0.7)
    request_id = ce.rank.wait_for(Submit)[0].request_id
    assert ce.rank.wait_for(Abort)[0].request_id == request_id
    assert pe.rank.wait_for(Abort)[0].request_id == request_id


def test_a_stop_string_cancels_both_legs(pair: Any) -> None:
    def pe_behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        yield from accepts(rank, message)
        if isinstance(message, Prefill):
            ce.rank.send(output(message.request_id, ids("x."), route="remote"))

    ce, pe = pair(pe_behave=pe_behave)
    response = ce.client.post(CHAT, json={**ASK, "stop": "."})
    assert response.json()["choices"][0]["message"]["content"] == "x"
    assert ce.rank.wait_for(Abort)[0].reason == "stop"
    assert pe.rank.wait_for(Abort)[0].reason == "stop"


class Ahead:
    """A CE's rank whose first grant gives an id for the next call. What it says to later requests is `then`."""

    def __init__(self, *then: Any) -> None:
        self.then = then
        self.calls: list[tuple[bytes, float] | None] = []

    def behave(self, rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, PrefillFailed):
            yield output(message.request_id, ids("fallback"), "length")
        if not isinstance(message, Submit):
            return
        self.calls.append(message.called)
        if len(self.calls) == 1:
            yield Granted(request_id=message.request_id, ticket=TICKET, next_ticket=b"n" * 16)
            yield output(message.request_id, ids("one"), "length", route="remote")
            return
        for say in self.then:
            yield say(message.request_id)


def finished(request_id: str) -> ToFront:
    return output(request_id, ids("two"), "length", route="remote")


def test_the_second_call_leaves_ahead_of_its_grant(pair: Any) -> None:
    ahead = Ahead()
    ce, pe = pair(ahead.behave)
    assert ce.client.post(CHAT, json=ASK).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ce.client.post, CHAT, json=ASK)
        # The rank has not said anything yet.
        first, second = pe.rank.wait_for(Prefill, 2)
        assert (first.ticket, second.ticket) == (TICKET, b"n" * 16)
        submit = ce.rank.wait_for(Submit, 2)[1]
        assert submit.request_id == second.request_id
        assert (ahead.calls[0], ahead.calls[1][0]) == (None, second.ticket)
        ce.rank.send(Granted(request_id=submit.request_id, ticket=second.ticket), finished(submit.request_id))
        assert answer.result(10).json()["choices"][0]["message"]["content"] == "two"
        # That id was for one call.
        third = pool.submit(ce.client.post, CHAT, json=ASK)
        submit = ce.rank.wait_for(Submit, 3)[2]
        assert submit.called is None
        ce.rank.send(finished(submit.request_id))
        assert third.result(10).status_code == 200
    assert len([m for m in pe.rank.received if isinstance(m, Prefill)]) == 2
    assert not [m for m in pe.rank.received if isinstance(m, Abort)]


def test_a_deferred_call_is_taken_back_and_made_again_with_the_ticket_of_the_grant(pair: Any) -> None:
    ahead = Ahead(lambda name: Deferred(request_id=name))
    ce, pe = pair(ahead.behave)
    ce.client.post(CHAT, json=ASK)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ce.client.post, CHAT, json=ASK)
        request_id = ce.rank.wait_for(Submit, 2)[1].request_id
        # A cancel that overtakes its call leaves nothing to abort.
        ce.server.wait_until("/metrics", lambda r: "kvrail_cancel_calls_total 1.0" in r.text)
        ce.rank.send(Granted(request_id=request_id, ticket=b"l" * 16))
        pe.server.wait_until("/metrics", lambda r: "kvrail_cancel_calls_total 1.0" in r.text)
        while pe.rank.wait_for(Prefill, 2)[-1].ticket != b"l" * 16:
            pe.rank.wait_for(Prefill, len([m for m in pe.rank.received if isinstance(m, Prefill)]) + 1)
        ce.rank.send(finished(request_id))
        assert answer.result(10).json()["choices"][0]["message"]["content"] == "two"
    calls = [m for m in pe.rank.received if isinstance(m, Prefill)]
    assert len({m.ticket for m in calls}) == len(calls)
    assert len({m.request_id for m in calls}) == len(calls)
    aborted = {m.request_id for m in pe.rank.received if isinstance(m, Abort)}
    assert calls[-1].request_id not in aborted
    assert aborted == {m.request_id for m in calls if m.ticket == b"n" * 16}


def test_a_call_ahead_of_a_request_that_fails_is_taken_back(pair: Any) -> None:
    ahead = Ahead(lambda name: Failed(request_id=name, status=503, reason="no room"))
    ce, pe = pair(ahead.behave)
    ce.client.post(CHAT, json=ASK)
    assert ce.client.post(CHAT, json=ASK).status_code == 503
    pe.server.wait_until("/metrics", lambda r: "kvrail_cancel_calls_total 1.0" in r.text)
    pe.server.wait_until("/metrics", lambda r: 'kvrail_rank_requests{rank="0"} 1.0' in r.text)


def test_a_call_ahead_that_is_refused_is_told_to_the_rank(pair: Any) -> None:
    ahead = Ahead()
    ce, pe = pair(ahead.behave, refuses)
    assert ce.client.post(CHAT, json=ASK).status_code == 200
    answer = ce.client.post(CHAT, json=ASK)
    assert answer.json()["choices"][0]["message"]["content"] == "fallback"
    assert ce.rank.wait_for(PrefillFailed, 2)[1].ticket == b"n" * 16
    assert len([m for m in pe.rank.received if isinstance(m, Prefill)]) == 2


def test_a_cancel_may_overtake_its_prefill(stand: Any) -> None:
    pe = stand(accepts, role="pe")
    pe.server.wait_ready()
    cancel = CancelCall(request_id="r1", incarnation=pe.rank.incarnation, rank=0, reason="left")
    assert post(pe.server.url, "/cancel", cancel).status_code == 200
    assert post(pe.server.url, "/prefill", call(pe)).status_code == 409
    assert post(pe.server.url, "/prefill", call(pe, "r2")).status_code == 202
    assert (
        post(pe.server.url, "/cancel", CancelCall(**{**to_dict(cancel), "request_id": "r2"})).status_code
        == 200
    )
    assert pe.rank.wait_for(Abort)[0].request_id == "r2"
    assert [m.request_id for m in pe.rank.wait_for(Prefill)] == ["r2"]
    # That is how it should be: nobody refused anything.
    metrics = pe.client.get("/metrics").text
    assert 'kvrail_prefill_calls_total{outcome="cancelled"} 1.0' in metrics
    assert 'kvrail_prefill_calls_total{outcome="refused"} 0.0' in metrics


def to_dict(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_what_a_prefill_engine_refuses(stand: Any) -> None:
    pe = stand(lambda rank, message: accepts(rank, message), role="pe", queue_limit=1)
    pe.server.wait_ready()
    url = pe.server.url
    assert post(url, "/prefill", call(pe, tokens=b"")).status_code == 400
    assert post(url, "/prefill", call(pe, tokens=b"xyz")).status_code == 400
    assert post(url, "/prefill", call(pe, incarnation=b"?" * 16)).status_code == 409
    assert post(url, "/prefill", call(pe, rank=1)).status_code == 409
    headers = bearer_header(TOKEN)
    response = httpx.post(f"{url}/prefill", content=b"\xc1", headers=headers, trust_env=False)
    assert response.status_code == 400
    assert not [m for m in pe.rank.received if isinstance(m, Prefill)]
    assert post(url, "/prefill", call(pe, "r1")).status_code == 202
    assert post(url, "/prefill", call(pe, "r1")).status_code == 409
    # Its completion engine may have r1's first token already, and call for the next one while r1 rings.
    assert post(url, "/prefill", call(pe, "r2")).status_code == 202
    full = post(url, "/prefill", call(pe, "r3"))
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["type"] == "rate_limit_error"
    # The OpenAI routes are not here.
    lost = pe.client.post(CHAT, json=ASK)
    assert lost.status_code == 404
    assert "ask its completion engine" in lost.json()["error"]["message"]


def test_internal_routes_need_the_cluster_token(stand: Any) -> None:
    pe = stand(accepts, role="pe")
    pe.server.wait_ready()
    url = pe.server.url
    for headers in ({}, bearer_header(b"wrong-token-of-tests-xx"), {"Authorization": "Basic abc"}):
        for method, path in (("GET", "/ranks"), ("POST", "/prefill"), ("POST", "/cancel")):
            response = httpx.request(method, url + path, headers=headers, trust_env=False)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    reply = httpx.get(f"{url}/ranks", headers=bearer_header(TOKEN), trust_env=False)
    ranks = msgspec.msgpack.decode(reply.content, type=RanksReply).ranks
    assert [(card.peer, card.limit) for card in ranks] == [(pe.rank.ready.self_rank, 8)]


def test_a_restarted_prefill_engine_is_another_peer(pair: Any) -> None:
    ce, pe = pair()
    old = pe.rank
    old.stop()
    pe.server.wait_until("/metrics", lambda r: 'kvrail_rank_ready{rank="0"} 0.0' in r.text)
    pe.ranks[0] = FakeRank(old.endpoint, accepts)
    try:
        gone = ce.rank.wait_for(Disconnect)[0]
        assert (gone.incarnation, gone.rank) == (old.incarnation, 0)
        connect = ce.rank.wait_for(Connect, 2)[1]
        assert connect.peer.incarnation == pe.rank.incarnation
        # What it had said by then is void.
        ce.rank.link(old)
        ce.rank.send(LinkDropped(incarnation=old.incarnation, rank=0))
        ce.rank.link(pe.rank)
        wait_up(ce, pe)
        assert [one["peer"] for one in ce.client.get("/lanes").json()["links"]] == [pe.rank.incarnation.hex()]
    finally:
        pe.server.stop()
        pe.rank.stop()


def test_a_restarted_completion_rank_is_told_again(pair: Any) -> None:
    ce, pe = pair()
    ce.rank.stop()
    ce.server.wait_until("/ready", lambda r: r.status_code == 503)
    assert ce.client.get("/lanes").json()["links"] == []
    ce.ranks[0] = FakeRank(ce.rank.endpoint, grants)
    try:
        assert ce.rank.wait_for(Connect)[0].peer.incarnation == pe.rank.incarnation
    finally:
        ce.server.stop()
        ce.rank.stop()


def test_a_prefill_engine_may_come_later(stand: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvrail")
    url = "http://127.0.0.1:9"
    ce = stand(grants, role="ce", pe_url=(url,))
    trouble = ce.server.wait_until(
        "/lanes", lambda r: "cannot connect" in r.json()["prefill_engines"][0]["trouble"]
    )
    assert trouble.json()["prefill_engines"][0]["url"] == url
    assert ce.client.post(CHAT, json=ASK).headers["x-kvrail-prefill"] == "local"
    assert caplog.text.count("does not answer") == 1


def test_without_local_prefill_a_link_decides_over_readiness(stand: Any) -> None:
    pe = stand(accepts, role="pe")
    pe.server.wait_ready()
    ce = stand(grants, role="ce", pe_url=(pe.server.url,), local_prefill="never", ready=False)
    ce.rank.send(ce.rank.ready)
    ce.rank.wait_for(Connect)
    response = ce.client.post(CHAT, json=ASK)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert ce.client.get("/ready").status_code == 503
    assert ce.client.get("/health").status_code == 200
    ce.rank.link(pe.rank)
    ce.server.wait_ready()
    with pytest.raises(httpx.ReadTimeout):
        ce.client.post(CHAT, json=ASK, timeout=0.5)
    assert ce.rank.wait_for(Submit)[0].fallback is False


def never(stand: Any, **settings: Any) -> tuple[Any, Any]:
    """A linked pair whose completion engine never prefills."""
    pe = stand(accepts, role="pe")
    pe.server.wait_ready()
    ce = stand(
        remote("ok"), role="ce", pe_url=(pe.server.url,), local_prefill="never", ready=False, **settings
    )
    ce.rank.send(ce.rank.ready)
    link(ce, pe)
    return ce, pe


def test_without_local_prefill_a_silent_peer_is_waited_for(stand: Any) -> None:
    ce, pe = never(stand)
    ce.rank.link(pe.rank, "suspect", "heartbeats are missing")
    ce.server.wait_until("/lanes", lambda r: r.json()["links"][0]["state"] == "suspect")
    assert ce.client.get("/ready").status_code == 503, "others should be asked first"
    with pytest.raises(httpx.ReadTimeout):
        ce.client.post(CHAT, json=ASK, timeout=0.5)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ce.client.post, CHAT, json=ASK)
        ce.server.wait_until("/metrics", lambda r: "kvrail_front_waiting 1.0" in r.text)
        ce.rank.link(pe.rank)
        assert answer.result().headers["x-kvrail-prefill"] == "remote"


def test_a_silent_peer_is_not_waited_for_for_ever(stand: Any) -> None:
    ce, pe = never(stand, ticket_ttl_s=1.0)
    ce.rank.link(pe.rank, "suspect", "heartbeats are missing")
    ce.server.wait_until("/lanes", lambda r: r.json()["links"][0]["state"] == "suspect")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ce.client.post, CHAT, json=ASK) for _ in range(2)]
        assert [answer.result().status_code for answer in answers] == [503, 503]
    started = time.monotonic()
    refused = ce.client.post(CHAT, json=ASK)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert time.monotonic() - started < 0.5
    assert not [m for m in ce.rank.received if isinstance(m, Submit)]


def test_a_wrong_token_is_named(stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pe = stand(accepts, role="pe")
    pe.server.wait_ready()
    monkeypatch.setattr("kit.live_server.TOKEN", b"another-cluster-token-x")
    ce = stand(grants, role="ce", pe_url=(pe.server.url,))
    ce.server.wait_until("/lanes", lambda r: "cluster token" in r.json()["prefill_engines"][0]["trouble"])
    assert not [m for m in ce.rank.received if isinstance(m, Connect)]


def test_short_prompts_stay_here(pair: Any) -> None:
    ce, _ = pair(local_prefill_max_tokens=5)
    assert ce.client.post("/v1/completions", json={"prompt": "short"}).headers["x-kvrail-prefill"] == "local"
    assert ce.rank.wait_for(Submit)[0].peer is None


def test_no_more_tickets_than_a_prefill_rank_takes(pair: Any) -> None:
    ce, pe = pair(pe_limit=1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ce.client.post, CHAT, json=ASK) for _ in range(2)]
        first = pe.rank.wait_for(Prefill)[0]
        ce.server.wait_until("/metrics", lambda r: "kvrail_front_waiting 1.0" in r.text)
        assert len([m for m in ce.rank.received if isinstance(m, Submit)]) == 1
        pe.rank.send(PrefillDone(request_id=first.request_id, ok=True))
        # Else the next call may overtake this news, and is refused.
        pe.server.wait_until("/metrics", lambda r: 'kvrail_rank_requests{rank="0"} 0.0' in r.text)
        ce.rank.send(output(first.request_id, ids("a"), "length", route="remote"))
        second = pe.rank.wait_for(Prefill, 2)[1]
        ce.rank.send(output(second.request_id, ids("b"), "length", route="remote"))
        texts = {one.result(15).json()["choices"][0]["message"]["content"] for one in asked}
    assert texts == {"a", "b"}


def test_prefills_of_others_are_waited_for(stand: Any) -> None:
    pe = stand(accepts, role="pe", queue_limit=1)
    pe.server.wait_ready()
    # Another completion engine's prefill is there before ours looks.
    assert post(pe.server.url, "/prefill", call(pe, "other")).status_code == 202

    def answers_remote(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, ids("a"), "length", route="remote")

    ce = stand(answers_remote, role="ce", pe_url=(pe.server.url,))
    link(ce, pe)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ce.client.post, CHAT, json=ASK)
        ce.server.wait_until("/metrics", lambda r: "kvrail_front_waiting 1.0" in r.text)
        pe.rank.send(PrefillDone(request_id="other", ok=True))
        # Nothing of ours ends; the next look at the prefill engine finds the room.
        assert asked.result(15).headers["x-kvrail-prefill"] == "remote"


def test_counters_are_there_before_they_count(pair: Any) -> None:
    """Whoever takes differences of two scrapes would miss the first count of a series that was not there before."""
    ce, _ = pair(pe_behave=refuses)
    ended = re.compile(r'vllm:request_success_total\{finished_reason="(\w+)",model_name="[^"]+"\} (\S+)')
    metrics = ce.client.get("/metrics").text
    for series in (
        'kvrail_requests_total{api="responses",outcome="stop",route="local"}',
        'kvrail_prefill_calls_total{outcome="unreachable"}',
    ):
        assert f"{series} 0.0\n" in metrics
    assert dict(ended.findall(metrics)) == {"stop": "0.0", "length": "0.0"}
    assert ce.client.post(CHAT, json=ASK).json()["choices"][0]["finish_reason"] == "length"
    assert dict(ended.findall(ce.client.get("/metrics").text)) == {"stop": "0.0", "length": "1.0"}


def test_lanes_and_metrics_of_links(pair: Any) -> None:
    ce, pe = pair()
    peer = pe.rank.incarnation.hex()
    ce.rank.send(
        Stats(
            steps=3,
            gauges={"pages_free": 60},
            counters={"tickets_granted": 2},
            links=[(peer, 0, {"pages": 12, "bytes": 12288})],
        )
    )
    text = ce.server.wait_until("/metrics", lambda r: "kvrail_pages_free" in r.text).text
    assert 'kvrail_pages_free{rank="0"} 60.0' in text
    assert 'kvrail_tickets_granted_total{rank="0"} 2.0' in text
    assert f'kvrail_link_pages_total{{lane="shm",peer="{peer}/0",rank="0",transport="memfd"}} 12.0' in text
    lanes = ce.client.get("/lanes").json()
    assert (lanes["page_tokens"], lanes["page_bytes"]) == (16, 1024)
    one = lanes["links"][0]
    assert (one["lane"], one["transport"], one["state"], one["peer_url"]) == (
        "shm",
        "memfd",
        "up",
        pe.server.url,
    )
    assert one["probes"] == [{"bytes": 65536, "gb_per_s": 5.0, "us": 13.0, "runs": 1, "way": "shm"}]
    assert one["counters"] == {"pages": 12, "bytes": 12288}
