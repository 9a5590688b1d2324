# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of one role: builds its application, runs it, and stops it in order within five seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn
import zmq.asyncio
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvrail.frontend.cache_routes import cache_routes
from kvrail.frontend.dispatch import Dispatcher
from kvrail.frontend.envelope import Envelope, install_error_bodies
from kvrail.frontend.metrics import FrontMetrics
from kvrail.frontend.page_route import page_route
from kvrail.frontend.prefill_call import PrefillCalls
from kvrail.frontend.prefill_routes import PrefillDesk
from kvrail.frontend.render import Renderer
from kvrail.frontend.routes import openai_routes
from kvrail.frontend.status_routes import status_routes
from kvrail.frontend.tls import client_trust
from kvrail.frontend.tracing import Tracing
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.admission import Admission
from kvrail.runtime.control.auth import ApiKeys
from kvrail.runtime.control.bounded_http import BoundedHttp
from kvrail.runtime.control.kept_connections import KeptConnections
from kvrail.runtime.control.peers import PeerWatcher
from kvrail.runtime.control.rank_client import RankClient
from kvrail.runtime.errors import ConfigError

__all__ = ["Application", "HttpServer", "bare_app", "listening_socket", "run_server", "serve"]

_log = logging.getLogger(__name__)
# Running answers may finish for this long after a stop was asked for; then they end with an error event.
_GRACE_S = 2.0
# The last net, counted from when the listening socket closes; also bounds answers to clients that do not read.
_LAST_NET_S = 3


