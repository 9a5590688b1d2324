# SPDX-License-Identifier: Apache-2.0
"""What is refused, with which status and body: always an OpenAI error that names the field, never a rank bothered."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.answering import TEMPLATE
from kit.fake_rank import FakeRank, answers, output
from kit.tiny_model import byte_level_tokenizer
from kvrail.runtime.messages import Abort, Failed, Submit, ToFront, ToRank

TOKENIZER = byte_level_tokenizer()
HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def refused(
    response: httpx.Response, status: int, param: str | None = None, says: str = ""
) -> dict[str, Any]:
    """The error of a response, checked for its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.headers["x-request-id"]) == 32
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert says in error["message"]
    return error


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


NOW = {"type": "function", "function": {"name": "now"}}
OTHER = {"type": "function", "function": {"name": "other"}}
WRONG: list[tuple[str, Any, str | None, str]] = [
    (CHAT, {}, "messages", "is required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": "Hi"}, "messages", "list"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "text",
    ),
    (CHAT, {"messages": HI, "surprise": 1}, "surprise", "not a known field"),
    (CHAT, {"messages": HI, "remote_host": "evil"}, "remote_host", "not a known field"),
    (CHAT, {"messages": HI, "re mote": "evil"}, None, "'re mote' is not a known field"),
    (CHAT, {"messages": HI, "max_tokens": "5"}, "max_tokens", "integer"),
    (CHAT, {"messages": HI, "max_tokens": True}, "max_tokens", "integer"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens", "greater"),
    (CHAT, {"messages": HI, "max_completion_tokens": -1}, "max_completion_tokens", "greater"),
    (CHAT, {"messages": HI, "temperature": 2.5}, "temperature", "less than"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature", "number"),
    (CHAT, {"messages": HI, "top_p": 0}, "top_p", "greater"),
    (CHAT, {"messages": HI, "top_k": 1.5}, "top_k", "integer"),
    (CHAT, {"messages": HI, "top_k": 10**30}, "top_k", "less than"),
    (CHAT, {"messages": HI, "seed": 2**64}, "seed", "less than"),
    (CHAT, {"messages": HI, "stream": "yes"}, "stream", "boolean"),
    (CHAT, {"messages": HI, "stream_options": {"x": 1}}, "stream_options.x", "not a known field"),
    (CHAT, {"messages": HI, "stream_options": {}}, "stream_options", "stream: true only"),
    (CHAT, {"messages": HI, "stop": ""}, "stop", "empty"),
    (CHAT, {"messages": HI, "stop": [1]}, "stop", "string"),
    (CHAT, {"messages": HI, "stop": ["x"] * 17}, "stop", "at most"),
    (CHAT, {"messages": HI, "stop": "x" * 1025}, "stop", "1024 characters"),
    (CHAT, {"messages": HI, "n": 0}, "n", "greater"),
    (CHAT, {"messages": HI, "n": 129}, "n", "less than"),
    (CHAT, {"messages": HI, "min_p": 1.5}, "min_p", "less than"),
    (CHAT, {"messages": HI, "min_tokens": -1}, "min_tokens", "greater"),
    (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "to max_tokens"),
    (CHAT, {"messages": HI, "stop_token_ids": [10**6]}, "stop_token_ids", "of token ids"),
    (CHAT, {"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids", "of token ids"),
    (CHAT, {"messages": HI, "stop_token_ids": "2"}, "stop_token_ids", "list"),
    (CHAT, {"messages": HI, "logit_bias": {"a": 1}}, "logit_bias", "'a' is no token id"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    (CHAT, {"messages": HI, "logit_bias": {"1": True}}, "logit_bias", "a number"),
    (CHAT, {"messages": HI, "logit_bias": [1]}, "logit_bias", "an object"),
    (CHAT, {"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias", "of token ids"),
    (CHAT, {"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "greater"),
    (CHAT, {"messages": HI, "frequency_penalty": -2.5}, "frequency_penalty", "greater"),
    (CHAT, {"messages": HI, "skip_special_tokens": 1}, "skip_special_tokens", "boolean"),
    (CHAT, {"messages": HI, "metadata": {"a": 1}}, "metadata.a", "string"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    (CHAT, {"messages": HI, "tools": [NOW]}, "tools", "no place for tools"),
    (CHAT, {"messages": HI, "tools": [NOW, NOW]}, "tools", "same name"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "no tools"),
    (CHAT, {"messages": HI, "tool_choice": "always"}, "tool_choice", '"auto"'),
    (CHAT, {"messages": HI, "tools": [NOW], "tool_choice": OTHER}, "tool_choice", "'other'"),
    (CHAT, {"messages": HI, "continue_final_message": True}, "continue_final_message", "of the assistant"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "of its own"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0]", "role tool"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
        "is required",
    ),
    (CHAT, {"messages": HI, "presence_penalty": 2.5}, "presence_penalty", "less than"),
    (CHAT, {"messages": HI, "top_logprobs": 21}, "top_logprobs", "less than"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    (CHAT, {"messages": HI, "logprobs": 1}, "logprobs", "boolean"),
    (COMPLETIONS, {}, "prompt", "is required"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "a string, token ids"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", "all strings or all token ids"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "a string, token ids"),
    (COMPLETIONS, {"prompt": [[True]]}, "prompt", "a string, token ids"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
    (COMPLETIONS, {"prompt": [[5], [10**6]]}, "prompt[1][0]", "no token id"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 128, "best_of": 128, "echo": 1}, "echo", "boolean"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 100}, "n", "at most 256 answers"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "greater"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3}, "best_of", "must be n"),
    (COMPLETIONS, {"prompt": [10, 10**6]}, "prompt[1]", "no token id"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]", "no token id"),
    (COMPLETIONS, {"prompt": "\ud800"}, None, "surrogate"),
]


def test_wrong_requests(stand: Any) -> None:
    at = stand(answers(ids("x")))
    for path, body, param, says in WRONG:
        error = refused(
            at.client.post(path, content=json.dumps(body).encode(), headers=JSON), 400, param, says
        )
        assert error["type"] == "invalid_request_error", body
    assert not [m for m in at.rank.received if isinstance(m, Submit)]


JSON = {"content-type": "application/json"}


def test_unknown_fields_can_be_left_out(stand: Any, caplog: pytest.LogCaptureFixture) -> None:
    at = stand(answers(ids("x")), ignore_unknown_fields=True)
    for _ in "12":
        body = {"messages": HI, "surprise": 1, "max_tokens": 3, "remote_host": "evil"}
        assert at.client.post(CHAT, json=body).status_code == 200
    assert at.rank.wait_for(Submit)[0].sampling.max_tokens == 3
    assert sum("'surprise' is not known" in line for line in caplog.messages) == 1
    # What is known must still be right, and inside of fields nothing is left out.
    refused(at.client.post(CHAT, json={"messages": HI, "surprise": 1, "n": 0}), 400, "n", "greater")
    wrong = {"messages": HI, "stream_options": {"x": 1}}
    refused(at.client.post(CHAT, json=wrong), 400, "stream_options.x", "not a known field")
    refused(at.client.post(CHAT, content=b"[]", headers=JSON), 400, None, "a JSON object")
    assert at.client.post(COMPLETIONS, json={"prompt": "a", "odd": {}}).status_code == 200


def test_bodies_that_are_no_json_object(stand: Any) -> None:
    at = stand(answers(ids("x")))
    refused(at.client.post(CHAT, content=b'{"messages": ', headers=JSON), 400, None, "JSON")
    refused(at.client.post(CHAT, content=b"[]", headers=JSON), 400, None, "a JSON object")
    refused(at.client.post(CHAT, content=b"", headers=JSON), 400, None, "a JSON object")
    refused(at.client.post(CHAT, content=b"\xff\xfe", headers=JSON), 400)
    # Python would read these, and fail when it writes an answer that repeats them.
    for odd in (b'"\\ud800"', b"NaN", b"-Infinity", b"1e400", b"[" * 5000 + b"]" * 5000):
        for path, field in ((CHAT, "chat_template_kwargs"), ("/v1/responses", "metadata")):
            body = b'{"messages": [], "input": "a", "%s": {"x": %s}}' % (field.encode(), odd)
            refused(at.client.post(path, content=body, headers=JSON), 400, None, "not valid JSON")
    good = json.dumps({"messages": HI}).encode()
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        refused(at.client.post(CHAT, content=good, headers=kind), 415, None, "application/json")
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert at.client.post(CHAT, content=good, headers=charset).status_code == 200


def test_too_long(stand: Any) -> None:
    at = stand(answers(ids("x")), max_model_len=64)
    error = refused(at.client.post(COMPLETIONS, json={"prompt": "a" * 64}), 400, "prompt", "64 tokens")
    assert error["code"] == "context_length_exceeded"
    error = refused(
        at.client.post(COMPLETIONS, json={"prompt": "a" * 60, "max_tokens": 5}),
        400,
        "max_tokens",
        "60 tokens",
    )
    assert error["code"] == "context_length_exceeded"
    refused(at.client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 64}]}), 400, "messages")
    # As much as fits is no fault.
    assert at.client.post(COMPLETIONS, json={"prompt": "a" * 63, "max_tokens": 1}).status_code == 200


def test_paths_and_methods(stand: Any) -> None:
    at = stand(answers(ids("x")))
    refused(at.client.get("/nowhere"), 404, None, "/nowhere")
    refused(at.client.get(CHAT), 405)
    refused(at.client.post("/prefill", content=b""), 404)
    error = refused(at.client.post(CHAT, json={"model": "gpt", "messages": HI}), 404, "model", "gpt")
    assert error["code"] == "model_not_found"
    refused(at.client.get("/v1/models/gpt"), 404, "model")


def test_bodies_are_bounded(stand: Any) -> None:
    at = stand(answers(ids("x")), max_body_mb=0.1)
    refused(at.client.post(COMPLETIONS, json={"prompt": "a" * 200_000}), 413, None, "--max-body-mb")

    def unannounced() -> Iterable[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 10_000

    refused(at.client.post(COMPLETIONS, content=unannounced(), headers=JSON), 413, None, "larger")


MANY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}),
    (CHAT, {"messages": HI, **{f"x{n}": 1 for n in range(100_000)}}),
    (CHAT, {"messages": [{"role": "user", "content": "a", **{f"x{n}": 1 for n in range(100_000)}}]}),
    (COMPLETIONS, {"prompt": [[1]] * 100_000}),
    (COMPLETIONS, {"prompt": [1] * 3_000_000}),
    ("/detokenize", {"tokens": [1] * 3_000_000}),
]


