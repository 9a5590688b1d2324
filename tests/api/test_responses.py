# SPDX-License-Identifier: Apache-2.0
"""The Responses API by the official client: text, streams, tools, thinking; and what needs a state is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kit.answering import CALL, TEMPLATE, WEATHER, prompts, says
from kit.fake_rank import output
from kvrail.runtime.messages import CacheUse, Failed, Submit

TOOL: Any = {"type": "function", **WEATHER["function"]}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.fixture
def client(stand: Any, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    clients = []

    def make(behave: Any, **settings: Any) -> tuple[openai.OpenAI, Any]:
        at = stand(behave, chat_template=str(tmp_path / "chat.jinja"), max_model_len=2048, **settings)
        clients.append(openai.OpenAI(base_url=f"{at.server.url}/v1", api_key="any", max_retries=0))
        return clients[-1], at

    yield make
    for one in clients:
        one.close()


def test_text(client: Any) -> None:
    asks, at = client(says("It is sunny."))
    answer = asks.responses.create(
        model="tiny", input="And now?", instructions="Be kind.", max_output_tokens=50, metadata={"a": "b"}
    )
    assert answer.output_text == "It is sunny."
    assert (answer.status, answer.store, answer.metadata) == ("completed", False, {"a": "b"})
    assert answer.usage.output_tokens == len("It is sunny.") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert prompts(at) == ["[system]Be kind.[user]And now?[assistant]<think></think>\n"]
    assert at.rank.wait_for(Submit)[0].sampling.max_tokens == 50


def test_sampling_as_clients_of_vllm_say_it(client: Any) -> None:
    asks, at = client(says("It is sunny."))
    more = {
        "ignore_eos": True,
        "stop": "sun",
        "stop_token_ids": [5],
        "min_tokens": 3,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "prefix_cache": False,
        "cache_salt": "mine",
    }
    answer = asks.responses.create(model="tiny", input="?", max_output_tokens=50, extra_body=more)
    assert answer.output_text == "It is "
    (submit,) = at.rank.wait_for(Submit)
    sampling = submit.sampling
    assert sampling.stop_token_ids == [5], "and not the model's own end"
    assert (sampling.min_tokens, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.5)
    assert submit.cache == CacheUse(use=False, salt="mine")


def test_the_events_of_a_stream(client: Any) -> None:
    asks, _ = client(says(f"Hm.</think>Yes. {CALL}"), thinking_mode="thinking")
    with asks.responses.stream(model="tiny", input="?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.index(f"response.{kind}.delta") < kinds.index(f"response.{kind}.done")
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "Hm."
    assert final.output_text == "Yes."
    assert json.loads(final.output[2].arguments) == {"city": "Köln"}
    # Whole, it is the same.
    whole = asks.responses.create(model="tiny", input="?", tools=[TOOL])
    drop = {"id": True, "call_id": True, "content": {"__all__": {"parsed"}}, "parsed_arguments": True}
    for one, other in zip(whole.output, final.output, strict=True):
        assert one.model_dump(exclude=drop) == other.model_dump(exclude=drop)


def test_a_round_trip_of_tools(client: Any) -> None:
    asks, at = client(says(CALL, "Sunny."))
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    first = asks.responses.create(model="tiny", input=talk, tools=[TOOL], tool_choice="auto")
    (call,) = first.output
    talk += [item.model_dump(exclude_none=True) for item in first.output]
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert asks.responses.create(model="tiny", input=talk, tools=[TOOL]).output_text == "Sunny."
    assert (
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>[tool]sunny'
        in prompts(at)[1]
    )


def test_an_answer_that_was_cut(client: Any) -> None:
    asks, _ = client(
        lambda rank, m: [output(m.request_id, [70, 71], "length")] if isinstance(m, Submit) else []
    )
    answer = asks.responses.create(model="tiny", input="?")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_that_fails(client: Any) -> None:
    def fails(rank: Any, message: Any) -> Any:
        if isinstance(message, Submit):
            yield output(message.request_id, [70])
            yield Failed(request_id=message.request_id, status=500, reason="told so")

    asks, _ = client(fails)
    events = list(asks.responses.create(model="tiny", input="?", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "told so"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "image"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"instructions": "Be kind.", "input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [CALLED, CALLED, {"role": "robot", "content": "x"}]}, "input[2].role"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"reasoning": {"effort": "HIGH"}}, "reasoning.effort"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 10**6}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_refused(client: Any, more: dict[str, Any], param: str) -> None:
    _, at = client(says("x"))
    response = at.client.post("/v1/responses", json={"model": "tiny", "input": "?", **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
