# SPDX-License-Identifier: Apache-2.0
"""Ranks without a model, for tests: the transfer layer alone, each in a process that can be frozen and killed."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["LAYOUT", "PAGES", "PATIENCE_S", "Event", "Rank", "Start", "connect", "starting"]

LAYOUT = {"model_id": "m", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "page_tokens": 64}
PAGES = 32
# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_S = 30.0

Event = dict[str, Any]
Start = Callable[..., "Rank"]


class Rank:
    """One link_peer.py process."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("link_peer.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.Queue[Event] = queue.Queue()
        self._pending: list[Event] = []
        self._commands = 0
        threading.Thread(target=self._read, daemon=True).start()

    @functools.cached_property
    def key(self) -> list[Any]:
        """[incarnation, rank]. Waits until the process is ready: two that are started together load together."""
        return list(self.wait("Ready")["key"])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def _next(self, matches: Callable[[Event], bool], what: str, patience_s: float) -> Event:
        for at, event in enumerate(self._pending):
            if matches(event):
                return self._pending.pop(at)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                event = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no {what} within {patience_s} s; came instead: {self._pending}"
                ) from None
            if matches(event):
                return event
            self._pending.append(event)

    def wait(self, name: str, patience_s: float = PATIENCE_S, **fields: object) -> Event:
        """The next event `name` with these fields; others stay for later."""
        wanted = fields | {"event": name}
        return self._next(lambda event: wanted.items() <= event.items(), f"{wanted}", patience_s)

    def expect_none(self, name: str, seconds: float) -> None:
        with pytest.raises(AssertionError, match="within"):
            self.wait(name, seconds)

    def ask(self, do: str, **fields: object) -> Any:
        assert self.process.stdin is not None
        self._commands += 1
        number = self._commands
        self.process.stdin.write(json.dumps({"id": number, "do": do, **fields}) + "\n")
        answer = self._next(lambda event: event.get("answer") == number, f"answer to {do}", PATIENCE_S)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """start(accept, token=…, layout=…, ucx=…, cuda=…, …, **options) → Rank. All are killed at the end.

    `cuda`: ordinal of the GPU that holds the pages (None: host memory), or, `pinned`, that copies host pages. `mps`:
    what it says of MPS.
    """
    ranks: list[Rank] = []

    def make(
        accept: bool,
        *,
        token: str = "00" * 32,
        layout: dict[str, Any] = LAYOUT,
        ucx: dict[str, str] | None = None,
        cuda: int | None = None,
        pinned: bool = False,
        mps: str = "",
        pages: int = PAGES,
        **options: object,
    ) -> Rank:
        config = {
            "accept": accept,
            "pages": pages,
            "layout": layout,
            "options": {"socket_dir": str(folder), "heartbeat_s": 0.1} | options,
            "token": token,
            "ucx": ucx or {},
            "rank": len(ranks),
            "cuda": cuda,
            "pinned": pinned,
            "mps": mps,
        }
        ranks.append(Rank(config))
        return ranks[-1]

    try:
        yield make
    finally:
        for rank in ranks:
            rank.kill()
            for pipe in (rank.process.stdin, rank.process.stdout):
                assert pipe is not None
                pipe.close()


def connect(pe: Rank, ce: Rank, *, unix: bool = True) -> tuple[Event, Event]:
    """(the CE's LinkUp, the PE's)."""
    peer = pe.ask("address")
    if not unix:
        peer[-1] = ""
    ce.ask("connect", peer=peer)
    return ce.wait("LinkUp", key=pe.key), pe.wait("LinkUp", key=ce.key)
