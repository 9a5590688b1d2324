# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's port for calls, over TCP and TLS, in front of an engine core that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trustme
import uvicorn

with warnings.catch_warnings():
    # Those of torch, with which vLLM compiles as it is imported.
    warnings.simplefilter("ignore")
    pytest.importorskip(
        "vllm.v1.engine.async_llm", reason="vLLM is not installed (scripts/test_vllm makes an environment)"
    )

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from kvrail.runtime.control.auth import bearer_header
from kvrail.runtime.control.kept_connections import CallFailed, KeptConnections, Reply
from kvrail.runtime.control.upstream import Upstream
from kvrail.runtime.vllm import call_server, server_side
from kvrail.runtime.vllm.call_server import CallServer
from kvrail.runtime.vllm.compat import outputs_of
from kvrail.runtime.vllm.core_tap import CoreTap
from kvrail.runtime.vllm.counters import SplitCounters
from kvrail.runtime.vllm.ports import free_ports
from kvrail.runtime.vllm.server_side import ServerSide
from kvrail.runtime.vllm.spec import PREFILL_ROUTE, ChildSpec, FirstToken, PrefillCall, ServerState
from kvrail.transfer.wire import pack_u32

TOKEN = b"a token of the cluster"


class Core:
    """An engine core that answers each request when the test lets it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.aborted: list[str] = []
        self.hangs = asyncio.Event()
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    async def is_sleeping_async(self) -> bool:
        while self.hangs.is_set():
            await asyncio.sleep(0.01)
        return False

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request)

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names

    async def get_output_async(self) -> Any:
        return await self._said.get()

    def say(self, request: Any, token: int) -> None:
        output = EngineCoreOutput(request.request_id, [token], finish_reason=FinishReason.LENGTH)
        self._said.put_nowait(outputs_of(0, [output]))


class Engine:
    """The port of a prefill engine, and a caller."""

    def __init__(self, trust: ssl.SSLContext, **spec: Any) -> None:
        self.core = Core()
        self.tap = CoreTap(self.core)
        port = free_ports("127.0.0.1", None, 1)
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=dict), dtype="bfloat16", max_model_len=64
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
        )
        told = ChildSpec(role="pe", token=TOKEN, address="127.0.0.1:1", call_port=port, **spec)
        self.side = ServerSide(told, self.tap, config, "0.32.0")
        CallServer(told, self.tap, self.side)
        self.url = f"{'https' if spec.get('ssl_certfile') else 'http'}://127.0.0.1:{port}"
        self.connections = KeptConnections(trust)
        # As vLLM's serving layer does, for what is not taken aside.
        self.reading = asyncio.create_task(self.tap.get_output_async())

    def state(self) -> ServerState:
        return self.side.state(
            SimpleNamespace(output_processor=SimpleNamespace(get_num_unfinished_requests=int))
        )

    def call(self, **changes: Any) -> PrefillCall:
        card = self.state().card
        fields: dict[str, Any] = {
            "version": card.version,
            "model": card.model,
            "ticket": b"t" * 16,
            "tokens": pack_u32([5, 6, 7]),
            "sampling": msgspec.msgpack.encode(SamplingParams(temperature=0.0, max_tokens=9)),
        }
        return PrefillCall(**{**fields, **changes})

    async def ask(self, call: PrefillCall | bytes, path: str = PREFILL_ROUTE, **changes: Any) -> Reply:
        body = call if isinstance(call, bytes) else msgspec.msgpack.encode(call)
        settings = {"headers": bearer_header(TOKEN), "timeout_s": 10.0, **changes}
        return await self.connections.call("POST", f"{self.url}{path}", body=body, **settings)


@contextlib.asynccontextmanager
async def serving(trust: ssl.SSLContext | None = None, **spec: Any) -> AsyncIterator[Engine]:
    engine = Engine(trust or ssl.create_default_context(), **spec)
    try:
        async with asyncio.timeout(30):
            yield engine
        assert engine.side.load == 0
        assert not engine.tap.taps
    finally:
        await engine.connections.close()


@pytest.fixture(autouse=True)
def _own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "SplitCounters", lambda: SplitCounters(CollectorRegistry()))


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def said(reply: Reply) -> str:
    return str(msgspec.json.decode(reply.body)["error"]["message"])


def test_a_call_and_its_token() -> None:
    async def test() -> None:
        async with serving() as engine:
            for token in (7, 8):
                asked = asyncio.create_task(engine.ask(engine.call(priority=2, cache_salt="s")))
                await until(lambda: engine.core.requests)
                request = engine.core.requests.pop()
                assert (request.prompt_token_ids, request.cache_salt, request.priority) == ([5, 6, 7], "s", 2)
                params = request.sampling_params
                assert (params.max_tokens, params.temperature) == (1, 0.0)
                assert params.extra_args["kv_transfer_params"]["ticket"] == "74" * 16
                assert engine.side.load == 1
                engine.core.say(request, token)
                reply = await asked
                assert msgspec.msgpack.decode(reply.body, type=FirstToken).token == token

    asyncio.run(test())


def test_only_other_engines_and_only_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_server, "_LARGEST_REST", 2000)

    async def test() -> None:
        async with serving() as engine:
            for headers in ({}, bearer_header(b"another token of nobody"), {"Authorization": "Bearer \xfc"}):
                reply = await engine.ask(engine.call(), headers=headers)
                assert (reply.status, "cluster token" in said(reply)) == (401, True)
                assert TOKEN not in reply.body
            assert (await engine.ask(engine.call(), "/v1/completions")).status == 404
            assert (await engine.ask(b"\0" * 4000)).status == 413
            for call, status, words in (
                (b"?", 400, "no PrefillCall"),
                (engine.call(version="0.31.0"), 409, "this engine runs vLLM 0.32.0"),
                (engine.call(model="n"), 409, "another model"),
                (engine.call(tokens=b"abc"), 400, "no PrefillCall"),
                (engine.call(tokens=pack_u32(range(64))), 400, "the prompt has 64 tokens"),
                (engine.call(sampling=b"?"), 400, "sampling"),
            ):
                reply = await engine.ask(call)
                assert (reply.status, words in said(reply)) == (status, True), said(reply)
            engine.side.load = 2
            assert (await engine.ask(engine.call())).status == 429
            engine.side.load = 0
            assert not engine.core.requests

    asyncio.run(test())


def test_a_caller_that_leaves() -> None:
    async def test() -> None:
        async with serving() as engine:
            asked = asyncio.create_task(engine.ask(engine.call()))
            await until(lambda: engine.core.requests)
            asked.cancel()
            await until(lambda: engine.core.aborted == [engine.core.requests[0].request_id])
            await until(lambda: engine.side.load == 0)

    asyncio.run(test())


def test_a_core_that_hangs() -> None:
    async def test() -> None:
        async with serving(stuck_s=1.0) as engine:
            engine.core.hangs.set()
            reply = await engine.ask(engine.call())
            assert (reply.status, "has not finished a step" in said(reply)) == (503, True)
            assert len(engine.core.aborted) == 1
            assert (await engine.ask(engine.call())).status == 503
            assert len(engine.core.requests) == 1, "it is refused at once"
            engine.core.hangs.clear()
            await until(lambda: not engine.side.core.trouble)

    asyncio.run(test())


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("pe.example")
    certificate.private_key_pem.write_to_path(tmp_path / "key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    files = {"ssl_certfile": str(tmp_path / "cert"), "ssl_keyfile": str(tmp_path / "key")}

    async def test() -> None:
        async with serving(trust, **files) as engine:
            with pytest.raises(CallFailed, match="certificate"):
                await engine.ask(engine.call())
            to = Upstream(("127.0.0.1", int(engine.url.rpartition(":")[2])), tls=(trust, "pe.example"))
            headers = [(b"authorization", b"Bearer " + TOKEN)]
            answer = await to.ask(b"POST", PREFILL_ROUTE.encode(), headers, b"?")
            assert (answer.status, b"no PrefillCall" in await answer.whole(1000)) == (400, True)
            to.close()

    asyncio.run(test())


def test_a_certificate_that_is_none_fails_the_start_and_leaves_the_port(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("nothing")
    files = {"ssl_certfile": str(tmp_path / "cert"), "ssl_keyfile": str(tmp_path / "cert")}

    async def test() -> None:
        with pytest.raises(ssl.SSLError):
            Engine(ssl.create_default_context(), **files)

    asyncio.run(test())


def test_a_port_that_takes_no_calls_any_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine would look well, and every call to it fail."""

    async def fails(_: uvicorn.Server, sockets: list[socket.socket]) -> None:
        raise OSError("for this test")

    async def test() -> None:
        async with serving() as engine:
            assert engine.state().trouble == ""
        monkeypatch.setattr(uvicorn.Server, "serve", fails)
        async with serving() as engine:
            await until(lambda: engine.state().trouble)
            assert engine.state().trouble == "the port for calls is closed: OSError('for this test')"
            with pytest.raises(CallFailed):
                await engine.ask(engine.call())

    asyncio.run(test())


def test_what_is_no_call_at_all_is_refused_in_json() -> None:
    async def test() -> None:
        async with serving() as engine:
            for request, status in (
                (b"?\r\n\r\n", b"400"),
                (b"GET / HTTP/1.1\r\nx-a: " + b"a" * 70_000, b"431"),
            ):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", int(engine.url.rpartition(":")[2])
                )
                writer.write(request)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert head.split()[1] == status
                assert set(msgspec.json.decode(body)["error"]) == {"message", "type", "param", "code"}
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    asyncio.run(test())
