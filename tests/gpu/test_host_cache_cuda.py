# SPDX-License-Identifier: Apache-2.0
"""The host cache under an engine on a GPU: copies are exact and in order, and no token of any answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.conftest import greedy
from gpu.cuda_rig import CudaModels, CudaRig
from kit.tiny_families import FAMILIES, WINDOWED
from kit.tiny_prompts import prompt
from kvrail.runtime.cuda_copier import CudaCopier
from kvrail.transfer import ucx
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.cuda import open_device
from kvrail.transfer.errors import CudaFailed

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaDevice, HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# Cycles that keep a stream busy for about a fifth of a second.
LONG = 400_000_000
MIB = 1 << 20
POISON = 0xFF


def u64(values: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.asarray(values, dtype=np.uint64)


def host_copies(cuda: CudaDevice, *, to_host: bool) -> HostCopies:
    # Its UCX was found when the device was opened.
    from kvrail.transfer import _ucx

    return _ucx.HostCopies(cuda, to_host=to_host)


class Both:
    """`units` units in GPU memory and as many in pinned host memory, in chunks of seven."""

    def __init__(self, cuda: CudaDevice, units: int, unit_bytes: int) -> None:
        self.units, self.unit_bytes = units, unit_bytes
        self.gpu = cuda.allocate(units * unit_bytes)
        self.context = ucx.open_context("tcp", "127.0.0.1")
        chunk = max(7, -(-units // 16)) * unit_bytes
        self.host = ChunkedPool(
            self.context, units=units, unit_bytes=unit_bytes, name="t", chunk_bytes=chunk, pin=cuda
        )

    def on_gpu(self, units: Any) -> Any:
        return u64(self.gpu.address + np.asarray(units, dtype=np.uint64) * np.uint64(self.unit_bytes))

    def on_host(self, units: Any) -> Any:
        return self.host.addresses(np.asarray(units, dtype=np.uint32))

    def fill_gpu(self, content: np.ndarray[Any, Any]) -> None:
        self.gpu.write(0, content.tobytes())

    def fill_host(self, content: np.ndarray[Any, Any]) -> None:
        flat, at = content.reshape(-1), 0
        for chunk in self.host._chunks:
            chunk.write(0, flat[at : at + chunk.nbytes].tobytes())
            at += chunk.nbytes

    def gpu_bytes(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.gpu.read(0, self.gpu.nbytes), np.uint8).reshape(self.units, -1)

    def host_bytes(self) -> np.ndarray[Any, Any]:
        whole = b"".join(chunk.read(0, chunk.nbytes) for chunk in self.host._chunks)
        return np.frombuffer(whole, np.uint8).reshape(self.units, -1)

    def close(self) -> None:
        self.host.close()
        self.context.close()
        self.gpu.close()


@pytest.fixture(scope="module")
def cuda(kernel_cache: str) -> CudaDevice:
    """One for all tests here: to open it and to load its kernels takes longer than most of them."""
    try:
        return open_device(0, Path(kernel_cache))
    except CudaFailed as error:
        pytest.skip(str(error))


@pytest.fixture
def both(cuda: CudaDevice) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(units: int, unit_bytes: int) -> Both:
        made.append(Both(cuda, units, unit_bytes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def shaped(cuda: CudaDevice) -> Iterator[Callable[[int, int], tuple[Both, np.ndarray[Any, Any]]]]:
    """shaped(units, unit_bytes): memory and random content of that shape, kept until another shape is asked for."""
    kept: list[tuple[Both, np.ndarray[Any, Any]]] = []

    def make(units: int, unit_bytes: int) -> tuple[Both, np.ndarray[Any, Any]]:
        if not kept or (kept[0][0].units, kept[0][0].unit_bytes) != (units, unit_bytes):
            while kept:
                kept.pop()[0].close()
            kept.append((Both(cuda, units, unit_bytes), content_of(units, unit_bytes)))
        return kept[0]

    yield make
    for memory, _ in kept:
        memory.close()


def content_of(units: int, unit_bytes: int) -> np.ndarray[Any, Any]:
    """Random bytes [units, unit_bytes]."""
    words = np.random.default_rng(unit_bytes).integers(0, 1 << 64, units * unit_bytes // 8, dtype=np.uint64)
    return words.view(np.uint8).reshape(units, unit_bytes)


SHAPES = [(3000, 48), (70_000, 64), (512, 4096), (100, 65_552), (20, MIB), (8, 3 * MIB + 16)]


@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "runs"])
@pytest.mark.parametrize("to_host", [False, True], ids=["load", "save"])
@pytest.mark.parametrize("way", ["kernel", "engine", ""])
@pytest.mark.parametrize(("units", "unit_bytes"), SHAPES)
def test_copies_land_whole_and_no_other_byte(
    cuda: CudaDevice, shaped: Any, units: int, unit_bytes: int, way: Any, to_host: bool, scattered: bool
) -> None:
    if way == "engine" and units > 5000:
        pytest.skip("a call of the driver for each of so many would take long")
    memory, content = shaped(units, unit_bytes)
    random = np.random.default_rng(unit_bytes)
    poison = np.full_like(content, POISON)
    (memory.fill_gpu if to_host else memory.fill_host)(content)
    (memory.fill_host if to_host else memory.fill_gpu)(poison)
    count = units - units // 8
    sources = random.permutation(units)[:count] if scattered else np.arange(count)
    targets = random.permutation(units)[:count] if scattered else np.arange(count) + units - count
    copies = host_copies(cuda, to_host=to_host)
    if to_host:
        done = copies.copy(memory.on_gpu(sources), memory.on_host(targets), unit_bytes, way=way)
    else:
        done = copies.copy(memory.on_host(sources), memory.on_gpu(targets), unit_bytes, way=way)
    copies.wait()
    assert done.done()
    assert done.seconds() > 0
    poison[targets] = content[sources]
    assert np.array_equal(memory.host_bytes() if to_host else memory.gpu_bytes(), poison)
    assert np.array_equal(memory.gpu_bytes() if to_host else memory.host_bytes(), content)


def test_what_the_gpu_cannot_copy_is_refused_before_anything_is_queued(cuda: CudaDevice, both: Any) -> None:
    memory = both(8, 4096)
    pageable = np.zeros(2 * 4096, np.uint8)
    free = -(-pageable.ctypes.data // 16) * 16
    into, out = host_copies(cuda, to_host=False), host_copies(cuda, to_host=True)
    here, there = memory.on_gpu([0]), memory.on_host([0])
    for stream, source, target, nbytes, said in (
        (into, u64([free]), here, 4096, "not pinned"),
        (out, here, u64([free]), 4096, "not pinned"),
        (into, there, here, 4 * MIB, "not pinned"),
        (into, there, here, 100, "multiples of 16"),
        (into, there + np.uint64(8), here, 48, "multiples of 16"),
    ):
        with pytest.raises(ValueError, match=said):
            stream.copy(source, target, nbytes)
    with pytest.raises(ValueError, match="as many"):
        into.copy(there, memory.on_gpu([0, 1]), 4096)
    with pytest.raises(TypeError):
        into.copy(there.astype(np.int64), here, 4096)  # type: ignore[arg-type]
    assert into.copy(u64([]), u64([]), 4096).done() in (True, False)
    into.wait()
    assert not memory.gpu_bytes().any()


# --- order with the engine's stream ------------------------------------------------------------------------------


@pytest.fixture
def stream() -> torch.cuda.Stream:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def at(memory: torch.Tensor, nbytes: int, unit: int = 0) -> Any:
    return u64([memory.data_ptr() + unit * nbytes])


@pytest.mark.parametrize("unit_bytes", [64 << 10, 256 * MIB], ids=["kernel", "engine"])
def test_work_behind_a_load_finds_its_bytes_and_nobody_waits_on_the_host(
    cuda: CudaDevice, stream: torch.cuda.Stream, both: Any, unit_bytes: int
) -> None:
    units = (256 * MIB) // unit_bytes
    memory = both(units, unit_bytes)
    content = content_of(units, unit_bytes)
    memory.fill_host(content)
    target = torch.full((units, unit_bytes), POISON, dtype=torch.uint8, device="cuda")
    order = np.random.default_rng(2).permutation(units)
    torch.cuda.synchronize()
    copier = CudaCopier(cuda, stream.cuda_stream)
    addresses = u64([target.data_ptr() + int(unit) * unit_bytes for unit in order])
    copy = copier.load(memory.on_host(range(units)), addresses, unit_bytes)
    assert copy.usable
    copy.precede()
    with torch.cuda.stream(stream):
        # At once behind it, and before the host knows that it is over.
        read = target.clone()
    early = copy.done
    stream.synchronize()
    assert not early, "256 MiB cannot be here yet"
    assert copy.done
    assert copy.error == ""
    assert np.array_equal(read.cpu().numpy()[order], content)
    copier.close()


def test_a_save_comes_behind_what_was_queued_and_beside_what_comes_later(
    cuda: CudaDevice, stream: torch.cuda.Stream, both: Any
) -> None:
    memory = both(4, MIB)
    memory.fill_host(np.full((4, MIB), POISON, np.uint8))
    pages = torch.zeros((4, MIB), dtype=torch.uint8, device="cuda")
    copier = CudaCopier(cuda, stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        pages[0] = 7
    copy = copier.save(at(pages, MIB), memory.on_host([2]), MIB)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        later = torch.cuda.Event()  # type: ignore[no-untyped-call]
        later.record(stream)
    assert not copy.done
    assert (memory.host_bytes() == POISON).all()
    while not copy.done:
        copy.wait(0.1)
    assert not later.query(), "it does not wait for what comes later"
    assert (memory.host_bytes()[2] == 7).all()
    assert (memory.host_bytes()[[0, 1, 3]] == POISON).all()
    assert 0 < copy.seconds < 0.05, "the time that it waited is not counted"
    copier.close()


def test_a_snapshot_is_of_the_moment_and_a_load_may_take_its_place(
    cuda: CudaDevice, stream: torch.cuda.Stream, both: Any
) -> None:
    memory = both(4, MIB)
    memory.fill_host(np.full((4, MIB), 9, np.uint8))
    slot = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    copier = CudaCopier(cuda, stream.cuda_stream, state_bytes=MIB)
    torch.cuda.synchronize()
    copies = []
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for value in (1, 2, 3):
            slot.fill_(value)
            copies.append(copier.snapshot(at(slot, MIB), memory.on_host([value - 1]), MIB))
        # The slot has a new owner, whose state comes from the host.
        loaded = copier.load(memory.on_host([3]), at(slot, MIB), MIB)
        loaded.precede()
        read = slot.clone()
    assert not any(copy.done for copy in copies)
    stream.synchronize()
    copier.close()
    assert all(copy.done for copy in [*copies, loaded])
    assert [int(unit[0]) for unit in memory.host_bytes()] == [1, 2, 3, 9]
    assert all((unit == unit[0]).all() for unit in memory.host_bytes())
    assert bool((read == 9).all())


# --- engines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(models: CudaModels) -> Iterator[Callable[..., CudaRig]]:
    made: list[CudaRig] = []

    def make(*args: Any, **more: Any) -> CudaRig:
        made.append(models.rig(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def flushed(one: CudaRig) -> None:
    """Nothing is left in the engine's own pool, and what was there is NaN."""
    one.pool.flush_cache()
    assert one.pool.free == one.pool.pages
    one.poison_free_pages()


