# SPDX-License-Identifier: Apache-2.0
"""Pairs of link ends: two in this process, or one here and one in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

_PEER = Path(__file__).with_name("peer.py")
_spec = importlib.util.spec_from_file_location("loopback_peer", _PEER)
assert _spec is not None
assert _spec.loader is not None
peer_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer_module)


class Remote:
    """A Peer in another process. Every method of peer.Server can be called here."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, command: str, **arguments: Any) -> None:
        """Give a command; result() waits for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the other process ended with status {self.process.wait(10)}"
        return json.loads(line)

    def do(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.result()

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL: also reaped, a zombie counts as alive to those who look for its process id."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Any]]:
    """make_pair(transport, **options) → (writer end, receiver end) in this process, joined."""
    with ExitStack() as stack:

        def make(transport: str, **options: Any) -> tuple[Any, Any]:
            ends = tuple(peer_module.Peer(transport, **options) for _ in range(2))
            for end in ends:
                stack.callback(end.close)
            ends[0].join(ends[1].card())
            ends[1].join(ends[0].card())
            return ends

        yield make


@pytest.fixture
def make_remote() -> Iterator[Callable[..., Any]]:
    """make_remote(transport, **options) → (end here, end in another process), joined."""
    with ExitStack() as stack:

        def make(transport: str, **options: Any) -> tuple[Any, Remote]:
            remote = Remote()
            stack.callback(remote.end)
            theirs = remote.do("open", transport=transport, **options)
            here = peer_module.Peer(transport, **options)
            stack.callback(here.close)
            here.join(theirs)
            remote.do("join", card=here.card())
            return here, remote

        yield make
