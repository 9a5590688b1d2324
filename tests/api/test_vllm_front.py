# SPDX-License-Identifier: Apache-2.0
"""The front over a vLLM server, with a server behind it that the test plays: what passes through, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kit.live_server import TOKEN
from kvrail.frontend import vllm_link
from kvrail.frontend.server import listening_socket
from kvrail.frontend.vllm_launch import serve_vllm
from kvrail.frontend.vllm_link import VllmLink
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.vllm.spec import (
    CARD_ROUTE,
    PREFILL_ROUTE,
    STATE_ROUTE,
    EngineCard,
    PeerState,
    ServerState,
)

_CARD = EngineCard(
    version="0.32.0",
    model="m",
    address="127.0.0.1:4",
    call_port=5,
    incarnation="ab",
    max_model_len=64,
    load=0,
    limit=4,
)


class Behind:
    """The vLLM server."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.state = ServerState(card=_CARD, max_num_seqs=1, requests=0)
        self.left = threading.Event()
        self.hold = threading.Event()
        self.hangs = threading.Event()
        routes = [
            Route(STATE_ROUTE, self._state),
            Route("/metrics", lambda _: Response("vllm:num_requests_running 0.0\n")),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/stream", self._stream, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _state(self, _: Request) -> Response:
        while self.hangs.is_set():
            await asyncio.sleep(0.01)
        return Response(msgspec.msgpack.encode(self.state))

    async def _completions(self, request: Request) -> Response:
        self.seen.append((request.url.query, dict(request.headers), await request.body()))
        if request.query_params.get("wait"):
            await self._gone(request)
        return JSONResponse({"text": "ä"}, 201, {"x-kvrail-prefill": "remote", "x-mine": "1"})

    async def _gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    async def _stream(self, request: Request) -> Response:
        kind = request.query_params["kind"]

        async def events() -> Any:
            try:
                yield b"data: 1\n\n"
                while not self.hold.is_set():
                    await asyncio.sleep(0.01)
                if kind == "break":
                    raise RuntimeError("the server dies")
                yield b"data: [DONE]\n\n"
            finally:
                self.left.set()

        return StreamingResponse(events(), media_type="text/event-stream")


class Front:
    """Both servers on a thread."""

    def __init__(self, folder: Path, behind: Behind, **settings: Any) -> None:
        self.behind = behind
        self.config = LaunchConfig(
            **{
                "role": "ce",
                "engine": "vllm",
                "model": "m",
                "port": 0,
                "runtime_dir": str(folder),
                **settings,
            }
        )
        self._listener = listening_socket(self.config)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self._listener.getsockname()[1]}", timeout=10, trust_env=False
        )
        self._socket, self._status = folder / "vllm.sock", folder / "connector.json"
        self._status.write_text(
            json.dumps(
                {"links": [{"address": "127.0.0.1:4", "state": "up", "lane": "shm"}], "gauges": {"held": 2}}
            )
        )
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._running.wait(10)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        upstream = uvicorn.Server(
            uvicorn.Config(self.behind.app, uds=str(self._socket), log_level="critical", lifespan="off")
        )
        upstream.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(upstream.serve())
        async with VllmLink(self._socket, self._status) as link:
            self._running.set()
            await serve_vllm(self.config, link, TOKEN, self._listener, self._stop)
        upstream.force_exit = upstream.should_exit = True
        await task

    def wait_ready(self) -> None:
        wait_for(lambda: self.http.get("/ready").status_code == 200)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.http.close()
        self._listener.close()


