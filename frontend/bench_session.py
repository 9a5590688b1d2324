# SPDX-License-Identifier: Apache-2.0
"""The sending side of transfer-bench: the receiving process, and both processes' pools of one page size."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvrail.frontend.bench_nixl import NixlSender, nixl_version
from kvrail.frontend.bench_rank import OPTIONS, LinkWay, Memory, SocketWay, Way
from kvrail.frontend.bench_receiver import POISON, digest_of
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import HostPool

__all__ = ["Receiver", "Session"]


class Receiver:
    """The other process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvrail.frontend.bench_receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._left = b""

    def tell(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def has_answer(self) -> bool:
        return b"\n" in self._left or bool(select.select([self._out], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """Sleeps until the next line comes."""
        while b"\n" not in self._left:
            data = os.read(self._out.fileno(), 1 << 20)
            if not data:
                raise TransferError("the receiving process has died")
            self._left += data
        line, _, self._left = self._left.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise TransferError(f"receiver: {found['error']}")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()


class Session:
    """Both processes with pools of one page size, and every way opened that can be."""

    def __init__(
        self,
        receiver: Receiver,
        ways: tuple[str, ...],
        page_bytes: int,
        pages: int,
        spin_us: int,
        folder: Path,
    ) -> None:
        self._receiver = receiver
        self.threads = "spin" if spin_us else "sleep"
        # Twice the batch, so that random pages are not simply all pages.
        pool_pages = max(2 * pages, 64)
        self._memory = memory = Memory(page_bytes, pool_pages)
        rng = np.random.default_rng(1)
        words = memory.rows.view(np.uint64)
        words[:] = rng.integers(0, 1 << 63, words.shape, dtype=np.uint64)
        self._ways: dict[str, Way] = {}
        self.facts: dict[str, dict[str, str]] = {}
        self.missing: dict[str, str] = {}
        links = {
            # Only the receiver spins: it waits for something that it cannot foresee.
            way: LinkWay(memory, way, folder, accept=True, spin_us=0)
            for way in ways
            if way in OPTIONS
        }
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = listener.getsockname()[1] if "socket" in ways else 0
            nixl = "nixl" in ways and nixl_version() is not None
            receiver.tell(
                do="open",
                page_bytes=page_bytes,
                pool_pages=pool_pages,
                spin_us=spin_us,
                folder=str(folder),
                links={lane: way.address for lane, way in links.items()},
                socket_port=port,
                nixl=nixl,
            )
            while not receiver.has_answer():
                for link in links.values():
                    link.turn(1)
            opened = receiver.answer()["ways"]
            if port:
                self._ways["socket"] = SocketWay(memory, listener.accept()[0])
        self._ways.update(links)
        if nixl:
            self._ways["nixl"] = NixlSender(memory, opened["nixl"].pop("peer"))
        for way, fact in opened.items():
            if "error" in fact:
                self.missing[way] = fact["error"]
            else:
                self.facts[way] = fact
        self._copy: HostPool | None = None
        if "memcpy" in ways:
            self._copy = HostPool(memory.context, units=pool_pages, unit_bytes=page_bytes, name="copy")
            self.facts["memcpy"] = {"transport": "memcpy", "memory": "host"}

    @property
    def backing(self) -> str:
        return self._memory.pool.backing

    def batch(self, way: str, number: int, pages: int, rng: np.random.Generator) -> tuple[float, bool]:
        """(µs, whether the contents arrived) of one batch."""
        units = self._memory.pool.units
        source = rng.permutation(units)[:pages].astype(np.uint32)
        target = rng.permutation(units)[:pages].astype(np.uint32)
        if way == "memcpy":
            return self._memcpy(source)
        sums = digest_of(self._memory, source)
        self._receiver.tell(do="take", way=way, number=number, target=target.tolist())
        self._receiver.answer()
        time.sleep(0.002)  # The receiver has fallen asleep by now.
        begun = time.monotonic_ns()
        self._ways[way].push(number, source, target)
        came = self._receiver.answer()
        self._ways[way].settle()
        return (came["seen"] - begun) / 1000, came["digest"] == sums

    def _memcpy(self, source: np.ndarray[Any, np.dtype[np.uint32]]) -> tuple[float, bool]:
        """Rows in random order, copied in C (numpy.take) into other memory of the same kind, in this process."""
        assert self._copy is not None
        assert self._copy.buffer is not None
        size = self._memory.pool.unit_bytes
        out = np.frombuffer(self._copy.buffer, np.uint8)[: len(source) * size].reshape(len(source), size)
        out[:] = POISON
        rows = self._memory.rows
        indices = source.astype(np.intp)
        begun = time.monotonic_ns()
        # "wrap": the default mode would go through a buffer.
        np.take(rows, indices, axis=0, out=out, mode="wrap")
        ended = time.monotonic_ns()
        return (ended - begun) / 1000, bool((out == rows[indices]).all())

    def close(self) -> None:
        self._receiver.tell(do="close")
        self._receiver.answer()
        for way in self._ways.values():
            way.close()
        if self._copy is not None:
            self._copy.close()
        self._memory.close()
