# SPDX-License-Identifier: Apache-2.0
"""What a CE offers of its GPU pools, and to whom: nobody that it cannot watch gets the means to map them."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.transfer.connector import LinkSetup
from kvrail.transfer.device_pool import DevicePool
from kvrail.transfer.dialer import Dialer
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.handshake import Offer
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LinkKey, LinkOptions
from kvrail.transfer.memory import Pools

LAYOUT = PageLayout(model_id="m", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
GPU = Gpu(uuid=b"g" * 16, name="GPU")
HANDLE = b"h" * 64


def device_pool(units: int) -> DevicePool:
    memory: Any = SimpleNamespace(
        address=1 << 30, ipc_handle=lambda: HANDLE, packed_key=lambda: b"key", close=lambda: None
    )
    gpu: Any = SimpleNamespace(
        allocate=lambda nbytes: memory, make_current=lambda: None, register=lambda *_: memory
    )
    return DevicePool(gpu, gpu, units=units, unit_bytes=4096)


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def offered(selector: selectors.BaseSelector, lane: Any, distance: str) -> tuple[Offer, tuple[int, ...]]:
    pools = Pools(device_pool(8), None, device_pool(2))
    setup = LinkSetup(
        reactor=SimpleNamespace(),  # type: ignore[arg-type]
        me=LinkKey(b"c" * 16, 0),
        token=b"t",
        layout=LAYOUT,
        pools=pools,
        options=LinkOptions(socket_dir=Path("/none"), lane=lane),
        ucx_version=(1, 22, 0),
        gpu=GPU,
    )
    native: Any = SimpleNamespace(address=lambda network_only=False: b"network" if network_only else b"all")
    return Dialer(setup, selector, lambda *_: None)._offer(native, 1, 2, distance)


def test_a_near_peer_gets_the_handles_and_no_descriptors(selector: selectors.BaseSelector) -> None:
    offer, fds = offered(selector, "auto", "")
    assert fds == ()
    assert [(pool.pool, pool.memory, pool.fd, pool.handle) for pool in offer.pools] == [
        (0, "cuda", -1, HANDLE),
        (2, "cuda", -1, HANDLE),
    ]
    assert (offer.gpu, offer.address) == (GPU, b"all")


@pytest.mark.parametrize(("lane", "distance"), [("put", ""), ("auto", "another host"), ("peer", "no pidfd")])
def test_whoever_may_not_map_them_gets_no_handle(
    selector: selectors.BaseSelector, lane: str, distance: str
) -> None:
    offer, fds = offered(selector, lane, distance)
    assert (fds, {pool.handle for pool in offer.pools}) == ((), {b""})
    assert offer.gpu == GPU
    assert bool(offer.address) == (not distance)
