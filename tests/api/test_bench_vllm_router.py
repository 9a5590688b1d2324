# SPDX-License-Identifier: Apache-2.0
"""The router of scripts/bench_vllm in front of two engines that the test plays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvrail.frontend.bench_vllm_router import application
from kvrail.frontend.launched import free_port

SAID = {"do_remote_prefill": True, "remote_port": 7}


class Engine:
    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.names: list[str | None] = []
        app = web.Application()

        async def complete(request: web.Request) -> web.StreamResponse:
            self.asked.append(await request.json())
            self.names.append(request.headers.get("x-request-id"))
            return await answer(request)

        app.router.add_post("/v1/completions", complete)

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m"}]})

        app.router.add_get("/v1/models", models)
        self.server = TestServer(app)


async def prefilled(_: web.Request) -> web.Response:
    return web.json_response({"kv_transfer_params": SAID})


async def full(_: web.Request) -> web.Response:
    return web.json_response({"error": "full"}, status=503)


def test_both_engines_are_asked_and_the_stream_is_passed_on_as_it_comes() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def decoded(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await go_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        prefill, decode, busy = Engine(prefilled), Engine(decoded), Engine(full)
        async with prefill.server, decode.server, busy.server:
            app = application(str(prefill.server.make_url("")), str(decode.server.make_url("")))
            body = {"model": "m", "prompt": [1], "max_tokens": 5, "stream": True, "stream_options": {}}
            async with TestClient(TestServer(app)) as client, asyncio.timeout(10):
                assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "m"
                answer = await client.post("/v1/completions", json=body)
                assert answer.content_type == "text/event-stream"
                assert await answer.content.readany() == b"data: 1\n\n"
                go_on.set()
                assert await answer.read() == b"data: [DONE]\n\n"
            (first,) = prefill.asked
            assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
            assert first["kv_transfer_params"]["do_remote_decode"]
            assert decode.asked == [{**body, "kv_transfer_params": SAID}]
            # By its name the one that pushes knows which prefill is wanted.
            assert prefill.names == decode.names != [None]
            app = application(str(busy.server.make_url("")), str(decode.server.make_url("")))
            async with TestClient(TestServer(app)) as client:
                refused = await client.post("/v1/completions", json=body)
                assert (refused.status, await refused.json()) == (503, {"error": "full"})
            assert len(decode.asked) == 1

    asyncio.run(test())


def test_nobody_is_left_standing_still_behind_it() -> None:
    """The tool stops the engines for a while, and may be killed then: its end is the router's, who lets them go on."""
    engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    port = free_port()
    command = [sys.executable, "-P", "-m", "kvrail.frontend.bench_vllm_router", "--port", str(port)]
    urls = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    router = subprocess.Popen([*command, *urls, "--wake", str(engine.pid)])
    try:
        os.killpg(engine.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        # Listening: from then on it takes SIGTERM as an orderly end.
        while not any(one.laddr.port == port for one in psutil.Process(router.pid).net_connections()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED
        router.terminate()
        router.wait(60)
        while psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        engine.kill()
        engine.wait()
        router.kill()
        router.wait()
