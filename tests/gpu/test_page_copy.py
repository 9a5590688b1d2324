# SPDX-License-Identifier: Apache-2.0
"""The page-copy kernels against their torch reference: every byte asked for is written, and no other."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kvrail.kernels import page_copy_reference as reference
from kvrail.kernels.page_copy import PageCopier, PageKernels, PageList, Stride

pytestmark = pytest.mark.gpu

# Reading or writing at an index past the listed ones would leave the pool, or the address space.
POISON_INDEX = {torch.int64: 2**62, torch.int32: 2**31 - 1, torch.uint32: 2**32 - 1}
GIB = 2**30


class Case(NamedTuple):
    """Pools in CPU memory, and what the target must hold after the copy."""

    source: torch.Tensor
    target: torch.Tensor
    source_index: torch.Tensor
    target_index: torch.Tensor
    expected: torch.Tensor
    sums: torch.Tensor


def make_case(unit_bytes: int, entries: int, source: Stride, target: Stride, segments: int = 1) -> Case:
    """Random bytes where pages are listed; all other bytes are 0xFF (NaN in every float format) on both sides."""
    random = torch.Generator().manual_seed(unit_bytes * 1000 + entries)
    pages = entries + 3
    pools = [torch.full((pages * stride.page + 512,), 0xFF, dtype=torch.uint8) for stride in (source, target)]
    indices = [torch.randperm(pages, generator=random)[:entries] for _ in range(2)]
    for page in indices[0].tolist():
        for segment in range(segments):
            start = page * source.page + source.offset + segment * source.segment
            unit = pools[0][start : start + unit_bytes]
            unit.random_(0, 256, generator=random)
    expected = pools[1].clone()
    sums = torch.zeros(entries, dtype=torch.int64)
    reference.copy_pages(
        pools[0],
        indices[0],
        source,
        expected,
        indices[1],
        target,
        unit_bytes=unit_bytes,
        segments=segments,
        sums=sums,
    )
    return Case(pools[0], pools[1], indices[0], indices[1], expected, sums)


def on_gpu(index: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The indices between poisoned ones."""
    poison = torch.full((8,), POISON_INDEX[dtype], dtype=torch.int64)
    padded = torch.cat([poison, index.to(torch.int64), poison]).to(dtype).cuda()
    return padded[8 : 8 + index.numel()]


def run(
    copier: PageCopier,
    case: Case,
    source: Stride,
    target: Stride,
    *,
    unit_bytes: int,
    segments: int = 1,
    dtype: torch.dtype = torch.int64,
    with_sums: bool = False,
    blocks: int = 8,
    threads: int = 1024,
) -> None:
    """Copy on the GPU and compare every byte of the target pool, every sum, and the receiver's own sums."""
    from_pool, to_pool = case.source.cuda(), case.target.cuda()
    from_index, to_index = on_gpu(case.source_index, dtype), on_gpu(case.target_index, dtype)
    sums = torch.zeros(case.sums.numel() + 2, dtype=torch.int64, device="cuda")
    shape = {"unit_bytes": unit_bytes, "segments": segments, "blocks": blocks, "threads": threads}
    copied = sums[1:-1] if with_sums else 0
    copier.copy(
        PageList.of(from_pool, from_index, source),
        PageList.of(to_pool, to_index, target),
        sums=copied,
        **shape,
    )
    assert_same_bytes(to_pool.cpu(), case.expected)
    assert torch.equal(from_pool.cpu(), case.source), "the source was written"
    if with_sums:
        assert torch.equal(sums[1:-1].cpu(), case.sums)
        again = torch.zeros_like(sums)
        copier.sum(PageList.of(to_pool, to_index, target), sums=again[1:-1], **shape)
        assert torch.equal(again, sums)
        assert sums[0] == 0
        assert sums[-1] == 0


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    wrong = (got != want).nonzero()
    if wrong.numel():
        first = int(wrong[0])
        pytest.fail(
            f"{wrong.numel()} bytes differ, the first at {first}: {int(got[first])}, not {int(want[first])}"
        )


UNITS = [16, 32, 48, 496, 512, 528, 1008, 2048, 2064, 4080, 4096, 4112, 8176, 65536, 65552, 2**20, 8 * 2**20]


@pytest.mark.parametrize("with_sums", [False, True], ids=["plain", "sums"])
@pytest.mark.parametrize("entries", [1, 3, 37])
@pytest.mark.parametrize("unit_bytes", UNITS)
def test_whole_pages(copier: PageCopier, unit_bytes: int, entries: int, with_sums: bool) -> None:
    if unit_bytes * entries > 64 * 2**20:
        entries = 5
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, entries, stride, stride)
    run(copier, case, stride, stride, unit_bytes=unit_bytes, with_sums=with_sums)


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 1024), (3, 96), (16, 512), (132, 1024)])
@pytest.mark.parametrize("unit_bytes", [48, 2064, 12304])
def test_any_number_of_blocks_and_threads(
    copier: PageCopier, unit_bytes: int, blocks: int, threads: int
) -> None:
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, 1001, stride, stride)
    run(copier, case, stride, stride, unit_bytes=unit_bytes, with_sums=True, blocks=blocks, threads=threads)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32, torch.int32], ids=str)