def test_the_parts_of_a_body_are_bounded(stand: Any) -> None:
    at = stand(answers(ids("x")), ignore_unknown_fields=True, max_model_len=100_000)
    for path, body in MANY:
        refused(at.client.post(path, json=body), 413, None, "too many parts")
    # Seen before the body is read, even where they stand in a text.
    marks = json.dumps({"prompt": "[" * 1_100_000}).encode()
    refused(at.client.post(COMPLETIONS, content=marks, headers=JSON), 413, None, "too many parts")
    # What is merely long is not meant.
    assert at.client.post(COMPLETIONS, json={"prompt": [1] * 90_000}).status_code == 200
    body = {"messages": [{"role": "user", "content": "{[,]}"}] * 3000}
    assert at.client.post(CHAT, json=body).status_code == 200


def test_prompts_are_bounded(stand: Any) -> None:
    at = stand(answers(ids("x")), max_prompt_tokens=50)
    assert at.client.post(COMPLETIONS, json={"prompt": "a" * 50}).status_code == 200
    error = refused(
        at.client.post(COMPLETIONS, json={"prompt": "a" * 51}), 400, "prompt", "--max-prompt-tokens"
    )
    assert error["code"] == "context_length_exceeded"
    refused(at.client.post(COMPLETIONS, json={"prompt": "a" * 10_000}), 400, None, "10000 characters")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("where", ["description", "arguments"])
