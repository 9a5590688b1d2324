# SPDX-License-Identifier: Apache-2.0
"""One end of a link with a pool of pages, in this process or (run as a script) in another one, told by JSON lines."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from kit.native_events import NativeEvents
from kit.remote import serve
from kvrail.transfer import ucx
from kvrail.transfer.stream_socket import dial_stream, listen_stream
from kvrail.transfer.ucx import EventKind

PUT, SHM, STREAM = 0, 1, 2  # the pool ids under which the other end's pages are imported
SECRET = bytes(range(32))


class Peer(NativeEvents):
    """A link, its reactor, and `pages` pages of `page_bytes` in a sealed memfd, registered with UCX.

    `reads`: of lane stream it is the reading end, else the writing one.
    """

    def __init__(
        self,
        transport: ucx.PutTransport,
        *,
        pages: int = 64,
        page_bytes: int = 4096,
        cookie: int = 0x1234_5678_9ABC_DEF0,
        spin_us: int = 0,
        copy_threads: int = 1,
        rails: int = 1,
        reads: bool = False,
        overrides: dict[str, str] | None = None,
    ) -> None:
        self.page_bytes, self._rails = page_bytes, rails
        self.context = ucx.open_context(transport, "127.0.0.1", overrides=overrides)
        self.reactor = ucx.open_reactor(self.context, spin_us=spin_us, copy_threads=copy_threads)
        self.fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.fd, pages * page_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(self.fd, pages * page_bytes)
        self.data = np.frombuffer(self.memory, dtype=np.uint64).reshape(pages, page_bytes // 8)
        self.base: int = self.data.ctypes.data
        self.region = self.context.register(self.base, self.data.nbytes)
        self.link = self.reactor.open_link(epoch=1, cookie=cookie)
        self.listening = listen_stream("127.0.0.1") if reads else None
        self._stream = None if self.listening is None else self.listening.getsockname()
        super().__init__(self.reactor)

    def card(self) -> dict[str, Any]:
        """What the other end needs."""
        return {
            "address": self.link.address().hex(),
            "base": self.base,
            "nbytes": self.data.nbytes,
            "page_bytes": self.page_bytes,
            "key": self.region.packed_key().hex(),
            "memfd": f"/proc/{os.getpid()}/fd/{self.fd}",
            "stream": self._stream,
        }

    def join(self, card: dict[str, Any]) -> None:
        """Connect to the other end, and import its pages for both lanes."""
        self.link.connect(bytes.fromhex(card["address"]))
        self.link.open_rails(self._rails)
        size = {"nbytes": card["nbytes"], "unit_bytes": card["page_bytes"]}
        self.link.import_put(PUT, base=card["base"], key=bytes.fromhex(card["key"]), **size)
        self._theirs = card
        self._import_shm(SHM)
        if self.listening is not None:
            self.read_stream()
        elif card["stream"]:
            self.link.write_stream(dial_stream(*card["stream"]).detach(), secret=SECRET)
            self.link.import_stream(STREAM, **size)
        self.link.settle_stream(True)
        nothing = np.zeros(1, dtype=np.uint32)
        for number in range(1, self._rails):
            # It takes part in pushes once it has carried something alone.
            writer = self.link.writer(-number % (1 << 64), ttl_s=30.0)
            writer.push(PUT, self.base, nothing, nothing, rail=number)
            self.take(EventKind.PROGRESS)

    def read_stream(self) -> None:
        assert self.listening is not None
        pools = [(STREAM, self.base, self.data.nbytes, self.page_bytes)]
        self.link.read_stream(self.listening.detach(), secret=SECRET, pools=pools)

    def import_both(self, pool: int) -> None:
        """Import the other end's pages as `pool`, which they are for puts already, for lane shm as well."""
        self._import_shm(pool)

    def _import_shm(self, pool: int) -> None:
        card = self._theirs
        fd = os.open(card["memfd"], os.O_RDWR | os.O_CLOEXEC)
        try:
            self.link.import_shm(pool, fd=fd, offset=0, nbytes=card["nbytes"], unit_bytes=card["page_bytes"])
        finally:
            os.close(fd)

    def close(self) -> None:
        """Everything, in the order that the layers ask for."""
        self.link.close()
        if self.listening is not None:
            self.listening.close()
        self.region.close()
        self.reactor.close()
        self.context.close()
        super().close()
        os.close(self.fd)


class Server:
    """The commands that the other process gives to its Peer. Each returns something that JSON can carry."""

    def __init__(self) -> None:
        self.peer: Peer

    def open(self, **arguments: Any) -> dict[str, Any]:
        self.peer = Peer(**arguments)
        return self.peer.card()

    def card(self) -> dict[str, Any]:
        return self.peer.card()

    def join(self, card: dict[str, Any]) -> None:
        self.peer.join(card)

    def send(self, messages: list[str]) -> None:
        for message in messages:
            self.peer.link.send(bytes.fromhex(message))

    def messages(self, count: int) -> list[str]:
        return [message.hex() for message in self.peer.messages(count)]

    def words(self) -> list[int]:
        """First word of each page."""
        return self.peer.data[:, 0].tolist()

    def checksums(self) -> list[int]:
        pages = np.arange(len(self.peer.data), dtype=np.uint32)
        return ucx.checksum_pages(self.peer.base, self.peer.page_bytes, pages).tolist()

    def acknowledge(self, rounds: int, pages: list[int], each: int) -> int:
        """Answer each doorbell (8 bytes: the round); count the rounds whose pages were not there yet."""
        wrong = 0
        for expected in range(1, rounds + 1):
            (bell,) = self.peer.messages()
            number = int.from_bytes(bell, "little")
            assert number == expected
            last = self.peer.data[pages[(number - 1) % len(pages)] :][:each, -1]
            wrong += int(not (last == number).all())
            self.peer.link.send(bell)
        return wrong

    def push(self, lane: int, pages: list[int], key: int, times: int) -> None:
        """Write those pages over and over."""
        self.writer = self.peer.link.writer(key, ttl_s=60.0)
        indices = np.array(pages, dtype=np.uint32)
        for _ in range(times):
            self.writer.push(lane, self.peer.base, indices, indices)

    def fill(self, word: int) -> None:
        self.peer.data[:] = word

    def fence(self) -> None:
        self.peer.link.fence()
        self.peer.take(EventKind.FENCED)

    def kinds(self) -> list[int]:
        self.peer.poll()
        return [event[0] for event in self.peer.events]

    def listening(self) -> list[str]:
        """Local addresses (hex, as /proc shows them) of this process's listening TCP sockets."""
        inodes = set()
        for fd in Path("/proc/self/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                continue
        found = []
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].split(":")[0])
        return found

    def stats(self) -> dict[str, int]:
        return self.peer.reactor.stats()

    def close(self) -> None:
        self.peer.close()


if __name__ == "__main__":
    serve(Server())
