# SPDX-License-Identifier: Apache-2.0
"""Copy listed pages, or parts of each, between memories that one GPU can address; sum them for their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvrail.kernels.compiled import KernelsUnavailable, cubin, device_architecture, require_cuda

__all__ = ["KernelsUnavailable", "PageCopier", "PageKernels", "PageList", "Stride"]

_SOURCE = Path(__file__).parent / "csrc" / "page_copy.cu"
_VECTOR_BYTES = 16
_CHUNK_BYTES = 4096
# The kernels count chunks in 32 bits; half of that leaves room for the stride of the loop over them.
_MOST_CHUNKS = 2**31
_INDEX_BYTES = {torch.int64: 8, torch.uint32: 4, torch.int32: 4}


class Stride(NamedTuple):
    """Where segment s of page p lies in its pool: at byte p * page + offset + s * segment."""

    page: int
    offset: int = 0
    segment: int = 0


class PageList(NamedTuple):
    """One side of a copy: the pool's address, and the address of `entries` page indices.

    Both addresses are as the GPU sees them: its own memory, a mapped peer's, pinned host memory. Indices are int64 or
    uint32 (`index_bytes` 8 or 4); a page stride of 1 makes them byte offsets, which must then be multiples of 16.
    The memory must stay until the stream has passed the copy. Tensors given to `of` live as long as the list does,
    which is enough when they were allocated on the copy's own stream.
    """

    base: int
    indices: int
    entries: int
    index_bytes: int
    stride: Stride
    held: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, pool: torch.Tensor | int, index: torch.Tensor, stride: Stride) -> PageList:
        """From a pool (tensor, or address) and a contiguous 1-D tensor of indices: int64, uint32, non-negative int32.

        The index tensor lies where the GPU can read it; for more than a few pages, in its own memory.
        """
        width = _INDEX_BYTES.get(index.dtype)
        if width is None or index.dim() != 1 or not index.is_contiguous():
            raise ValueError(
                f"page indices must be a contiguous 1-D tensor of int64, uint32 or int32, not {index.dim()}-D "
                f"{index.dtype}"
            )
        if index.device.type != "cuda" and not index.is_pinned():
            raise ValueError("page indices must be in GPU memory or in pinned host memory")
        held = (pool, index) if isinstance(pool, torch.Tensor) else (index,)
        return cls(_address(pool), index.data_ptr(), index.numel(), width, stride, held)


class PageKernels:
    """The page-copy kernels of one CUDA device, loaded. Threads may share it; `on` gives what launches them."""

    def __init__(self, device: int, code: bytes) -> None:
        """`code` from `machine_code`. Raises KernelsUnavailable when the device cannot run it."""
        core = require_cuda()
        self.device = device
        try:
            module = core.ObjectCode.from_cubin(code)
            self.page_copy = module.get_kernel("page_copy")
            self.page_copy_sum = module.get_kernel("page_copy_sum")
            self.page_sum = module.get_kernel("page_sum")
            self.page_sum_finish = module.get_kernel("page_sum_finish")
        except Exception as error:  # the driver's class is private to cuda.core
            raise KernelsUnavailable(f"the page-copy kernels cannot be loaded: {error}") from error

    @staticmethod
    def machine_code(device: int, cache: Path | None) -> bytes:
        """The kernels' cubin for a device, for this class or for any other loader; `cache` as in `compiled.cubin`."""
        return cubin(_SOURCE, device_architecture(device), cache)

    @classmethod
    def load(cls, device: int, cache: Path | None) -> PageKernels:
        """Compile, or take from the cache, and load. Raises KernelsUnavailable naming what is missing."""
        return cls(device, cls.machine_code(device, cache))

    def on(self, stream: Any) -> PageCopier:
        """What launches on `stream`: a torch or cuda.core stream of this device, or the address of one."""
        return PageCopier(self, stream)


