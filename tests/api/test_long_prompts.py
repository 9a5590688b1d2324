# SPDX-License-Identifier: Apache-2.0
"""A request with a hundred thousand tokens does not hold up the streams of others: the loop turns all the time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kit.fake_rank import answers
from kvrail.runtime.messages import Submit

TOKENS = 100_000


class Pulse:
    """How long the event loop of a server stood still at most, while this block ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest_s = 0.0
        self._loop = loop
        self._running = True
        self._last = 0.0

    def __enter__(self) -> Pulse:
        started = threading.Event()

        def beat() -> None:
            now = time.perf_counter()
            if started.is_set():
                self.longest_s = max(self.longest_s, now - self._last - 0.001)
            self._last = now
            started.set()
            if self._running:
                self._loop.call_later(0.001, beat)

        self._loop.call_soon_threadsafe(beat)
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("backend", ["hf", "fastokens"])
def test_the_loop_turns_all_the_time(stand: Any, path: str, backend: str) -> None:
    if backend == "fastokens":
        pytest.importorskip("fastokens")
    at = stand(answers([70]), max_model_len=2 * TOKENS, tokenizer_backend=backend, tokenizer_verify_rate=0.0)
    text = "abcde fghi" * (TOKENS // 10)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    stood: list[float] = []
    # The best of some: on a busy machine any of them may have waited for its core, as long as it took.
    while len(stood) < 12 and min(stood, default=1.0) >= 0.020:
        with Pulse(at.server._loop) as pulse:
            assert at.client.post(path, json={**body, "max_tokens": 1}).status_code == 200
        stood.append(pulse.longest_s)
    assert len(at.rank.wait_for(Submit)[0].tokens) >= TOKENS * 4
    assert min(stood) < 0.020, stood


def test_token_ids_let_others_through(stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the loop computes for much longer than it takes to read the JSON: by CPU time of its thread."""
    at = stand(answers([70]), max_model_len=2 * TOKENS)
    body = msgspec.json.encode({"prompt": [4 + n % 200 for n in range(TOKENS)], "max_tokens": 1})
    reading = min(_cpu_s(lambda: msgspec.json.decode(body)) for _ in range(5))
    turns: list[float] = []
    run = asyncio.Handle._run  # type: ignore[attr-defined]
    monkeypatch.setattr(asyncio.Handle, "_run", lambda handle: turns.append(_cpu_s(lambda: run(handle))))
    longest = []
    for _ in range(6):
        turns.clear()
        answer = at.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        longest.append(max(turns))
    assert min(longest) < 3 * reading, (longest, reading)


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
