# SPDX-License-Identifier: Apache-2.0
"""Store K and V of single tokens in a page pool on a GPU, except those of rows that only fill up a batch."""

from __future__ import annotations

from pathlib import Path

import torch

from kvrail.kernels.launching import TorchKernels

__all__ = ["KvStore"]

_SOURCE = Path(__file__).parent / "csrc" / "kv_store.cu"
_VECTOR_BYTES = 16
_MOST_THREADS = 256


class KvStore:
    """The kernel of one CUDA device, loaded. It may be captured in a CUDA graph."""

    def __init__(self, device: int, cache: Path | None) -> None:
        """Compile it, or take it from the folder `cache`. Raises KernelsUnavailable naming what is missing."""
        self._kernels = TorchKernels(_SOURCE, device, cache, ("kv_store",))

    def __call__(
        self, pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor
    ) -> None:
        """Store on the current stream; see reference.store_tokens for what goes where.

        Raises ValueError for what the kernel cannot do: other types or widths than the pool's, odd strides.
        """
        tokens, kv_heads, dim = key.shape
        page_tokens, width = pool.shape[3], pool.element_size()
        if not key.dtype == value.dtype == pool.dtype or not key.shape == value.shape == (
            tokens,
            *pool.shape[4:],
        ):
            raise ValueError(f"K {key.dtype} {list(key.shape)} and V {list(value.shape)} are not as the pool")
        strides = [stride * width for one in (key, value) for stride in one.stride()[:2]]
        addresses = (key.data_ptr(), value.data_ptr(), pool.data_ptr(), dim * width, *strides)
        if any(number % _VECTOR_BYTES for number in addresses) or not key.stride(2) == value.stride(2) == 1:
            raise ValueError(f"K and V do not lie in vectors of {_VECTOR_BYTES} bytes: strides {strides}")
        row_bytes = kv_heads * dim * width
        base = pool.data_ptr() + 2 * layer * page_tokens * row_bytes
        vectors = row_bytes // _VECTOR_BYTES
        self._kernels.launch(
            "kv_store",
            (tokens, 1),
            min(_MOST_THREADS, -(-vectors // 32) * 32),
            key.data_ptr(),
            value.data_ptr(),
            base,
            base + page_tokens * row_bytes,
            places.data_ptr(),
            *strides,
            dim * width // _VECTOR_BYTES,
            vectors,
        )
