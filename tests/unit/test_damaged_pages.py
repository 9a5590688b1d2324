# SPDX-License-Identifier: Apache-2.0
"""A prompt whose pages do not have the checksums of its doorbell is never decoded: it fails, and nothing is held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrail.runtime.completion import Completion
from kvrail.runtime.messages import Failed, Outputs, Sampling, Submit
from kvrail.transfer.checksums import pack_checksums, page_checksums
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LaneInfo, LinkKey, LinkUp, Received
from kvrail.transfer.pages import PagePool
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.wire import Doorbell, FirstToken, Grant, HandOff, pack_u32, unpack_u32

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
PE = LinkKey(b"p" * 16, 0)


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


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("first_token_ahead", [False, True])
def test_damaged_pages_are_never_decoded(damaged: bool, first_token_ahead: bool) -> None:
    memory = np.arange(8 * LAYOUT.page_bytes // 4, dtype=np.uint32)
    pages = SimpleNamespace(address=memory.ctypes.data, unit_bytes=LAYOUT.page_bytes)
    told: list[Any] = []
    on_link: list[Any] = []
    pool, engine = PagePool(8), FakeEngine()
    completion = Completion(
        engine=engine,  # type: ignore[arg-type]
        pool=pool,
        pools=SimpleNamespace(pages=pages, state=None),  # type: ignore[arg-type]
        links=SimpleNamespace(send=lambda key, message: on_link.append(message)),  # type: ignore[arg-type]
        receiver=Receiver(pool, LAYOUT, incarnation=b"c" * 16, rank=0, link_share=1.0),
        send=told.append,
        verify_share=1.0,
        seats=4,
        largest_ticket=8,
    )
    completion.on_link(0.0, LinkUp(PE, 1, LaneInfo("shm", "memcpy", "host", "process")))
    tokens = pack_u32(range(40))
    sampling = Sampling(max_tokens=5, seed=1)
    completion.handle(0.0, Submit(request_id="r", tokens=tokens, sampling=sampling, peer=PE))
    completion.tick(0.0)
    (grant,) = (message for message in on_link if isinstance(message, Grant))
    hand_off = HandOff(first_token=7, seed=1, next_position=41)
    sums = page_checksums(pages, unpack_u32(grant.pages))  # type: ignore[arg-type]
    if damaged:
        memory[int(unpack_u32(grant.pages)[1]) * LAYOUT.page_bytes // 4 + 5] ^= 1
    if first_token_ahead:
        ahead = FirstToken(ticket=grant.ticket, epoch=1, hand_off=hand_off)
        completion.on_link(1.0, Received(PE, ahead))
    bell = Doorbell(
        ticket=grant.ticket,
        epoch=1,
        status="landed",
        token_start=0,
        token_end=40,
        hand_off=hand_off,
        checksums=pack_checksums(sums),
    )
    completion.on_link(1.0, Received(PE, bell))
    completion.tick(1.0)
    failures = [message for message in told if isinstance(message, Failed)]
    emitted = [item for message in told if isinstance(message, Outputs) for item in message.items]
    if damaged:
        assert [(f.request_id, f.status) for f in failures] == [("r", 500)]
        assert "checksum of page 1 of 3" in failures[0].reason
        assert engine.adopted == []
        assert (pool.free, pool.quarantined) == (8, 0)
        assert len(emitted) == first_token_ahead
    else:
        assert (failures, engine.adopted, len(emitted)) == ([], ["r"], 1)
    pool.check()
