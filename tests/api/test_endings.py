# SPDX-License-Identifier: Apache-2.0
"""How requests end early: clients that leave, ranks that die or fall silent, a server that stops."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest

from kit.fake_rank import FakeRank, answers, output
from kit.tiny_model import byte_level_tokenizer
from kvrail.runtime.messages import Abort, Failed, Submit, ToFront, ToRank
from kvrail.transfer.wire import TokenLogprob

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def starts(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """Begins each answer and leaves it open."""
    if isinstance(message, Submit):
        yield output(message.request_id, ids("be"))


def silent(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """Takes everything and says nothing."""
    return ()


def open_request(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, so that the test decides when the client leaves."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=15)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("behave", [silent, starts], ids=["before the first token", "during decoding"])
def test_a_client_that_leaves_is_forgotten(stand: Any, behave: Any, streamed: bool) -> None:
    at = stand(behave)
    connection = open_request(at.server.url, {**ASK, "stream": streamed})
    submit = at.rank.wait_for(Submit)[0]
    if behave is starts and streamed:
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    abort = at.rank.wait_for(Abort)[0]
    assert (abort.request_id, abort.reason) == (submit.request_id, "cancelled by the client")
    at.server.wait_until("/metrics", lambda r: 'kvrail_rank_requests{rank="0"} 0.0' in r.text)
    assert 'outcome="cancelled"' in at.client.get("/metrics").text


def test_a_client_that_leaves_the_queue_makes_room(stand: Any) -> None:
    at = stand(silent, queue_limit=1)
    first = open_request(at.server.url, ASK)
    at.rank.wait_for(Submit)
    second = open_request(at.server.url, ASK)
    at.server.wait_until("/metrics", lambda r: "kvrail_front_waiting 1.0" in r.text)
    second.close()
    at.server.wait_until("/metrics", lambda r: "kvrail_front_waiting 0.0" in r.text)
    assert len([m for m in at.rank.received if isinstance(m, Submit)]) == 1
    first.close()
    at.rank.wait_for(Abort)


def test_a_client_that_does_not_read_keeps_nobody_out(stand: Any) -> None:
    """Its answer has ended at the rank, whose place is free, though most of it waits to be sent."""
    note = TokenLogprob(logprob=-1.0, top=[(token, -1.0) for token in range(4, 24)])

    def many(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            for part in range(100):
                finish = "length" if part == 99 else None
                yield output(message.request_id, ids("x" * 50), finish, logprobs=[note] * 50)

    at = stand(many, queue_limit=1)
    lazy = open_request(at.server.url, {**ASK, "stream": True, "logprobs": True, "top_logprobs": 20})
    at.rank.wait_for(Submit)
    at.rank.behave = answers(ids("x"))
    assert at.client.post(CHAT, json=ASK).status_code == 200
    assert "kvrail_front_waiting 0.0" in at.client.get("/metrics").text
    # The first one was not over by then.
    assert 'outcome="length",route="local"} 1.0' in at.client.get("/metrics").text
    lazy.close()
    at.server.wait_until("/metrics", lambda r: 'outcome="cancelled",route="local"} 1.0' in r.text)
    assert not [m for m in at.rank.received if isinstance(m, Abort)]


def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(stand: Any) -> None:
    def fails(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        yield from starts(rank, message)
        if isinstance(message, Submit):
            yield Failed(request_id=message.request_id, status=500, reason="pages were lost")

    at = stand(fails)
    response = at.client.post(CHAT, json={**ASK, "stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("pages were lost", "server_error")
    assert "[DONE]" not in response.text
    with openai.OpenAI(base_url=f"{at.server.url}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(model="tiny", messages=ASK["messages"], stream=True)  # type: ignore[call-overload]
        with pytest.raises(openai.APIError, match="pages were lost"):
            list(stream)


def test_a_failure_in_the_middle_of_a_whole_answer_is_no_200(stand: Any) -> None:
    def fails(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        yield from starts(rank, message)
        if isinstance(message, Submit):
            yield output(message.request_id, ids("x"), "abort")

    at = stand(fails)
    response = at.client.post(CHAT, json=ASK)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_a_rank_that_dies_fails_its_requests_and_may_come_back(stand: Any) -> None:
    at = stand(silent)
    answer: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answer.append(
            httpx.post(f"{at.server.url}{CHAT}", json=ASK, timeout=30, trust_env=False)
        )
    )
    asking.start()
    at.rank.wait_for(Submit)
    at.rank.stop()
    asking.join(15)
    assert answer[0].status_code == 503
    assert "rank 0 is gone" in answer[0].json()["error"]["message"]
    assert at.client.get("/health").status_code == 200
    ready = at.client.get("/ready")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["rank 0: its process ended"])
    assert at.client.post(CHAT, json=ASK).status_code == 503
    anew = FakeRank(at.rank.endpoint, answers(ids("x")))
    try:
        at.server.wait_ready()
        assert at.client.post(CHAT, json=ASK).status_code == 200
    finally:
        at.server.stop()
        anew.stop()


def test_the_other_rank_goes_on(stand: Any) -> None:
    at = stand(answers(ids("x")), answers(ids("x")))
    at.ranks[0].stop()
    at.server.wait_until("/metrics", lambda r: 'kvrail_rank_ready{rank="0"} 0.0' in r.text)
    assert at.client.get("/ready").status_code == 200
    for number in range(6):
        body = {"messages": [{"role": "user", "content": f"conversation {number}"}]}
        assert at.client.post(CHAT, json=body).status_code == 200


def test_a_silent_rank_fails_its_requests_and_is_used_again_when_it_speaks(stand: Any) -> None:
    at = stand(silent, silent_limit_s=0.4)
    response = at.client.post(CHAT, json=ASK)
    assert response.status_code == 503
    assert "has said nothing" in response.json()["error"]["message"]
    assert at.client.get("/ready").status_code == 503
    at.rank.wait_for(Abort)
    at.rank.behave = answers(ids("x"))
    at.rank.send(output("unknown", ids("x")))
    at.server.wait_ready()
    assert at.client.post(CHAT, json=ASK).status_code == 200


def test_stopping_with_an_open_stream_takes_less_than_five_seconds(stand: Any) -> None:
    at = stand(starts)
    connection = open_request(at.server.url, {**ASK, "stream": True})
    assert b"200 OK" in connection.recv(4096)
    assert at.server.stop() < 5
    rest = b""
    while part := connection.recv(65536):
        rest += part
    connection.close()
    assert b"the server is stopping" in rest
    assert b"[DONE]" not in rest


def test_stopping_lets_short_answers_finish(stand: Any) -> None:
    at = stand(starts)
    connection = open_request(at.server.url, {**ASK, "stream": True})
    assert b"200 OK" in connection.recv(4096)
    stopping = threading.Thread(target=at.server.stop)
    stopping.start()
    time.sleep(0.3)
    at.rank.send(output(at.rank.wait_for(Submit)[0].request_id, ids("end"), "length"))
    rest = b""
    while part := connection.recv(65536):
        rest += part
    connection.close()
    stopping.join(10)
    assert b"[DONE]" in rest


def test_no_text_of_a_request_is_logged(stand: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvrail")
    at = stand(answers(ids("SECRETANSWER")))
    secret = {"messages": [{"role": "user", "content": "SECRETQUESTION"}]}
    assert at.client.post(CHAT, json=secret).status_code == 200
    assert at.client.post(CHAT, json={**secret, "max_tokens": 10**6}).status_code == 400
    assert at.client.post(CHAT, json={**secret, "SECRETFIELD": 1}).status_code == 400
    at.server.stop()
    assert "request " in caplog.text
    assert "SECRET" not in caplog.text
