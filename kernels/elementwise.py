# SPDX-License-Identifier: Apache-2.0
"""What stands between the matrix products of a decoder layer, one launch each; 16 bits in memory, float32 inside."""

from __future__ import annotations

from pathlib import Path

import torch

from kvrail.kernels.launching import TorchKernels

__all__ = ["Elementwise"]

_SOURCE = Path(__file__).parent / "csrc" / "elementwise.cu"
_WIDTH = 8  # numbers in a vector of 16 bytes
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MOST_THREADS = 1024
_GATE_THREADS = 256


class Elementwise:
    """The kernels of one CUDA device, for tensors of one 16-bit type. Launched on torch's current stream.

    Raise ValueError for shapes and strides that are not made of vectors of 8 numbers.
    """

    def __init__(self, device: int, dtype: torch.dtype, cache: Path | None) -> None:
        """Compile, or take from the folder `cache`. Raises KernelsUnavailable, and KeyError for another type."""
        kind = _KINDS[dtype]
        self._dtype = dtype
        self._norm, self._rotate, self._gate = (f"{name}_{kind}" for name in ("norm", "rotate", "gate"))
        self._kernels = TorchKernels(_SOURCE, device, cache, (self._norm, self._rotate, self._gate))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension: x [..., n], weight [n] → contiguous, of the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        self._check(rows, weight)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        vectors = x.shape[-1] // _WIDTH
        if len(rows):
            self._kernels.launch(
                self._norm,
                (len(rows), 1),
                _threads(vectors),
                rows.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                rows.stride(0) * 2,
                vectors,
                epsilon,
            )
        return out

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Turn x [T, heads, dim] in place: halves (a, b) become (a cos - b sin, b cos + a sin); angles [T, dim]."""
        tokens, heads, dim = x.shape
        self._check(x, cosines, sines)
        if dim % (2 * _WIDTH) or x.stride(1) != dim or not cosines.shape == sines.shape == (tokens, dim):
            raise ValueError(f"cannot turn {list(x.shape)} by angles {list(cosines.shape)}")
        if not (cosines.is_contiguous() and sines.is_contiguous()):
            raise ValueError("angles must be contiguous")
        half = dim // (2 * _WIDTH)
        if tokens:
            self._kernels.launch(
                self._rotate,
                (tokens, 1),
                _threads(heads * half),
                x.data_ptr(),
                cosines.data_ptr(),
                sines.data_ptr(),
                x.stride(0) * 2,
                heads,
                half,
            )

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the last dimension: x [..., 2 n], contiguous → [..., n]."""
        self._check(x)
        vectors, odd = divmod(x.shape[-1], 2 * _WIDTH)
        if odd or not x.is_contiguous():
            raise ValueError(f"cannot gate {list(x.shape)}: want contiguous halves of whole vectors")
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        rows = out.numel() // out.shape[-1]
        if rows:
            self._kernels.launch(
                self._gate,
                (rows, -(-vectors // _GATE_THREADS)),
                _GATE_THREADS,
                x.data_ptr(),
                out.data_ptr(),
                vectors,
            )
        return out

    def _check(self, *tensors: torch.Tensor) -> None:
        for one in tensors:
            strides = (one.data_ptr() // 2, *one.stride()[:-1], one.shape[-1])
            if one.dtype != self._dtype or one.stride(-1) != 1 or any(stride % _WIDTH for stride in strides):
                raise ValueError(
                    f"want {self._dtype} in vectors of {_WIDTH}, not {one.dtype} {list(one.shape)} with strides "
                    f"{one.stride()}"
                )


def _threads(vectors: int) -> int:
    """Whole warps, a thread for each vector as far as a block goes."""
    return min(_MOST_THREADS, -(-vectors // 32) * 32)
