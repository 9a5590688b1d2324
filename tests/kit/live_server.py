# SPDX-License-Identifier: Apache-2.0
"""A role's real HTTP server on a thread, on a free port, with fake ranks behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from kvrail.frontend.server import listening_socket, serve
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.control.rank_client import RankClient

__all__ = ["TOKEN", "LiveServer", "config"]

TOKEN = b"a-cluster-token-of-tests"


class LiveServer:
    """Runs from construction to `stop`. `url` is where it listens."""

    def __init__(
        self, config: LaunchConfig, endpoints: Sequence[str], *, silent_limit_s: float = 60.0
    ) -> None:
        self._listener = listening_socket(config)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._config = config
        self._clients = [
            RankClient(rank, endpoint, silent_limit_s=silent_limit_s)
            for rank, endpoint in enumerate(endpoints)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._running = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._running.wait(10)

    def _run(self) -> None:
        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._running.set()
            await serve(self._config, self._clients, token=TOKEN, listener=self._listener, stop=self._stop)

        try:
            asyncio.run(run())
        except BaseException as error:
            self.error = error

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Return once /ready says 200."""
        self.wait_until("/ready", lambda response: response.status_code == 200, timeout_s)

    def wait_until(self, path: str, good: object, timeout_s: float = 15.0) -> httpx.Response:
        """GET `path` until `good(response)`."""
        assert callable(good)
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            while True:
                response = client.get(path)
                if good(response):
                    return response
                assert time.monotonic() < deadline, f"{path}: {response.status_code} {response.text}"
                assert self.error is None, self.error
                time.sleep(0.02)

    def stop(self) -> float:
        """Stop in order; returns how many seconds that took."""
        started = time.monotonic()
        if self._thread.is_alive():
            assert self._loop is not None
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(15)
            assert not self._thread.is_alive(), "the server did not stop"
        if self.error is not None:
            raise self.error
        return time.monotonic() - started


def config(role: str, model: Path, **settings: object) -> LaunchConfig:
    """A configuration on any free port."""
    return LaunchConfig(role=role, model=str(model), port=0, page_tokens=16, **settings)  # type: ignore[arg-type]
