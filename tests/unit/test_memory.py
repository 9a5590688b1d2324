# SPDX-License-Identifier: Apache-2.0
"""Host pools: what the kernel gave, that nothing is left, and when they may go."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kit.shm import segments
from kvrail.transfer import memory
from kvrail.transfer.errors import TransferError
from kvrail.transfer.memory import SEALS, HostPool, OutOfMemory, Pools, available_bytes


class Region:
    def __init__(self) -> None:
        self.links = 0

    def packed_key(self) -> bytes:
        return b"key"

    def close(self) -> None:
        if self.links:
            raise RuntimeError("a link lives")


class Context:
    """Registers without UCX; the real one is in tests/loopback."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def register(self, address: int, nbytes: int, memory: str) -> Region:
        assert (memory, nbytes > 0) == ("host", True)
        self.regions.append(Region())
        return self.regions[-1]


def make(units: int, unit_bytes: int) -> tuple[HostPool, Context]:
    context: Any = Context()
    return HostPool(context, units=units, unit_bytes=unit_bytes), context


def test_pool_is_zero_sealed_shared_and_nameless() -> None:
    shm = segments(os.getpid())
    pool, _ = make(5, 1000)
    assert (pool.nbytes, pool.mapped_bytes % 4096) == (5000, 0)
    assert pool.buffer is not None
    assert not np.frombuffer(pool.buffer, np.uint8).any()
    assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    pool.buffer[4999] = 7
    assert os.pread(pool.fd, 1, 4999) == b"\x07"
    assert segments(os.getpid()) == shm
    pool.close()


def test_large_pool_is_aligned_and_says_what_backs_it() -> None:
    pool, _ = make(4, 2 << 20)
    assert pool.address % (2 << 20) == 0
    smaps = Path("/proc/self/smaps").read_text().split("memfd:kvrail-pages")[1]
    huge = int(smaps.split("ShmemPmdMapped:")[1].split()[0]) << 10
    assert pool.backing == (
        "thp" if huge >= pool.mapped_bytes else "hugetlb" if "ht" in smaps[:2000] else "4k"
    )
    pool.close()


def test_closing_leaves_nothing() -> None:
    # (Another test of this process may have left a pool behind.)
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("kvrail-pages")

    fds, before = len(os.listdir("/proc/self/fd")), mapped()
    pool, _ = make(4, 1 << 20)
    assert mapped() > before
    pool.close()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert mapped() == before


def test_a_view_or_a_link_keeps_it_open() -> None:
    pool, context = make(4, 4096)
    assert pool.buffer is not None
    view = np.frombuffer(pool.buffer, np.uint8)[4096:]
    context.regions[0].links = 1
    with pytest.raises(TransferError, match="close the links first"):
        pool.close()
    context.regions[0].links = 0
    with pytest.raises(TransferError, match="still viewed"):
        pool.close()
    assert not view.any()
    del view
    pool.close()


def test_too_large_a_pool_is_refused_with_numbers() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemory, match=r"needs 67108864 MiB .*--kv-pages"):
        make(1 << 20, 64 << 20)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_pools_of_a_rank() -> None:
    context: Any = Context()
    pools = Pools.allocate(context, pages=3, page_bytes=4096, state_slots=2, state_bytes=128)
    assert [(pool_id, pool.unit_bytes) for pool_id, pool in pools.by_id()] == [(0, 4096), (1, 128), (2, 4096)]
    pools.close()
    stateless = Pools.allocate(context, pages=3, page_bytes=4096)
    assert [pool_id for pool_id, _ in stateless.by_id()] == [0, 2]
    stateless.close()


class Locking:
    """A GPU that notes what host memory it was told to lock."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> Any:
        self.locked[address] = nbytes
        return SimpleNamespace(close=lambda: self.locked.pop(address))


def test_what_a_gpu_copies_is_page_locked_the_probe_area_too() -> None:
    context: Any = Context()
    gpu: Any = Locking()
    pools = Pools.allocate(context, pages=3, page_bytes=4096, state_slots=2, state_bytes=128, pin=gpu)
    assert set(gpu.locked) == {pool.address for _, pool in pools.by_id()}
    pools.close()
    assert not gpu.locked


@pytest.mark.parametrize(("limit", "found"), [("64", 64 - 40 + 25), ("120", 100), ("max", 100)])
def test_files_that_are_not_in_use_are_available(tmp_path, monkeypatch, limit: str, found: int) -> None:
    """In a container 30 GiB of checkpoint were just read."""
    gib = 1 << 30
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {100 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (group / "memory.max").write_text(f"{limit if limit == 'max' else int(limit) * gib}\n")
    (group / "memory.current").write_text(f"{40 * gib}\n")
    (group / "memory.stat").write_text(f"anon {10 * gib}\ninactive_file {25 * gib}\nactive_file {5 * gib}\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert available_bytes() == found * gib