def wait_for(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def behind() -> Behind:
    return Behind()


@contextlib.contextmanager
def serving(folder: Path, behind: Behind, **settings: Any) -> Iterator[Front]:
    front = Front(folder, behind, **settings)
    try:
        front.wait_ready()
        yield front
    finally:
        behind.hold.set()
        front.stop()


def test_a_request_passes_through_unchanged(tmp_path: Path, behind: Behind) -> None:
    with serving(tmp_path, behind) as front:
        sent = '{"prompt": "ü",   "odd": [1]}'.encode()
        headers = {
            "content-type": "application/json",
            "x-data-parallel-rank": "1",
            "x-request-id": "mine",
            "x-title": "Übung",
            "connection": "keep-alive, x-hop",
            "x-hop": "1",
            "x-kvrail-prefill": "remote",
        }
        answer = front.http.post(
            "/v1/completions?a=1&b=%20", content=sent, headers=httpx.Headers(headers, encoding="utf-8")
        )
        ((query, seen, body),) = behind.seen
        assert (query, body) == ("a=1&b=%20", sent)
        assert not {"x-data-parallel-rank", "x-hop", "x-kvrail-prefill"} & set(seen)
        assert seen["x-title"].encode("latin-1").decode() == "Übung"
        assert seen["accept-encoding"] == "identity", "bytes are passed on as they are"
        assert seen["x-request-id"] != "mine", "inside, our own names requests"
        assert (answer.status_code, answer.json(), answer.headers["x-mine"]) == (201, {"text": "ä"}, "1")
        assert answer.headers["x-kvrail-prefill"] == "remote"
        assert answer.headers["x-request-id"] == "mine"
        counted = 'kvrail_requests_total{api="completions",outcome="http_201",route="remote"} 1.0'
        wait_for(lambda: counted in front.http.get("/metrics").text)
        assert "vllm:num_requests_running 0.0" in front.http.get("/metrics").text
        for path in (STATE_ROUTE, PREFILL_ROUTE, CARD_ROUTE, "/inference/v1/generate", "/reset_prefix_cache"):
            assert front.http.post(path).status_code in (404, 405)


@pytest.mark.parametrize(
    "target",
    ["/v1/%2e%2e/kvrail/state", "/v1/../kvrail/state", "/v1/x/%2E./..%2fkvrail/state", "/v1/%00", "/v1/%0a"],
)
def test_no_path_leads_out_of_what_clients_may_call(tmp_path: Path, behind: Behind, target: str) -> None:
    with serving(tmp_path, behind) as front, socket.socket() as raw:
        raw.settimeout(10)
        raw.connect(front._listener.getsockname())
        raw.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert raw.recv(1000).split()[1] == b"404"


def test_keys_and_room(tmp_path: Path, behind: Behind) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    with serving(tmp_path, behind, api_key_file=str(keys), max_queue=0) as front:
        assert front.http.post("/v1/completions", json={}).status_code == 401
        front.http.headers["authorization"] = "Bearer sesame"
        assert front.http.post("/v1/completions", json={}).status_code == 201
        assert "authorization" not in behind.seen[0][1]
        with front.http.stream("POST", "/v1/stream?kind=whole", json={}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "data: 1", "it comes at once"
            refused = front.http.post("/v1/completions", json={})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
            behind.hold.set()
            assert [line for line in lines if line] == ["data: [DONE]"]
        wait_for(lambda: front.http.post("/v1/completions", json={}).status_code == 201)


def test_a_body_that_is_still_coming_has_its_place(tmp_path: Path, behind: Behind) -> None:
    """So many bodies are read at once as may be here, and not as many as come."""
    with serving(tmp_path, behind, max_queue=0) as front:
        with socket.create_connection(front._listener.getsockname(), 10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n{")
            wait_for(lambda: "kvrail_front_open 1.0" in front.http.get("/metrics").text)
            assert front.http.post("/v1/completions", json={}).status_code == 429
            assert front.http.get("/v1/models").status_code == 404, "nothing is computed for it"
        wait_for(lambda: front.http.post("/v1/completions", json={}).status_code == 201)
        assert 'outcome="cancelled"' in front.http.get("/metrics").text


def test_a_body_that_is_too_large_is_no_failure_of_ours(tmp_path: Path, behind: Behind) -> None:
    with serving(tmp_path, behind, max_body_mb=0.01) as front:
        assert front.http.post("/v1/completions", content=b"x" * 20_000).status_code == 413
        metrics = front.http.get("/metrics").text
        assert 'outcome="http_413"' in metrics
        assert 'outcome="http_500"' not in metrics


@pytest.mark.parametrize("path", ["/v1/completions?wait=1", "/v1/stream?kind=whole"])
def test_a_client_that_leaves_ends_it_behind(tmp_path: Path, behind: Behind, path: str) -> None:
    with serving(tmp_path, behind) as front:
        with pytest.raises(httpx.ReadTimeout):
            front.http.post(path, json={}, timeout=0.5)
        assert behind.left.wait(5)
        wait_for(lambda: "kvrail_front_open 0.0" in front.http.get("/metrics").text)
        wait_for(lambda: 'outcome="cancelled"' in front.http.get("/metrics").text)


def test_a_stream_that_breaks_says_so(tmp_path: Path, behind: Behind) -> None:
    with serving(tmp_path, behind) as front:
        behind.hold.set()
        answer = front.http.post("/v1/stream?kind=break", json={})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[0] == "1"
        assert "broke off" in json.loads(events[1])["error"]["message"]
        assert len(events) == 2, "and no [DONE]"


def test_time_is_limited(tmp_path: Path, behind: Behind) -> None:
    with serving(tmp_path, behind, request_timeout_s=0.3) as front:
        assert front.http.post("/v1/completions?wait=1", json={}).status_code == 504
        assert behind.left.wait(5)
        answer = front.http.post("/v1/stream?kind=whole", json={})
        assert answer.status_code == 200
        assert '"timeout_error"' in answer.text


def test_a_server_that_hangs_holds_nobody(
    tmp_path: Path, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_link, "_ANSWER_S", 0.2)
    monkeypatch.setattr(vllm_link, "_SILENT_S", 0.5)
    with serving(tmp_path, behind) as front:
        behind.hangs.set()
        assert front.http.post("/v1/completions?wait=1", json={}).status_code == 503
        behind.hangs.clear()
        front.wait_ready()


def test_an_engine_core_that_hangs_holds_nobody(tmp_path: Path, behind: Behind) -> None:
    """The server in front of it lives, and says so."""
    good, stuck = behind.state, "vLLM's engine core has not finished a step for 60 s"
    with serving(tmp_path, behind) as front:
        with front.http.stream("POST", "/v1/stream?kind=whole", json={}) as answer:
            lines = answer.iter_lines()
            next(lines)
            behind.state = msgspec.structs.replace(good, trouble=stuck)
            assert stuck in "".join(lines)
        assert behind.left.wait(5)
        response = front.http.post("/v1/completions", json={})
        assert (response.status_code, response.json()["error"]["message"]) == (503, stuck)
        assert "retry-after" in response.headers
        assert front.http.get("/ready").json()["reasons"] == [stuck]
        assert 'kvrail_rank_ready{rank="0"} 0.0' in front.http.get("/metrics").text
        behind.state = good
        front.wait_ready()


def test_a_stop_ends_streams_in_good_order(tmp_path: Path, behind: Behind) -> None:
    front = Front(tmp_path, behind)
    front.wait_ready()
    with front.http.stream("POST", "/v1/stream?kind=whole", json={}) as answer:
        lines = answer.iter_lines()
        next(lines)
        front._loop.call_soon_threadsafe(front._stop.set)
        assert "the server is stopping" in "".join(lines)
    front.stop()


def test_what_the_front_says_of_itself(tmp_path: Path, behind: Behind) -> None:
    peer = PeerState(url="http://pe", trouble="not asked yet", address="127.0.0.1:4")
    behind.state = ServerState(card=_CARD, max_num_seqs=1, requests=3, peers=(peer,), unsplit="why")
    settings = {"pe_url": ("http://pe",), "local_prefill": "never"}
    front = Front(tmp_path, behind, **settings)
    try:
        wait_for(lambda: front.http.get("/ready").json()["reasons"] == ["http://pe: not asked yet"])
        lanes = front.http.get("/lanes").json()
        assert lanes["links"] == [
            {"address": "127.0.0.1:4", "state": "up", "lane": "shm", "peer_url": "http://pe"}
        ]
        assert lanes["unsplit"] == "why"
        metrics = front.http.get("/metrics").text
        assert "kvrail_held 2.0" in metrics
        assert 'kvrail_rank_requests{rank="0"} 3.0' in metrics
        assert front.http.get("/").headers["content-type"].startswith("text/html")
        behind.state = ServerState(
            card=_CARD, max_num_seqs=1, requests=0, peers=(PeerState(url="x", trouble=""),)
        )
        front.wait_ready()
    finally:
        front.stop()


def test_a_prefill_engine_is_for_engines_only(tmp_path: Path, behind: Behind) -> None:
    with serving(tmp_path, behind, role="pe") as front:
        assert front.http.post("/v1/completions", json={}).status_code == 404
        assert front.http.get(CARD_ROUTE).status_code == 401
        front.http.headers["authorization"] = f"Bearer {TOKEN.decode()}"
        assert msgspec.msgpack.decode(front.http.get(CARD_ROUTE).content, type=EngineCard) == _CARD
        assert front.http.post(PREFILL_ROUTE, content=b"x").status_code == 404, "that has a port of its own"
