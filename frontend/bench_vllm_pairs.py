# SPDX-License-Identifier: Apache-2.0
"""The two pairs of engines of scripts/bench_vllm: kvrail's, and one with vLLM's own NIXL connector behind a router.

NIXL's progress threads never sleep. So that they take no core from the other pair, their engines stand still (SIGSTOP)
while it is measured; kvrail's threads sleep by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from kvrail.frontend.launched import Launched, LaunchFailed, free_port, undisturbed
from kvrail.runtime.bound import bound_command
from kvrail.runtime.config import child_environment

__all__ = ["CONNECTORS", "NAME", "Engines", "KvrailPair", "NixlPair", "Pair"]

CONNECTORS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
# What the model is called.
NAME = "m"
_STOP_S = 10.0


@dataclass(frozen=True)
class Engines:
    """What all engines are given; `vllm`: in vLLM's own words."""

    model: str
    dtype: str
    max_model_len: int
    vllm: list[str]

    @property
    def common(self) -> list[str]:
        """Flags that kvrail and vLLM call alike."""
        flags = ["--model", self.model, "--served-model-name", NAME, "--dtype", self.dtype]
        return [*flags, "--max-model-len", str(self.max_model_len)]


class Pair(Protocol):
    """Two engines behind one URL."""

    @property
    def url(self) -> str: ...

    def start(self, deadline: float) -> None:
        """Start it, and return when it serves. Raises LaunchFailed, also at `deadline` (time.monotonic)."""
        ...

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """While it is asked something."""
        ...

    def stop(self) -> None:
        """End what was started, all of it."""
        ...


class KvrailPair:
    """Two `runtime launch --engine vllm`."""

    def __init__(self, engines: Engines, logs: Path) -> None:
        self._engines, self._logs = engines, logs
        self._roles: list[Launched] = []

    @property
    def url(self) -> str:
        return self._roles[1].url

    def start(self, deadline: float) -> None:
        common = ["--engine", "vllm", *self._engines.common, "--runtime-dir", str(self._logs / "run")]
        for role in ("pe", "ce"):
            more = ["--pe-url", self._roles[0].url] if self._roles else []
            with undisturbed():
                flags = [*common, *more, "--", *self._engines.vllm]
                self._roles.append(Launched(role, free_port(), self._logs, *flags))
        for one in self._roles:
            one.wait_ready(deadline)
        self._wait_linked(deadline)

    def awake(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop(self) -> None:
        for role in self._roles:
            role.ask_to_stop()
        for role in self._roles:
            role.stop()

    def _wait_linked(self, deadline: float) -> None:
        engines = None
        while time.monotonic() < deadline:
            engines = httpx.get(f"{self.url}/lanes", timeout=5, trust_env=False).json()["prefill_engines"]
            if engines and not any(one["trouble"] for one in engines):
                return
            time.sleep(0.5)
        raise LaunchFailed(f"no link between kvrail's engines: {engines}")


class NixlPair:
    """Two plain vLLM servers with the connector CONNECTORS[how], and a router. `threads`: NIXL's `num_threads`."""

    def __init__(self, how: str, threads: int, engines: Engines, logs: Path) -> None:
        self._how, self._threads, self._engines, self._logs = how, threads, engines, logs
        self._servers: list[_Plain] = []
        self._router: _Plain | None = None

    @property
    def url(self) -> str:
        assert self._router is not None
        return self._router.url

    def start(self, deadline: float) -> None:
        for role in ("kv_producer", "kv_consumer"):
            transfer = {
                "kv_connector": CONNECTORS[self._how],
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"num_threads": self._threads},
            }
            command = ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *self._engines.common]
            command += ["--kv-transfer-config", json.dumps(transfer), *self._engines.vllm]
            with undisturbed():
                server = _Plain(
                    f"{self._how}-{role}",
                    self._logs,
                    command,
                    VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                    VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
                    UCX_TLS="tcp,sm,self",
                )
                self._servers.append(server)
        prefill, decode = self._servers
        command = ["kvrail.frontend.bench_vllm_router", "--prefill", prefill.url, "--decode", decode.url]
        # When this process is killed, the router ends, and sees to it that nobody is left standing still.
        for server in self._servers:
            command += ["--wake", str(server.process.pid)]
        with undisturbed():
            self._router = _Plain(f"{self._how}-router", self._logs, command)
        for server in self._servers:
            server.wait_ready("/health", deadline)
        self._router.wait_ready("/v1/models", deadline)
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        everybody = [*self._servers, *([self._router] if self._router else [])]
        for one in everybody:
            one.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for one in everybody:
            one.end(deadline)

    def _signal(self, number: signal.Signals) -> None:
        for server in self._servers:
            server.signal_all(number)


class _Plain:
    """A program of vLLM's or ours that serves HTTP, in a session of its own: the server, and what it starts."""

    def __init__(self, name: str, logs: Path, command: Sequence[str], **variables: str) -> None:
        port = free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", logs / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                bound_command([sys.executable, "-P", "-m", *command, "--port", str(port)]),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**child_environment(OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1"), **variables},
                start_new_session=True,
            )

    def wait_ready(self, path: str, deadline: float) -> None:
        """Return when it answers there; raises LaunchFailed."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}{path}", timeout=2, trust_env=False).status_code == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self._log.read_text(errors="replace")[-3000:]
                raise LaunchFailed(f"{self._log.stem} did not start; its log ends with:\n{text}")
            time.sleep(0.5)

    def signal_all(self, number: signal.Signals) -> None:
        """To it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, deadline: float) -> None:
        """Wait until it has ended, and end all that is left by then, or at `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.signal_all(signal.SIGKILL)
        self.process.wait()
