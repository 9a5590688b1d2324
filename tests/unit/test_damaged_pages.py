# SPDX-License-Identifier: Apache-2.0
"""A prompt whose pages do not have the checksums of its doorbell is never decoded: it fails, and nothing is held."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrail.runtime.completion import Completion
from kvrail.runtime.messages import Abort, Failed, Outputs, Sampling, Submit
from kvrail.transfer.checksums import pack_checksums, page_checksums
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LaneInfo, LinkKey, LinkUp, Received
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import Doorbell, FirstToken, Grant, HandOff, pack_u32, unpack_u32

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
PE = LinkKey(b"p" * 16, 0)
SHM = LaneInfo("shm", "memcpy", "host", "process")


class FakeEngine:
    """Only notes what it was given to decode."""

    layout = LAYOUT
    max_model_len = 64
    has_work = False
    vocab_size = 100

    def __init__(self) -> None:
        self.adopted: list[str] = []

    def adopt(self, sequence_id: str, *_: Any, **__: Any) -> None:
        self.adopted.append(sequence_id)

    def prefix_keys(self, *_: Any) -> list[bytes]:
        return []


class Landing:
    """A CE whose one request lands: three pages over `lane`. `flush`: what the GPU's flush of remote writes does.

    `slowly`: checksums take until somebody sets `summing`.
    """

    def __init__(
        self, lane: LaneInfo = SHM, flush: Callable[[], None] | None = None, slowly: bool = False
    ) -> None:
        self.summing = threading.Event() if slowly else None
        slow: Any = None
        if self.summing is not None:
            slow = ThreadPoolExecutor(1, initializer=self.summing.wait, initargs=(30,))
        self.memory = np.arange(8 * LAYOUT.page_bytes // 4, dtype=np.uint32)
        pages: Any = SimpleNamespace(
            address=self.memory.ctypes.data, unit_bytes=LAYOUT.page_bytes, name="pages", units=8
        )
        self.told: list[Any] = []
        on_link: list[Any] = []
        self.pool, self.engine = PagePool(8), FakeEngine()
        cuda = SimpleNamespace(flush_remote_writes=flush) if flush else None
        self.completion = Completion(
            engine=self.engine,  # type: ignore[arg-type]
            pool=self.pool,
            pools=SimpleNamespace(pages=pages, state=None, cuda=cuda),  # type: ignore[arg-type]
            links=SimpleNamespace(send=lambda key, message: on_link.append(message)),  # type: ignore[arg-type]
            receiver=Receiver(self.pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=1.0),
            send=self.told.append,
            verify_share=1.0,
            seats=4,
            largest_ticket=8,
            checksums=slow,
        )
        self.completion.on_link(0.0, LinkUp(PE, 1, lane))
        sampling = Sampling(max_tokens=5, seed=1)
        submit = Submit(request_id="r", tokens=pack_u32(range(40)), sampling=sampling, peer=PE)
        self.completion.handle(0.0, submit)
        self.completion.tick(0.0)
        (self.grant,) = (message for message in on_link if isinstance(message, Grant))
        self.sums = page_checksums(pages, unpack_u32(self.grant.pages))

    def damage(self) -> None:
        """Flip a bit of the second page; a second time it is right again."""
        self.memory[int(unpack_u32(self.grant.pages)[1]) * LAYOUT.page_bytes // 4 + 5] ^= 1

    def land(
        self, *, first_token_ahead: bool = False, leaves: bool = False
    ) -> tuple[list[Failed], list[Any]]:
        """(failures, what was emitted) by the doorbell, and a first token ahead of it.

        `leaves`: the client does, while checksums are computed.
        """
        grant, hand_off = self.grant, HandOff(first_token=7, seed=1, next_position=41)
        if first_token_ahead:
            ahead = FirstToken(ticket=grant.ticket, epoch=1, hand_off=hand_off)
            self.completion.on_link(1.0, Received(PE, ahead))
        bell = Doorbell(
            ticket=grant.ticket,
            epoch=1,
            status="landed",
            token_start=0,
            token_end=40,
            hand_off=hand_off,
            checksums=pack_checksums(self.sums),
        )
        self.completion.on_link(1.0, Received(PE, bell))
        if self.summing is not None:
            self.completion.tick(1.0)
            # Whoever has the pages keeps them until the verdict.
            assert (self.engine.adopted, self.pool.owned) == ([], 3)
            if leaves:
                self.completion.handle(1.0, Abort(request_id="r"))
                self.completion.tick(1.0)
                assert self.pool.owned == 3
            self.summing.set()
        assert select.select([self.completion.wake_fd], [], [], 30)[0]
        self.completion.tick(1.0)
        assert not select.select([self.completion.wake_fd], [], [], 0)[0], "it would not sleep any more"
        self.completion.close()
        self.pool.check()
        return (
            [message for message in self.told if isinstance(message, Failed)],
            [item for message in self.told if isinstance(message, Outputs) for item in message.items],
        )


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("first_token_ahead", [False, True])
def test_damaged_pages_are_never_decoded(damaged: bool, first_token_ahead: bool) -> None:
    landing = Landing()
    if damaged:
        landing.damage()
    failures, emitted = landing.land(first_token_ahead=first_token_ahead)
    if damaged:
        assert [(f.request_id, f.status) for f in failures] == [("r", 500)]
        assert "checksum of page 1 of 3" in failures[0].reason
        assert landing.engine.adopted == []
        assert (landing.pool.free, landing.pool.quarantined) == (8, 0)
        assert len(emitted) == first_token_ahead
    else:
        assert (failures, landing.engine.adopted, len(emitted)) == ([], ["r"], 1)


@pytest.mark.parametrize("leaves", [False, True])
def test_running_answers_do_not_wait_for_checksums(leaves: bool) -> None:
    """The loop turns on while they are computed; pages whose client leaves meanwhile are free only afterwards."""
    landing = Landing(slowly=True)
    failures, emitted = landing.land(leaves=leaves)
    assert (failures, landing.engine.adopted) == ([], [] if leaves else ["r"])
    assert len(emitted) == (not leaves)
    assert landing.pool.free == (8 if leaves else 5)


@pytest.mark.parametrize(
    ("transport", "flushed"), [("rc_mlx5", True), ("cuda_ipc", False)], ids=["card", "copy engine"]
)
def test_what_a_card_wrote_into_the_gpu_is_flushed_before_anything_reads_it(
    transport: str, flushed: bool
) -> None:
    """Until the flush the GPU sees an old page. What its own kind of engine wrote needs none."""
    lane = LaneInfo("put", transport, "cuda", "worker")
    landing = Landing(lane, flush=lambda: landing.damage())
    if flushed:
        landing.damage()
    failures, _ = landing.land()
    assert (failures, landing.engine.adopted) == ([], ["r"])
