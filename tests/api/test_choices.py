# SPDX-License-Identifier: Apache-2.0
"""Several answers in one response: indices, usage, streams, stop strings that end one of them, echoed prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from kit.fake_rank import FakeRank
from kit.tiny_model import END, byte_level_tokenizer
from kvrail.runtime.messages import Abort, Output, Outputs, Submit, ToFront, ToRank
from kvrail.transfer.wire import TokenLogprob, pack_u32, unpack_u32

TOKENIZER = byte_level_tokenizer()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def told(
    request_id: str, choice: int, tokens: Iterable[int], finish: str | None = None, **more: Any
) -> Outputs:
    item = Output(request_id, pack_u32(list(tokens)), finish, "local", 3, choice=choice, **more)  # type: ignore[arg-type]
    return Outputs(items=[item])


def lettered(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
    """Answer k is its prompt's first letter, k times over, then "!"; token by token, choices in turn."""
    if isinstance(message, Submit):
        first = int(unpack_u32(message.tokens)[0])
        count = message.sampling.n
        for step in range(count + 1):
            for choice in range(step - 1 if step else 0, count):
                if step <= choice:
                    yield told(message.request_id, choice, [first])
                elif step == choice + 1:
                    yield told(message.request_id, choice, ids("!"), "length")


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert (blocks.pop(), blocks.pop()) == ("", "data: [DONE]")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def texts(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def test_choices_of_several_prompts(stand: Any) -> None:
    at = stand(lettered)
    body = {"prompt": ["abc", "xy"], "n": 2}
    answer = at.client.post(TEXT, json=body).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "a!", "length"),
        (1, "aa!", "length"),
        (2, "x!", "length"),
        (3, "xx!", "length"),
    ]
    # Each prompt counts once, each answer for itself.
    usage = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 6}}
    first, second = at.rank.wait_for(Submit, 2)
    assert first.request_id != second.request_id
    assert answer["id"] == f"cmpl-{first.request_id}"
    chunks = events(
        at.client.post(TEXT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert chunks[-1]["usage"] == answer["usage"]
    assert texts(chunks) == {0: "a!", 1: "aa!", 2: "x!", 3: "xx!"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", [["ab", "c"], [ids("ab"), ids("c")]])
def test_forms_of_several_prompts(stand: Any, prompt: Any) -> None:
    at = stand(lettered)
    assert at.client.post(TEXT, json={"prompt": prompt}).status_code == 200
    found = sorted(unpack_u32(one.tokens).tolist() for one in at.rank.wait_for(Submit, 2))
    assert found == sorted([ids("ab"), ids("c")])


def test_chat_choices(stand: Any) -> None:
    at = stand(lettered)
    answer = at.client.post(CHAT, json={**ASK, "n": 3}).json()
    # (The prompt begins with a special token, which is no text.)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [
        (0, "!"),
        (1, "!"),
        (2, "!"),
    ]
    assert answer["usage"]["completion_tokens"] == 2 + 3 + 4
    chunks = events(at.client.post(CHAT, json={**ASK, "n": 3, "stream": True}))
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
    assert roles == [0, 1, 2]
    assert texts(chunks) == {0: "!", 1: "!", 2: "!"}


def test_continuous_usage(stand: Any) -> None:
    at = stand(lettered)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "n": 2, "stream": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(at.client.post(TEXT, json=body))]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a_stop_string_ends_one_choice_and_the_others_go_on(stand: Any) -> None:
    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield told(message.request_id, 0, ids("one"))
            yield told(message.request_id, 1, ids("two"))
        elif isinstance(message, Abort) and message.choice == 1:
            yield told(message.request_id, 1, ids("late"))  # it crossed the abort
            yield told(message.request_id, 0, ids("!"), "length")

    at = stand(behave)
    answer = at.client.post(TEXT, json={"prompt": "x", "n": 2, "stop": "wo"}).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("one!", "length"), ("t", "stop")]
    assert len(at.rank.wait_for(Abort)) == 1


def test_the_last_choice_ended_by_a_stop_string_ends_the_request(stand: Any) -> None:
    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield told(message.request_id, 0, ids("a"), "length")
            yield told(message.request_id, 1, ids("bST"))
            yield told(message.request_id, 1, ids("OP"))

    at = stand(behave)
    answer = at.client.post(TEXT, json={"prompt": "x", "n": 2, "stop": "STOP"}).json()
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("a", "length"), ("b", "stop")]
    (abort,) = at.rank.wait_for(Abort)
    assert (abort.choice, abort.reason) == (None, "stop")


def test_one_failing_prompt_fails_the_response_and_ends_the_others(stand: Any) -> None:
    from kvrail.runtime.messages import Failed

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            if int(unpack_u32(message.tokens)[0]) == ids("b")[0]:
                yield Failed(request_id=message.request_id, status=503, reason="no room")
            else:
                yield told(message.request_id, 0, ids("a"))

    at = stand(behave)
    response = at.client.post(TEXT, json={"prompt": ["a", "b"]})
    assert response.status_code == 503
    assert at.rank.wait_for(Abort)[0].request_id == at.rank.wait_for(Submit)[0].request_id