def test_what_stands_beside_contents_is_bounded_as_well(
    stand: Any, tmp_path: Path, path: str, where: str
) -> None:
    """Before it becomes tokens, which takes a second for a million characters."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    at = stand(answers(ids("x")), chat_template=str(tmp_path / "chat.jinja"))
    long = "a" * 100_000
    body: dict[str, Any] = {"messages": HI}
    if where == "description":
        body["tools"] = [{"type": "function", "function": {"name": "now", "description": long}}]
    else:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "now", "arguments": json.dumps({"a": long})},
        }
        body["messages"] = [*HI, {"role": "assistant", "tool_calls": [call]}]
    refused(at.client.post(path, json=body), 400, None, "characters")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_may_take_only_so_long(stand: Any, streamed: bool) -> None:
    at = stand(lambda rank, message: (), request_timeout_s=0.3)
    response = at.client.post(CHAT, json={"messages": HI, "stream": streamed})
    assert refused(response, 504, None, "--request-timeout-s")["type"] == "timeout_error"
    assert at.rank.wait_for(Abort)[0].reason == "timeout"

    def begins(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, ids("a"))

    at = stand(begins, request_timeout_s=0.3)
    response = at.client.post(CHAT, json={"messages": HI, "stream": streamed})
    if streamed:
        assert response.status_code == 200
        assert "--request-timeout-s" in json.loads(response.text.split("data: ")[-1])["error"]["message"]
    else:
        refused(response, 504)
    at.rank.wait_for(Abort)
    assert 'outcome="timeout"' in at.client.get("/metrics").text


def test_origins(stand: Any) -> None:
    at = stand(answers(ids("x")))
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert at.client.options(CHAT, headers=asks).status_code == 405
    at = stand(answers(ids("x")), cors_origin=("https://a.example",))
    allowed = at.client.options(CHAT, headers={**asks, "access-control-request-headers": "authorization"})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert at.client.options(CHAT, headers={**asks, "origin": "https://b.example"}).status_code == 400
    answer = at.client.post(CHAT, json={"messages": HI}, headers={"origin": "https://a.example"})
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_request_ids_and_the_access_log(stand: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrail.access")
    at = stand(answers(ids("x")))
    secret = [{"role": "user", "content": "a secret"}]
    ours = at.client.post(CHAT, json={"messages": secret}).headers["x-request-id"]
    theirs = at.client.post(CHAT, json={"messages": secret}, headers={"x-request-id": "mine-1"})
    assert theirs.headers["x-request-id"] == "mine-1"
    assert "mine-1" not in theirs.json()["id"]
    forged = at.client.post(CHAT, json={}, headers={"x-request-id": "a b"})
    refused(forged, 400, "messages")
    deadline = time.monotonic() + 10  # a line is written when its answer has left
    while caplog.text.count('"POST"') < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "kvrail.access"]
    assert [(line["path"], line["status"]) for line in lines if line["method"] == "POST"] == [
        (CHAT, 200),
        (CHAT, 200),
        (CHAT, 400),
    ]
    first, second, third = [line for line in lines if line["method"] == "POST"]
    assert (first["request_id"], first["client_request_id"]) == (ours, None)
    assert (second["client_request_id"], third["client_request_id"]) == ("mine-1", None)
    assert theirs.json()["id"] == "chatcmpl-" + second["request_id"]
    assert "secret" not in caplog.text
    # Those that only watch are not worth a line.
    assert not [line for line in lines if line["path"] == "/ready" and line["status"] == 200]


def test_several_keys(stand: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the team\nsesame\n\nanother key\n")
    at = stand(answers(ids("x")), api_key_file=str(tmp_path / "keys"))
    for key, status in (("sesame", 200), ("another key", 200), ("# of the team", 401)):
        asked = at.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert asked.status_code == status
    refused(at.client.post("/tokenize", json={"prompt": "a"}), 401)


def test_api_keys_guard_the_openai_routes_only(stand: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sesame\n")
    at = stand(answers(ids("x")), api_key_file=str(tmp_path / "keys"))
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer a-cluster-token-of-tests"}):
        response = at.client.post(CHAT, json={"messages": HI}, headers=key)
        assert refused(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        refused(at.client.get("/v1/models", headers=key), 401)
        refused(at.client.post(CHAT, json={"surprise": 1}, headers=key), 401)
    good = {"Authorization": "Bearer sesame"}
    assert at.client.post(CHAT, json={"messages": HI}, headers=good).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/lanes", "/version"):
        assert at.client.get(path).status_code == 200


def test_before_the_model_is_loaded(stand: Any) -> None:
    at = stand(answers(ids("x")), ready=False)
    response = at.client.post(CHAT, json={"messages": HI})
    refused(response, 503, None, "loading")
    # What no loading makes right is said at once.
    for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})):
        refused(at.client.post(path, json={**body, "max_tokens": 5000}), 400, "max_tokens", "4096")
        refused(at.client.post(path, json={**body, "max_tokens": 4000}), 503, None, "loading")
    assert int(response.headers["retry-after"]) >= 1
    assert at.client.get("/health").status_code == 200
    assert at.client.head("/health").status_code == 200
    assert at.client.head("/ready").status_code == 503
    assert at.client.head("/metrics").status_code == 200
    ready = at.client.get("/ready")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["rank 0: its process is starting"])
    at.rank.send(at.rank.ready)
    at.server.wait_ready()
    assert at.client.post(CHAT, json={"messages": HI}).status_code == 200


@pytest.mark.parametrize(
    ("status", "wanted", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "server_error"),
        (503, 503, "service_unavailable"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_rank_refuses_has_a_real_status(
    stand: Any, status: int, wanted: int, kind: str, streamed: bool
) -> None:
    def refuse(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield Failed(request_id=message.request_id, status=status, reason="told so", retry_after_s=2.5)

    at = stand(refuse)
    response = at.client.post(CHAT, json={"messages": HI, "stream": streamed})
    assert refused(response, wanted, None, "told so")["type"] == kind
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    assert f'outcome="http_{status}"' in at.client.get("/metrics").text


def refused_ahead_of_its_body(url: str) -> int:
    """The status of the answer to a large request of which only the headers have been sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 10) as raw:
        raw.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Content-Length: 20000000\r\n\r\n".encode()
        )
        return int(raw.recv(1000).split()[1])


