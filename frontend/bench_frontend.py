# SPDX-License-Identifier: Apache-2.0
"""What the front costs by itself: a fake engine that emits tokens at a fixed rate, many streams, a thin client.

Engine, front and client are three processes; only the front is measured. Latency is what it adds: from the engine's
send of a token to the client's receipt of its event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrail.frontend.server import listening_socket, serve
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.messages import Output, Outputs, PeerRank, Ready, Shutdown, Submit, decode_to_rank, encode
from kvrail.runtime.output_file import fault_of_output
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.wire import pack_u32

__all__ = ["main"]

_ID = re.compile(rb'"id":"chatcmpl-([0-9a-f]{32})"')


def main() -> int:
    """Run, print, and fail when a bound is exceeded that was given."""
    parser = argparse.ArgumentParser(prog="bench_frontend", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="answers at once, 1 to 10000")
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second and stream, 0.1 to 10000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of all streams together, 0.1 to 3600")
    parser.add_argument("--most-us", type=float, help="fail above so many µs of CPU a token")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    flags = parser.parse_args()
    for name, least, most in (("streams", 1, 10_000), ("rate", 0.1, 10_000), ("seconds", 0.1, 3600)):
        if not least <= getattr(flags, name) <= most:
            parser.error(f"--{name} must be between {least} and {most}")
    if flags.json is not None and (fault := fault_of_output(flags.json)):
        parser.error(f"--json: {fault}")
    with tempfile.TemporaryDirectory(prefix="kvrail-b") as folder:
        figures = _measure(Path(folder), flags.streams, flags.rate, flags.seconds)
    print(json.dumps(figures, indent=2))
    if flags.json is not None:
        flags.json.write_text(json.dumps(figures, indent=2) + "\n")
    if flags.most_us is not None and figures["cpu_us_per_token"] > flags.most_us:
        print(f"more than {flags.most_us:g} µs of CPU a token", file=sys.stderr)
        return 1
    return 0


def _measure(folder: Path, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    _write_tokenizer(folder)
    spawn = multiprocessing.get_context("spawn")
    endpoint = f"ipc://{folder}/rank"
    ours, theirs = spawn.Pipe()
    port_ours, port_theirs = spawn.Pipe()
    count = int(rate * (seconds + 0.025 * streams + 1))
    engine = spawn.Process(target=_engine, args=(endpoint, streams, rate, count, theirs), daemon=True)
    front = spawn.Process(target=_front, args=(str(folder), endpoint, port_theirs), daemon=True)
    engine.start()
    front.start()
    try:
        port = port_ours.recv()
        assert front.pid is not None
        seen = asyncio.run(_client(port, streams, front.pid, seconds))
        sent: dict[str, list[float]] = ours.recv()
    finally:
        front.terminate()
        engine.terminate()
        front.join(10)
        engine.join(10)
    added = [
        arrived - emitted
        for name, times in seen["arrivals"].items()
        for arrived, emitted in zip(times[1:], sent[name][2:], strict=False)
    ]
    first = [
        (sent[name][0] - seen["asked"][name]) + (times[0] - sent[name][1])
        for name, times in seen["arrivals"].items()
    ]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "streams": streams,
        "tokens_per_s": round(seen["tokens"] / seen["window_s"]),
        "cpu_us_per_token": round(seen["cpu_s"] / seen["tokens"] * 1e6, 1),
        "added_latency_ms": {f"p{p}": round(float(np.percentile(added, p)) * 1e3, 2) for p in (50, 99)},
        "added_first_byte_ms": {f"p{p}": round(float(np.percentile(first, p)) * 1e3, 2) for p in (50, 99)},
    }


def _engine(endpoint: str, streams: int, rate: float, count: int, pipe: Connection) -> None:
    """A rank that answers a request at once and then emits one token a step for all of them.

    Reports for each request: when it came, and when each of its tokens was sent.
    """
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(endpoint)
    layout = PageLayout(model_id="bench", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
    peer = PeerRank(incarnation=bytes(16), rank=0, host="127.0.0.1", port=1)
    ready = Ready(
        self_rank=peer,
        layout=layout,
        pages=1,
        max_model_len=2**20,
        pool_memory="none",
        queue_limit=2 * streams,
    )
    socket.send(encode(ready))
    token = pack_u32([4 + 65])
    times: dict[str, list[float]] = {}
    running: dict[str, int] = {}
    next_step = time.monotonic()
    while running or len(times) < streams:
        wait_ms = max(0.0, (next_step - time.monotonic()) * 1e3)
        if socket.poll(int(wait_ms)):
            message = decode_to_rank(socket.recv())
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Submit):
                now = time.monotonic()
                times[message.request_id], running[message.request_id] = [now, now], count - 1
                socket.send(encode(Outputs(items=[Output(message.request_id, token, None, "local", 0)])))
            continue
        if time.monotonic() < next_step:
            continue
        next_step += 1.0 / rate
        items = []
        now = time.monotonic()
        for name in list(running):
            running[name] -= 1
            items.append(Output(name, token, None if running[name] else "length", "local", 0))
            times[name].append(now)
            if not running[name]:
                del running[name]
        if items:
            socket.send(encode(Outputs(items=items)))
    pipe.send(times)
    while not isinstance(decode_to_rank(socket.recv()), Shutdown):
        pass


def _front(folder: str, endpoint: str, pipe: Connection) -> None:
    """The product's own front, in front of that engine."""
    config = LaunchConfig(role="single", model=folder, port=0, access_log="none", tokenizer_backend="hf")
    listener = listening_socket(config)

    async def run() -> None:
        pipe.send(listener.getsockname()[1])
        await serve(config, [RankClient(0, endpoint)], token=b"unused by this role", listener=listener)

    asyncio.run(run())


async def _client(port: int, streams: int, front: int, seconds: float) -> dict[str, Any]:
    """Ask for all streams, 20 ms apart; then measure over `seconds`; then read them to their end."""
    await _wait_ready(port)
    arrivals: dict[str, list[float]] = {}
    asked: dict[str, float] = {}
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 10**5})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    tokens = 0

    async def stream() -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        writer.write(request)
        data = b""
        while not (found := _ID.search(data)):
            data += await reader.read(65536)
        name = found[1].decode()
        asked[name] = began
        times = arrivals[name] = []
        while True:
            now = time.monotonic()
            new = data.count(b'"content":"') - data.count(b'"content":""')
            times.extend([now] * new)
            tokens += new
            if data.endswith(b"0\r\n\r\n"):
                break
            data = await reader.read(65536)
        writer.close()

    tasks = []
    for _ in range(streams):
        tasks.append(asyncio.create_task(stream()))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    used, began, before = _cpu_s(front), time.monotonic(), tokens
    await asyncio.sleep(seconds)
    window_s, count = time.monotonic() - began, tokens - before
    cpu_s = _cpu_s(front) - used
    await asyncio.gather(*tasks)
    return {"arrivals": arrivals, "asked": asked, "cpu_s": cpu_s, "window_s": window_s, "tokens": count}


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, all its threads and the kernel on its behalf together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _wait_ready(port: int) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if b" 200 " in answer[:20]:
            return
        await asyncio.sleep(0.05)


def _write_tokenizer(folder: Path) -> None:
    """Byte-level, one token a byte; the engine is a fake one, so nothing more is needed."""
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    vocabulary = {name: place for place, name in enumerate(names)}
    vocabulary |= {char: 4 + place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))


if __name__ == "__main__":
    sys.exit(main())