def listening_socket(config: LaunchConfig) -> socket.socket:
    """The socket of --host and --port, listening. Port 0: any, see its getsockname(). Raises ConfigError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.resolved_port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.resolved_port}: {error.strerror or error}; "
            "choose another with --host and --port"
        ) from None
    # Connections inherit it. asyncio sets it only on sockets that were made with an explicit protocol number;
    # without it each answer would wait 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Application(Protocol):
    """An ASGI application and how to bring it to an end."""

    app: FastAPI

    def refuse(self) -> None:
        """Admit nothing new; what runs may go on."""

    def fail_all(self, reason: str) -> None:
        """End every open request with a failure."""


@dataclass
class _Application:
    """The application of a role with ranks."""

    app: FastAPI
    admission: Admission
    desk: PrefillDesk | None
    ranks: Sequence[RankClient]

    def refuse(self) -> None:
        self.admission.stop()
        for rank in self.ranks:
            rank.expect_end()
        if self.desk is not None:
            self.desk.stopping = True

    def fail_all(self, reason: str) -> None:
        for rank in self.ranks:
            rank.fail_all(reason)


def bare_app(config: LaunchConfig) -> FastAPI:
    """An application without routes, that answers errors as ours do."""
    # /openapi.json, but none of the pages that show it: they load scripts from elsewhere.
    app = FastAPI(title="kvrail", version="1", docs_url=None, redoc_url=None)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-kvrail-prefill", "retry-after", "retry-after-ms"],
        )
    install_error_bodies(app, for_clients=config.role != "pe")
    return app


@contextlib.asynccontextmanager
async def _application(
    config: LaunchConfig,
    ranks: Sequence[RankClient],
    token: bytes,
    renderer: Renderer | None,
    connections: KeptConnections,
) -> AsyncIterator[_Application]:
    """The application of a role, with what runs beside it."""
    metrics = FrontMetrics(ranks, config.model_name)
    admission = Admission(config.max_queue)
    app = bare_app(config)
    tracing = Tracing(config.otlp_endpoint, config.role)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        peers: PeerWatcher | None = None
        desk: PrefillDesk | None = None
        if config.role == "pe":
            desk = PrefillDesk(config, ranks, token, metrics, tracing)
            stack.push_async_callback(desk.close)
            app.include_router(desk.routes())
        else:
            if config.role == "ce":
                peers = PeerWatcher(
                    config.pe_url,
                    token,
                    ranks,
                    connections,
                    admission.at_peer,
                    # As long as the tickets of requests that are under way wait for it.
                    patience_s=config.ticket_ttl_s,
                )
                peers.start()
                stack.push_async_callback(peers.close)
            assert renderer is not None
            renderer.encoder.on_check = lambda same: metrics.tokenizer_checks.labels(str(same).lower()).inc()
            calls = PrefillCalls(connections, token, metrics)
            stack.push_async_callback(calls.close)
            dispatcher = Dispatcher(config, ranks, peers, admission, calls, metrics, tracing)
            app.include_router(page_route())
            app.include_router(
                openai_routes(config, ranks, dispatcher, renderer, ApiKeys(config.api_key_file))
            )
        app.include_router(cache_routes(config, ranks, token))
        app.include_router(status_routes(config, ranks, peers, metrics, lambda: admission.stopping))
        yield _Application(app, admission, desk, ranks)


class HttpServer(uvicorn.Server):
    """A uvicorn server that ends running answers in good order: first by grace, then by an error event."""

    def __init__(self, config: LaunchConfig, application: Application) -> None:
        super().__init__(
            uvicorn.Config(
                Envelope(application.app, config),
                http=BoundedHttp,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than the other side keeps idle connections, so that no call meets a closing one.
                timeout_keep_alive=30,
                timeout_graceful_shutdown=_LAST_NET_S,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self._application = application

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end `serve`. uvicorn would raise them again afterwards, past the ranks' good end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _told_to_stop(self, number: signal.Signals) -> None:
        # At once: the signal may have reached the ranks as well, which are quicker to end than uvicorn is to look.
        self._application.refuse()
        self.handle_exit(number, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._application.refuse()
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(_GRACE_S)
        self._application.fail_all("the server is stopping")


async def serve(
    config: LaunchConfig,
    ranks: Sequence[RankClient],
    *,
    token: bytes,
    listener: socket.socket,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT (both only in the main thread) or `stop`; then stop in order and tell the ranks.

    `ranks` are clients that have not been started, one for each rank process, in rank order. Raises ConfigError,
    before anything is served, when the model has no usable tokenizer.
    """
    renderer = None
    if config.role != "pe":
        renderer = await asyncio.to_thread(
            Renderer.load,
            config.model,
            thinking=config.thinking_mode == "thinking",
            chat_template=config.chat_template,
            trust_remote_code=config.trust_remote_code,
            backend=config.tokenizer_backend,
            verify_rate=config.tokenizer_verify_rate,
        )
    context = zmq.asyncio.Context()
    try:
        async with contextlib.AsyncExitStack() as stack:
            for rank in ranks:
                await rank.start(context)
                stack.push_async_callback(_end, rank)
            connections = KeptConnections(client_trust(config))
            stack.push_async_callback(connections.close)
            application = await stack.enter_async_context(
                _application(config, ranks, token, renderer, connections)
            )
            await run_server(config, application, listener, stop)
    finally:
        context.term()
        listener.close()


async def run_server(
    config: LaunchConfig, application: Application, listener: socket.socket, stop: asyncio.Event | None
) -> None:
    """Serve `application` until SIGTERM, SIGINT (both only in the main thread) or `stop`."""
    server = HttpServer(config, application)
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    _log.info("%s %s listens on %s://%s:%d", config.role, config.model_name, scheme, host, port)
    stopper = asyncio.create_task(_stop_when(stop, server)) if stop is not None else None
    try:
        await server.serve(sockets=[listener])
    finally:
        if stopper is not None:
            stopper.cancel()


async def _end(rank: RankClient) -> None:
    """The last thing that a front does: its ranks are told to stop once nothing can come for them any more."""
    rank.shutdown()
    await rank.close()


async def _stop_when(stop: asyncio.Event, server: uvicorn.Server) -> None:
    await stop.wait()
    server.should_exit = True
