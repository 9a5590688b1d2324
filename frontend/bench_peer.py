# SPDX-License-Identifier: Apache-2.0
"""The receiving process of transfer-bench as the sending one sees it: beside it on this host, or on another one.

Two hosts have two clocks. They are compared before each batch, by the shortest of some round trips: then a time between
them is right to within half of that trip, and wrong by as much as its two ways differ.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from typing import Any

from kvrail.frontend.bench_lines import Lines, OtherGone
from kvrail.transfer.errors import TransferError

__all__ = ["FarReceiver", "LocalReceiver", "Receiver"]

_TRIPS, _TRIPS_S = 8, 0.03
_LEAVE_S = 10


class Receiver:
    """The other process. `host`: where it finds ours. `far`: it is on another host, or is treated as if."""

    far = False
    # How far a time between the two may be wrong, µs.
    clock_us = 0.0

    def __init__(self, lines: Lines, host: str) -> None:
        self.host = host
        # With which both ends of a link know each other. It is told to the receiver, so it keeps out strangers only.
        self.token = secrets.token_bytes(32)
        self._lines = lines

    def tell(self, **command: object) -> None:
        """Raises OtherGone."""
        self._lines.tell(**command)

    def has_answer(self) -> bool:
        return self._lines.waiting()

    def answer(self) -> dict[str, Any]:
        """Sleeps until the next line comes. Raises TransferError when the receiver tells of one, or OtherGone."""
        try:
            found = self._lines.hear()
        except ValueError as error:
            raise OtherGone(f"{self._lines.other} says what cannot be understood: {error}") from None
        if found is None:
            raise OtherGone(f"{self._lines.other} has ended")
        if "error" in found:
            raise TransferError(f"receiver: {found['error']}")
        return found

    def compare_clocks(self) -> None:
        """What `ours` needs to know, outside of the measured time."""

    def ours(self, theirs_ns: int) -> int:
        """A time of the receiver's time.monotonic_ns() by our clock."""
        return theirs_ns

    def say_all_is_measured(self) -> None:
        """Before `close`, if nothing went wrong: somebody is looking at it."""

    def close(self) -> None:
        """It ends."""
        self._lines.close()


class LocalReceiver(Receiver):
    """A process of its own on this host. `environment`: of that process (None: ours)."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvrail.frontend.bench_receiver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                # Ctrl-C is for us; the receiver ends when its commands do.
                process_group=0,
            )
        super().__init__(Lines(ours, "the receiving process"), "127.0.0.1")

    def close(self) -> None:
        super().close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class FarReceiver(Receiver):
    """The process at the other end of a meeting."""

    far = True

    def __init__(self, lines: Lines, host: str) -> None:
        super().__init__(lines, host)
        self._ahead_ns = 0

    def compare_clocks(self) -> None:
        best = None
        until = time.monotonic() + _TRIPS_S
        for turn in range(_TRIPS):
            if turn >= 2 and time.monotonic() > until:
                break
            begun = time.monotonic_ns()
            self.tell(do="clock")
            theirs = int(self.answer()["now"])
            ended = time.monotonic_ns()
            if best is None or ended - begun < best:
                best, self._ahead_ns = ended - begun, theirs - (begun + ended) // 2
        assert best is not None
        self.clock_us = best / 2000

    def ours(self, theirs_ns: int) -> int:
        return theirs_ns - self._ahead_ns

    def say_all_is_measured(self) -> None:
        self.tell(do="end")
