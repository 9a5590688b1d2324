# SPDX-License-Identifier: Apache-2.0
"""A push waits for the GPU work that writes its pages, and can be stopped while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu.cuda_peer import content
from kit.remote import Remote
from kvrail.transfer.checksums import page_checksums
from kvrail.transfer.errors import TransferError
from kvrail.transfer.ucx import EventKind, checksum_pages

pytestmark = pytest.mark.gpu

POOL, PAGES, PAGE_BYTES = 0, 64, 65536
TIMED_OUT = -20
Make = Callable[..., tuple[Any, Remote]]
ALL = np.arange(PAGES, dtype=np.uint32)


def as_torch(end: Any) -> torch.Tensor:
    """Our pool as torch sees it, int64 [pages, words]. No test keeps it: a pool that is viewed cannot be closed."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    tensor = torch.as_tensor(end.pool.buffer, device="cuda:0")
    assert tensor.data_ptr() == end.pool.address
    assert not tensor.any()
    return tensor.view(torch.int64).view(PAGES, -1)


def compute(tensor: torch.Tensor, seconds: float, stream: torch.cuda.Stream) -> None:
    """On the stream: something long, then the pages. Skips where nothing on a GPU runs beside the CPU."""
    values = torch.from_numpy(content(9, PAGES, PAGE_BYTES).view(np.int64)).cuda()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)  # loads what it needs
        torch.cuda.synchronize()
        begun = time.monotonic()
        torch.cuda._sleep(int(seconds * 1.7e9))
        launched_s = time.monotonic() - begun
        tensor.copy_(values)
    if launched_s > seconds / 2:
        pytest.skip(f"a launch takes as long as its kernel ({launched_s:.2f} s), as under a sanitizer")


@pytest.mark.parametrize("default_stream", [False, True])
@pytest.mark.parametrize("way", ["kernel", "engine", "put"])
def test_pages_leave_when_they_are_written(make_gpu_pair: Make, way: str, default_stream: bool) -> None:
    here, remote = make_gpu_pair(pages=PAGES, page_bytes=PAGE_BYTES)
    tensor = as_torch(here)
    stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
    compute(tensor, 0.1, stream)
    fence = here.cuda.record(stream.cuda_stream)
    writer = here.link.writer(1, ttl_s=30.0)
    writer.push(POOL, here.pool.address, ALL, ALL, after=fence, way=way)
    writer.ring(b"bell")
    time.sleep(0.02)
    assert not fence.done()
    assert writer.posted == 0
    remote.do("messages", count=1)
    assert fence.done()
    pages = ALL.tolist()
    assert remote.do("wrong_words", seed=9, source=pages, target=pages, pages=PAGES) == 0


def test_a_push_that_waits_can_be_stopped_and_ends_with_its_time(make_gpu_pair: Make) -> None:
    here, remote = make_gpu_pair(pages=PAGES, page_bytes=PAGE_BYTES)
    tensor = as_torch(here)
    stream = torch.cuda.Stream()
    compute(tensor, 0.5, stream)
    fence = here.cuda.record(stream.cuda_stream)
    stopped, timed, free = (
        here.link.writer(key, ttl_s=ttl) for key, ttl in ((1, 30.0), (2, 0.05), (3, 30.0))
    )
    for writer in (stopped, timed):
        writer.push(POOL, here.pool.address, ALL, ALL, after=fence)
    stopped.stop()
    assert here.take(EventKind.QUIET)[0][2:4] == (1, 0)
    # Another one, whose pages are there, is not held up.
    free.push(POOL, here.pool.address, ALL[:1], ALL[:1])
    assert here.take(EventKind.PROGRESS)[0][2] == 3
    assert here.take(EventKind.FAILED)[0][2:4] == (2, TIMED_OUT)
    assert not fence.done()
    fence.wait()
    time.sleep(0.02)
    assert (stopped.posted, timed.posted) == (0, 0)
    assert remote.do("wrong_words", seed=9, source=[], target=[], pages=0) > 0  # the free one's page of zeros


def test_checksums_equal_those_of_the_cpu_and_wait(make_gpu_pair: Make) -> None:
    here, _ = make_gpu_pair(pages=PAGES, page_bytes=PAGE_BYTES)
    tensor = as_torch(here)
    stream = torch.cuda.Stream()
    compute(tensor, 0.1, stream)
    fence = here.cuda.record(stream.cuda_stream)
    order = np.random.default_rng(0).permutation(ALL)
    sums = page_checksums(here.pool, order, fence)
    words = content(9, PAGES, PAGE_BYTES)
    assert (sums == checksum_pages(words.ctypes.data, PAGE_BYTES, order)).all()
    assert len(page_checksums(here.pool, order[:0])) == 0
    with pytest.raises(IndexError, match="outside pool"):
        page_checksums(here.pool, np.array([PAGES], np.uint32))


def test_a_pool_with_tensors_over_it_stays(make_gpu_pair: Make) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    here, _ = make_gpu_pair(pages=2)
    view = torch.as_tensor(here.pool.buffer, device="cuda:0")[65536:]
    here.fence()
    here.link.close()
    with pytest.raises(TransferError, match="still viewed"):
        here.pool.close()
    assert view.sum().item() == 0
    del view


def test_the_gpu_says_what_it_lacks(make_gpu_pair: Make) -> None:
    here, _ = make_gpu_pair(pages=2)
    with pytest.raises(TransferError, match=r"are needed, and CUDA device 0 .* has \d+ MiB free of \d+ MiB"):
        here.cuda.allocate(1 << 44)
    with pytest.raises(TransferError, match=r"pinning 1 MiB of host memory stopped after 0 MiB \(memlock"):
        here.cuda.pin(4096, 1 << 20)
