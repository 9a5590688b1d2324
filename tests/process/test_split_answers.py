# SPDX-License-Identifier: Apache-2.0
"""Whatever is asked, the split answers with the single engine's very bytes, apart from ids, time and route."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from kit.cluster import Server, wait_until
from kit.split import MODEL
from kit.tiny_checkpoint import MAX_LENGTH, VOCABULARY

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# As in conftest: what follows these prompts ends an answer at its first and third token.
EOS_AT_1, EOS_AT_3 = list(range(300, 340)), list(range(700, 720))


def ids(count: int, start: int) -> list[int]:
    """A prompt of its own for each case, so that prefix caches are equally warm on both sides."""
    return [300 + (start * 131 + 17 * i) % 1700 for i in range(count)]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


class Case(NamedTuple):
    """A request, and what its answer must be: finish reason and completion tokens, or the error's code."""

    path: str
    body: dict[str, Any]
    finish: str | None = "length"
    tokens: int | None = None


GOOD = {
    "one token of prompt": Case(TEXT, {"prompt": ids(1, 1), "max_tokens": 8}, tokens=8),
    "below a page": Case(TEXT, {"prompt": ids(15, 2), "max_tokens": 8}, tokens=8),
    "exactly a page": Case(TEXT, {"prompt": ids(16, 3), "max_tokens": 20}, tokens=20),
    "above a page": Case(TEXT, {"prompt": ids(17, 4), "max_tokens": 8}, tokens=8),
    "many pages in chunks": Case(TEXT, {"prompt": ids(400, 5), "max_tokens": 8}, tokens=8),
    "default length": Case(TEXT, {"prompt": ids(9, 6)}, tokens=16),
    "up to the very end": Case(TEXT, {"prompt": ids(MAX_LENGTH - 3, 7), "max_tokens": 3}, tokens=3),
    "longest prompt": Case(TEXT, {"prompt": ids(MAX_LENGTH - 1, 8), "max_tokens": 1}, tokens=1),
    "one token of answer": Case(TEXT, {"prompt": ids(20, 9), "max_tokens": 1, "logprobs": 2}, tokens=1),
    "text": Case(TEXT, {"prompt": "Die Würde des Menschen 🙂 日本", "max_tokens": 9}, tokens=9),
    "logprobs": Case(TEXT, {"prompt": ids(33, 10), "logprobs": 5, "max_tokens": 6}, tokens=6),
    "no alternatives": Case(TEXT, {"prompt": ids(33, 11), "logprobs": 0, "max_tokens": 6}, tokens=6),
    "eos at token 1": Case(TEXT, {"prompt": EOS_AT_1, "max_tokens": 9}, "stop", 1),
    "eos at token 1, logprobs": Case(TEXT, {"prompt": EOS_AT_1, "max_tokens": 9, "logprobs": 2}, "stop", 1),
    "eos as the only token": Case(TEXT, {"prompt": EOS_AT_1, "max_tokens": 1}, "stop", 1),
    "eos at token 3": Case(TEXT, {"prompt": EOS_AT_3, "max_tokens": 9}, "stop", 3),
    "ignored eos at token 1": Case(TEXT, {"prompt": EOS_AT_1, "max_tokens": 9, "ignore_eos": True}, tokens=9),
    "ignored eos at token 3": Case(TEXT, {"prompt": EOS_AT_3, "max_tokens": 9, "ignore_eos": True}, tokens=9),
    # Every word of this vocabulary begins with " w": the first token is held back, or is the end.
    "stop string in token 1": Case(TEXT, {"prompt": ids(21, 13), "stop": [" "], "max_tokens": 60}, "stop"),
    "stop string over tokens": Case(
        TEXT, {"prompt": ids(22, 14), "stop": ["1 w", "2 w"], "max_tokens": 60}, "stop"
    ),
    "stop string that never comes": Case(
        TEXT, {"prompt": ids(23, 15), "stop": "xyz", "max_tokens": 9}, tokens=9
    ),
    "sampled": Case(TEXT, {"prompt": ids(24, 16), "temperature": 1.3, "seed": 5, "max_tokens": 12}),
    "sampled, another seed": Case(
        TEXT, {"prompt": ids(25, 17), "temperature": 0.8, "seed": -1, "max_tokens": 12}
    ),
    "top_p and top_k": Case(
        TEXT,
        {"prompt": ids(26, 18), "temperature": 2, "top_p": 0.7, "top_k": 40, "seed": 2**63, "logprobs": 3},
    ),
    "chat": Case(CHAT, {"messages": messages("What now?"), "max_tokens": 7}, tokens=7),
    "chat logprobs": Case(
        CHAT,
        {"messages": messages("And now?"), "logprobs": True, "top_logprobs": 3, "max_tokens": 5},
        tokens=5,
    ),
    "max_completion_tokens": Case(
        CHAT, {"messages": messages("Stop soon."), "max_completion_tokens": 3, "max_tokens": 9}, tokens=3
    ),
    "neutral fields": Case(
        CHAT, {"messages": messages("Plain."), "n": 1, "presence_penalty": 0, "user": "me", "max_tokens": 2}
    ),
    "empty message": Case(CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 4}, tokens=4),
}

