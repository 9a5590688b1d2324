# SPDX-License-Identifier: Apache-2.0
"""A role that a tool starts for itself by `runtime launch`, waits for, and stops: for the demo and for benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from kvrail.runtime.bound import bound_command
from kvrail.runtime.config import child_environment

__all__ = ["LaunchFailed", "Launched", "free_port", "undisturbed"]

_STOP_S = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_END = 3000


class LaunchFailed(Exception):
    """A role did not come up, or ended. The message has the end of its log."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would end this process come after the block: no role is lost between its start and its entry in a
    list, and a second ctrl-C does not leave behind those that were still to be stopped. Main thread only.
    """
    came: list[int] = []
    # A handler, and not SIG_IGN or a mask: children inherit those.
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])


def free_port(wanted: int = 0) -> int:
    """`wanted` when nothing listens there, else any free port of loopback. Raises LaunchFailed."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise LaunchFailed("no free port on loopback")


class Launched:
    """One `runtime launch`: a process in a session of its own, whose log goes to a file in `logs`.

    It ends when this process is killed, unless it `stays`. To be made in the main thread.
    """

    def __init__(self, role: str, port: int, logs: Path, *flags: str, stays: bool = False) -> None:
        self.role, self.url, self.log = role, f"http://127.0.0.1:{port}", logs / f"{role}-{port}.log"
        command = [sys.executable, "-P", "-m", "kvrail.frontend.cli", "launch", "--role", role]
        command += ["--port", str(port), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command if stays else bound_command(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(OMP_NUM_THREADS="1"),
                start_new_session=True,
            )

    def ready(self) -> bool:
        """Whether /ready answers 200 now. Raises LaunchFailed when the process has ended."""
        if self.process.poll() is not None:
            raise self.failed(f"ended with status {self.process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=2, trust_env=False).status_code == 200
        return False

    def wait_ready(self, deadline: float) -> None:
        """Return when it is ready; raises LaunchFailed when it has ended, or at `deadline` (time.monotonic)."""
        while not self.ready():
            if time.monotonic() > deadline:
                raise self.failed(f"did not become ready in time ({self._reasons()})")
            time.sleep(0.2)

    def _reasons(self) -> str:
        """What the role itself says about why it is not ready."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=2, trust_env=False).text[:300]
        except httpx.HTTPError as error:
            return f"{self.url}/ready: {type(error).__name__}"

    def failed(self, what: str) -> LaunchFailed:
        """The error to raise, with the end of this role's log."""
        text = self.log.read_text(errors="replace")[-_LOG_END:]
        return LaunchFailed(f"the {self.role} {what}; its log, {self.log}, ends with:\n{text}")

    def ask_to_stop(self) -> None:
        """SIGTERM, which ends the whole role. Does not wait: several may end at the same time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM; SIGKILL to what ignored it. Returns when it has ended."""
        self.ask_to_stop()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
