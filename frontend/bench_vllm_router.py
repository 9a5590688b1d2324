# SPDX-License-Identifier: Apache-2.0
"""The router that vLLM's own prefill/decode split needs in front of it, as small as one can be: for scripts/bench_vllm.

The prefill engine is asked for one token; what its connector says of the KV goes to the decode engine with the whole
request, and that one's answer is passed on as it comes. Both get the request under one id: by that NixlPushConnector
knows which finished prefill a decode engine waits for, and without it pushes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid
from typing import Annotated, Any

import aiohttp
import typer
from aiohttp import web

__all__ = ["application", "main"]

_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(prefill: str, decode: str) -> web.Application:
    """Routes /v1/completions, /v1/chat/completions and /v1/models over the engines at these URLs."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _PREFILL}
        client, named = request.app[_CLIENT], {"X-Request-Id": uuid.uuid4().hex}
        async with client.post(f"{prefill}{request.path}", json=first, headers=named) as answer:
            if answer.status != 200:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
            params = (await answer.json())["kv_transfer_params"]
        async with client.post(
            f"{decode}{request.path}", json=body | {"kv_transfer_params": params}, headers=named
        ) as answer:
            passed_on = web.StreamResponse(status=answer.status)
            passed_on.content_type = answer.content_type
            await passed_on.prepare(request)
            async for piece in answer.content.iter_any():
                await passed_on.write(piece)
            await passed_on.write_eof()
            return passed_on

    async def models(request: web.Request) -> web.Response:
        async with request.app[_CLIENT].get(f"{decode}/v1/models") as answer:
            return web.json_response(json.loads(await answer.read()), status=answer.status)

    async def client(app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
            app[_CLIENT] = session
            yield

    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(client)
    app.router.add_get("/v1/models", models)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, complete)
    return app


_CLIENT = web.AppKey("client", aiohttp.ClientSession)


def main(
    port: Annotated[int, typer.Option(help="where to listen, on loopback")],
    prefill: Annotated[str, typer.Option(help="URL of the engine that prefills")],
    decode: Annotated[str, typer.Option(help="URL of the engine that decodes")],
    wake: Annotated[
        list[int] | None, typer.Option(help="a process group that is to run on (SIGCONT) when this ends")
    ] = None,
) -> None:
    """Serve until killed."""
    try:
        web.run_app(application(prefill, decode), host="127.0.0.1", port=port, print=None, access_log=None)
    finally:
        for group in wake or ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


if __name__ == "__main__":
    typer.run(main)