def test_a_body_that_stops_coming(stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrail.frontend.envelope._BODY_WITHIN_S", 0.2)
    assert refused_ahead_of_its_body(stand(answers(ids("x"))).server.url) == 408


def test_a_full_queue_answers_429_and_drains(stand: Any) -> None:
    at = stand(lambda rank, message: (), queue_limit=1, max_queue=1)
    done: list[httpx.Response] = []

    def ask() -> None:
        done.append(httpx.post(f"{at.server.url}{CHAT}", json={"messages": HI}, timeout=30, trust_env=False))

    first = threading.Thread(target=ask)
    first.start()
    at.rank.wait_for(Submit)
    second = threading.Thread(target=ask)
    second.start()
    at.server.wait_until("/metrics", lambda response: "kvrail_front_waiting 1.0" in response.text)
    response = at.client.post(CHAT, json={"messages": HI})
    assert refused(response, 429, None, "--max-queue")["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    assert refused_ahead_of_its_body(at.server.url) == 429
    assert 'api="chat",outcome="http_429"' in at.client.get("/metrics").text
    # The one that waits gets the place of the one that ends.
    for count in (1, 2):
        at.rank.send(output(at.rank.wait_for(Submit, count)[-1].request_id, ids("x"), "length"))
    first.join(15)
    second.join(15)
    assert [response.status_code for response in done] == [200, 200]
