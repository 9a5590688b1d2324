# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter, greedy and seeded: the split's answer is the single engine's, and so is each choice."""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kit.cluster import Server, wait_until
from kit.split import MODEL
from kit.tiny_model import byte_level_tokenizer

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LANES = ["shm", "put/cma"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Each with a prompt of its own, so that prefix caches are equally warm on both sides.
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7, "seed": 3},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "top_p, top_k and min_p": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.4},
    "repetition that rewards": {"repetition_penalty": 0.7, "max_tokens": 20},
    "logit_bias": {"logit_bias": {"301": 12, "302": 12, "303": -100}},
    "logit_bias that decides": {"logit_bias": {"777": 100}, "logprobs": 2},
    "min_tokens": {"min_tokens": 6, "logit_bias": {"2": 40}},
    "stop": {"stop": ["1 w", "2 w", "3 w"], "max_tokens": 40},
    "stop, kept": {"stop": ["1 w", "2 w", "3 w"], "max_tokens": 40, "include_stop_str_in_output": True},
    "stop in token 1": {"stop": [" "]},
    "stop_token_ids": {"logit_bias": {"500": 8, "501": 8}, "stop_token_ids": [500, 501], "max_tokens": 40},
    "stop_token_ids in token 1": {"logit_bias": {"500": 100}, "stop_token_ids": [500]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 40},
    "logprobs": {"logprobs": 5},
    "logprobs and penalties": {"logprobs": 3, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "skip_special_tokens": {
        "skip_special_tokens": False,
        "logit_bias": {"0": 50, "1": 50},
        "ignore_eos": True,
    },
    "n": {"n": 3},
    "n of one token": {"n": 3, "max_tokens": 1, "logprobs": 1},
    "n, logprobs and penalties": {"n": 4, "logprobs": 2, "frequency_penalty": 1.0},
    "n with ends": {
        "n": 4,
        "logit_bias": {"500": 6, "501": 6},
        "stop_token_ids": [500, 501],
        "max_tokens": 30,
    },
    "n with stop strings": {"n": 4, "stop": ["1 w", "2 w"], "max_tokens": 40},
    "echo": {"echo": True},
    "regex": {"guided_regex": r"[0-9]{2,5}(ab|cd)", "max_tokens": 30},
    "choice, with logprobs": {"guided_choice": ["yes", "no", "maybe"], "logprobs": 2},
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "max_tokens": 60,
    },
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "grammar": {"guided_grammar": 'root ::= "a" root "b" | "c"', "max_tokens": 12},
    "n with a regex and penalties": {
        "structured_outputs": {"regex": "[a-z]{4,8}"},
        "n": 3,
        "frequency_penalty": 1.0,
        "max_tokens": 20,
    },
    "one token": {"max_tokens": 1, "logprobs": 2, "presence_penalty": 1.0},
    "all": {
        "n": 2,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"400": 3},
        "min_tokens": 5,
        "stop": ["9 w"],
        "stop_token_ids": [600],
        "logprobs": 3,
    },
}
EVERY_LANE = ("plain", "n", "n with ends", "all")
# Prompts end just below, on and above a page of 16 tokens.
LENGTHS = (15, 16, 33)
MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"seed": 11, "temperature": 1.0}}


def prompt(number: int, length: int) -> list[int]:
    return [300 + (number * 191 + 23 * place) % 1700 for place in range(length)]


def send(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=120)
    assert response.status_code == 200, response.text
    return response


