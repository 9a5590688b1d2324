# SPDX-License-Identifier: Apache-2.0
"""Real `runtime launch` processes for tests: started, asked, killed, frozen, and never left behind.

When a wait runs out, every process of the server prints the stacks of its threads (SIGUSR1) and the end of its log
goes into the failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from kvrail.runtime.bound import bound_command

__all__ = ["Server", "free_port", "serving", "wait_until"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(holds: Callable[[], bool], within_s: float, what: str, *servers: Server) -> None:
    """Return as soon as `holds()`; fail with every server's stacks and log otherwise."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if holds():
                return
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s} s: {what}\n" + "\n".join(s.post_mortem() for s in servers))


class Server:
    """One role: the front process and its ranks, in a session of their own. However the test run ends, it does, too."""

    def __init__(
        self,
        role: str,
        model: Path,
        folder: Path,
        *flags: str,
        port: int | None = None,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """`inside`: words before the command, that run it elsewhere (in a network namespace)."""
        self.role = role
        self.port = port or free_port()
        self.url = f"http://{host}:{self.port}"
        # One for all: making a client costs more than asking. No proxy may come between, nothing is kept alive.
        self.http = httpx.Client(
            base_url=self.url, timeout=10, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.log = folder / f"{role}-{self.port}-{time.monotonic_ns()}.log"
        command = [
            *inside,
            sys.executable,
            "-P",
            "-m",
            "kvrail.frontend.cli",
            "launch",
            "--role",
            role,
            "--model",
            str(model),
        ]
        if role == "pe" and "--hicache-size-gb" not in flags and "vllm" not in flags:
            # Tests start many: a cache of the usual size would be their largest part.
            command += ["--hicache-size-gb", "0.06"]
        if role == "ce" and "--verify-kv" not in flags and "vllm" not in flags:
            command += ["--verify-kv", "1"]
        command += ["--host", host, "--port", str(self.port), "--runtime-dir", str(folder / "run"), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                bound_command(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self, within_s: float = 90) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, (
                f"{self.role} ended with {self.process.returncode}\n{self.tail()}"
            )
            return self.http.get("/ready").status_code == 200

        wait_until(ready, within_s, f"{self.role} is ready", self)
        return self

    def pids(self) -> list[int]:
        """The front and its ranks."""
        try:
            front = psutil.Process(self.process.pid)
            return [front.pid, *(child.pid for child in front.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[int]:
        return self.pids()[1:]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all label sets that contain `labels`; 0 when absent."""
        text = self.http.get("/metrics").text
        total = 0.0
        for found, value in re.findall(rf"^{name}(?:\{{(.*?)\}})? (\S+)$", text, re.MULTILINE):
            has = dict(re.findall(r'(\w+)="(.*?)"', found))
            if labels.items() <= has.items():
                total += float(value)
        return total

    def signal_all(self, which: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def kill(self) -> None:
        """kill -9 of every process, the front first, as when a machine's OOM killer goes wild."""
        self.signal_all(signal.SIGKILL)
        self.process.wait(10)

    def freeze(self) -> None:
        self.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_all(signal.SIGCONT)

    def stop(self, within_s: float = 10) -> float:
        """SIGTERM to the front; returns how long it took, and fails when any process outlives it."""
        pids, started = self.pids(), time.monotonic()
        self.process.terminate()
        self.process.wait(within_s)
        took = time.monotonic() - started
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        assert not left, f"{self.role} left processes {left} behind"
        return took

    def tail(self, count: int = 4000) -> str:
        return f"--- {self.log.name} ---\n{self.log.read_text(errors='replace')[-count:]}"

    def logged(self, text: str) -> bool:
        """Whether the log has it."""
        return text in self.log.read_text(errors="replace")

    def post_mortem(self) -> str:
        """The log's end, with a stack of every thread when the processes can still speak."""
        if self.process.poll() is None:
            self.thaw()
            self.signal_all(signal.SIGUSR1)
            time.sleep(0.5)
        return self.tail(12000)

    def ensure_dead(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.http.close()


@contextlib.contextmanager
def serving(*servers: Server) -> Iterator[None]:
    """Nothing outlives the block, whatever happens in it."""
    try:
        yield
    except BaseException:
        for server in servers:
            print(server.tail())
        raise
    finally:
        for server in servers:
            server.ensure_dead()
