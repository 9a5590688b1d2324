# SPDX-License-Identifier: Apache-2.0
"""The PE's judgement of offers, through real sockets, with a pretended native side."""

from __future__ import annotations

import fcntl
import os
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrail.transfer import control_socket, handshake
from kvrail.transfer.connector import LinkSetup, NewLink
from kvrail.transfer.conversation import Conversation
from kvrail.transfer.errors import LinkLost, LinkRefused
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.handshake import Offer, PoolOffer
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.link_events import LinkKey, LinkOptions, LinkRefusal
from kvrail.transfer.listener import Listener
from kvrail.transfer.memory import PAGE_POOL, PROBE_POOL, SEALS

TOKEN = b"t" * 32
CE, PE = LinkKey(b"c" * 16, 0), LinkKey(b"p" * 16, 0)
LAYOUT = PageLayout(model_id="m", layers=2, kv_heads=2, head_dim=32, dtype="float32", page_tokens=64)
PROBE = SimpleNamespace(unit_bytes=4096)
PAGES_HERE = SimpleNamespace(unit_bytes=LAYOUT.unit_bytes)
POOLS = SimpleNamespace(
    memory="host", probe=PROBE, by_id=lambda: [(PAGE_POOL, PAGES_HERE), (PROBE_POOL, PROBE)]
)


class Link:
    def __init__(self, epoch: int, cookie: int) -> None:
        self.epoch, self.cookie, self.closed = epoch, cookie, False

    def address(self, *, network_only: bool = False) -> bytes:
        return b"network" if network_only else b"all"

    def close(self) -> None:
        self.closed = True


