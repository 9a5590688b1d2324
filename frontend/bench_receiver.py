# SPDX-License-Identifier: Apache-2.0
"""The receiving process of transfer-bench. JSON lines on stdin and stdout: open, take a batch, close.

Started by frontend/transfer_bench.py; of no use alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvrail.frontend.bench_nixl import NixlReceiver
from kvrail.frontend.bench_rank import LinkWay, Memory, SocketWay, Way
from kvrail.transfer.ucx import checksum_pages

__all__ = ["digest_of", "main"]

POISON = 0xA5
_UP_S = 20.0


def digest_of(memory: Memory, pages: np.ndarray[Any, np.dtype[np.uint32]]) -> str:
    """One value for the contents of these pages, in this order."""
    sums = checksum_pages(memory.pool.address, memory.pool.unit_bytes, pages)
    return hashlib.sha256(sums.tobytes()).hexdigest()


class _Receiver:
    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._memory: Memory | None = None
        self._ways: dict[str, Way] = {}

    def open(self, command: dict[str, Any]) -> dict[str, Any]:
        self._memory = memory = Memory(command["page_bytes"], command["pool_pages"])
        opened: dict[str, Any] = {}
        for lane, address in command["links"].items():
            way = LinkWay(memory, lane, Path(command["folder"]), accept=False, spin_us=command["spin_us"])
            self._ways[lane] = way
            way.dial(address)
            # One after the other: the lane tests of several Links in one process would share the probe pool.
            deadline = time.monotonic() + _UP_S
            while not way.decided and time.monotonic() < deadline:
                way.turn(10)
            if way.info is not None:
                opened[lane] = {"transport": way.info.transport, "memory": way.info.memory}
            else:
                opened[lane] = {"error": way.refusal or "no answer"}
        if command["socket_port"]:
            sock = socket.create_connection(("127.0.0.1", command["socket_port"]))
            self._ways["socket"] = SocketWay(memory, sock)
            opened["socket"] = {"transport": "tcp", "memory": "host"}
        if command["nixl"]:
            nixl = NixlReceiver(memory)
            self._ways["nixl"] = nixl
            opened["nixl"] = {"transport": "ucx", "memory": "host", "peer": nixl.card}
        return {"ways": opened, "backing": memory.pool.backing}

    def take(self, command: dict[str, Any]) -> dict[str, Any]:
        """Poison the targets, say that we wait, wait, and sum what came."""
        assert self._memory is not None
        target = np.array(command["target"], dtype=np.uint32)
        self._memory.rows[target] = POISON
        self._tell({"ready": True})
        seen = self._ways[command["way"]].await_batch(command["number"])
        return {"seen": seen, "digest": digest_of(self._memory, target)}

    def close(self, command: dict[str, Any]) -> dict[str, Any]:
        for way in self._ways.values():
            way.close()
        self._ways.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return {}


def main() -> None:
    """Serve commands until stdin ends."""
    # Libraries print what they like to stdout; the answers go where it was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    receiver = _Receiver(tell)
    acts = {"open": receiver.open, "take": receiver.take, "close": receiver.close}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            tell(acts[command["do"]](command))
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
            return


if __name__ == "__main__":
    main()
