# SPDX-License-Identifier: Apache-2.0
"""How large a host cache becomes: as asked for or not at all; by default what the host has to spare, with a warning."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvrail.runtime import host_cache_build
from kvrail.runtime.config import LaunchConfig
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.host_cache_build import build_host_cache
from kvrail.transfer import ucx
from kvrail.transfer.errors import CudaFailed
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.pages import PagePool

MIB = 1 << 20
# A page of 1 MiB, a state of 3 MiB.
LAYOUT = PageLayout(model_id="m", layers=8, kv_heads=8, head_dim=64, dtype="float32", page_tokens=32)
WINDOWS = PageLayout(
    model_id="m", layers=8, kv_heads=8, head_dim=64, dtype="float32", page_tokens=32, state_bytes=3 * MIB
)


class Gpu:
    """Pins `room` bytes; its streams copy nothing."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.pinned, self.staging = room, 0, 0

    def pin(self, address: int, nbytes: int) -> Any:
        if self.pinned + nbytes > self.room:
            raise CudaFailed("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", "memlock limit: 8 MiB")
        self.pinned += nbytes
        return SimpleNamespace(close=lambda: self._unpin(nbytes))

    def _unpin(self, nbytes: int) -> None:
        self.pinned -= nbytes


class Built:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None, layout: PageLayout = LAYOUT, **flags: Any
    ) -> None:
        copier = SimpleNamespace(in_stream_order=True, close=lambda: None)
        monkeypatch.setattr(host_cache_build, "CudaCopier", lambda gpu, stream, state_bytes: copier)
        config = LaunchConfig(role="pe", model="m", device="cpu" if gpu is None else "cuda", **flags)
        self.memory = contextlib.ExitStack()
        self.context = ucx.open_context("tcp", "127.0.0.1")
        self.memory.callback(self.context.close)
        place = SimpleNamespace(address=1 << 30)
        pools: Any = SimpleNamespace(pages=place, state=place)
        self.cache = build_host_cache(
            config, self.context, layout, pools, PagePool(4), self.memory, gpu=gpu,  # type: ignore[arg-type]
            stream=None if gpu is None else 7,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int]:
        assert self.cache is not None
        return self.cache.index.pages, self.cache.index.state_slots


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Built] = []

    def make(gpu: Gpu | None, *args: Any, **flags: Any) -> Built:
        made.append(Built(monkeypatch, gpu, *args, **flags))
        return made[-1]

    yield make
    for one in made:
        if one.cache is not None:
            one.cache.close()
        one.memory.close()


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(nbytes: int) -> None:
        for module in ("runtime.host_cache_build", "transfer.chunked_pool"):
            monkeypatch.setattr(f"kvrail.{module}.available_bytes", lambda: nbytes)

    return set_to


def test_what_was_asked_for_is_pinned_whole(build: Any) -> None:
    gpu = Gpu()
    built = build(gpu, hicache_size_gb=0.0625)
    assert (built.sizes, gpu.pinned) == ((64, 0), 64 * MIB)
    built.cache.close()
    built.memory.close()
    assert gpu.pinned == 0


def test_by_default_it_takes_at_most_half_of_what_the_host_has_over_all_ranks(
    build: Any, available: Any
) -> None:
    available(80 * MIB)
    assert build(Gpu()).sizes == (40, 0)
    assert build(Gpu(), dp=4).sizes == (10, 0)
    assert build(None).sizes == (40, 0)


def test_without_any_of_the_default_a_rank_starts_all_the_same_and_says_what_to_do(
    build: Any, available: Any, caplog: pytest.LogCaptureFixture
) -> None:
    available(128 * MIB)
    with caplog.at_level(logging.WARNING):
        assert build(Gpu(room=0)).cache is None
    assert "there is no host prefix cache" in caplog.text
    assert "memlock limit" in caplog.text
    assert "--hicache-size-gb" in caplog.text


def test_what_was_asked_for_and_cannot_be_had_is_an_error(build: Any, available: Any) -> None:
    gpu = Gpu(room=MIB)
    with pytest.raises(ConfigError, match=r"memlock limit: 8 MiB.*give less --hicache-size-gb"):
        build(gpu, hicache_size_gb=0.0625)
    assert gpu.pinned == 0
    available(32 * MIB)
    with pytest.raises(
        ConfigError, match=r"needs 64 MiB of memory and the host has 32 MiB.*--hicache-size-gb"
    ):
        build(Gpu(), hicache_size_gb=0.0625)
    with pytest.raises(ConfigError, match=r"hold no page of 1.0 MB.*--hicache-size-gb"):
        build(Gpu(), hicache_size_gb=0.0005)


def test_states_take_at_most_half_unless_their_number_was_given(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    assert build(gpu, WINDOWS, hicache_size_gb=0.0625).sizes == (64 - 3 * 10, 10)
    assert gpu.pinned >= 64 * MIB, "states are pinned as well"
    assert build(Gpu(), WINDOWS, hicache_size_gb=0.0625, hicache_state_slots=4).sizes == (64 - 3 * 4, 4)
    monkeypatch.setattr(host_cache_build, "_GPU_STATES", 5)
    monkeypatch.setattr(host_cache_build, "_CPU_STATES", 3)
    assert build(Gpu(), WINDOWS, hicache_size_gb=0.0625).sizes == (64 - 3 * 5, 5)
    assert build(None, WINDOWS, hicache_size_gb=0.0625).sizes == (64 - 3 * 3, 3)


def test_0_is_none(build: Any) -> None:
    assert build(Gpu(), hicache_size_gb=0.0).cache is None
