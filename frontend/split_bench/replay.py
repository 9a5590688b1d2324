# SPDX-License-Identifier: Apache-2.0
"""Agents at work, replayed: conversations side by side whose context grows with each tool's result.

The turns are written down beforehand, what the model answers is thrown away: every engine gets the same requests.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvrail.frontend.load.answer import Trace, read
from kvrail.frontend.load.prompts import Prompts
from kvrail.frontend.load.request import Recording, Target, post
from kvrail.frontend.split_bench.engines import Engine
from kvrail.frontend.split_bench.runner import Clock, Row, Runner, Settings, was_cut

__all__ = ["replay_part"]

_PATH = "/v1/chat/completions"
_GOOD = b"HTTP/1.1 200"


def replay_part(
    engines: Sequence[Engine], settings: Settings, runner: Runner, clock: Clock, **facts: Any
) -> None:
    """One row an engine; `facts` say how it was launched."""
    # The same conversations for every engine and launch: none has seen them before.
    for engine in engines:
        runner.say(f"replay: {engine.name}, {', '.join(f'{k} {v}' for k, v in facts.items())}")
        row: Row = {"part": "replay", "engine": engine.name, "devices": engine.plan.devices, **facts}
        if clock.left_s <= 0:
            runner.keep({**row, "cut": True})
            continue
        began = time.perf_counter()
        talks = asyncio.run(_all(engine.url, settings, runner.prompts, clock.left_s))
        runner.keep(row | _figures(talks, time.perf_counter() - began))


def _figures(talks: Sequence[Sequence[Trace]], seconds: float) -> Row:
    traces = [trace for talk in talks for trace in talk]
    errors = [trace.error for trace in traces if trace.error]
    good = [trace for trace in traces if not trace.error]
    turns = max(len(talk) for talk in talks)
    by_turn = [[talk[n] for talk in talks if n < len(talk) and not talk[n].error] for n in range(turns)]
    prompt = sum(trace.prompt_tokens for trace in good)
    first = [1e3 * trace.first_s for trace in good]
    return {
        "cut": was_cut(errors),
        "errors": len(errors),
        "error_messages": errors[:3],
        "seconds": round(seconds, 3),
        "requests": len(good),
        "prompt_tokens_last_turn": round(statistics.fmean(t.prompt_tokens for t in by_turn[-1]))
        if by_turn[-1]
        else 0,
        "cached_share": round(sum(trace.cached_tokens for trace in good) / prompt, 4) if prompt else 0.0,
        "ttft_ms": {f"p{q}": round(float(np.percentile(first, q)), 2) for q in (50, 90, 99)} if first else {},
        "ttft_ms_by_turn": [
            round(1e3 * statistics.median(t.first_s for t in turn), 2) if turn else None for turn in by_turn
        ],
        "conversation_s": round(statistics.median(talk[-1].ended - talk[0].begun for talk in talks), 3),
        "tok_per_s": round(sum(trace.tokens for trace in good) / seconds, 2),
    }


async def _all(url: str, settings: Settings, prompts: Prompts, within_s: float) -> list[list[Trace]]:
    deadline = time.monotonic() + within_s
    shared = prompts.words(settings.shared_words, -1)
    recorded = await asyncio.gather(
        *(
            _converse(Target(url), settings, prompts, shared, number, deadline)
            for number in range(settings.conversations)
        )
    )
    return [[read(recording) for recording in talk] for talk in recorded]


async def _converse(
    target: Target, settings: Settings, prompts: Prompts, shared: str, number: int, deadline: float
) -> list[Recording]:
    def text(place: int, words: int) -> str:
        return prompts.words(words, 1000 * number + place)

    messages = [
        {"role": "system", "content": shared},
        {"role": "user", "content": text(0, settings.task_words)},
    ]
    recorded = []
    for turn in range(settings.turns):
        body = msgspec.json.encode(
            {
                "model": prompts.model,
                "messages": messages,
                "max_tokens": settings.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        left_s = max(0.1, deadline - time.monotonic())
        recorded.append(await post(target, _PATH, body, f"turn {turn + 1}", within_s=left_s))
        pieces = recorded[-1].pieces
        if recorded[-1].error or not pieces or not pieces[0][1].startswith(_GOOD):
            break
        # The answer as it was written down, and what the tool said: short turns.
        messages += [
            {"role": "assistant", "content": text(2 * turn + 1, settings.answer_tokens)},
            {"role": "user", "content": text(2 * turn + 2, settings.turn_words)},
        ]
    return recorded