@pytest.mark.parametrize("unit_bytes", [64, 8192])
def test_index_types(copier: PageCopier, unit_bytes: int, dtype: torch.dtype) -> None:
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, 129, stride, stride)
    run(copier, case, stride, stride, unit_bytes=unit_bytes, dtype=dtype)


@pytest.mark.parametrize("with_sums", [False, True], ids=["plain", "sums"])
@pytest.mark.parametrize("unit_bytes", [16, 240, 512, 1024, 4096, 5120])
def test_segments_between_pools_of_different_shape(
    copier: PageCopier, unit_bytes: int, with_sums: bool
) -> None:
    """One layer's K and V, of pages with three layers, into pages with a header and two layers."""
    source = Stride(page=6 * unit_bytes, offset=2 * unit_bytes, segment=unit_bytes)
    target = Stride(page=8 * unit_bytes + 32, offset=32, segment=3 * unit_bytes)
    case = make_case(unit_bytes, 77, source, target, segments=2)
    run(copier, case, source, target, unit_bytes=unit_bytes, segments=2, with_sums=with_sums)


def test_layers_one_by_one_make_the_checksums_of_whole_pages(copier: PageCopier) -> None:
    layers, unit = 4, 6144
    page_bytes, entries = layers * unit, 21
    whole = Stride(page_bytes)
    case = make_case(page_bytes, entries, whole, whole)
    source, target = case.source.cuda(), case.target.cuda()
    from_index, to_index = on_gpu(case.source_index), on_gpu(case.target_index)
    sums = torch.zeros(entries, dtype=torch.int64, device="cuda")
    for layer in range(layers):
        stride = Stride(page_bytes, offset=layer * unit)
        copier.copy(
            PageList.of(source, from_index, stride),
            PageList.of(target, to_index, stride),
            unit_bytes=unit,
            sums=sums,
        )
    copier.finish_sums(sums, entries, page_bytes)
    assert_same_bytes(target.cpu(), case.expected)
    want = reference.page_checksums(case.source, case.source_index, page_bytes)
    assert torch.equal(sums.cpu(), want)


def test_one_changed_bit_changes_the_receivers_checksum(copier: PageCopier) -> None:
    page_bytes, entries = 8192, 9
    pages = torch.randint(0, 256, (entries * page_bytes,), dtype=torch.uint8, device="cuda")
    listed = PageList.of(pages, torch.arange(entries, device="cuda"), Stride(page_bytes))

    def checksums() -> torch.Tensor:
        sums = torch.zeros(entries, dtype=torch.int64, device="cuda")
        copier.sum(listed, unit_bytes=page_bytes, sums=sums)
        copier.finish_sums(sums, entries, page_bytes)
        return sums.cpu()

    before = checksums()
    pages[4 * page_bytes + 5001] ^= 4
    assert (checksums() != before).tolist() == [entry == 4 for entry in range(entries)]


def test_byte_offsets_beyond_4_gib(copier: PageCopier) -> None:
    """Offsets as indices (page stride 1), at and past every 4 GiB line of a 9 GiB target."""
    unit = 4112
    starts = [0, 2 * GIB - 16, 4 * GIB - 4096, 4 * GIB + 16 * 400, 8 * GIB - 2048, 9 * GIB - unit]
    source = torch.randint(0, 256, (len(starts) * unit,), dtype=torch.uint8, device="cuda")
    target = torch.full((9 * GIB,), 0xA5, dtype=torch.uint8, device="cuda")
    copier.copy(
        PageList.of(source, on_gpu(torch.arange(len(starts)) * unit), Stride(1)),
        PageList.of(target, on_gpu(torch.tensor(starts)), Stride(1)),
        unit_bytes=unit,
    )
    for entry, start in enumerate(starts):
        assert_same_bytes(target[start : start + unit].cpu(), source[entry * unit : (entry + 1) * unit].cpu())
        target[start : start + unit] = 0xA5
    for gib in range(9):
        assert int((target[gib * GIB : (gib + 1) * GIB] != 0xA5).sum()) == 0, f"stray write in GiB {gib}"


def test_page_numbers_beyond_4_gib(copier: PageCopier) -> None:
    page = 2 * 2**20
    pool = torch.full((9 * GIB,), 0xA5, dtype=torch.uint8, device="cuda")
    rows = pool.view(-1, page)
    written = [4095, 2048, 2049, 4400]
    rows[[1, 3, 5, 7]] = torch.randint(0, 256, (4, page), dtype=torch.uint8, device="cuda")
    copier.copy(
        PageList.of(pool, on_gpu(torch.tensor([1, 3, 5, 7])), Stride(page)),
        PageList.of(pool, on_gpu(torch.tensor(written)), Stride(page)),
        unit_bytes=page,
    )
    assert torch.equal(rows[written], rows[[1, 3, 5, 7]])
    changed = (rows != 0xA5).any(1).nonzero().flatten().tolist()
    assert changed == sorted([1, 3, 5, 7, *written])


