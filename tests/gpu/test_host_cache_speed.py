# SPDX-License-Identifier: Apache-2.0
"""How fast pages go to the host cache and back, and what that costs a prefill that runs meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from gpu.cuda_rig import PinnedCache
from kvrail.runtime.checkpoint import open_checkpoint
from kvrail.runtime.device import Compute
from kvrail.runtime.embedded import EmbeddedEngine
from kvrail.runtime.messages import Sampling
from kvrail.runtime.model import PagedModel
from kvrail.runtime.random_model import make_model
from kvrail.transfer import ucx
from kvrail.transfer.chunked_pool import ChunkedPool
from kvrail.transfer.memory import available_bytes
from kvrail.transfer.pages import PagePool

if TYPE_CHECKING:
    from kvrail.transfer._ucx import CudaDevice, HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
BLOCK = 16 * MIB
ROUNDS = 7


class Blocks:
    """A GiB in pinned host memory (registered, as pools are), on the GPU, and in torch's own pinned memory."""

    def __init__(self, cuda: CudaDevice) -> None:
        from kvrail.transfer import _ucx

        self.context = ucx.open_context("tcp", "127.0.0.1")
        began = time.perf_counter()
        self.host = ChunkedPool(
            self.context, units=GIB // BLOCK, unit_bytes=BLOCK, name="t", chunk_bytes=GIB // 4, pin=cuda,
            collapse=False,
        )  # fmt: skip
        print(f"a GiB allocated and pinned in {time.perf_counter() - began:.2f} s ({self.host.backing})")
        self.gpu, self.other = (torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.block = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        self.loads, self.second = (_ucx.HostCopies(cuda, to_host=False) for _ in range(2))
        self.saves = _ucx.HostCopies(cuda, to_host=True)

    def lists(self, page_bytes: int) -> tuple[Any, Any]:
        """Addresses of all pages in random order: (in the host, on the GPU)."""
        random, pages = np.random.default_rng(page_bytes), GIB // page_bytes
        place = random.permutation(pages).astype(np.uint64) * np.uint64(page_bytes)
        blocks = self.host.addresses((place // np.uint64(BLOCK)).astype(np.uint32))
        there = random.permutation(pages).astype(np.uint64) * np.uint64(page_bytes)
        return blocks + place % np.uint64(BLOCK), np.uint64(self.gpu.data_ptr()) + there

    def driver(self, to_host: bool) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        (self.block if to_host else self.gpu).copy_(self.gpu if to_host else self.block, non_blocking=True)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def close(self) -> None:
        del self.loads, self.second, self.saves
        self.host.close()
        self.context.close()


@pytest.fixture
def blocks(cuda: CudaDevice) -> Iterator[Blocks]:
    made = Blocks(cuda)
    yield made
    made.close()


def run(copies: HostCopies, source: Any, target: Any, nbytes: int, way: Any) -> float:
    copy = copies.copy(source, target, nbytes, way=way)
    copies.wait()
    assert copy.done()
    return copy.seconds()


def test_pages_are_copied_near_the_rate_of_one_pinned_block(blocks: Blocks) -> None:
    best = {}
    for page_bytes in (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, BLOCK):
        host, gpu = blocks.lists(page_bytes)
        ways = ["kernel", "engine"] if page_bytes >= 256 * KIB else ["kernel"]
        took: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, seconds in (
                ("load by driver", blocks.driver(False)),
                ("save by driver", blocks.driver(True)),
                *((f"load by {way}", run(blocks.loads, host, gpu, page_bytes, way)) for way in ways),
                *((f"save by {way}", run(blocks.saves, gpu, host, page_bytes, way)) for way in ways),
                ("load", run(blocks.loads, host, gpu, page_bytes, "")),
                ("save", run(blocks.saves, gpu, host, page_bytes, "")),
            ):
                took.setdefault(name, []).append(seconds)
        rates = {name: GIB / median(values) / 1e9 for name, values in took.items()}
        print(
            f"{page_bytes >> 10} KiB, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        )
        best[page_bytes] = (rates["load"] / rates["load by driver"], rates["save"] / rates["save by driver"])
    print({size >> 10: tuple(round(share, 3) for share in both) for size, both in best.items()})
    assert min(load for load, _ in best.values()) >= 0.9
    assert min(save for _, save in best.values()) >= 0.85


def test_a_second_trip_from_the_host_would_delay_the_first(blocks: Blocks) -> None:
    """Why hits are pushed from the pool, behind their copy into it, and not from the host beside it."""
    host, gpu = blocks.lists(BLOCK)
    other = gpu - np.uint64(blocks.gpu.data_ptr()) + np.uint64(blocks.other.data_ptr())
    alone, beside = [], []
    for _ in range(ROUNDS):
        alone.append(run(blocks.loads, host, gpu, BLOCK, ""))
        blocks.second.copy(host, other, BLOCK, way="kernel")
        beside.append(run(blocks.loads, host, gpu, BLOCK, ""))
        blocks.second.wait()
    print(
        f"a GiB from the host: {median(alone) * 1e3:.1f} ms, beside another one {median(beside) * 1e3:.1f} ms"
    )
    assert median(beside) > 1.3 * median(alone)


def test_a_cache_of_the_usual_size_is_there_in_seconds(cuda: CudaDevice) -> None:
    if available_bytes() < 64 * GIB:
        pytest.skip("needs a host with 64 GiB available")
    context = ucx.open_context("tcp", "127.0.0.1")
    began = time.perf_counter()
    pool = ChunkedPool(context, units=2048, unit_bytes=BLOCK, name="t", pin=cuda, collapse=False)
    took = time.perf_counter() - began
    pool.close()
    context.close()
    print(f"{pool.nbytes / GIB:.0f} GiB allocated and pinned in {took:.1f} s, closed in "
          f"{time.perf_counter() - began - took:.1f} s")  # fmt: skip
    assert took < 30


# --- beside a model of 8 B ------------------------------------------------------------------------------------------

PAGE_TOKENS, PROMPT, TOGETHER, PAIRS = 128, 8192, 4, 4


class Big:
    """An engine of the 8B shape, with a host cache of `host_pages` pages, or without."""

    def __init__(
        self, model: PagedModel, pages: int, host_pages: int, kernel_cache: str, budget: int
    ) -> None:
        self.pool = PagePool(pages)
        memory = torch.empty(pages * model.layout.page_bytes, dtype=torch.uint8, device="cuda")
        compute = Compute(model.device)
        self.pinned: PinnedCache | None = None
        began = time.perf_counter()
        if host_pages:
            self.pinned = PinnedCache(
                model, self.pool, memory, None, compute, pages=host_pages, chunk_pages=64,
                kernel_cache=Path(kernel_cache),
            )  # fmt: skip
            print(f"{host_pages} pages pinned in {time.perf_counter() - began:.1f} s")
        self.host = self.pinned.cache if self.pinned else None
        self.engine = EmbeddedEngine(
            model, self.pool, memory, host_cache=self.host, compute=compute, max_num_seqs=1,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        self.vocabulary = model.vocab_size

    def prompt(self, tokens: int, seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, self.vocabulary, tokens).astype(np.uint32)

    def run(self, prompts: list[Any]) -> float:
        """Seconds until the last of them, one after the other, has its first token."""
        names = [f"p{n}" for n in range(len(prompts))]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for name, one in zip(names, prompts, strict=True):
            self.engine.add(name, one, Sampling(max_tokens=1, seed=0))
        waiting = set(names)
        while waiting:
            waiting -= {output.sequence_id for output in self.engine.step() if output.token is not None}
        took = time.perf_counter() - began
        self.drain()
        return took

    def drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def close(self) -> None:
        self.engine.close()
        if self.pinned is not None:
            self.pinned.close()


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 60 * GIB:
        pytest.skip("needs a GPU of 60 GiB")
    folder = make_model(tmp_path_factory.mktemp("big") / "m", "llama-8b", seed_only=True, device="cuda")
    began = time.perf_counter()
    model = PagedModel.load(open_checkpoint(str(folder)), "bfloat16", PAGE_TOKENS, device="cuda:0")
    print(f"{model.arithmetic}; loaded in {time.perf_counter() - began:.0f} s")
    return model


@pytest.mark.parametrize("budget", [2048, 8192])
def test_writing_through_costs_a_prefill_little(
    big_model: PagedModel, kernel_cache: str, budget: int
) -> None:
    pages = 3 * PROMPT // PAGE_TOKENS
    with ExitStack() as stack:
        # Every round finds the host cache full of the one before, so that it evicts as well.
        with_cache = Big(big_model, pages, (TOGETHER + 1) * PROMPT // PAGE_TOKENS, kernel_cache, budget)
        stack.callback(with_cache.close)
        without = Big(big_model, pages, 0, kernel_cache, budget)
        stack.callback(without.close)
        took: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(PAIRS + 1):
            prompts = [with_cache.prompt(PROMPT, 100 * number + n) for n in range(TOGETHER)]
            pair = (("with", with_cache), ("without", without))
            for name, one in pair if number % 2 else pair[::-1]:
                took[name].append(one.run(prompts))
        # The first of each finds libraries and memory that are not ready yet.
        share = [a / b - 1 for a, b in zip(took["with"][1:], took["without"][1:], strict=True)]
        counters = with_cache.host.counters() if with_cache.host else {}
        ms = {name: [round(one * 1e3) for one in values[1:]] for name, values in took.items()}
        rate = counters["hicache_save_bytes"] / counters["hicache_save_seconds"] / 1e9
        print(
            f"{TOGETHER} prompts of {PROMPT}, chunks of {budget}: {ms['without']} ms without, {ms['with']} with; "
            f"{100 * median(share):+.2f} % in the median; saved at {rate:.1f} GB/s"
        )
        assert counters["hicache_stored_pages"] == (PAIRS + 1) * TOGETHER * PROMPT // PAGE_TOKENS
        assert median(share) <= 0.02


def test_a_long_hit_comes_in_at_the_rate_of_the_bus(big_model: PagedModel, kernel_cache: str) -> None:
    cached, suffix = 32768, 128
    with ExitStack() as stack:
        one = Big(big_model, cached // PAGE_TOKENS + 8, cached // PAGE_TOKENS + 8, kernel_cache, 8192)
        stack.callback(one.close)
        prompt = one.prompt(cached + suffix, 5)
        cold = one.run([prompt])
        assert one.host is not None
        before = one.host.counters()
        hits = []
        for _ in range(5):
            one.pool.flush_cache()
            hits.append(one.run([prompt]))
        after = one.host.counters()
        spent = {
            name: after[f"hicache_{name}"] - before[f"hicache_{name}"]
            for name in ("load_bytes", "load_seconds")
        }
        print(
            f"{cached} tokens in the host cache and {suffix} new: first token after {median(hits) * 1e3:.0f} ms, "
            f"{cold * 1e3:.0f} without; copied in at {spent['load_bytes'] / spent['load_seconds'] / 1e9:.1f} GB/s"
        )
        assert after["hicache_hit_tokens"] - before["hicache_hit_tokens"] == 5 * cached
        assert median(hits) < 0.25 * cold
