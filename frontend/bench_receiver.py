# SPDX-License-Identifier: Apache-2.0
"""The receiving process of transfer-bench. JSON lines on stdin and stdout: open, take a batch, close.

Started by frontend/bench_session.py, which gives it a pipe to pace the sender with; of no use alone.
"""

from __future__ import annotations

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
from kvrail.frontend.bench_rank import LinkWay, Memory, Pages, Way
from kvrail.frontend.bench_socket import SocketWay

__all__ = ["main"]

_UP_S = 20.0


class _Receiver:
    def __init__(self, tell: Callable[[dict[str, Any]], None], pace: int) -> None:
        self._tell = tell
        self._pace = pace
        self._memory: Pages | None = None
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
                opened[lane] = {"transport": way.info.transport}
            else:
                opened[lane] = {"error": way.refusal or "no answer"}
        if command["socket_port"]:
            sock = socket.create_connection(("127.0.0.1", command["socket_port"]))
            self._ways["socket"] = SocketWay(memory.pool, sock)
            opened["socket"] = {"transport": "tcp"}
        if command["nixl"]:
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
        self._tell({"ready": True})
        seen = self._ways[command["way"]].await_batch(command["number"], target)
        return {"seen": seen, "digest": self._memory.digest(target)}

    def loop(self, command: dict[str, Any]) -> dict[str, Any]:
        """One page after the other; as soon as one is seen, the sender is told to send the next."""
        assert self._memory is not None
        target = np.array(command["target"], dtype=np.uint32)
        self._memory.poison(target)
        way, seen = self._ways[command["way"]], []
        self._tell({"ready": True})
        for place in range(len(target)):
            seen.append(way.await_batch(command["number"] + place, target[place : place + 1]))
            os.write(self._pace, b"n")
        return {"seen": seen, "digest": self._memory.digest(target)}

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


def main() -> None:
    """Serve commands until stdin ends."""
    # Libraries print what they like to stdout; the answers go where it was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    receiver = _Receiver(tell, int(sys.argv[1]))
    acts = {
        "open": receiver.open,
        "open_gpu": receiver.open_gpu,
        "take": receiver.take,
        "loop": receiver.loop,
        "poll": receiver.poll,
        "close": receiver.close,
        "leave": receiver.leave,
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            tell(acts[command["do"]](command))
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
