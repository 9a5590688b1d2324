# SPDX-License-Identifier: Apache-2.0
"""Two vLLM workers without vLLM, each in a process that can be frozen and killed, whose steps a test tells by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Worker", "free_port", "ticket", "until"]

# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_S = 30.0


class Worker:
    """One vllm_worker.py process. What its steps report is added up in `sent`, `received`, `failed`, `tokens`; `held`
    by the names of loads.
    """

    def __init__(
        self,
        role: str,
        extra: dict[str, Any],
        *,
        blocks: int = 40,
        groups: int = 1,
        tensors: int = 3,
        token: str = "a" * 32,
        facts: dict[str, str] | None = None,
    ) -> None:
        config = {
            "role": role,
            "extra": extra,
            "blocks": blocks,
            "groups": groups,
            "tensors": tensors,
            "token": token,
            "facts": facts or {},
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("vllm_worker.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._status = Path(extra["status_file"])
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self._ready = False

    def do(self, **command: Any) -> Any:
        """Give a command, and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self._ready:
            assert self.process.stdout.readline(), "the worker did not start"
            self._ready = True
        self.process.stdin.write(json.dumps(command) + "\n")
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def step(self, **facts: Any) -> None:
        """One step of vLLM's loop."""
        self._hear(self.do(do="step", facts=facts))

    def begin(self, **facts: Any) -> None:
        """A step whose forward pass is told layer by layer, up to `end`."""
        self.do(do="begin", facts=facts)

    def layer(self, tensor: int, values: Sequence[tuple[int, float]], group: int = 0) -> None:
        """It computes the layer of this group in this tensor: (block, value) of each."""
        self.do(do="layer", group=group, tensor=tensor, values=list(values))

    def end(self) -> None:
        """The forward pass is done."""
        self._hear(self.do(do="end"))

    def tensors(self, block: int) -> list[float]:
        """What stands in a block, tensor by tensor."""
        found: list[float] = self.do(do="tensors", block=block)
        return found

    def _hear(self, told: dict[str, Any]) -> None:
        self.sent += told["sent"]
        self.received += told["received"]
        self.failed |= set(told["failed"])
        self.tokens |= told["tokens"]
        self.held |= told["held"]
        for name in told["quiet"]:
            del self.held[name]

    def steps_until(self, done: Callable[[Worker], bool], patience_s: float = PATIENCE_S) -> float:
        """Empty steps until `done`; returns how long that took."""
        begun = time.monotonic()
        while not done(self):
            assert time.monotonic() - begun < patience_s, (
                self.sent,
                self.received,
                self.failed,
                self.gauges(),
            )
            self.step()
            time.sleep(0.002)
        return time.monotonic() - begun

    def load(
        self,
        request: str,
        ticket: str,
        port: int,
        end: int,
        pages: Sequence[int],
        start: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """The facts of a load, for `step(loads=[…])`."""
        return {
            "request": request,
            "ticket": ticket,
            "peer": ("127.0.0.1", port),
            "rest": (start, end, list(pages)),
            "more": more,
        }

    def look(self, blocks: Sequence[int]) -> list[float | None]:
        """What was written into these blocks, all tensors."""
        found: list[float | None] = self.do(do="look", blocks=list(blocks))
        return found

    def links(self) -> dict[str, str]:
        """The state of each link of a CE as a front sees it, by the peer's address ("" when it is not there)."""
        if not self._status.exists():
            return {}
        return {link["address"]: link["state"] for link in json.loads(self._status.read_text())["links"]}

    def gauges(self) -> dict[str, int]:
        found: dict[str, int] = self.do(do="gauges")
        return found

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, also when it is frozen or dead."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def until(done: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for `done`."""
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ticket() -> str:
    """A new ticket."""
    return os.urandom(16).hex()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
