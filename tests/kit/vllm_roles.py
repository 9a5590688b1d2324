# SPDX-License-Identifier: Apache-2.0
"""Roles with vLLM as their engine, as small as vLLM gets on a CPU, and questions to compare their answers by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from kit.cluster import Server

__all__ = ["CASES", "STUCK_S", "Case", "answer_of", "engine_core", "vllm_role"]

# Half of the time after which an engine core is taken as stuck; longer than any step, also on a crowded machine.
_TICKET_TTL_S = 15
STUCK_S = 2 * _TICKET_TTL_S
# What vLLM itself is told: no compilation, which takes longer than the tests.
_FOR_VLLM = ("--", "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def vllm_role(role: str, model: Path, folder: Path, *flags: str, port: int | None = None) -> Server:
    """Start it; nothing waits. fp32: no 16-bit ties fall either way."""
    return Server(
        role,
        model,
        folder,
        *("--engine", "vllm", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16"),
        *("--served-model-name", "m", "--kv-memory-gb", "0.5", "--ticket-ttl-s", str(_TICKET_TTL_S)),
        *flags,
        *_FOR_VLLM,
        port=port,
    )


def engine_core(server: Server) -> psutil.Process:
    """The process of a role in which vLLM's scheduler loops. Its workers, and the links, are in others."""
    (core,) = [
        one
        for one in psutil.Process(server.process.pid).children(recursive=True)
        if "EngineCore" in " ".join(one.cmdline())
    ]
    return core


class Case(NamedTuple):
    """A request, and where its prompt is prefilled on a pair."""

    name: str
    path: str
    body: dict[str, Any]
    route: str = "remote"


def _story(about: str, sentences: int) -> str:
    """Text of about 16 tokens a sentence; two of them have no beginning in common."""
    line = "The {} number {} stood by the old road and waited for the rain to end."
    return " ".join(line.format(about, n) for n in range(sentences))


def _chat(name: str, words: str, *, route: str = "remote", **body: Any) -> Case:
    messages = [{"role": "user", "content": words}]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12, **body}
    return Case(name, "/v1/chat/completions", body, route)


def _text(name: str, prompt: Any, *, route: str = "remote", **body: Any) -> Case:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12, **body}
    return Case(name, "/v1/completions", body, route)


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ONE_WORD = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}},
}

CASES = (
    _chat("chat", "Hello! Who are you?"),
    _chat("chat of several blocks", _story("horse", 30)),
    _chat("streamed chat", _story("cow", 12), stream=True, stream_options={"include_usage": True}),
    _chat("chat log-probabilities", _story("goat", 10), logprobs=True, top_logprobs=3),
    _chat("streamed log-probabilities", "Name a colour.", logprobs=True, top_logprobs=2, stream=True),
    _chat("tools", "What is the weather in Paris?", tools=[_TOOL], max_tokens=24),
    _chat("streamed tools", "What is the weather in Rome?", tools=[_TOOL], stream=True),
    _chat("one token", "Say yes.", max_tokens=1),
    _chat("one token, streamed", "Say no.", max_tokens=1, stream=True),
    _chat("two tokens", "Say maybe.", max_tokens=2),
    _text("completion", _story("sheep", 20)),
    _text("exactly one block", [11] * 128),
    _text("one block and a token", [12] * 129),
    _text("a prompt of one token", [300]),
    _text("token ids", list(range(400, 700)), logprobs=2),
    _text("several prompts", ["The sun is", "The moon is", _story("star", 9)]),
    _text("streamed completion", _story("river", 15), stream=True, max_tokens=20),
    _text("stop string", "One, two, three, four,", stop=["seven"], max_tokens=40),
    _text("stop at token 1", "A B C D E F G H I J K", stop=[" L"]),
    _text("stop string, kept", "1 2 3 4 5 6", stop=["9"], include_stop_str_in_output=True, max_tokens=30),
    _text("stop token ids", "Once upon a time", stop_token_ids=[28, 30, 281], max_tokens=40),
    _text("min_tokens and ignore_eos", "The end.", min_tokens=10, ignore_eos=True),
    _text("logit_bias", "The sky is", logit_bias={"1234": 100}),
    _text("repetition penalty", _story("boat", 8), repetition_penalty=1.3),
    _text("seed without chance", "The grass is", seed=7),
    _text("near the longest context", list(range(1000, 2018)), max_tokens=None),
    _text("one short of the longest context", list(range(2000, 3023)), max_tokens=None),
    _text("bad words of one token", "Roses are", bad_words=[" red"]),
    _text("presence penalty", "Snow is", presence_penalty=1.5, route="local"),
    _text("frequency penalty", "Ice is", frequency_penalty=1.5, route="local"),
    _text("seeded chance", "Fire is", temperature=0.9, seed=11, route="local"),
    _text("echo", "Water is", echo=True, logprobs=1, route="local"),
    _text("echo alone", "Earth is", echo=True, max_tokens=8),
    _chat("structured", "Give an object.", response_format=_ONE_WORD, route="local"),
    _chat(
        "a tool that must be called", "Weather in Oslo?", tools=[_TOOL], tool_choice="required", route="local"
    ),
    _chat("n", "Say a number.", n=2, temperature=0.5, seed=3, route="local"),
)


def answer_of(url: str, case: Case) -> tuple[Any, str]:
    """What a client learns: (the answer without what differs between any two answers, where it was prefilled)."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        response = client.post(case.path, json=case.body)
    assert response.status_code == 200, f"{case.name}: {response.status_code} {response.text}"
    route = response.headers.get("x-kvrail-prefill", "")
    if not case.body.get("stream"):
        return _same(response.json()), route
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]", case.name
    return _same(_put_together([json.loads(event) for event in events])), route


def _put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream says, however it was cut: a server that is busy sends several tokens in one event."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "calls": "", "logprobs": []})
            delta = choice.get("delta") or {}
            whole["text"] += choice.get("text") or delta.get("content") or ""
            whole["calls"] += "".join(str(call.get("function")) for call in delta.get("tool_calls") or ())
            whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            whole |= {
                key: choice[key] for key in ("finish_reason", "stop_reason") if choice.get(key) is not None
            }
    return {
        "choices": list(choices.values()),
        "usage": next((e["usage"] for e in events if e.get("usage")), None),
    }


def _same(value: Any) -> Any:
    """Without names, times, and the last digits of log-probabilities."""
    if isinstance(value, dict):
        return {k: _same(v) for k, v in value.items() if k not in ("id", "created", "system_fingerprint")}
    if isinstance(value, list):
        return [_same(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value