class PageCopier:
    """Launches the page-copy kernels on one stream. Calls return when the work is on the stream; one thread at a time.

    Launches of one copier share a counter in GPU memory, so they must not overlap: a graph that was captured from it
    runs on its stream, too. Copiers are independent of one another.

    Each of a call's `blocks` takes one SM away from what else the GPU does. The default reaches 94 % of the driver's
    own rate over NVLink (doc/kernels.md). A list with no entries launches nothing.
    """

    def __init__(self, kernels: PageKernels, stream: Any) -> None:
        core = require_cuda()
        self._kernels = kernels
        self._config: Any = core.LaunchConfig
        self._launcher: Any = core.launch
        self._stream = core.Stream.from_handle(_stream_address(stream))
        self._configs: dict[tuple[int, int], Any] = {}
        self._counter = torch.zeros(1, dtype=torch.int32, device=f"cuda:{kernels.device}")
        # The zero must be there before a kernel on another stream looks.
        torch.cuda.current_stream(kernels.device).synchronize()

    def copy(
        self,
        source: PageList,
        target: PageList,
        *,
        unit_bytes: int,
        segments: int = 1,
        sums: int | torch.Tensor = 0,
        blocks: int = 10,
        threads: int = 1024,
    ) -> None:
        """Copy `segments` units of `unit_bytes` of each entry. Targets must not overlap one another or any source.

        `sums`: uint64 (or int64) [entries] in GPU memory, to which each entry's bytes are added at their place in the
        **target** page. Clear it before the first part of a page; after the last, `finish_sums`.
        Raises ValueError for what the kernels cannot do: sizes and offsets that are not multiples of 16 bytes.
        """
        if source.entries != target.entries or source.index_bytes != target.index_bytes:
            raise ValueError(
                f"the two page lists differ: {source.entries} indices of {source.index_bytes} bytes against "
                f"{target.entries} of {target.index_bytes}"
            )
        _check(source, unit_bytes, segments)
        _check(target, unit_bytes, segments)
        shape = (source.entries, segments, unit_bytes, source.index_bytes, self._counter.data_ptr())
        sides = (source.base, source.indices, *source.stride, target.base, target.indices, *target.stride)
        total = _address(sums)
        if total:
            self._launch(self._kernels.page_copy_sum, blocks, threads, source.entries, *sides, *shape, total)
        else:
            self._launch(self._kernels.page_copy, blocks, threads, source.entries, *sides, *shape)

    def sum(
        self,
        pages: PageList,
        *,
        unit_bytes: int,
        sums: int | torch.Tensor,
        segments: int = 1,
        blocks: int = 10,
        threads: int = 1024,
    ) -> None:
        """Add to `sums` what `copy` with sums would have added for these pages as targets."""
        _check(pages, unit_bytes, segments)
        shape = (pages.entries, segments, unit_bytes, pages.index_bytes, self._counter.data_ptr())
        side = (pages.base, pages.indices, *pages.stride)
        self._launch(self._kernels.page_sum, blocks, threads, pages.entries, *side, *shape, _address(sums))

    def finish_sums(self, sums: int | torch.Tensor, entries: int, page_bytes: int) -> None:
        """Turn the sums of `entries` whole pages into their checksums, in place."""
        self._launch(self._kernels.page_sum_finish, 1, 1024, entries, _address(sums), entries, page_bytes)

    def _launch(self, kernel: Any, blocks: int, threads: int, entries: int, *arguments: int) -> None:
        if not entries:
            return
        config = self._configs.get((blocks, threads))
        if config is None:
            if not (0 < threads <= 1024 and threads % 32 == 0 and blocks > 0):
                raise ValueError(
                    f"{blocks} blocks of {threads} threads: want 1 block or more, whole warps, at most 1024"
                )
            config = self._configs[blocks, threads] = self._config(grid=blocks, block=threads)
        self._launcher(self._stream, config, kernel, *arguments)


def _stream_address(stream: Any) -> int:
    torch_stream = getattr(stream, "cuda_stream", None)
    if torch_stream is not None:
        return int(torch_stream)
    return int(getattr(stream, "handle", stream))


def _address(memory: int | torch.Tensor) -> int:
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else memory


def _check(pages: PageList, unit_bytes: int, segments: int) -> None:
    page, offset, segment = pages.stride
    if page == 1:  # the indices are byte offsets, which only the caller can check
        page = 0
    if (unit_bytes | offset | segment | pages.base | page) % _VECTOR_BYTES:
        raise ValueError(
            f"unit of {unit_bytes} bytes, pool at {pages.base:#x}, {pages.stride}: want multiples of {_VECTOR_BYTES}"
        )
    if unit_bytes <= 0 or segments <= 0:
        raise ValueError(f"nothing to copy: {segments} segments of {unit_bytes} bytes")
    if pages.indices % pages.index_bytes:
        raise ValueError(
            f"the page indices at {pages.indices:#x} are not aligned to {pages.index_bytes} bytes"
        )
    units = pages.entries * segments
    if units * -(-unit_bytes // _CHUNK_BYTES) >= _MOST_CHUNKS:
        raise ValueError(f"{units} units of {unit_bytes} bytes are too many for one call: split the list")
