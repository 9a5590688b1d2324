# SPDX-License-Identifier: Apache-2.0
"""`runtime launch --engine vllm`: a front process and its vLLM server, started together, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from kvrail.frontend.page_route import page_route
from kvrail.frontend.server import bare_app, run_server
from kvrail.frontend.vllm_counts import ProxyCounts
from kvrail.frontend.vllm_link import VllmLink
from kvrail.frontend.vllm_proxy import VllmProxy
from kvrail.frontend.vllm_routes import engine_routes, vllm_status_routes
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.vllm.child import VllmProcess

__all__ = ["run_vllm", "serve_vllm"]

_log = logging.getLogger(__name__)
# As running answers have.
_GRACE_S = 2.0


def run_vllm(config: LaunchConfig, token: bytes, listener: socket.socket) -> int:
    """Serve until told to stop; returns the exit status. A server that dies takes the role down: 1."""
    folder = Path(config.model).expanduser()
    if not folder.exists() and (folder.is_absolute() or folder.parent.is_dir()) and str(folder.parent) != ".":
        raise ConfigError(
            f"--model {config.model}: no such file or folder"
        )  # at once; vLLM takes long to say so
    with VllmProcess(config, token) as server:
        return _event_loop()(_run(config, server, token, listener))


def _event_loop() -> Callable[[Coroutine[Any, Any, int]], int]:
    """Every token passes here twice: with uvloop, which vLLM needs as well, for two thirds of the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    return run


@dataclass
class _Application:
    app: FastAPI
    proxy: VllmProxy

    def refuse(self) -> None:
        self.proxy.stopping = True

    def fail_all(self, reason: str) -> None:
        self.proxy.fail_all(reason)


async def _run(config: LaunchConfig, server: VllmProcess, token: bytes, listener: socket.socket) -> int:
    stop = asyncio.Event()
    # From before the server starts to after its end; in between, uvicorn has handlers of its own.
    _heed_signals(stop)
    async with VllmLink(server.socket, server.status_file) as link:
        server.start()
        watcher = asyncio.create_task(_watch(server, stop))
        try:
            await serve_vllm(config, link, token, listener, stop)
            if config.role == "pe":
                await _until_idle(link)
        finally:
            _heed_signals(stop)
            failed = watcher.done() and watcher.result()
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            listener.close()
    await asyncio.to_thread(server.stop)
    return 1 if failed else 0


async def serve_vllm(
    config: LaunchConfig, link: VllmLink, token: bytes, listener: socket.socket, stop: asyncio.Event
) -> None:
    """Serve the front of the server behind `link` until `stop`, SIGTERM or SIGINT."""
    await run_server(config, _application(config, link, token), listener, stop)


def _application(config: LaunchConfig, link: VllmLink, token: bytes) -> _Application:
    counts = ProxyCounts(link)
    proxy = VllmProxy(config, link, ApiKeys(config.api_key_file), counts)
    link.on_silent = proxy.fail_all
    app = bare_app(config)
    if config.role == "pe":
        app.include_router(engine_routes(link, token, lambda: proxy.stopping))
    else:
        app.include_router(page_route())
        app.include_router(proxy.routes())
    app.include_router(vllm_status_routes(config, link, counts, lambda: proxy.stopping))
    return _Application(app, proxy)


async def _until_idle(link: VllmLink) -> None:
    """Let prefills that run come to their end, for a while: their callers do not ask through the front."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            while link.state is not None and link.state.card.load:
                await asyncio.sleep(0.05)


def _heed_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for an orderly stop, also where they would end the process and leave its folder."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _watch(server: VllmProcess, stop: asyncio.Event) -> bool:
    """Ask the front to stop when the server has ended; True when it ended badly."""
    while (status := server.dead()) is None:
        await asyncio.sleep(0.2)
    if not stop.is_set():
        _log.error("the vLLM server ended with exit status %d: stopping this role", status)
        stop.set()
        return True
    return status != 0