def bare(response: httpx.Response) -> Any:
    body = response.json()
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def alike(one: Any, other: Any) -> bool:
    """Equal, but for the last digits of numbers: choices that end at other moments make other batches."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-3)
    return bool(one == other)


def streamed(response: httpx.Response) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice."""
    found: dict[int, tuple[str, str]] = {}
    for block in response.text.split("\n\n")[:-2]:
        for choice in json.loads(block.removeprefix("data: "))["choices"]:
            text, reason = found.get(choice["index"], ("", ""))
            more = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            found[choice["index"]] = (text + more, reason + (choice["finish_reason"] or ""))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_same_answer(cluster: Cluster, name: str, mode: str) -> None:
    number = list(PARAMETERS).index(name) * len(MODES) + list(MODES).index(mode)
    for place, lane in enumerate(LANES if name in EVERY_LANE else LANES[:1]):
        ce, single = cluster.split(lane).ce, cluster.single(lane)
        tokens = prompt(number, LENGTHS[(number + place) % len(LENGTHS)])
        body = {"prompt": tokens, "max_tokens": 10, **MODES[mode], **PARAMETERS[name]}
        ours, theirs = send(ce, TEXT, body), send(single, TEXT, body)
        assert ours.headers["x-kvrail-prefill"] == "remote"
        mine, others = bare(ours), bare(theirs)
        if body.get("n", 1) == 1:
            assert mine["choices"] == others["choices"], lane
        if lane == "shm":
            # (The other model's pages are larger than these prompts, so its cache has nothing to count.)
            assert alike(mine, others), (mine, others)
        assert alike(mine["choices"], others["choices"]), (lane, mine, others)
        assert len(mine["choices"]) == body.get("n", 1)
        again = streamed(send(ce, TEXT, {**body, "stream": True}))
        assert again == {c["index"]: (c["text"], c["finish_reason"]) for c in mine["choices"]}, lane


def test_the_parameters_do_something(cluster: Cluster) -> None:
    """Each changes the answer to one prompt; a table of equal answers would prove nothing."""
    ce = cluster.split("shm").ce
    tokens = prompt(5000, 33)

    def text(mode: str, more: dict[str, Any]) -> Any:
        answer = send(ce, TEXT, {"prompt": tokens, "max_tokens": 24, **MODES[mode], **more}).json()
        return [choice["text"] for choice in answer["choices"]]

    plain = {mode: text(mode, {}) for mode in MODES}
    for mode, name in (
        ("seeded", "top_p"),
        ("seeded", "top_k"),
        ("seeded", "min_p"),
        ("seeded", "temperature"),
        ("greedy", "logit_bias"),
        ("greedy", "repetition that rewards"),
        ("seeded", "frequency"),
        ("seeded", "n"),
    ):
        changed = text(mode, {**PARAMETERS[name], "max_tokens": 24})
        assert changed != plain[mode], name
    choices = text("seeded", {"n": 4})
    assert choices[0] == plain["seeded"][0], "the first choice is the answer of that seed"
    assert len(set(choices)) == 4
    assert len(set(text("greedy", {"n": 3}))) == 1


def test_a_seed_gives_the_same_whatever_else_runs(cluster: Cluster) -> None:
    ce = cluster.split("shm").ce
    bodies = [
        {
            "prompt": prompt(6000 + n, 20 + n),
            "max_tokens": 16,
            "seed": n,
            "top_p": 0.9,
            "frequency_penalty": 0.3,
        }
        for n in range(6)
    ]
    bodies[2]["n"] = bodies[4]["n"] = 3
    alone = [bare(send(ce, TEXT, body))["choices"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: bare(send(ce, TEXT, body))["choices"], bodies * 3))
    assert found == alone * 3


def test_prompts_and_choices_in_one_request(cluster: Cluster) -> None:
    ce, single = cluster.split("shm").ce, cluster.single("shm")
    prompts = [prompt(7000 + n, 17 + n) for n in range(3)]
    body = {"prompt": prompts, "n": 2, "seed": 4, "max_tokens": 6, "logprobs": 1}
    ours, theirs = bare(send(ce, TEXT, body)), bare(send(single, TEXT, body))
    assert alike(ours, theirs), (ours, theirs)
    assert [choice["index"] for choice in ours["choices"]] == list(range(6))
    for place, one in enumerate(prompts):
        alone = bare(send(ce, TEXT, {**body, "prompt": one}))["choices"]
        for choice in alone:
            found = ours["choices"][2 * place + choice["index"]]
            assert alike(found, {**choice, "index": found["index"]})
    streams = streamed(send(ce, TEXT, {**body, "stream": True}))
    assert streams == {c["index"]: (c["text"], c["finish_reason"]) for c in ours["choices"]}


