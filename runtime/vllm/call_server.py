# SPDX-License-Identifier: Apache-2.0
"""Where completion engines call a prefill engine: a port of its own, in the process that talks to the engine core.

A call stands before every first token, so it passes neither the role's front nor vLLM's serving layer: token ids go to
the engine core as they come, and the token that it samples goes back. Under the cluster token, as all between engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from typing import Any

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from kvrail.runtime.control.auth import token_matches
from kvrail.runtime.control.bounded_http import BoundedHttp
from kvrail.runtime.vllm.asgi import Reply, answer, gone, refusal, whole_body
from kvrail.runtime.vllm.compat import decode_sampling, first_token_of, prefill_request
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.server_side import ServerSide
from kvrail.runtime.vllm.spec import PREFILL_ROUTE, ChildSpec, PrefillCall
from kvrail.transfer.control_socket import listen_tcp
from kvrail.transfer.wire import unpack_u32

__all__ = ["CallServer"]

_log = logging.getLogger(__name__)
# Beside four bytes for each token.
_LARGEST_REST = 1 << 20
# Longer than callers keep idle connections, so that no call meets a closing one.
_KEEP_ALIVE_S = 30


class CallServer:
    """Listens from its making on, in the running event loop. An ASGI application.

    Raises TransferError when the port is taken, OSError (ssl.SSLError among them) for a certificate that is no good.
    When it ends all the same, the server's state says so: nobody could call this engine any more.
    """

    def __init__(self, spec: ChildSpec, tap: CoreTap, side: ServerSide) -> None:
        self._token = spec.token
        self._tap = tap
        self._side = side
        self._numbers = itertools.count()
        host = spec.address.rpartition(":")[0].strip("[]")
        listener = listen_tcp(host, spec.call_port)
        # Connections inherit it: no answer waits for the acknowledgement of the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            self,
            interface="asgi3",
            http=BoundedHttp,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=spec.ssl_certfile,
            ssl_keyfile=spec.ssl_keyfile,
        )
        try:
            # Here, and not when it serves: vLLM's start is to fail by it.
            config.load()
        except BaseException:
            listener.close()
            raise
        server = uvicorn.Server(config)
        # Signals are for vLLM's own server, with whose loop this one ends.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._listener = listener
        self._task = asyncio.create_task(server.serve(sockets=[listener]))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._listener.close()
        error = None if task.cancelled() else task.exception()
        self._side.uncallable = "the port for calls is closed" + (f": {error!r}" if error is not None else "")
        if error is not None:
            _log.error("no calls are taken any more", exc_info=error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not token_matches(self._token, headers.get(b"authorization", b"").decode("latin-1")):
            await answer(send, *refusal(401, "this port is for other engines, and needs the cluster token"))
        elif (scope["method"], scope["path"]) != ("POST", PREFILL_ROUTE):
            await answer(send, *refusal(404, "there is nothing else here"))
        else:
            body = await whole_body(receive, 4 * self._side.max_model_len + _LARGEST_REST)
            if body is None:
                await answer(send, *refusal(413, "more than the longest prompt"))
            else:
                await answer(send, *await self._prefill(body, receive))

    async def _prefill(self, body: bytes, receive: Receive) -> Reply:
        side = self._side
        try:
            call = msgspec.msgpack.decode(body, type=PrefillCall)
            tokens = unpack_u32(call.tokens).tolist()
        except (msgspec.MsgspecError, ValueError) as error:
            return refusal(400, f"the body is no PrefillCall: {error}")
        if why := side.why_refused(call, len(tokens)):
            side.counters.calls.labels("refused").inc()
            return refusal(*why)
        try:
            sampling = decode_sampling(call.sampling)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            return refusal(400, f"sampling: {error}")
        transfer = None
        if call.ticket:
            transfer = {"do_remote_decode": True, "do_remote_prefill": False, "ticket": call.ticket.hex()}
        name = f"prefill-{next(self._numbers)}-{call.ticket.hex()}"
        request = prefill_request(name, tokens, sampling, transfer, call.cache_salt, call.priority)
        heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def hear(output: Any) -> list[Any]:
            if not heard.done():
                heard.set_result(output)
            return []

        side.load += 1
        leaving = asyncio.create_task(gone(receive))
        stuck = asyncio.create_task(side.core.until_stuck())
        try:
            self._tap.submit(request, hear)
            await asyncio.wait((heard, leaving, stuck), return_when=asyncio.FIRST_COMPLETED)
        finally:
            side.load -= 1
            leaving.cancel()
            stuck.cancel()
            if not heard.done():
                self._tap.withdraw(name)
        if not heard.done():
            trouble = side.core.trouble
            return refusal(503, trouble) if trouble else refusal(499, "the caller went away")
        first = first_token_of(heard.result())
        if first is None:
            return refusal(500, "the engine gave the prefill up")
        side.counters.calls.labels("accepted").inc()
        return 200, msgspec.msgpack.encode(first)