def one_answer(*steps: Iterable[int], finish: str = "length", **more: Any) -> Any:
    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            for place, step in enumerate(steps):
                yield told(message.request_id, 0, step, finish if place == len(steps) - 1 else None, **more)

    return behave


def test_include_stop_str_in_output(stand: Any) -> None:
    at = stand(one_answer(ids("on"), ids("e, tw"), ids("o")))
    for include, text in ((False, "on"), (True, "one")):
        body = {"prompt": "x", "stop": ["e", "never"], "include_stop_str_in_output": include}
        choice = at.client.post(TEXT, json=body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_stop_token_ids(stand: Any) -> None:
    at = stand(one_answer(ids("on"), ids("e"), finish="stop"))
    stop = ids("e")
    for include, text in ((False, "on"), (True, "one")):
        body = {"prompt": "x", "stop_token_ids": stop, "include_stop_str_in_output": include}
        choice = at.client.post(TEXT, json=body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert at.rank.wait_for(Submit)[0].sampling.stop_token_ids == sorted({0, END, *stop})
    at.client.post(TEXT, json={"prompt": "x", "stop_token_ids": stop, "ignore_eos": True})
    assert at.rank.wait_for(Submit, 3)[2].sampling.stop_token_ids == stop


def test_stop_strings_count_behind_min_tokens(stand: Any) -> None:
    at = stand(one_answer(ids("ab"), ids("ab"), ids("c")))
    for least, text in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "ababc")):
        body = {"prompt": "x", "stop": "b", "min_tokens": least}
        assert at.client.post(TEXT, json=body).json()["choices"][0]["text"] == text


def test_skip_special_tokens(stand: Any) -> None:
    at = stand(one_answer([1, *ids("a")], [3, END], finish="stop"))
    assert at.client.post(TEXT, json={"prompt": "x"}).json()["choices"][0]["text"] == "a<think>"
    body = {"prompt": "x", "skip_special_tokens": False}
    # The end token is no part of the answer all the same.
    assert at.client.post(TEXT, json=body).json()["choices"][0]["text"] == "<|im_start|>a<think>"


def note(token: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(logprob=logprob, top=[(token, logprob), (5, -9.0)])


def test_echo(stand: Any) -> None:
    at = stand(one_answer(ids("cd")))
    for prompt in ("ab", ids("ab")):
        answer = at.client.post(TEXT, json={"prompt": prompt, "echo": True}).json()
        assert answer["choices"][0]["text"] == "abcd"
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 2
    chunks = events(at.client.post(TEXT, json={"prompt": "ab", "echo": True, "stream": True}))
    assert texts(chunks) == {0: "abcd"}
    assert at.rank.wait_for(Submit)[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("count", [0, 4])
def test_echo_with_logprobs(stand: Any, count: int) -> None:
    prompt = [note(token, -float(place)) for place, token in enumerate(ids("abc"))]

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if isinstance(message, Submit):
            yield told(message.request_id, 0, [], prompt_logprobs=prompt[1:2])
            yield told(message.request_id, 0, [], prompt_logprobs=prompt[2:])
            for choice in range(message.sampling.n):
                yield told(message.request_id, choice, ids("d"), "length", logprobs=[note(ids("e")[0], -7.0)])

    at = stand(behave)
    body = {"prompt": "abc", "echo": True, "logprobs": 2, "n": 2, "max_tokens": count}
    answer = at.client.post(TEXT, json=body).json()
    tail = ["d"] if count else []
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert choice["text"] == "abc" + "".join(tail)
        assert found["tokens"] == ["a", "b", "c", *tail]
        assert found["token_logprobs"] == [None, -1.0, -2.0, *([-7.0] if count else [])]
        assert found["top_logprobs"][:2] == [None, {"b": -1.0, TOKENIZER.id_to_token(5): -9.0}]
        assert found["text_offset"] == [0, 1, 2, *([3] if count else [])]
        if count:
            # The chosen token is there, though it was not among the likeliest.
            assert set(found["top_logprobs"][3]) == {"d", "e", TOKENIZER.id_to_token(5)}
    assert answer["usage"]["completion_tokens"] == (2 if count else 0)
    sampling = at.rank.wait_for(Submit)[0].sampling
    assert (sampling.prompt_logprobs, sampling.max_tokens) == (2, max(count, 1))


def test_what_a_rank_is_told(stand: Any) -> None:
    at = stand(one_answer(ids("c")))
    asked = {
        "n": 1,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -3, "9": 1.5},
        "min_tokens": 2,
        "max_tokens": 5,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
    }
    assert at.client.post(CHAT, json={**ASK, **asked}).status_code == 200
    got = at.rank.wait_for(Submit)[0].sampling
    assert (got.min_p, got.presence_penalty, got.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (got.repetition_penalty, got.logit_bias, got.min_tokens) == (1.2, [(7, -3.0), (9, 1.5)], 2)


@pytest.mark.parametrize("name", ["n", "logit_bias", "stop", "min_p", "stop_token_ids", "seed", "echo"])
def test_null_is_the_default(stand: Any, name: str) -> None:
    at = stand(one_answer(ids("c")))
    assert at.client.post(TEXT, json={"prompt": "x", name: None}).status_code == 200