BAD: dict[str, tuple[str, dict[str, Any] | str, int, str | None]] = {
    "empty prompt": (TEXT, {"prompt": ""}, 400, "prompt"),
    "no token": (TEXT, {"prompt": []}, 400, "prompt"),
    "no prompt": (TEXT, {}, 400, "prompt"),
    "no messages": (CHAT, {"messages": []}, 400, "messages"),
    "too long": (TEXT, {"prompt": ids(MAX_LENGTH, 30)}, 400, "prompt"),
    "answer too long": (TEXT, {"prompt": ids(MAX_LENGTH - 4, 31), "max_tokens": 5}, 400, "max_tokens"),
    "unknown field": (TEXT, {"prompt": ids(3, 32), "temprature": 0}, 400, "temprature"),
    "pages are not for clients": (
        TEXT,
        {"prompt": ids(3, 33), "kv_transfer_params": {}},
        400,
        "kv_transfer_params",
    ),
    "wrong type": (TEXT, {"prompt": ids(3, 34), "max_tokens": "9"}, 400, "max_tokens"),
    "fraction": (TEXT, {"prompt": ids(3, 35), "max_tokens": 1.5}, 400, "max_tokens"),
    "no answer": (TEXT, {"prompt": ids(3, 36), "max_tokens": 0}, 400, "max_tokens"),
    "no answers": (TEXT, {"prompt": ids(3, 37), "n": 0}, 400, "n"),
    "unknown token": (TEXT, {"prompt": [5, VOCABULARY]}, 400, "prompt[1]"),
    "unknown model": (TEXT, {"prompt": ids(3, 38), "model": "other"}, 404, "model"),
    "not JSON": (TEXT, "{", 400, None),
    "role": (CHAT, {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
}


def send(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    # "temperature" first: a case may say otherwise.
    return httpx.post(f"{server.url}{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=60)


def comparable(response: httpx.Response) -> Any:
    """Status and body without what differs by nature; a stream as the list of its events."""

    def bare(body: Any) -> Any:
        return {key: value for key, value in body.items() if key not in ("id", "created")}

    if response.headers["content-type"].startswith("text/event-stream"):
        blocks = response.text.split("\n\n")
        assert blocks[-1] == ""
        assert all(block.startswith("data: ") for block in blocks[:-1])
        events = [block.removeprefix("data: ") for block in blocks[:-1]]
        assert events[-1] == "[DONE]", response.text
        return [bare(json.loads(event)) for event in events[:-1]]
    return response.status_code, bare(response.json())


@pytest.mark.parametrize("name", GOOD)
def test_the_same_answer(cluster: Cluster, name: str) -> None:
    ce, single, case = cluster.split("shm").ce, cluster.single("shm"), GOOD[name]
    ours, theirs = (send(server, case.path, case.body) for server in (ce, single))
    assert ours.status_code == 200, ours.text
    assert comparable(ours) == comparable(theirs)
    assert ours.headers["x-kvrail-prefill"] == "remote"
    assert theirs.headers["x-kvrail-prefill"] == "local"
    answer = ours.json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == case.finish
    if case.tokens is not None:
        assert usage["completion_tokens"] == case.tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if isinstance(case.body.get("prompt"), list):
        assert usage["prompt_tokens"] == len(case.body["prompt"])

    # Streamed, it is the same answer again; the prompt is now equally warm on both sides.
    body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
    ours, theirs = (send(server, case.path, body) for server in (ce, single))
    assert ours.status_code == 200, ours.text
    assert ours.headers["x-kvrail-prefill"] == "remote"
    events = comparable(ours)
    assert events == comparable(theirs)
    assert _text(events) == (choice["message"]["content"] if case.path == CHAT else choice["text"])
    assert [c["finish_reason"] for e in events for c in e["choices"]].count(case.finish) == 1
    assert events[-1]["choices"] == []
    streamed = events[-1]["usage"]
    for counts in (usage, streamed):
        del counts["prompt_tokens_details"]
    assert streamed == usage


def _text(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_refusal(cluster: Cluster, name: str, stream: bool) -> None:
    ce, single = cluster.split("shm").ce, cluster.single("shm")
    path, body, status, param = BAD[name]
    if isinstance(body, str):
        headers = {"content-type": "application/json"}
        answers = [httpx.post(f"{s.url}{path}", content=body, headers=headers) for s in (ce, single)]
    else:
        answers = [send(server, path, {**body, "stream": stream}) for server in (ce, single)]
    assert comparable(answers[0]) == comparable(answers[1])
    assert answers[0].status_code == status
    error = answers[0].json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert error["code"] == ("context_length_exceeded" if "too long" in name else error["code"])


def test_what_the_cases_stand_for(cluster: Cluster) -> None:
    ce = cluster.split("shm").ce

    def ask(name: str) -> dict[str, Any]:
        case = GOOD[name]
        choice: dict[str, Any] = send(ce, case.path, case.body).json()["choices"][0]
        return choice

    # The token that ends an answer is counted and is no text, not even as a log-probability.
    assert ask("eos at token 1")["text"] == ""
    assert ask("eos at token 1, logprobs")["logprobs"]["tokens"] == []
    assert ask("ignored eos at token 3")["text"].startswith(ask("eos at token 3")["text"])
    assert ask("stop string in token 1")["text"].count(" ") == 0
    assert " w" in ask("stop string over tokens")["text"]
    assert len(ask("one token of answer")["logprobs"]["tokens"]) == 1
    # A seed gives the same answer again, another seed another one.
    case = GOOD["sampled"]
    texts = {
        seed: [send(ce, TEXT, {**case.body, "seed": seed}).json()["choices"][0]["text"] for _ in "12"]
        for seed in (1, 2)
    }
    assert texts[1][0] == texts[1][1] != texts[2][0] == texts[2][1]


def test_nothing_is_held_afterwards(cluster: Cluster) -> None:
    split = cluster.split("shm")
    for server in (split.ce, split.pe):
        for gauge in ("pages_owned", "pages_quarantined", "tickets_open", "rank_requests", "front_waiting"):
            wait_until(
                lambda server=server, gauge=gauge: server.metric(f"kvrail_{gauge}") == 0,
                15,
                f"no {gauge}",
                server,
            )
