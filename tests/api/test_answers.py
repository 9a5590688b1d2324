# SPDX-License-Identifier: Apache-2.0
"""Good answers: the OpenAI shapes, whole and streamed, and what counts as text, tokens and reasons."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest

from kit.fake_rank import FakeRank, answers, output
from kit.tiny_model import END, byte_level_tokenizer
from kvrail.runtime.messages import Abort, Submit, ToFront, ToRank
from kvrail.transfer.wire import TokenLogprob, unpack_u32

TOKENIZER = byte_level_tokenizer()
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; [DONE] stays a string."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    datas = [line.removeprefix("data: ") for line in lines]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def test_chat_whole(stand: Any) -> None:
    at = stand(answers(ids("Hel"), [*ids("lo"), END], finish="stop"))
    response = at.client.post("/v1/chat/completions", json={**ASK, "user": "someone"})
    body = response.json()
    assert response.headers["x-kvrail-prefill"] == "local"
    assert body["id"] == "chatcmpl-" + response.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    submit = at.rank.wait_for(Submit)[0]
    prompt = unpack_u32(submit.tokens).tolist()
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == ids(text)
    # The end token was computed and is counted; it is no text.
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(prompt) + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert submit.sampling.stop_token_ids == [0, END]
    assert submit.sampling.max_tokens == 256 - len(prompt)
    assert (submit.peer, submit.fallback) == (None, True)


def test_chat_stream(stand: Any) -> None:
    at = stand(answers(ids("Hel"), ids("lo"), finish="length"))
    events = stream(at.client, "/v1/chat/completions", ASK)
    assert events.pop() == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]


def test_usage_in_a_stream(stand: Any) -> None:
    at = stand(
        lambda rank, m: [output(m.request_id, ids("ab"), "length", cached=3)] if isinstance(m, Submit) else []
    )
    events = stream(at.client, "/v1/chat/completions", {**ASK, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(event["usage"] is None for event in events)


def test_completions_whole_and_streamed(stand: Any) -> None:
    at = stand(answers(ids("xy"), ids("z"), finish="length"))
    body = at.client.post("/v1/completions", json={"model": "tiny", "prompt": "Once", "seed": 7}).json()
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert body["choices"] == [{"index": 0, "text": "xyz", "logprobs": None, "finish_reason": "length"}]
    submit = at.rank.wait_for(Submit)[0]
    assert unpack_u32(submit.tokens).tolist() == ids("Once")
    assert (submit.sampling.max_tokens, submit.sampling.seed, submit.sampling.temperature) == (16, 7, 1.0)
    events = stream(at.client, "/v1/completions", {"prompt": "Once"})
    assert events.pop() == "[DONE]"
    assert [event["choices"][0]["text"] for event in events] == ["xy", "z"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]


@pytest.mark.parametrize("prompt", ["ab", ["ab"], ids("ab"), [ids("ab")]])
def test_forms_of_a_prompt(stand: Any, prompt: Any) -> None:
    at = stand(answers(ids("c")))
    assert at.client.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    assert unpack_u32(at.rank.wait_for(Submit)[0].tokens).tolist() == ids("ab")


def test_text_parts_and_messages_sent_back_as_they_came(stand: Any) -> None:
    at = stand(answers(ids("c")))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "go on"},
    ]
    assert at.client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    text = bytes(unpack_u32(at.rank.wait_for(Submit)[0].tokens).astype("u4")).hex()
    wanted = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == bytes(unpack_u32(b"".join(i.to_bytes(4, "little") for i in ids(wanted)))).hex()


def test_sampling_is_passed_on(stand: Any) -> None:
    at = stand(answers(ids("c")))
    asked = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 9,
        "seed": -1,
        "ignore_eos": True,
        "max_tokens": 3,
        "max_completion_tokens": 2,
        "n": 1,
        "frequency_penalty": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert at.client.post("/v1/chat/completions", json={**ASK, **asked}).status_code == 200
    submit = at.rank.wait_for(Submit)[0]
    got = submit.sampling
    assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.0, 0.5, 9, 2**64 - 1)
    assert (got.max_tokens, got.stop_token_ids, got.logprobs) == (2, [], None)
    assert unpack_u32(submit.tokens)[-len(ids("<think>\n")) :].tolist() == ids("<think>\n")


def test_thinking_mode_is_the_default_of_enable_thinking(stand: Any) -> None:
    at = stand(answers(ids("c")), thinking_mode="thinking")
    at.client.post("/v1/chat/completions", json=ASK)
    tail = ids("<think>\n")
    assert unpack_u32(at.rank.wait_for(Submit)[0].tokens)[-len(tail) :].tolist() == tail


def test_seeds_are_drawn_where_none_is_given(stand: Any) -> None:
    at = stand(answers(ids("c")))
    for _ in range(2):
        at.client.post("/v1/chat/completions", json=ASK)
    first, second = at.rank.wait_for(Submit, 2)
    assert first.sampling.seed != second.sampling.seed


def test_one_token_is_an_answer(stand: Any) -> None:
    at = stand(answers(ids("c")))
    body = at.client.post("/v1/chat/completions", json={**ASK, "max_tokens": 1}).json()
    assert body["choices"][0]["message"]["content"] == "c"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


def test_the_end_token_alone_is_an_empty_answer(stand: Any) -> None:
    at = stand(answers([END], finish="stop"))
    body = at.client.post("/v1/chat/completions", json=ASK).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("stop", 1)
    events = stream(at.client, "/v1/chat/completions", ASK)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_an_emoji_is_never_cut(stand: Any) -> None:
    steps = [[token] for token in ids("a🙂b")]
    at = stand(answers(*steps))
    events = stream(at.client, "/v1/chat/completions", ASK)
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert texts == ["", "a", "🙂", "b", None]


def endless(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """Starts an answer and never ends it."""
    if isinstance(message, Submit):
        for step in ("one S", "T", "OP two"):
            yield output(message.request_id, ids(step))


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]])
def test_a_stop_string_over_tokens_ends_the_answer_and_the_request(stand: Any, stop: Any) -> None:
    at = stand(endless)
    body = at.client.post("/v1/chat/completions", json={**ASK, "stop": stop}).json()
    assert body["choices"][0]["message"]["content"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("one STOP")
    assert at.rank.wait_for(Abort)[0].request_id == at.rank.wait_for(Submit)[0].request_id
    assert (
        'kvrail_requests_total{api="chat",outcome="stop",route="local"} 1.0' in at.client.get("/metrics").text
    )


def test_a_streamed_stop_string_lets_nothing_of_it_out(stand: Any) -> None:
    at = stand(endless)
    events = stream(at.client, "/v1/chat/completions", {**ASK, "stop": "STOP"})
    assert events.pop() == "[DONE]"
    assert [event["choices"][0]["delta"] for event in events[1:]] == [{"content": "one "}, {}]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    at.rank.wait_for(Abort)


def with_logprobs(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    if isinstance(message, Submit):
        tokens = [*ids("é"), END]
        noted = [TokenLogprob(logprob=-0.5, top=[(t, -0.5), (ids("x")[0], float("-inf"))]) for t in tokens]
        yield output(message.request_id, tokens[:1], logprobs=noted[:1])
        yield output(message.request_id, tokens[1:], "stop", logprobs=noted[1:])


def test_chat_logprobs(stand: Any) -> None:
    at = stand(with_logprobs)
    asked = {**ASK, "logprobs": True, "top_logprobs": 2}
    content = at.client.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "é"
    assert content[0]["top_logprobs"][1] == {"token": "x", "logprob": -9999.0, "bytes": [ord("x")]}
    assert at.rank.wait_for(Submit)[0].sampling.logprobs == 2
    events = stream(at.client, "/v1/chat/completions", asked)
    streamed = [e["choices"][0]["logprobs"] for e in events[:-1]]
    assert [one["token"] for part in streamed if part for one in part["content"]] == [
        "bytes:\\xc3",
        "bytes:\\xa9",
    ]


def test_completion_logprobs(stand: Any) -> None:
    at = stand(with_logprobs)
    body = at.client.post("/v1/completions", json={"prompt": "a", "logprobs": 2}).json()
    noted = body["choices"][0]["logprobs"]
    assert noted["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert noted["token_logprobs"] == [-0.5, -0.5]
    assert noted["top_logprobs"][0] == {"bytes:\\xc3": -0.5, "x": -9999.0}
    assert len(noted["text_offset"]) == 2


def test_many_at_once_are_not_mixed_up(stand: Any) -> None:
    def echo(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield output(message.request_id, unpack_u32(message.tokens).tolist(), "length")

    at = stand(echo, queue_limit=4)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = [f"request {n}" for n in range(40)]
        bodies = pool.map(lambda text: at.client.post("/v1/completions", json={"prompt": text}).json(), texts)
    assert [body["choices"][0]["text"] for body in bodies] == texts


def test_the_official_client(stand: Any) -> None:
    at = stand(answers(ids("Hel"), ids("lo 🙂"), finish="length"))
    with openai.OpenAI(base_url=f"{at.server.url}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        messages: Any = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=5)
        assert whole.choices[0].message.content == "Hello 🙂"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        messages += [whole.choices[0].message, {"role": "user", "content": "and?"}]
        streamed = list(
            client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
        assert "".join(texts) == "Hello 🙂"
        assert streamed[-1].usage is not None
        assert streamed[-1].usage.completion_tokens == 10
        assert client.completions.create(model="tiny", prompt="Hi").choices[0].text == "Hello 🙂"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=10**6)
