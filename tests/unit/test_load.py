# SPDX-License-Identifier: Apache-2.0
"""The load generator against a server on a real socket whose every delay is known, and that can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from kvrail.frontend.load.answer import read
from kvrail.frontend.load.arrivals import Load, run_load
from kvrail.frontend.load.prompts import Prompts, TextLength
from kvrail.frontend.load.report import Cell, compare, table
from kvrail.frontend.load.request import Target, post

PROMPTS = Prompts("known", (300, 2000))
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def token(text: str = "x", **more: object) -> bytes:
    return chunk(json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}))


class KnownServer:
    """Answers every completion by `behaviour`, which gets the request's body and a writer."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.at_once = self.most_at_once = 0
        self.first_s, self.gap_s, self.what = 0.05, 0.02, "good"
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.tasks.add(task)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await self.answer(body, writer)
            await writer.drain()
        except ConnectionError:
            pass  # the client has hung up
        finally:
            self.at_once -= 1
            writer.close()

    async def answer(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        count = int(str(body["max_tokens"]))
        if self.what == "busy":
            writer.write(b'HTTP/1.1 503 Busy\r\nContent-Length: 15\r\n\r\n{"error":"full"}')
            return
        writer.write(OK)
        await asyncio.sleep(self.first_s)
        for number in range(count):
            if number:
                await asyncio.sleep(self.gap_s)
            if self.what == "torn" and number == 2:
                return
            if self.what == "failing" and number == 2:
                writer.write(chunk('{"error": {"message": "out of pages"}}') + b"0\r\n\r\n")
                return
            writer.write(token())
        usage = {"prompt_tokens": len(str(body["prompt"]).split()), "completion_tokens": 2 * count}
        if self.what == "pairs":
            writer.write(chunk(json.dumps({"choices": [], "usage": usage})))
        writer.write(chunk("[DONE]") + b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def known_server() -> AsyncIterator[tuple[KnownServer, Target]]:
    known = KnownServer()
    server = await asyncio.start_server(known.accept, "127.0.0.1", 0)
    async with server:
        yield known, Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for task in known.tasks:
            task.cancel()
        await asyncio.gather(*known.tasks, return_exceptions=True)


def test_times_are_those_of_the_server() -> None:
    async def go() -> dict[str, object]:
        async with known_server() as (_, target):
            load = Load(8, 5, concurrency=4, requests=8)
            cell = Cell(target.url, "known", {})
            cell.add(await run_load(load, target, PROMPTS))
            return cell.record()

    record = asyncio.run(go())
    kind = record["kinds"]["short"]
    assert (kind["requests"], kind["good"], record["errors"]) == (8, 8, 0)
    # A sleep is never shorter than asked for; a machine with other work makes it longer.
    assert 50 <= kind["ttft_ms"]["p50"] < 150
    assert 20 <= kind["itl_ms"]["p50"] < 60
    assert kind["tokens_per_chunk"] == 1
    # Two batches of four answers, each of five tokens in 130 ms and more.
    assert 40 <= record["tok_per_s"] <= 8 * 5 / 0.26


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("busy", "HTTP 503"),
        ("torn", "RemoteProtocolError: peer closed connection"),
        ("failing", "out of pages"),
    ],
)
def test_bad_answers_are_errors(what: str, message: str) -> None:
    async def go() -> dict[str, object]:
        async with known_server() as (known, target):
            known.what = what
            cell = Cell(target.url, "known", {})
            cell.add(await run_load(Load(8, 5, requests=2), target, PROMPTS))
            return cell.record()

    record = asyncio.run(go())
    assert (record["errors"], record["kinds"]["short"]["good"]) == (2, 0)
    (found,) = record["error_messages"]
    assert message in found
    assert record["kinds"]["short"]["ttft_ms"] == {}


def test_nobody_there_and_nobody_answering() -> None:
    async def go() -> list[str]:
        async with known_server() as (known, target):
            known.first_s = 30
            slow = await post(target, "/v1/completions", PROMPTS.body(4, 2, 0), "short", within_s=0.3)
        gone = await post(target, "/v1/completions", b"{}", "short", within_s=5)
        return [read(slow).error, read(gone).error]

    slow, gone = asyncio.run(go())
    assert slow == "no end of the answer within 0.3 s"
    assert "Connect" in gone