class Bench:
    """A listener, and what came of the handshakes with it."""

    def __init__(self, folder: Path, gpu: Gpu | None = None, **options: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.outcomes: list[NewLink | LinkRefusal] = []
        self.links: list[Link] = []
        setup: Any = LinkSetup(
            reactor=SimpleNamespace(open_link=self._open),  # type: ignore[arg-type]
            me=PE,
            token=TOKEN,
            layout=LAYOUT,
            pools=POOLS,  # type: ignore[arg-type]
            options=LinkOptions(socket_dir=folder / "run", **options),
            ucx_version=(1, 22, 0),
            gpu=gpu,
        )
        self.listener = Listener(setup, self.selector, lambda outcome, now: self.outcomes.append(outcome))

    def _open(self, *, epoch: int, cookie: int) -> Link:
        self.links.append(Link(epoch, cookie))
        return self.links[-1]

    def turn(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        for key, _ in self.selector.select(0.01):
            key.data(now)
        self.listener.tick(now)

    def offer(self, made: Offer, *, unix: bool = True, fds: tuple[int, ...] = ()) -> tuple[Offer, Any]:
        address = self.listener.address
        stream = (
            control_socket.dial_unix(Path(address.unix_path))
            if unix
            else control_socket.dial_tcp(address.host, address.port)
        )
        generator = handshake.dialing(TOKEN, CE, PE, os.urandom(32), lambda: (made, fds))
        dialer: Conversation[Any] = Conversation(stream, generator, time.monotonic() + 10)
        while True:
            result = dialer.advance(time.monotonic())
            if result is not None:
                self.turn()
                stream.close()
                return result  # type: ignore[no-any-return]
            self.turn()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        for outcome in each.outcomes:
            if isinstance(outcome, NewLink):
                outcome.stream.close()
                if outcome.process is not None:
                    os.close(outcome.process.pidfd)
        each.listener.close()
        each.selector.close()


def offer(**changes: Any) -> Offer:
    pools = [
        PoolOffer(
            pool=0,
            base=1 << 20,
            nbytes=4 * LAYOUT.page_bytes,
            unit_bytes=LAYOUT.page_bytes,
            memory="host",
            key=b"k",
        ),
        PoolOffer(pool=2, base=8 << 20, nbytes=8192, unit_bytes=4096, memory="host", key=b"k"),
    ]
    fields: dict[str, Any] = {
        "ucx": (1, 22, 1),
        "layout": LAYOUT,
        "epoch": 1,
        "cookie": 7,
        "address": b"ce all",
        "network_address": b"ce network",
        "pools": pools,
        "probe_unit": 0,
        "lane": "auto",
        "put_transport": "auto",
        "require_lane": None,
        "distance": "",
    }
    return Offer(**(fields | changes))


def test_good_offer_makes_a_link(bench: Callable[..., Bench]) -> None:
    made = bench()
    _, accept, *_ = made.offer(offer())
    (new,) = made.outcomes
    assert isinstance(new, NewLink)
    assert (accept.scope, accept.address, new.peer_address) == ("all", b"all", b"ce all")
    assert (new.key, new.epoch, made.links[0].cookie) == (CE, 1, 7)
    assert new.process is not None
    assert new.process.pid == os.getpid()


def test_far_peer_gets_the_network_address_only(bench: Callable[..., Bench]) -> None:
    made = bench()
    _, accept, *_ = made.offer(offer(address=b"", distance="another host"), unix=False)
    assert (accept.scope, accept.address) == ("network", b"network")
    assert isinstance(made.outcomes[0], NewLink)
    assert made.outcomes[0].peer_address == b"ce network"


def test_after_a_local_failure_only_the_network_is_used(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.listener.local_lanes_failed(CE, "cma is forbidden")
    _, accept, *_ = made.offer(offer())
    assert accept.scope == "network"


BASE = offer().pools
GPU = Gpu(uuid=b"g" * 16, name="GPU")
ON_GPU = [msgspec.structs.replace(entry, memory="cuda", handle=b"h" * 64) for entry in BASE]
REFUSED = {
    "UCX minor": ({"ucx": (1, 21, 9)}, "UCX versions differ: 1.22.0 on the pe, 1.21.9 on the ce"),
    "layout": ({"layout": msgspec.structs.replace(LAYOUT, dtype="bfloat16")}, "dtype"),
    "epoch zero": ({"epoch": 0}, "not newer"),
    "no probe pool": ({"pools": BASE[:1]}, "pools differ"),
    "pool twice": ({"pools": [*BASE, BASE[0]]}, "pools differ"),
    "unknown pool": ({"pools": [*BASE, msgspec.structs.replace(BASE[0], pool=9)]}, "pools differ"),
    "other unit": ({"pools": [msgspec.structs.replace(BASE[0], unit_bytes=4096), BASE[1]]}, "pools differ"),
    "half a unit": ({"pools": [msgspec.structs.replace(BASE[0], nbytes=100), BASE[1]]}, "100 bytes"),
    "nowhere": ({"pools": [msgspec.structs.replace(BASE[0], base=0), BASE[1]]}, "bytes at 0"),
    "beyond memory": ({"pools": [msgspec.structs.replace(BASE[0], base=1 << 63), BASE[1]]}, "bytes at 9"),
    "epoch too large": ({"epoch": 1 << 32}, "out of range"),
    "negative cookie": ({"cookie": -1}, "out of range"),
    "negative unit": ({"probe_unit": -1}, "out of range"),
    "no address": ({"address": b""}, "no worker address"),
    "wishes": ({"require_lane": "shm"}, "required: shm"),
    "GPU pools without a GPU": ({"pools": ON_GPU}, "is in cuda memory, the offer is of host memory"),
    "host pools on a GPU": ({"gpu": GPU}, "is in host memory, the offer is of cuda memory"),
    "half a handle": (
        {"gpu": GPU, "pools": [msgspec.structs.replace(entry, handle=b"h" * 32) for entry in ON_GPU]},
        "handle of its GPU memory is malformed",
    ),
    "offset before the handle": (
        {"gpu": GPU, "pools": [msgspec.structs.replace(entry, handle_offset=-1) for entry in ON_GPU]},
        "handle of its GPU memory is malformed",
    ),
    "peer without a CUDA device here": (
        {"gpu": GPU, "pools": ON_GPU, "lane": "peer"},
        "this prefill engine has no CUDA device open",
    ),
}


def test_pools_on_gpus_are_reached_by_the_kernel_first(bench: Callable[..., Bench]) -> None:
    made = bench(gpu=GPU)
    _, accept, *_ = made.offer(offer(gpu=GPU, pools=ON_GPU))
    (new,) = made.outcomes
    assert isinstance(new, NewLink)
    assert new.plan is not None
    assert (new.plan.lanes, accept.scope, new.plan.reason) == (("peer", "put"), "all", "")


def test_under_mps_the_offer_of_a_gpu_is_taken_over_the_network_only(bench: Callable[..., Bench]) -> None:
    made = bench(gpu=GPU)
    theirs = msgspec.structs.replace(GPU, mps="its control pipe is there")
    _, accept, *_ = made.offer(offer(gpu=theirs, pools=ON_GPU))
    (new,) = made.outcomes
    assert isinstance(new, NewLink)
    assert new.plan is not None
    assert (new.plan.lanes, accept.scope) == (("put",), "network")
    assert "no peer: the completion engine's GPU is shared through MPS" in new.plan.reason


@pytest.mark.parametrize(("changes", "word"), REFUSED.values(), ids=REFUSED)
def test_bad_offer_is_refused_on_both_sides(
    bench: Callable[..., Bench], changes: dict[str, Any], word: str
) -> None:
    made = bench()
    with pytest.raises(LinkRefused, match=word):
        made.offer(offer(**changes))
    (refusal,) = made.outcomes
    assert isinstance(refusal, LinkRefusal)
    assert word in refusal.reason
    assert refusal.key == CE
    assert not made.links


def test_epoch_must_rise(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.offer(offer(epoch=3))
    for epoch in (3, 2):
        with pytest.raises(LinkRefused, match=f"link epoch {epoch} is not newer than 3"):
            made.offer(offer(epoch=epoch))
    made.offer(offer(epoch=4))


def test_bad_descriptors_are_refused_and_closed(bench: Callable[..., Bench]) -> None:
    made = bench()
    pools = [msgspec.structs.replace(entry, fd=at) for at, entry in enumerate(BASE)]
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkRefused, match="sealed"):
        made.offer(offer(pools=pools), fds=(unsealed, unsealed))
    with pytest.raises(LinkRefused, match="which pool"):
        made.offer(offer(), fds=(unsealed, unsealed))
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(unsealed)


def test_descriptors_of_one_who_hangs_up_before_the_answer_are_closed(bench: Callable[..., Bench]) -> None:
    made = bench()
    pools = [msgspec.structs.replace(entry, fd=at) for at, entry in enumerate(BASE)]
    memory = [os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in pools]
    for fd, pool in zip(memory, pools, strict=True):
        os.ftruncate(fd, pool.nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    before = len(os.listdir("/proc/self/fd"))
    stream = control_socket.dial_unix(Path(made.listener.address.unix_path))
    offered: list[bool] = []

    def make_offer() -> tuple[Offer, tuple[int, ...]]:
        offered.append(True)
        return offer(pools=pools), tuple(memory)

    dialer: Conversation[Any] = Conversation(
        stream, handshake.dialing(TOKEN, CE, PE, os.urandom(32), make_offer), time.monotonic() + 10
    )
    while not offered:
        dialer.advance(time.monotonic())
        if not offered:
            made.turn()
    stream.close()
    made.turn()
    assert [link.closed for link in made.links] == [True]
    assert isinstance(made.outcomes[-1], LinkRefusal)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in memory:
        os.close(fd)


def test_a_link_that_cannot_be_opened_here_is_refused(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench()

    def open_link(**_: int) -> Link:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(made.listener._setup.reactor, "open_link", open_link)
    with pytest.raises(LinkLost):
        made.offer(offer())
    assert "Too many open files" in str(made.outcomes[-1])


def test_what_came_in_time_is_not_late_because_we_are(bench: Callable[..., Bench]) -> None:
    made = bench(handshake_s=5.0)
    stream = control_socket.dial_unix(Path(made.listener.address.unix_path))
    dialer: Conversation[Any] = Conversation(
        stream,
        handshake.dialing(TOKEN, CE, PE, os.urandom(32), lambda: (offer(), ())),
        time.monotonic() + 10,
    )
    dialer.advance(time.monotonic())
    made.turn()
    dialer.advance(time.monotonic())
    made.turn()
    dialer.advance(time.monotonic())
    made.turn(time.monotonic() + 6)  # One long step: the offer has been here for most of it.
    assert isinstance(made.outcomes[-1], NewLink)
    stream.close()


def test_silent_stranger_is_dropped_at_the_deadline(bench: Callable[..., Bench]) -> None:
    made = bench(handshake_s=5.0)
    address = made.listener.address
    stream = control_socket.dial_tcp(address.host, address.port)
    while not stream.wants_write and made.selector.select(0):
        made.turn()
    made.turn(time.monotonic())
    assert not made.outcomes
    made.turn(time.monotonic() + 6)
    assert [outcome.reason for outcome in made.outcomes if isinstance(outcome, LinkRefusal)] == [
        "the handshake took too long"
    ]
    stream.close()


def test_crowd_at_the_door_is_turned_away(bench: Callable[..., Bench]) -> None:
    made = bench()
    address = made.listener.address
    crowd = []
    for _ in range(65):
        crowd.append(control_socket.dial_tcp(address.host, address.port))
        made.turn()
    try:
        for stream in crowd[:64]:
            stream.flush()
            assert stream.receive() is None
        with pytest.raises(LinkLost):
            crowd[64].receive()
    finally:
        for stream in crowd:
            stream.close()
