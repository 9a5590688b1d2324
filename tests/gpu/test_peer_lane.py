# SPDX-License-Identifier: Apache-2.0
"""Links between real processes whose pages lie on GPUs: which lane they get, why not another, and every way to die.

Two processes on one GPU map each other's memory as two on two GPUs do, so most of it needs only one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.link_ranks import LAYOUT, Rank, Start, connect, starting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device (torch {torch.__version__})"),
]

PE, CE = 0, min(1, max(0, torch.cuda.device_count() - 1))
# Pages of 1 MiB: copies of a pool last long enough to be killed in.
LARGE = LAYOUT | {"layers": 32, "head_dim": 64}
LARGE_PAGES = 512
PAIRS = [
    pytest.param((0, 0), id="one-gpu"),
    pytest.param(
        (0, 1),
        id="two-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]
LANES = {"peer": {"lane": "peer"}, "put/cuda_ipc": {"lane": "put", "require_lane": "put/cuda_ipc"}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path / "run") as make:
        yield make


def pages_cross(
    pe: Rank, ce: Rank, *, epoch: int = 1, writer: int = 5, way: str = "", value: int = 100
) -> None:
    """Six pages, scattered at the target, arrive whole; their neighbours stay as they were."""
    target = [31, 3, 4, 5, 0, 17]
    for page in range(6):
        pe.ask("fill", page=page, value=page + value)
    for page in range(32):
        ce.ask("fill", page=page, value=7)
    pe.ask("push", key=ce.key, writer=writer, epoch=epoch, source=[0, 1, 2, 3, 4, 5], target=target, way=way)
    ce.wait("Received", message="Doorbell", key=pe.key)
    assert ce.ask("look", pages=target) == [[page + value] for page in range(6)]
    assert ce.ask("look", pages=[1, 2, 6, 16, 18, 30]) == [[7]] * 6


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("lane", LANES)
def test_pages_cross(start: Start, lane: str, pair: tuple[int, int]) -> None:
    pe, ce = start(True, cuda=pair[0]), start(False, cuda=pair[1], **LANES[lane])
    for up in connect(pe, ce):
        assert (up["lane"], up["fence"], up["same_host"]) == (lane, "process", True)
        assert (up["reason"], up["slow"], up["transport"]) == ("", "", "cuda_ipc")
        ways = ["kernel", "engine"] if lane == "peer" else ["put"]
        assert sorted({way for *_, way in up["probes"]}) == sorted(ways)
        sizes = [nbytes for nbytes, *_, way in up["probes"] if way == ways[0]]
        assert sizes[:3] == [4096, 256 << 10, 256 << 20]
        assert all(rate > 0 and us > 0 for _, rate, us, *_ in up["probes"])
        print(pair, lane, *(probe for probe in up["probes"]), sep="\n  ")
    for number, way in enumerate(ways):
        pages_cross(pe, ce, writer=5 + number, way=way, value=100 + 10 * number)


def test_auto_takes_the_peer_lane(start: Start) -> None:
    pe, ce = start(True, cuda=PE), start(False, cuda=CE)
    for up in connect(pe, ce):
        assert (up["lane"], up["reason"]) == ("peer", "")


def test_pinned_host_pages_go_into_a_gpu(start: Start) -> None:
    pe, ce = start(True, cuda=PE, pinned=True, lane="peer"), start(False, cuda=CE)
    for up in connect(pe, ce):
        assert (up["lane"], up["reason"], up["slow"]) == ("peer", "", "")
        print("pinned", *(probe for probe in up["probes"]), sep="\n  ")
    pages_cross(pe, ce)


def refused(pe: Rank, ce: Rank, *, unix: bool = True) -> str:
    peer = pe.ask("address")
    if not unix:
        peer[-1] = ""
    ce.ask("connect", peer=peer)
    return str(ce.wait("LinkRefusal", key=pe.key)["reason"])


@pytest.mark.parametrize(
    ("pe_is", "ce_is", "unix", "words"),
    [
        ({"cuda": PE}, {"cuda": CE}, False, "no peer: the peer names no Unix socket"),
        (
            {"cuda": PE},
            {"cuda": CE, "mps": "its pipe is in /x"},
            True,
            "is shared through MPS (its pipe is in /x)",
        ),
        ({}, {"cuda": CE}, True, "no peer: this prefill engine has no CUDA device open"),
        ({"cuda": PE}, {}, True, "no peer: the completion engine's pages are in host memory"),
    ],
    ids=["no-socket", "mps", "pe-on-cpu", "ce-on-cpu"],
)
def test_the_peer_lane_is_refused_with_the_reason(
    start: Start, pe_is: dict[str, Any], ce_is: dict[str, Any], unix: bool, words: str
) -> None:
    pe, ce = start(True, **pe_is), start(False, lane="peer", **ce_is)
    assert words in refused(pe, ce, unix=unix)


@pytest.mark.parametrize(
    ("pe_is", "ce_is", "words"),
    [
        ({"cuda": PE}, {}, "no fast way from GPU memory to host memory"),
        ({}, {"cuda": CE}, "no fast way from host memory to GPU memory"),
    ],
    ids=["gpu-to-host", "host-to-gpu"],
)
def test_what_ucx_could_only_emulate_is_refused(
    start: Start, pe_is: dict[str, Any], ce_is: dict[str, Any], words: str
) -> None:
    pe, ce = start(True, **pe_is), start(False, **ce_is)
    assert words in refused(pe, ce)


@pytest.mark.parametrize("lane", LANES)
def test_the_pe_survives_a_ce_killed_under_its_copies(start: Start, lane: str) -> None:
    size = {"layout": LARGE, "pages": LARGE_PAGES}
    pe, ce = start(True, cuda=PE, **size), start(False, cuda=CE, **size, **LANES[lane])
    connect(pe, ce)
    everything = list(range(LARGE_PAGES))
    pe.ask("push", key=ce.key, writer=1, epoch=1, source=everything, target=everything[::-1], times=4000)
    time.sleep(0.05)
    ce.kill()
    pe.wait("LinkDown", key=ce.key)
    assert pe.wait("WriterEvent", writer=1, kind="failed")["ok"] is False
    pe.wait("Proven", key=ce.key, epoch=1, how="worker")
    # Its CUDA context has not been hurt: memory can be used, and another CE gets its pages.
    other = start(False, cuda=CE, **size, **LANES[lane])
    connect(pe, other)
    pages_cross(pe, other, writer=2)
    assert pe.process.poll() is None


@pytest.mark.parametrize("lane", LANES)
def test_a_killed_pe_is_proven_quiet_and_another_takes_over(start: Start, lane: str) -> None:
    size = {"layout": LARGE, "pages": LARGE_PAGES}
    pe, ce = start(True, cuda=PE, **size), start(False, cuda=CE, **size, **LANES[lane])
    connect(pe, ce)
    everything = list(range(LARGE_PAGES))
    pe.ask("fill", page=0, value=9)
    pe.ask("push", key=ce.key, writer=1, epoch=1, source=[0] * LARGE_PAGES, target=everything, times=4000)
    time.sleep(0.05)
    pe.kill()
    ce.wait("LinkDown", key=pe.key, epoch=1)
    assert ce.wait("Proven", key=pe.key, epoch=1)["how"] == "process"
    # From the proof on nothing lands any more.
    for page in (0, LARGE_PAGES // 2, LARGE_PAGES - 1):
        ce.ask("fill", page=page, value=1)
    time.sleep(0.3)
    assert ce.ask("look", pages=[0, LARGE_PAGES // 2, LARGE_PAGES - 1]) == [[1]] * 3
    other = start(True, cuda=PE, **size)
    connect(other, ce)
    pages_cross(other, ce)
    assert ce.ask("unproven") == []


def test_pools_stay_while_a_living_peer_has_them_mapped(start: Start) -> None:
    pe, ce = start(True, cuda=PE), start(False, cuda=CE, lane="peer")
    connect(pe, ce)
    assert ce.ask("close") is False
    pe.wait("LinkDown", key=ce.key)
    pe.wait("Proven", key=ce.key, epoch=1)


def test_a_fenced_link_comes_back_with_new_mappings(start: Start) -> None:
    pe, ce = start(True, cuda=PE), start(False, cuda=CE, lane="peer")
    connect(pe, ce)
    for epoch in (2, 3):
        ce.ask("fence", key=pe.key)
        assert ce.wait("LinkUp", key=pe.key)["epoch"] == epoch
        pe.wait("LinkUp", key=ce.key, epoch=epoch)
        pages_cross(pe, ce, epoch=epoch, writer=5 + epoch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_lies_between_two_gpus_is_known() -> None:
    pytest.importorskip("pynvml")
    from kvrail.transfer.cuda import open_device
    from kvrail.transfer.gpu import Gpu, offered

    ours, theirs = (
        Gpu(uuid=device.uuid, name=device.name) for device in (open_device(number, None) for number in (0, 1))
    )
    found = offered(ours, theirs)
    assert found is not None
    print(found)
    assert found.gb_per_s > 10
    assert offered(ours, ours) is None
    to_host = offered(ours, None)
    assert to_host is not None
    print(to_host)
    assert to_host.what.startswith("PCIe")
