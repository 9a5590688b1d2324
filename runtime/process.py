# SPDX-License-Identifier: Apache-2.0
"""Rank processes: started by the front, told their settings on stdin, gone whenever the front is gone.

Three nets keep a rank from outliving its front: a Shutdown message or SIGTERM (orderly stop, between two steps),
SIGKILL from the front's `stop`, and the kernel's parent-death signal (the front crashed or was killed).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from kvrail.runtime.config import LaunchConfig, rank_environment
from kvrail.runtime.errors import ConfigError

__all__ = ["RankProcesses", "RankSpec", "die_with_parent", "private_directory"]

_PR_SET_PDEATHSIG = 1
# Bytes that a Unix socket's path may have, and that "/link-<12 digits>-<rank>.sock" needs at most.
_LONGEST_SOCKET_PATH = 107
_LONGEST_NAME = 30


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank process is told at start. Never on a command line: it holds the cluster token."""

    config: LaunchConfig
    rank: int
    endpoint: str
    socket_dir: str
    token: bytes
    parent: int


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when `parent` dies; exit at once when that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("kvrail: the parent process died before this one had started")


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """What is started in here ignores SIGINT from its first instruction on: the front tells it when to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may say so; the rank says it again, once it has loaded its modules.
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class RankProcesses:
    """The rank processes of one role and the private folder of their sockets. A context manager."""

    def __init__(self, config: LaunchConfig, token: bytes) -> None:
        self._config = config
        self._token = token
        self.directory, self._lock = private_directory(config)
        self.endpoints = [f"ipc://{self.directory}/front{rank}.ipc" for rank in range(config.dp)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start every rank. Their `Ready` comes over ZeroMQ once the model is loaded."""
        for rank in range(self._config.dp):
            with _without_ctrl_c():
                process = subprocess.Popen(
                    # -P: the working directory must not shadow installed packages.
                    [sys.executable, "-P", "-m", "kvrail.runtime.rank"],
                    stdin=subprocess.PIPE,
                    env=rank_environment(),
                )
            self.processes.append(process)
            spec = RankSpec(
                config=self._config,
                rank=rank,
                endpoint=self.endpoints[rank],
                socket_dir=str(self.directory),
                token=self._token,
                parent=os.getpid(),
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec))
            process.stdin.close()

    def dead(self) -> list[tuple[int, int]]:
        """(rank, exit code) of each rank process that has ended."""
        return [(n, p.returncode) for n, p in enumerate(self.processes) if p.poll() is not None]

    def stop(self, grace_s: float = 1.5) -> None:
        """Let ranks end by themselves for a while, then kill them. Removes the socket folder.

        A rank in the middle of a long step hears of no signal before the step is over, and none is waited for: all
        of it is the kernel's to clean up.
        """
        for kill, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 1.0)):
            alive = [p for p in self.processes if p.poll() is None]
            for process in alive:
                process.send_signal(kill)
            deadline = time.monotonic() + wait_s
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def private_directory(config: LaunchConfig) -> tuple[Path, int]:
    """A fresh folder for this role under the runtime folder, both of mode 0700, and the fd that holds its lock.

    Clears the folders that nobody holds: their roles are dead. (Process numbers would not tell: a role in another
    container may share the runtime folder, and none of its numbers.)
    """
    base = config.resolved_runtime_dir()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
    except OSError as error:
        raise ConfigError(f"--runtime-dir {base} cannot be used: {error}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{base} must belong to this user with mode 0700: repair it, or give --runtime-dir")
    directory = base / f"{config.role}-{os.getpid()}-{secrets.token_hex(3)}.run"
    # Said now, and not when a model has been loaded.
    if len(os.fsencode(directory)) + _LONGEST_NAME > _LONGEST_SOCKET_PATH:
        raise ConfigError(f"{base} is too long for the paths of Unix sockets: give a shorter --runtime-dir")
    turn = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # One role at a time: no other may find our folder before it is locked.
        fcntl.flock(turn, fcntl.LOCK_EX)
        for old in base.glob("*.run"):
            if (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
        directory.mkdir(mode=0o700)
        held = _lock(directory)
    finally:
        os.close(turn)
    assert held is not None
    return directory, held


def _lock(directory: Path) -> int | None:
    """An fd that holds the lock of a role's folder until it is closed, or None when another process has it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None  # Gone in the meantime, or not ours.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
