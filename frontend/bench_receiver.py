# SPDX-License-Identifier: Apache-2.0
"""The receiving process of transfer-bench: open, take a batch, close, as JSON lines on a socket tell.

Of one host started by frontend/bench_peer.py, which gives it that socket; of no use alone. On another host it is rank 1
of frontend/bench_two_hosts.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvrail.frontend.bench_lines import Lines, OtherGone
from kvrail.frontend.bench_nixl import NixlReceiver, nixl_version
from kvrail.frontend.bench_rank import LinkWay, Memory, Pages, Way
from kvrail.frontend.bench_socket import SocketWay
from kvrail.transfer.errors import TransferError
from kvrail.transfer.interfaces import with_our_scope

__all__ = ["main", "obey"]

_UP_S = 20.0
_DIAL_S = 10.0


class _Receiver:
    """`host`: where this side listens."""

    def __init__(self, lines: Lines, host: str, folder: Path) -> None:
        self._tell = lines.tell
        self._host = host
        self._folder = folder
        self._memory: Pages | None = None
        self._ways: dict[str, Way] = {}

    def open(self, command: dict[str, Any]) -> dict[str, Any]:
        self._memory = memory = Memory(command["page_bytes"], command["pool_pages"], self._host)
        opened: dict[str, Any] = {}
        for lane, address in command["links"].items():
            token = bytes.fromhex(command["token"])
            way = LinkWay(memory, lane, self._folder, token, accept=False, spin_us=command["spin_us"])
            self._ways[lane] = way
            way.dial(address)
            # One after the other: the lane tests of several Links in one process would share the probe pool.
            deadline = time.monotonic() + _UP_S
            while not way.decided and time.monotonic() < deadline:
                way.turn(10)
            if way.info is not None:
                opened[lane] = {"transport": way.info.transport}
            else:
                opened[lane] = {"error": way.refusal or "no answer"}
        if command["socket"]:
            host, port = command["socket"]
            try:
                sock = socket.create_connection((with_our_scope(host, self._host), port), _DIAL_S)
            except OSError as error:
                opened["socket"] = {"error": f"cannot reach {host} port {port}: {error.strerror or error}"}
            else:
                sock.settimeout(None)
                self._ways["socket"] = SocketWay(memory.pool, sock)
                opened["socket"] = {"transport": "tcp"}
        if command["nixl"] and nixl_version() is None:
            opened["nixl"] = {"error": "not installed at the receiver"}
        elif command["nixl"]:
            nixl = NixlReceiver(memory.pool)
            self._ways["nixl"] = nixl
            opened["nixl"] = {"transport": "ucx", "peer": nixl.card}
        return {"ways": opened}

    def open_gpu(self, command: dict[str, Any]) -> dict[str, Any]:
        # Only this needs torch.
        from kvrail.frontend.bench_gpu_receiver import open_ways

        self._memory, self._ways, opened = open_ways(command)
        return {"ways": opened}

    def take(self, command: dict[str, Any]) -> dict[str, Any]:
        """Poison the targets, say that we wait, wait, and sum what came."""
        assert self._memory is not None
        target = np.array(command["target"], dtype=np.uint32)
        self._memory.poison(target)
        self._tell(ready=True)
        seen = self._ways[command["way"]].await_batch(command["number"], target)
        return {"seen": seen, "digest": self._memory.digest(target)}

    def loop(self, command: dict[str, Any]) -> dict[str, Any]:
        """One page after the other; as soon as one is seen, the sender is told to send the next."""
        assert self._memory is not None
        target = np.array(command["target"], dtype=np.uint32)
        self._memory.poison(target)
        way, seen = self._ways[command["way"]], []
        self._tell(ready=True)
        for place in range(len(target)):
            seen.append(way.await_batch(command["number"] + place, target[place : place + 1]))
            self._tell(next=True)
        return {"seen": seen, "digest": self._memory.digest(target)}

    def clock(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"now": time.monotonic_ns()}

    def poll(self, command: dict[str, Any]) -> dict[str, Any]:
        """Whether Python waits for this way without sleeping."""
        way: Any = self._ways[command["way"]]
        way.polling = command["polling"]
        return {}

    def close(self, command: dict[str, Any]) -> dict[str, Any]:
        for way in self._ways.values():
            way.close()
        self._ways.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return {}

    def leave(self, command: dict[str, Any]) -> dict[str, Any]:
        """The other process ends what joins it to this one, and so do we."""
        from kvrail.frontend.bench_gpu_nccl import leave_nccl

        leave_nccl()
        return {}


def obey(lines: Lines, host: str, *, far: bool) -> bool:
    """Do what comes on `lines`; listen on `host`. Returns whether the sender has said that this was the end.

    `far`: the sender is on another host, and what has to do with GPUs is not for it. Raises OtherGone.
    """
    with tempfile.TemporaryDirectory(prefix="kvrail-bench-") as name:  # mode 0700
        receiver = _Receiver(lines, host, Path(name))
        acts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": receiver.open,
            "take": receiver.take,
            "loop": receiver.loop,
            "clock": receiver.clock,
            "poll": receiver.poll,
            "close": receiver.close,
        }
        if not far:
            acts |= {"open_gpu": receiver.open_gpu, "leave": receiver.leave}
        with contextlib.ExitStack() as stack:
            stack.callback(receiver.close, {})
            while (command := lines.hear()) is not None:
                if command["do"] == "end":
                    return True
                try:
                    answer = acts[command["do"]](command)
                except Exception as error:
                    if not far and not isinstance(error, TransferError):
                        traceback.print_exc()
                    answer = {"error": f"{type(error).__name__}: {error}"}
                lines.tell(**answer)
    return False


def main() -> None:
    """Obey until the socket, whose descriptor is the first argument, ends."""
    # Libraries print what they like to stdout, which is the table's.
    os.dup2(2, 1)
    lines = Lines(socket.socket(fileno=int(sys.argv[1])), "the sending process")
    # It may end whenever it likes.
    with contextlib.closing(lines), contextlib.suppress(OtherGone):
        obey(lines, "127.0.0.1", far=False)


if __name__ == "__main__":
    main()
