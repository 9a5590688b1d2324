# SPDX-License-Identifier: Apache-2.0
"""Tools and thinking through the real server: what the model is shown, and what the official client gets back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from kit.answering import CALL, TEMPLATE, WEATHER, ids, prompts, says
from kit.fake_rank import FakeRank, output
from kit.tiny_model import END, byte_level_tokenizer
from kvrail.runtime.messages import Submit, ToFront, ToRank
from kvrail.transfer.wire import TokenLogprob, unpack_u32

ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def serve(stand: Any, tmp_path: Path) -> Any:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)

    def make(*texts: str, **settings: Any) -> Any:
        return stand(says(*texts), chat_template=str(tmp_path / "chat.jinja"), max_model_len=2048, **settings)

    return make


@pytest.fixture
def client(serve: Any) -> Any:
    clients = []

    def make(*texts: str, **settings: Any) -> tuple[openai.OpenAI, Any]:
        at = serve(*texts, **settings)
        clients.append(openai.OpenAI(base_url=f"{at.server.url}/v1", api_key="any", max_retries=0))
        return clients[-1], at

    yield make
    for one in clients:
        one.close()


def test_a_round_trip_with_the_official_client(client: Any) -> None:
    asks, at = client(f"Let me see.\n{CALL}", "It is sunny.")
    first = asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see."
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = asks.chat.completions.create(
        model="tiny", messages=[*ASK, first.message, result], tools=[WEATHER]
    ).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is sunny.")
    assert second.message.tool_calls is None
    shown = prompts(at)
    assert '"name": "weather", "description": "The weather of a city"' in shown[0]
    # The arguments are shown as an object, not as a string in a string.
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>[tool]sunny' in shown[1]


def test_streamed_calls(client: Any) -> None:
    asks, _ = client(f"Both.\n{CALL}\n{CALL}")
    with asks.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER]) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    assert [e.type for e in events].count("tool_calls.function.arguments.done") == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Both."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_one_call_where_no_more_are_wanted(client: Any) -> None:
    asks, _ = client(f"{CALL}\n{CALL}")
    options: Any = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "parallel_tool_calls": False}
    message = asks.chat.completions.create(**options).choices[0].message
    assert len(message.tool_calls) == 1
    assert message.content is None


def test_a_call_that_is_none_is_content(client: Any) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": </tool_call> Sorry.'
    asks, _ = client(text)
    whole = asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER]).choices[0]
    assert (whole.finish_reason, whole.message.content, whole.message.tool_calls) == ("stop", text, None)
    chunks = list(asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_no_tools_no_calls(client: Any) -> None:
    asks, at = client(CALL)
    for more in ({"tools": [WEATHER], "tool_choice": "none"}, {}, {"tools": []}):
        choice = asks.chat.completions.create(model="tiny", messages=ASK, **more).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
    assert not any("TOOLS" in prompt for prompt in prompts(at))


def test_log_probabilities_beside_calls(client: Any, serve: Any) -> None:
    # Every token has its note, also those that became a call.
    asks, at = client(CALL)
    plain = at.rank.behave

    def noted(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        for outputs in plain(rank, message):
            (item,) = outputs.items
            logprobs = [TokenLogprob(logprob=-1.0, top=[])] * (len(item.tokens) // 4)
            yield output(
                item.request_id, unpack_u32(item.tokens).tolist(), item.finish_reason, logprobs=logprobs
            )

    at.rank.behave = noted
    options: Any = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "logprobs": True}
    whole = asks.chat.completions.create(**options).choices[0]
    streamed = list(asks.chat.completions.create(**options, stream=True))
    pieces = [c.choices[0].logprobs.content for c in streamed if c.choices[0].logprobs]
    assert len(whole.logprobs.content) == sum(map(len, pieces)) == len(ids(CALL))


def test_a_parser_by_flag_and_none(client: Any) -> None:
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'
    asks, _ = client(text, tool_call_parser="mistral")
    (call,) = (
        asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
        .choices[0]
        .message.tool_calls
    )
    assert len(call.id) == 9
    asks, _ = client(text, tool_call_parser="none")
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])


def test_thinking_is_apart(client: Any) -> None:
    asks, _ = client(f"Hm, {CALL}\n</think>\n\nSo: {CALL}", thinking_mode="thinking")
    message = asks.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER]).choices[0].message
    assert message.reasoning_content == f"Hm, {CALL}"
    assert (message.content, len(message.tool_calls)) == ("So:", 1)
    chunks = list(asks.chat.completions.create(model="tiny", messages=ASK, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == f"Hm, {CALL}"
    assert "".join(delta.content or "" for delta in deltas) == f"So: {CALL}"
    # Where the template has closed the thinking, all is answer.
    options: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    message = asks.chat.completions.create(model="tiny", messages=ASK, **options).choices[0].message
    assert message.content == f"Hm, {CALL}\n</think>\n\nSo: {CALL}"


def test_a_mark_in_a_message_opens_nothing(client: Any) -> None:
    asks, _ = client("So.", reasoning_parser="qwen3")
    options: Any = {"extra_body": {"add_generation_prompt": False}}
    talk: Any = [{"role": "user", "content": "What is <think> for?"}]
    assert (
        asks.chat.completions.create(model="tiny", messages=talk, **options).choices[0].message.content
        == "So."
    )


def test_an_answer_goes_on(serve: Any) -> None:
    at = serve(" blue")
    talk = [*ASK, {"role": "assistant", "content": "The sky is"}]
    body = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    answer = at.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == " blue"
    assert at.client.post(
        "/v1/chat/completions", json={"messages": ASK, "add_generation_prompt": False}
    ).is_success
    assert prompts(at) == [
        "[user]How is the weather?[assistant]The sky is",
        "[user]How is the weather?",
    ]


def test_the_official_client_s_pydantic_tools(client: Any) -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city"""

        city: str

    asks, _ = client(CALL)
    tool = openai.pydantic_function_tool(Weather, name="weather")
    choice = asks.chat.completions.parse(model="tiny", messages=ASK, tools=[tool]).choices[0]
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Köln")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls(client: Any, choice: Any) -> None:
    """A grammar makes the model call: the arguments alone when a function is named, else a list of calls."""
    arguments = '{"city":"Rom"}'
    said = arguments if isinstance(choice, dict) else f'[{{"name":"weather","parameters":{arguments}}}]'
    asks, at = client(said)
    options: Any = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "tool_choice": choice}
    answer = asks.chat.completions.create(**options).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rom"})
    assert answer.message.content is None
    with asks.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == {"city": "Rom"}
    grammar = at.rank.wait_for(Submit)[0].sampling.grammar
    matcher = LLMatcher(LLTokenizer(byte_level_tokenizer().to_str(), eos_token=[END]), grammar, log_level=0)
    assert matcher.try_consume_tokens(ids(said)) == len(ids(said))
    assert matcher.is_accepting()
    assert not matcher.consume_token(ids("x")[0])


def test_a_forced_call_and_a_form_exclude_each_other(serve: Any) -> None:
    at = serve("x")
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}
    response = at.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
