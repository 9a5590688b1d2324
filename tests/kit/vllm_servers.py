# SPDX-License-Identifier: Apache-2.0
"""Two plain `vllm serve` with the connector, and a router as small as one can be, both ways in which routers ask."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.vllm_pair import free_port, ticket
from kvrail.runtime.bound import bound_command
from kvrail.runtime.vllm.ports import free_ports

__all__ = ["Router", "VllmServer", "random_prompt", "small_pair", "text_of"]

_START_S = 300.0
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class VllmServer:
    """One vLLM server process (and its engine processes: all of a process group)."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str,
        extra: dict[str, Any],
        *,
        policy: str = "fail",
        more: Sequence[str] = (),
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.model, self.log = model, folder / f"{name}.log"
        role = "kv_producer" if name.startswith("pe") else "kv_consumer"
        transfer = {
            "kv_connector": "KvrailConnector",
            "kv_connector_module_path": "kvrail.runtime.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            # A crowded machine may be late with a heartbeat: a second, not a quarter.
            "kv_connector_extra_config": {"runtime_dir": str(folder / "run"), "heartbeat_s": 1.0, **extra},
        }
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [
            "--served-model-name",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            "float32",
        ]
        command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"]
        command += ["--max-num-batched-tokens", "256", "--kv-transfer-config", json.dumps(transfer), *more]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                bound_command(command), stdout=log, stderr=log, start_new_session=True
            )
        # Nothing is kept alive: a server that is busy may close a connection just as it is used again.
        self.http = httpx.Client(
            base_url=self.url, timeout=120.0, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.http.post("/tokenize", json={"model": "m", "prompt": text}).json()["tokens"]
        return found

    def complete(
        self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The whole answer; `error` (the HTTP status) in its place when there is none."""
        body: dict[str, Any] = {"model": "m", "prompt": list(prompt), "max_tokens": count, "temperature": 0}
        response = self.http.post(
            "/v1/completions", json=body | ({"kv_transfer_params": params} if params else {})
        )
        answer: dict[str, Any] = response.json()
        return answer if response.status_code == 200 else {"error": response.status_code}

    def begin_and_leave(self, prompt: Sequence[int], params: dict[str, Any], after_s: float) -> None:
        """A client that hangs up after a while."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": 20, "kv_transfer_params": params}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=after_s))

    def busy(self) -> dict[str, float]:
        """Of what should be nothing at idle, what is not."""
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        found: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            name, _, rest = line.partition("{")
            if name in names and float(rest.rsplit(" ", 1)[1]):
                found[name] = float(rest.rsplit(" ", 1)[1])
        return found

    def wait_idle(self, patience_s: float = 20.0) -> None:
        deadline = time.monotonic() + patience_s
        while busy := self.busy():
            assert time.monotonic() < deadline, busy
            time.sleep(0.2)

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()
        self.http.close()


class Router:
    """Asks a prefill and a completion engine for one answer."""

    def __init__(self, pe: VllmServer, ce: VllmServer, kv_port: int) -> None:
        self.pe, self.ce, self.kv_port = pe, ce, kv_port

    def one_after_the_other(self, prompt: Sequence[int], count: int) -> str:
        """As routers do that know no tickets: the prefill engine's parameters go to the completion engine."""
        first = self.pe.complete(prompt, 1, _PREFILL)
        return text_of(self.ce.complete(prompt, count, first["kv_transfer_params"]))

    def at_once(self, prompt: Sequence[int], count: int) -> str:
        """Both under one ticket; the first token is the prefill engine's."""
        first, rest = self.legs(prompt, count)
        return text_of(first) + text_of(rest)

    def legs(self, prompt: Sequence[int], count: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each of the two answers."""
        name = ticket()
        answers: list[dict[str, Any]] = []

        def prefill() -> None:
            try:
                answers.append(self.pe.complete(prompt, 1, self.out(name)))
            except httpx.HTTPError as error:
                answers.append({"error": repr(error)})

        thread = threading.Thread(target=prefill)
        thread.start()
        rest = self.ce.complete([*prompt, 1], count - 1, self.into(name))
        thread.join()
        return answers[0], rest

    def out(self, name: str) -> dict[str, Any]:
        """Parameters for the prefill engine."""
        return {**_PREFILL, "ticket": name}

    def into(self, name: str) -> dict[str, Any]:
        """Parameters for the completion engine."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "ticket": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.kv_port,
            "first_token": "handoff",
        }

    @property
    def ways(self) -> dict[str, Callable[[Sequence[int], int], str]]:
        return {"one after the other": self.one_after_the_other, "at once": self.at_once}


@contextlib.contextmanager
def small_pair(
    model: Path, folder: Path, more: Sequence[str] = (), pe_extra: dict[str, Any] | None = None
) -> Iterator[Router]:
    """A pair for a tiny model, with little memory for KV."""
    more = ["--kv-cache-memory-bytes", str(64 << 20), *more]
    port = free_ports("127.0.0.1", None, 2)
    with pytest.MonkeyPatch.context() as environment:
        # vLLM would prefer what it says.
        environment.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        pe = VllmServer(model, folder, "pe", {"kv_port": port, **(pe_extra or {})}, more=more)
        ce = VllmServer(model, folder, "ce", {"peers": [f"127.0.0.1:{port}"]}, more=more)
    try:
        for server in (pe, ce):
            server.wait_ready()
        yield Router(pe, ce, port)
    finally:
        for server in (pe, ce):
            server.stop()


def text_of(answer: dict[str, Any]) -> str:
    """Its text; what it says instead when there is none, so that a comparison shows it."""
    return str(answer["choices"][0]["text"]) if "choices" in answer else str(answer)


def random_prompt(vocabulary: Sequence[int], length: int, seed: int) -> list[int]:
    """`length` tokens that no other prompt begins with."""
    chosen = random.Random(seed)
    return [vocabulary[0], *(chosen.choice(vocabulary) for _ in range(length - 1))]