@pytest.mark.parametrize("unit_bytes", [48, 4096, 65536 + 16])
@pytest.mark.parametrize("direction", ["gpu to host", "host to gpu"])
def test_pinned_host_memory(copier: PageCopier, direction: str, unit_bytes: int) -> None:
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, 65, stride, stride)
    source, target = case.source, case.target.clone()
    if direction == "gpu to host":
        source, target = source.cuda(), target.pin_memory()
    else:
        source, target = source.pin_memory(), target.cuda()
    sums = torch.zeros(65, dtype=torch.int64, device="cuda")
    copier.copy(
        PageList.of(source, on_gpu(case.source_index), stride),
        PageList.of(target, on_gpu(case.target_index), stride),
        unit_bytes=unit_bytes,
        sums=sums,
    )
    torch.cuda.synchronize()
    assert_same_bytes(target.cpu(), case.expected)
    assert torch.equal(sums.cpu(), case.sums)


def test_indices_in_pinned_host_memory(copier: PageCopier) -> None:
    stride = Stride(4096)
    case = make_case(4096, 7, stride, stride)
    source, target = case.source.cuda(), case.target.cuda()
    from_index, to_index = case.source_index.pin_memory(), case.target_index.pin_memory()
    copier.copy(
        PageList.of(source, from_index, stride),
        PageList.of(target, to_index, stride),
        unit_bytes=4096,
    )
    torch.cuda.synchronize()
    assert_same_bytes(target.cpu(), case.expected)


@pytest.mark.parametrize("unit_bytes", [48, 65536])
@pytest.mark.parametrize("direction", ["push", "pull", "host to peer"])
def test_peer_gpu(copier: PageCopier, peer: int, direction: str, unit_bytes: int) -> None:
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, 65, stride, stride)
    source = case.source.to(peer if direction == "pull" else 0)
    target = case.target.to(0 if direction == "pull" else peer)
    if direction == "host to peer":
        source = case.source.pin_memory()
    torch.cuda.synchronize(peer)
    sums = torch.zeros(65, dtype=torch.int64, device="cuda")
    copier.copy(
        PageList.of(source, on_gpu(case.source_index), stride),
        PageList.of(target, on_gpu(case.target_index), stride),
        unit_bytes=unit_bytes,
        sums=sums,
    )
    torch.cuda.synchronize(0)
    assert_same_bytes(target.cpu(), case.expected)
    assert torch.equal(sums.cpu(), case.sums)


def test_two_streams_into_one_pool(kernels: PageKernels) -> None:
    """Halves of a list on two streams at once, again and again; each entry's sum is made by one of them."""
    unit_bytes, entries, rounds = 8192 + 16, 2001, 5
    stride = Stride(unit_bytes)
    case = make_case(unit_bytes, entries, stride, stride)
    source, target = case.source.cuda(), case.target.cuda()
    from_index, to_index = on_gpu(case.source_index), on_gpu(case.target_index)
    sums = torch.zeros(entries, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    copiers = [kernels.on(torch.cuda.Stream()), kernels.on(torch.cuda.Stream(priority=-1))]
    half = entries // 2
    for _ in range(rounds):
        for part, copier in zip((slice(0, half), slice(half, entries)), copiers, strict=True):
            copier.copy(
                PageList.of(source, from_index[part], stride),
                PageList.of(target, to_index[part], stride),
                unit_bytes=unit_bytes,
                sums=sums[part],
                blocks=2,
                threads=256,
            )
    torch.cuda.synchronize()
    assert_same_bytes(target.cpu(), case.expected)
    assert torch.equal(sums.cpu(), case.sums * rounds)


def test_an_empty_list_launches_nothing(copier: PageCopier) -> None:
    empty = PageList(base=0, indices=0, entries=0, index_bytes=8, stride=Stride(4096))
    copier.copy(empty, empty, unit_bytes=4096)
    torch.cuda.synchronize()


def test_a_captured_copy_runs_again(kernels: PageKernels) -> None:
    stride = Stride(4096)
    case = make_case(4096, 3333, stride, stride)
    source, target = case.source.cuda(), case.target.cuda()
    lists = (
        PageList.of(source, on_gpu(case.source_index), stride),
        PageList.of(target, on_gpu(case.target_index), stride),
    )
    stream = torch.cuda.Stream()
    copier = kernels.on(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        copier.copy(*lists, unit_bytes=4096, blocks=1)
    assert_same_bytes(target.cpu(), case.target)
    for _ in range(2):
        target.copy_(case.target)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(target.cpu(), case.expected)
