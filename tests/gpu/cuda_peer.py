# SPDX-License-Identifier: Apache-2.0
"""One end of a link with a pool in GPU memory and a pinned host pool, here or (run as a script) in another process."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kit.native_events import NativeEvents
from kit.remote import serve
from kvrail.transfer import ucx
from kvrail.transfer.cuda import open_device
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.memory import HostPool
from kvrail.transfer.ucx import EventKind

POOL = 0
Words = npt.NDArray[np.uint64]


def content(seed: int, pages: int, page_bytes: int) -> Words:
    """What a pool is filled with: uint64 [pages, page_bytes / 8]."""
    return np.random.default_rng(seed).integers(0, 2**64, (pages, page_bytes // 8), dtype=np.uint64)


class CudaPeer(NativeEvents):
    """A link, its reactor, `pages` pages of `page_bytes` on that GPU, and as many in pinned host memory."""

    def __init__(
        self,
        device: int,
        cache: str,
        *,
        pages: int = 64,
        page_bytes: int = 65536,
        host_pages: int = 1,
        spin_us: int = 0,
    ) -> None:
        self.cuda = open_device(device, Path(cache))
        self.context = ucx.open_context("auto", "127.0.0.1", cuda=True)
        self.pool = DevicePool(self.context, self.cuda, units=pages, unit_bytes=page_bytes)
        self.host = HostPool(
            self.context, units=host_pages, unit_bytes=page_bytes, name="host", pin=self.cuda
        )
        self.reactor = ucx.open_reactor(self.context, spin_us=spin_us, copy_threads=1, cuda=self.cuda)
        super().__init__(self.reactor)
        self.link = self.reactor.open_link(epoch=1, cookie=0x1234)
        self._fenced = False

    def fill(self, seed: int) -> Words:
        words = content(seed, self.pool.units, self.pool.unit_bytes)
        self.pool.write(0, words.tobytes())
        return words

    def poison(self) -> None:
        self.pool.write(0, b"\xff" * self.pool.nbytes)

    def words(self) -> Words:
        return np.frombuffer(self.pool.read(0, self.pool.nbytes), np.uint64).reshape(self.pool.units, -1)

    def card(self) -> dict[str, Any]:
        """What the other end needs."""
        return {
            "address": self.link.address().hex(),
            "base": self.pool.address,
            "nbytes": self.pool.nbytes,
            "page_bytes": self.pool.unit_bytes,
            "key": self.pool.packed_key().hex(),
            "handle": self.pool.ipc_handle().hex(),
        }

    def join(self, card: dict[str, Any], put: bool = True) -> None:
        """Connect to the other end, and import its pages by all ways."""
        self.link.connect(bytes.fromhex(card["address"]))
        size = {"nbytes": card["nbytes"], "unit_bytes": card["page_bytes"]}
        if put:
            self.link.import_put(POOL, base=card["base"], key=bytes.fromhex(card["key"]), **size)
        self.link.import_peer(POOL, handle=bytes.fromhex(card["handle"]), offset=0, **size)

    def fence(self) -> None:
        """End the link; nothing of the other end is mapped any more."""
        if not self._fenced:
            self.link.fence()
            self.take(EventKind.FENCED)
        self._fenced = True

    def close(self) -> None:
        """Everything, in the order that the layers ask for."""
        self.link.close()
        self.pool.close()
        self.host.close()
        self.reactor.close()
        self.context.close()
        super().close()


class Server:
    """The commands that the other process gives to its CudaPeer."""

    def __init__(self) -> None:
        self.peer: CudaPeer

    def open(self, **arguments: Any) -> dict[str, Any]:
        self.peer = CudaPeer(**arguments)
        self.peer.poison()
        return self.peer.card()

    def card(self) -> dict[str, Any]:
        return self.peer.card()

    def join(self, card: dict[str, Any], put: bool = True) -> list[str]:
        self.peer.join(card, put)
        return self.peer.link.transports()

    def poison(self) -> None:
        self.peer.poison()

    def fill(self, seed: int) -> None:
        self.peer.fill(seed)

    def fence(self) -> None:
        self.peer.fence()

    def messages(self, count: int) -> list[str]:
        return [message.hex() for message in self.peer.messages(count)]

    def wrong_words(
        self,
        seed: int,
        source: list[int],
        target: list[int],
        pages: int,
        words: tuple[int, int] | None = None,
    ) -> int:
        """How many 64-bit words of the pool differ from: poison, but for the pages, or `words` of them, pushed."""
        want = np.full((self.peer.pool.units, self.peer.pool.unit_bytes // 8), 2**64 - 1, np.uint64)
        if source:
            some = slice(*(words or (0, None)))
            want[target, some] = content(seed, pages, self.peer.pool.unit_bytes)[source, some]
        return int((self.peer.words() != want).sum())

    def bells(self, count: int) -> list[int]:
        """When each of so many messages was seen by a Python thread that does nothing but look, time.monotonic_ns()."""
        seen: list[int] = []
        while len(seen) < count:
            for event in self.peer.reactor.drain():
                if event[0] == EventKind.MESSAGE:
                    seen.append(time.monotonic_ns())
                    self.peer.link.send(b"seen")
        return seen

    def push(self, key: int, times: int, way: str) -> None:
        """Write all pages, over and over."""
        self.writer = self.peer.link.writer(key, ttl_s=60.0)
        units = np.arange(self.peer.pool.units, dtype=np.uint32)
        for _ in range(times):
            self.writer.push(POOL, self.peer.pool.address, units, units[::-1].copy(), way=way)  # type: ignore[arg-type]

    def break_gpu(self) -> None:
        """An error that no later call of this process recovers from."""
        import torch

        with contextlib.suppress(RuntimeError):
            numbers = torch.zeros(1, device="cuda:0")
            print(numbers[torch.tensor([1 << 20], device="cuda:0")], file=sys.stderr)

    def failures(self, keys: list[int]) -> list[str]:
        """Push with a broken GPU, stop, fence: what the writers' and the link's events say."""
        told = []
        for key in keys:
            writer = self.peer.link.writer(key, ttl_s=30.0)
            one = np.zeros(1, np.uint32)
            writer.push(POOL, self.peer.pool.address, one, one)
            writer.ring(b"never")
            event = self.peer.take(EventKind.FAILED)[0]
            told.append(f"{event[2]} {event[3]} {event[4].decode()}")
            writer.stop()
            told.append(f"quiet {self.peer.take(EventKind.QUIET)[0][3]}")
        self.peer.fence()
        return told

    def close(self) -> None:
        self.peer.close()


if __name__ == "__main__":
    serve(Server())