def test_chat_takes_them_too(cluster: Cluster) -> None:
    ce, single = cluster.split("shm").ce, cluster.single("shm")
    messages = [{"role": "user", "content": "Tell me of n answers."}]
    body = {
        "messages": messages,
        "n": 3,
        "seed": 5,
        "max_completion_tokens": 7,
        "min_p": 0.05,
        "logprobs": True,
        # Its template's first words may have been here before, and usage would say so.
        "cache_salt": "chat takes them too",
    }
    body |= {"top_logprobs": 2, "presence_penalty": 0.3, "logit_bias": {"333": 2}}
    ours = bare(send(ce, CHAT, body))
    assert alike(ours, bare(send(single, CHAT, body)))
    assert {len(choice["logprobs"]["content"]) for choice in ours["choices"]} == {7}


def test_log_probabilities_of_a_prompt_are_refused_where_no_logits_are(cluster: Cluster) -> None:
    """The split of these tests never prefills locally; logits of a whole prompt do not travel."""
    ce, single = cluster.split("shm").ce, cluster.single("shm")
    body = {"prompt": prompt(8000, 40), "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    refused = httpx.post(f"{ce.url}{TEXT}", json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "echo"
    notes = send(single, TEXT, body).json()["choices"][0]["logprobs"]
    assert [value is None for value in notes["token_logprobs"]] == [True] + [False] * 42


def test_forms_are_kept(cluster: Cluster) -> None:
    """The first token comes from one engine and the others from another one, by the same grammar."""
    ce = cluster.split("shm").ce

    def ask(name: str, **more: Any) -> list[dict[str, Any]]:
        body = {"prompt": prompt(8500, 20), "seed": 2, **PARAMETERS[name], **more}
        choices: list[dict[str, Any]] = send(ce, TEXT, body).json()["choices"]
        return choices

    for number in range(3):
        choice = ask("regex", prompt=prompt(8500 + number, 20))[0]
        assert re.fullmatch(r"[0-9]{2,5}(ab|cd)", choice["text"])
        assert choice["finish_reason"] == "stop"
        assert ask("choice, with logprobs", seed=number)[0]["text"] in ("yes", "no", "maybe")
        choice = ask("json schema", seed=number, logit_bias={str(token): -100 for token in whitespace()})[0]
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["text"])
        assert found["name"] in ("Ann", "Bob")
        assert 1 <= found["age"] <= 99
    assert all(re.fullmatch("[a-z]{4,8}", one["text"]) for one in ask("n with a regex and penalties"))
    messages = [{"role": "user", "content": "Which?"}]
    body = {"messages": messages, "guided_choice": ["left", "right"], "seed": 1}
    assert send(ce, CHAT, body).json()["choices"][0]["message"]["content"] in ("left", "right")


def whitespace() -> list[int]:
    """Tokens that a random model would write for ever where JSON allows them."""
    return [token for text in (" ", "\n", "\t", "\r") for token in byte_level_tokenizer().encode(text).ids]


def test_clients_that_leave_in_the_middle_leave_nothing(cluster: Cluster) -> None:
    split = cluster.split("shm")
    for number in range(4):
        body = {
            "model": MODEL,
            "prompt": prompt(9000 + number, 90),
            "n": 4,
            "max_tokens": 400,
            "stream": True,
        }
        with httpx.stream("POST", f"{split.ce.url}{TEXT}", json=body, timeout=60) as stream:
            for _, _ in zip(range(number), stream.iter_raw(), strict=False):
                pass
    nothing_held(split.ce, split.pe)


def nothing_held(*servers: Server) -> None:
    for server in servers:
        for gauge in ("pages_owned", "pages_quarantined", "tickets_open", "rank_requests", "front_waiting"):
            wait_until(
                lambda server=server, gauge=gauge: server.metric(f"kvrail_{gauge}") == 0,
                30,
                f"no {gauge}",
                server,
            )


def test_nothing_is_held_afterwards(cluster: Cluster) -> None:
    for lane in LANES:
        split = cluster.split(lane)
        nothing_held(split.ce, split.pe, cluster.single(lane))
