# SPDX-License-Identifier: Apache-2.0
"""Real clients against a real split whose model has tools: round trips, structured outputs, responses; nothing is held.

The model is a random one: what it calls and says is forced by grammars, and that is what these tests are about.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ConfigDict

from kit.answering import TEMPLATE
from kit.cluster import serving, wait_until
from kit.fuzzing import BODIES, CALM
from kit.split import MODEL, Split, start_split, wait_for_links

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """The weather of a city"""

    # A random model writes white space without end where it may.
    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})

    city: Literal["Köln", "Rome"]
    days: Literal[1, 2, 3]


# Small ones: to this model's tokenizer each character is a token.
CITY = {"type": "object", "properties": {"city": {"enum": ["Köln", "Rome"]}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}},
}
CITIES = [{"city": "Köln"}, {"city": "Rome"}]


@pytest.fixture(scope="module")
def split(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "chat.jinja").write_text(TEMPLATE)
    template = ("--chat-template", str(folder / "chat.jinja"))
    made = start_split(cluster.model("llama"), folder, "shm", 16, ce_flags=template)
    with serving(made.pe, made.ce):
        wait_for_links(made.ce, made.pe)
        made.ce.wait_ready()
        yield made


@pytest.fixture
def client(split: Split) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{split.ce.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_tools_round_trip(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in (named, "required"):
        options: Any = {"model": MODEL, "tools": [TOOL], "tool_choice": choice, "max_tokens": 100}
        options["parallel_tool_calls"] = False
        first = client.chat.completions.create(messages=ASK, **options).choices[0]
        assert first.finish_reason == "tool_calls"
        calls = first.message.tool_calls
        assert calls
        call: Any = calls[0]
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) in CITIES
        talk = [*ASK, first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = client.chat.completions.create(
            model=MODEL, messages=talk, tools=[TOOL], tool_choice="none", max_tokens=3
        ).choices[0]
        assert second.message.tool_calls is None
        assert second.message.content


def test_tools_streamed_as_whole(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls
    assert whole
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed
    one, other = whole[0], streamed[0]
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)  # type: ignore[union-attr]


def test_structured_outputs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Weather, max_tokens=100
    ).choices[0]
    assert isinstance(answer.message.parsed, Weather)
    response = client.responses.parse(model=MODEL, input="?", text_format=Weather, max_output_tokens=100)
    assert isinstance(response.output_parsed, Weather)


def test_responses(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "Tell me of the sea.", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 6
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    assert kinds.count("response.output_text.delta") > 1
    tool: Any = {"type": "function", **TOOL["function"]}
    called = client.responses.create(
        model=MODEL,
        input="?",
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=100,
    )
    assert called.output[0].type == "function_call"
    assert json.loads(called.output[0].arguments) in CITIES


def test_async_clients_and_nothing_held(split: Split) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{split.ce.url}/v1", api_key="unused", max_retries=0
        ) as client:

            async def call(number: int) -> str:
                talk: Any = [{"role": "user", "content": f"Number {number}?"}]
                stream = await client.chat.completions.create(
                    model=MODEL, messages=talk, stream=True, max_tokens=40, tools=[TOOL], tool_choice="auto"
                )
                async with stream:
                    async for chunk in stream:
                        if number % 2 and chunk.choices[0].delta.content:
                            return "left"
                return "read"

            assert set(await asyncio.gather(*(call(number) for number in range(8)))) == {"left", "read"}

    asyncio.run(main())
    # Bodies that fail late are no different.
    for body in ({"messages": ASK, "tools": [{}]}, {"messages": ASK, "max_tokens": 10**6}, {"messages": [1]}):
        assert httpx.post(f"{split.ce.url}/v1/chat/completions", json=body, timeout=30).status_code == 400
    for server in (split.ce, split.pe):
        wait_until(lambda one=server: one.metric("kvrail_pages_held") == 0, 30, "no page is held", server)  # type: ignore[misc]


def test_bodies_that_are_nearly_right(split: Split) -> None:
    limits = {"/v1/responses": "max_output_tokens", "/v1/completions": "max_tokens", CHAT: "max_tokens"}

    @settings(CALM, max_examples=80)
    @given(BODIES)
    def ask(case: tuple[str, dict[str, Any]]) -> None:
        path, body = case
        if path in limits:
            body = {limits[path]: 3, **body}  # or it would talk to the end of its context
        data = json.dumps(body).encode()
        response = split.ce.http.post(
            path, content=data, headers={"content-type": "application/json"}, timeout=60
        )
        assert response.status_code < 500, response.text

    ask()
    for server in (split.ce, split.pe):
        wait_until(lambda one=server: one.metric("kvrail_pages_held") == 0, 30, "no page is held", server)  # type: ignore[misc]
        assert server.process.poll() is None


LITELLM = """
import json, sys
import litellm
url, model = sys.argv[1:]
options = dict(model=f"hosted_vllm/{model}", api_base=url, api_key="any", max_tokens=8, temperature=0)
talk = [{"role": "user", "content": "Hi"}]
whole = litellm.completion(messages=talk, **options)
pieces = [c.choices[0].delta.content or "" for c in litellm.completion(messages=talk, stream=True, **options)]
tool = json.loads(sys.stdin.read())
called = litellm.completion(
    messages=talk, tools=[tool], tool_choice={"type": "function", "function": {"name": "weather"}},
    **{**options, "max_tokens": 100},
)
call = called.choices[0].message.tool_calls[0].function
print(json.dumps([whole.choices[0].message.content, "".join(pieces), call.name, call.arguments]))
"""


def test_litellm(split: Split, request: pytest.FixtureRequest) -> None:
    python = request.config.getoption("--litellm-python") or sys.executable
    if subprocess.run([python, "-c", "import litellm"], capture_output=True, timeout=100).returncode:
        pytest.skip("litellm is not installed; --litellm-python PYTHON names an environment that has it")
    done = subprocess.run(
        [python, "-c", LITELLM, f"{split.ce.url}/v1", MODEL],
        input=json.dumps(TOOL),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    whole, streamed, name, arguments = json.loads(done.stdout.splitlines()[-1])
    assert whole == streamed
    assert name == "weather"
    assert json.loads(arguments) in CITIES
