# SPDX-License-Identifier: Apache-2.0
"""The official openai client against the completion engine of a split: sync and async, streamed and whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kit.split import MODEL

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ASKED: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
PROMPT = "In the beginning there was"


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return f"{cluster.split('shm').ce.url}/v1"


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASKED, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    assert raw.headers["x-kvrail-prefill"] == "remote"
    whole = raw.parse()
    choice = whole.choices[0]
    assert (whole.object, whole.model, choice.finish_reason) == ("chat.completion", MODEL, "length")
    assert choice.message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 6

    with client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, max_tokens=5, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        # (get_final_completion raises for an answer that was cut by its length.)
        choice = stream.current_completion_snapshot.choices[0]
    assert len(deltas) > 2
    assert "".join(deltas) == choice.message.content
    assert choice.finish_reason == "length"


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=1)
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == 5
    with client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, stream=True
    ) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) > 1
    assert "".join(pieces) == choice.text
    again = client.completions.create(
        model=MODEL, prompt=[400, 500, 600], max_tokens=2, seed=3, extra_body={"top_k": 5, "ignore_eos": True}
    )
    assert again.usage is not None
    assert (again.usage.prompt_tokens, again.usage.completion_tokens) == (3, 2)


def test_async(url: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:

            async def chat(number: int) -> tuple[str | None, str]:
                said: list[Any] = [{"role": "user", "content": f"Number {number}?"}]
                options: dict[str, Any] = {"model": MODEL, "messages": said, "max_tokens": 4, "seed": 1}
                whole = await client.chat.completions.create(**options)
                pieces = []
                async with await client.chat.completions.create(**options, stream=True) as stream:
                    async for chunk in stream:
                        pieces += [choice.delta.content or "" for choice in chunk.choices]
                return whole.choices[0].message.content, "".join(pieces)

            answers = await asyncio.gather(*(chat(number) for number in range(6)))
            assert all(whole == streamed for whole, streamed in answers)
            assert len(set(answers)) == 6
            completion = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 3
            models = [model.id async for model in client.models.list()]
            assert models == [MODEL]

    asyncio.run(main())


def test_errors_have_the_client_s_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served here") as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=PROMPT * 60)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="colour: is not a known field"):
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"colour": "red"})
    assert client.models.retrieve(MODEL).id == MODEL