def test_chunks_of_two_tokens_are_told() -> None:
    async def go() -> dict[str, object]:
        async with known_server() as (known, target):
            known.what = "pairs"
            cell = Cell(target.url, "known", {})
            cell.add(await run_load(Load(8, 5, requests=1), target, PROMPTS))
            return cell.record()

    record = asyncio.run(go())
    assert record["kinds"]["short"]["tokens_per_chunk"] == 2
    assert record["kinds"]["short"]["prompt_tokens"] == 8
    assert record["tok_per_s"] * record["seconds"] == pytest.approx(10, abs=0.2)


def test_concurrency_is_kept_and_prompts_are_new() -> None:
    async def go() -> KnownServer:
        async with known_server() as (known, target):
            known.gap_s = 0.002
            await run_load(Load(16, 3, concurrency=3, requests=10), target, PROMPTS)
            return known

    known = asyncio.run(go())
    assert known.most_at_once == 3
    prompts = [tuple(body["prompt"]) for body in known.bodies]
    assert len(set(prompts)) == 10
    assert all(len(prompt) == 16 and all(300 <= one < 2000 for one in prompt) for prompt in prompts)


def test_names_and_rates_are_whole_on_a_narrow_terminal() -> None:
    """Times take two lines instead; a table is also read out of a log, 80 columns wide."""
    times = {"p50": 12345.6, "p90": 23456.7, "p99": 34567.8, "max": 45678.9}
    kind = {"good": 300, "requests": 300, "ttft_ms": times, "itl_ms": times}
    name = "prefill.example:8888"
    record = {"url": f"http://{name}", "load": "4096 in", "tok_per_s": 4321.5, "kinds": {"short": kind}}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table([record]))
    words = shown.get().split()
    for whole in (name, "300/300", "4,321.5", *(f"{value:,.1f}" for value in times.values())):
        assert whole in words, shown.get()


def test_rate_and_long_prompts() -> None:
    async def go() -> tuple[list[str], float]:
        async with known_server() as (known, target):
            known.first_s, known.gap_s = 0.001, 0.001
            load = Load(8, 2, rate=40, seconds=2.0, long_in=64, long_every_s=0.25)
            turn = await run_load(load, target, PROMPTS)
            return [one.label for one in turn.recordings], turn.window[1] - turn.window[0]

    labels, seconds = asyncio.run(go())
    assert labels.count("long") == 7  # at 0.25, 0.5, … 1.75 s
    assert 45 <= labels.count("short") <= 120  # 80 on average
    assert seconds == pytest.approx(2.0, abs=0.05)


def test_what_comes_after_the_window_does_not_count() -> None:
    async def go() -> dict[str, object]:
        async with known_server() as (_, target):
            cell = Cell(target.url, "known", {})
            cell.add(await run_load(Load(8, 50, seconds=0.3), target, PROMPTS))
            return cell.record()

    record = asyncio.run(go())
    assert record["seconds"] == pytest.approx(0.3, abs=0.02)
    # The answer takes a second, of which 0.3 count.
    assert record["tok_per_s"] * 0.3 <= 14


def test_a_client_that_hangs_up() -> None:
    async def go() -> tuple[int, bool, str]:
        async with known_server() as (known, target):
            known.gap_s = 0.05
            body = PROMPTS.body(4, 100, 0)
            recording = await post(target, PROMPTS.path, body, "short", within_s=30, hang_up_after_s=0.3)
            trace = read(recording)
            return len(trace.arrivals), trace.hung_up, trace.error

    tokens, hung_up, error = asyncio.run(go())
    assert 1 <= tokens <= 6
    assert hung_up
    assert error == ""


def test_two_servers_are_compared() -> None:
    async def go(first_s: float) -> dict[str, object]:
        async with known_server() as (known, target):
            known.first_s = first_s
            cell = Cell(target.url, "known", {})
            cell.add(await run_load(Load(8, 3, requests=3), target, PROMPTS))
            return cell.record()

    (entry,) = compare([asyncio.run(go(0.02)), asyncio.run(go(0.12))])
    assert 80 <= entry["ttft_ms"]["p50"]["difference"] <= 140
    assert entry["tok_per_s_ratio"] < 1


def test_text_length() -> None:
    length = TextLength.from_counts((50, 110), (250, 510))
    assert (length.fixed, length.a_word) == (10, 2)
    assert length.words(410) == 200
    body = json.loads(Prompts("m", (0, 9), chat=True, text=length).body(410, 3, 5))
    assert len(body["messages"][0]["content"].split()) == 200
