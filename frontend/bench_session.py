# SPDX-License-Identifier: Apache-2.0
"""The sending side of transfer-bench: both processes' pools of one page size, and the batches between them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvrail.frontend.bench_lines import OtherGone
from kvrail.frontend.bench_nixl import NixlSender, nixl_version
from kvrail.frontend.bench_peer import Receiver
from kvrail.frontend.bench_rank import OPTIONS, POISON, Indices, LinkWay, Memory, Way
from kvrail.frontend.bench_socket import SocketWay
from kvrail.transfer.control_socket import listen_tcp
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import HostPool

__all__ = ["HostSession", "Session"]

# A receiver that waits for something has fallen asleep by then.
_PAUSE_S = 0.002
# For all links to come up. Beyond it nobody helps a receiver that is stuck, and its answer is only waited for.
_OPEN_S = 90.0


class Session:
    """Both processes with pools of one page size, and every way between them that can be opened.

    `facts`: of each open way its transport; `missing`: why the others are not open.
    """

    facts: dict[str, dict[str, str]]
    missing: dict[str, str]
    threads: str
    memory: str
    _receiver: Receiver
    _pages: Any  # the pages of this process, and their pool
    _ways: dict[str, Way]
    # The receiver is in a batch, and its last word about that is still to come.
    _in_batch = False

    @property
    def far(self) -> bool:
        """Whether the receiver is on another host."""
        return self._receiver.far

    @property
    def clock_us(self) -> float:
        """How far a time may be wrong because two hosts have two clocks."""
        return self._receiver.clock_us

    @property
    def backing(self) -> str:
        """What the sender's pool is made of."""
        return str(self._pages.pool.backing)

    def batch(self, way: str, number: int, pages: int, rng: np.random.Generator) -> tuple[float, bool]:
        """(µs, whether the contents arrived) of one batch."""
        source, target = self._draw(pages, rng)
        by_itself = self._by_itself(way, source, target)
        if by_itself is not None:
            return by_itself
        expected = self._expected(source)
        self._receiver.compare_clocks()
        self._in_batch = True
        try:
            came, begun = self._one_batch(way, number, source, target)
        except TransferError:
            self._in_batch = False
            raise
        self._in_batch = False
        self._ways[way].settle()
        return (self._receiver.ours(came["seen"]) - begun) / 1000, came["digest"] == expected

    def _one_batch(
        self, way: str, number: int, source: Indices, target: Indices
    ) -> tuple[dict[str, Any], int]:
        """(the receiver's last word, when the push began). TransferError: that word was, or is, no other one."""
        self._receiver.tell(do="take", way=way, number=number, target=target.tolist())
        self._receiver.answer()
        time.sleep(_PAUSE_S)
        begun = time.monotonic_ns()
        try:
            self._ways[way].push(number, source, target)
        except TransferError:
            # The receiver gives up by its own deadline; its answer must not be taken for that of the next batch.
            with contextlib.suppress(TransferError):
                self._receiver.answer()
            raise
        return self._receiver.answer(), begun

    def tight(self, way: str, number: int, count: int, rng: np.random.Generator) -> tuple[list[float], bool]:
        """µs of `count` single pages, each sent as soon as the receiver has seen the one before."""
        source, target = self._draw(count, rng)
        expected = self._expected(source)
        self._receiver.compare_clocks()
        self._in_batch = True
        self._receiver.tell(do="loop", way=way, number=number, target=target.tolist())
        self._receiver.answer()
        time.sleep(_PAUSE_S)
        begun = []
        for place in range(len(target)):
            begun.append(time.monotonic_ns())
            self._ways[way].push(number + place, source[place : place + 1], target[place : place + 1])
            # That it has seen this one.
            self._receiver.answer()
            self._ways[way].settle()
        came = self._receiver.answer()
        self._in_batch = False
        seen = map(self._receiver.ours, came["seen"])
        times = [(end - start) / 1000 for end, start in zip(seen, begun, strict=True)]
        return times, came["digest"] == expected

    def poll(self, way: str, polling: bool) -> None:
        """Whether the receiver's Python waits for this way without sleeping."""
        self._receiver.tell(do="poll", way=way, polling=polling)
        self._receiver.answer()

    def _draw(self, pages: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """Random pages on both sides."""
        units = self._pages.pool.units
        source, target = (rng.permutation(units)[:pages].astype(np.uint32) for _ in range(2))
        return source, target

    def _expected(self, source: Indices) -> str:
        """The digest of the pages to be sent."""
        return str(self._pages.digest(source))

    def _by_itself(self, way: str, source: Indices, target: Indices) -> tuple[float, bool] | None:
        """The batch of a way that has no second process; None for the others."""
        raise NotImplementedError

    def close(self) -> None:
        """Both sides' ways, then their pools. Ours first: the receiver may free only what we have mapped no more."""
        raise NotImplementedError

    def _close_receiver(self) -> None:
        """Not where it still waits for a batch that Ctrl-C kept back: it hears that our ends are closed, or that we are
        gone.
        """
        if self._in_batch:
            return
        with contextlib.suppress(OtherGone):
            self._receiver.tell(do="close")
            self._receiver.answer()


class HostSession(Session):
    """Between pools in host memory."""

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
        self.memory = "host->host"
        # Twice the batch, so that random pages are not simply all pages.
        pool_pages = max(2 * pages, 64)
        self._pages = memory = Memory(page_bytes, pool_pages, receiver.host)
        rng = np.random.default_rng(1)
        words = memory.rows.view(np.uint64)
        words[:] = rng.integers(0, 1 << 63, words.shape, dtype=np.uint64)
        self._ways = {}
        self.facts = {}
        self.missing = {}
        links = {
            way: LinkWay(memory, way, folder, receiver.token, accept=True, spin_us=spin_us)
            for way in ways
            if way in OPTIONS
        }
        with contextlib.closing(listen_tcp(receiver.host)) as listener:
            listener.setblocking(True)
            address = listener.getsockname()[:2] if "socket" in ways else None
            nixl = "nixl" in ways and nixl_version() is not None
            receiver.tell(
                do="open",
                page_bytes=page_bytes,
                pool_pages=pool_pages,
                spin_us=spin_us,
                folder=str(folder),
                token=receiver.token.hex(),
                links={lane: way.address(far=receiver.far) for lane, way in links.items()},
                socket=address,
                nixl=nixl,
            )
            until = time.monotonic() + _OPEN_S
            while not receiver.has_answer() and time.monotonic() < until:
                for link in links.values():
                    link.turn(1)
            opened = receiver.answer()["ways"]
            if "socket" in opened and "error" not in opened["socket"]:
                self._ways["socket"] = SocketWay(memory.pool, listener.accept()[0])
        self._ways.update(links)
        if nixl and "error" not in opened["nixl"]:
            self._ways["nixl"] = NixlSender(memory.pool, opened["nixl"].pop("peer"))
        for way, fact in opened.items():
            if "error" in fact:
                self.missing[way] = fact["error"]
            else:
                self.facts[way] = fact
        self._copy: HostPool | None = None
        if "memcpy" in ways:
            self._copy = HostPool(memory.context, units=pool_pages, unit_bytes=page_bytes, name="copy")
            self.facts["memcpy"] = {"transport": "memcpy"}

    def _by_itself(self, way: str, source: Indices, target: Indices) -> tuple[float, bool] | None:
        """memcpy: rows in random order, copied in C (numpy.take) into other memory of the same kind."""
        if way != "memcpy":
            return None
        assert self._copy is not None
        assert self._copy.buffer is not None
        size = self._pages.pool.unit_bytes
        out = np.frombuffer(self._copy.buffer, np.uint8)[: len(source) * size].reshape(len(source), size)
        out[:] = POISON
        rows = self._pages.rows
        indices = source.astype(np.intp)
        begun = time.monotonic_ns()
        # "wrap": the default mode would go through a buffer.
        np.take(rows, indices, axis=0, out=out, mode="wrap")
        ended = time.monotonic_ns()
        return (ended - begun) / 1000, bool((out == rows[indices]).all())

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._close_receiver()
        if self._copy is not None:
            self._copy.close()
        self._pages.close()