@pytest.mark.parametrize("kind", FAMILIES)
def test_cached_answers_equal_uncached_ones(models: CudaModels, rig: Any, kind: str) -> None:
    one = rig(kind, host_pages=60, host_states=12, max_num_batched_tokens=48)
    first = prompt(150)
    longer = np.concatenate([first, prompt(9, 1)])
    other = np.concatenate([first[:100], prompt(60, 2)])
    hits = []
    for each in (first, first, longer, other):
        assert one.generate([each], greedy(8)) == [models.expected(each, 8, kind)]
        hits.append(list(one.finished.values())[-1].cached_tokens)
        one.drain()
        one.assert_idle()
        flushed(one)
    assert hits == [0, 144, 144, 96]
    assert (kind in WINDOWED) == (one.host.counters()["hicache_stored_states"] > 0)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_random_prefixes_under_eviction_pressure(models: CudaModels, rig: Any, kind: str) -> None:
    """Both caches hold a few pages only, prompts run side by side and share beginnings, some leave."""
    one = rig(kind, pages=34, host_pages=12, host_states=4, max_num_batched_tokens=37)
    random = np.random.default_rng(3)
    roots = [prompt(150, seed) for seed in range(3)]
    for turn in range(12):
        prompts = []
        for _ in range(int(random.integers(1, 4))):
            root = roots[int(random.integers(3))][: int(random.integers(1, 150))]
            prompts.append(
                np.concatenate([root, prompt(int(random.integers(1, 20)), int(random.integers(99)))])
            )
        one.engine.add(f"leaves {turn}", roots[turn % 3], greedy(4), prefill_only=bool(turn % 2))
        for _ in range(turn % 4):
            one.step()
        one.engine.abort(f"leaves {turn}")
        assert one.generate(prompts, greedy(4)) == [models.expected(each, 4, kind) for each in prompts]
        one.drain()
        one.assert_idle()
        if random.random() < 0.7:
            flushed(one)
    counters = one.host.counters()
    assert counters["hicache_hit_tokens"] > 0
    assert counters["hicache_evicted_pages"] > 0
    assert (kind == "gemma3") == (counters["hicache_evicted_states"] > 0)


def test_a_first_token_comes_right_behind_its_pages(models: CudaModels, rig: Any) -> None:
    """One step queues all of it: the copy is not waited for on the host."""
    one = rig(host_pages=40)
    first = prompt(150)
    one.generate([first], greedy(1))
    one.drain()
    flushed(one)
    one.engine.add("hit", first, greedy(1))
    one.step()
    assert one.tokens["hit"] == models.expected(first, 1)
    assert one.finished["hit"].cached_tokens == 144
    one.drain()
