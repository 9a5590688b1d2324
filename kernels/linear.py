# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a fixed weight on a CPU: 16-bit weights in memory, float32 sums.

The product of two 16-bit numbers is exact in float32, so float32 sums over 16-bit weights are what a native 16-bit
product computes, without its rounding of inputs and results. Where the CPU would have to emulate 16-bit arithmetic,
activations therefore stay in float32 throughout: nothing is rounded to and fro between the products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["HalfLinear", "WideLinear", "activation_dtype", "has_native_16bit", "swap_modules"]

# Up to so many rows, reading the weight costs more than the sums do.
FEW_ROWS = 128
FEW_ROWS_NATIVE = 4
# Columns of one stored block. A narrow block keeps the rows of the weight on few memory pages, which makes the
# product of a few rows up to twice as fast as over the whole width.
BLOCK_COLUMNS = 1536


class HalfLinear(nn.Module):
    """y = x Wᵀ + b for a 16-bit weight, in the place of a `nn.Linear`; y has the type of x.

    A few rows go to FBGEMM's product of float32 rows with packed float16 weights, which reads half of the bytes; many
    rows to the product in the type of x, for which the weight is converted when that is another one. So the
    weight is in memory twice, with 16 bits. `transposed`: [in, out], which float32 products are quicker with.
    """

    def __init__(self, source: nn.Linear, few_rows: int, *, transposed: bool) -> None:
        super().__init__()
        self._few = few_rows * source.in_features
        weight = source.weight.detach()
        # As [out, in], however it lies in memory.
        self._weight = weight.t().contiguous().t() if transposed else weight
        self._bias = None if source.bias is None else source.bias.detach()
        bias = None if self._bias is None else self._bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(self._weight.float(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        if x.numel() > self._few:
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return F.linear(x, self._weight.to(x.dtype), bias)
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        return y.to(x.dtype)


class WideLinear(nn.Module):
    """y = x Wᵀ + b in float32, in the place of a `nn.Linear` of any type; takes 32 bits for each weight."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        weight = source.weight.detach()
        blocks = -(-self.out_features // BLOCK_COLUMNS)
        # Transposed: [in, columns], contiguous; that is the quickest order for a handful of rows.
        self._blocks = [block.float().t().contiguous() for block in weight.chunk(blocks)]
        self._bias = None if source.bias is None else source.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out], both float32."""
        rows = x.reshape(-1, self.in_features)
        if len(self._blocks) == 1:
            result = rows.mm(self._blocks[0])
        else:
            result = torch.empty(len(rows), self.out_features)
            first = 0
            for block in self._blocks:
                torch.mm(rows, block, out=result[:, first : first + block.shape[1]])
                first += block.shape[1]
        if self._bias is not None:
            result += self._bias
        return result.view(*x.shape[:-1], self.out_features)


class _WideEmbedding(nn.Module):
    """Rows of a 16-bit table, widened to float32. The table may be the weight of the last product, too."""

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__()
        self._weight = source.weight.detach()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight).float()


def has_native_16bit(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` (bfloat16 or float16) without emulation."""
    found = torch.cpu.get_capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return any(found.get(name, False) for name in names.get(dtype, ()))


def activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that a model with weights of `dtype` computes in on this CPU."""
    return dtype if has_native_16bit(dtype) else torch.float32


def swap_modules(model: nn.Module, dtype: torch.dtype) -> str:
    """Make `model`, loaded in `dtype`, compute in `activation_dtype(dtype)`. Returns the arithmetic in words."""
    native, wide = has_native_16bit(dtype), activation_dtype(dtype) == torch.float32
    packs = dtype != torch.float32 and torch.backends.quantized.engine in ("fbgemm", "x86")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                if packs and _fits_float16(child.weight):
                    setattr(
                        parent,
                        name,
                        HalfLinear(child, FEW_ROWS_NATIVE if native else FEW_ROWS, transposed=not native),
                    )
                elif wide:
                    setattr(parent, name, WideLinear(child))
            elif type(child) is nn.Embedding and wide:
                setattr(parent, name, _WideEmbedding(child))
    if wide:
        # What is left: the weights of norms.
        model.float()
    weights = str(dtype).removeprefix("torch.")
    if not native:
        return f"{weights} weights, float32 activations" + (", FBGEMM for few rows" if packs else "")
    return f"{weights}, native" + (", FBGEMM for few rows" if packs else "")


def _fits_float16(weight: torch.Tensor) -> bool:
    """Whether no row loses more in float16 than a fraction of the rounding of a bfloat16 result.

    float16 has more digits than bfloat16 and fewer exponents: huge numbers do not fit, and tiny ones lose digits,
    which matters only in a row that has nothing larger.
    """
    error = (weight.half().to(weight.dtype) - weight).abs().amax(dim=1)
    return bool((error <= weight.abs().amax(dim=1) * 2.0**-11).all())
