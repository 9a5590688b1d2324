# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a fixed weight on CPUs without 16-bit arithmetic: float32 inside, rounded once at the end.

The product of two bfloat16 (or float16) numbers is exact in float32, and a 16-bit matrix product sums in float32
and rounds its result once. So widening the operands gives the numbers of a native 16-bit product (up to the
order of the sum), several times faster where the CPU would have to emulate it. The price is float32 weights in memory.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["WideLinear", "has_native_16bit", "widen_linears"]

# Columns of one stored block. A narrow block keeps the rows of the weight on few memory pages, which makes the
# product of a few rows up to twice as fast as over the whole width.
BLOCK_COLUMNS = 1536


class WideLinear(nn.Module):
    """y = x Wᵀ + b in float32, rounded to the type of x. Takes over the weight of a `nn.Linear`."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        weight = source.weight.detach()
        blocks = -(-self.out_features // BLOCK_COLUMNS)
        # Transposed: [in, columns], contiguous; that is the quickest order for a handful of rows.
        self.blocks = [block.float().t().contiguous() for block in weight.chunk(blocks)]
        self.bias = None if source.bias is None else source.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        rows = x.reshape(-1, self.in_features).float()
        if len(self.blocks) == 1:
            result = rows.mm(self.blocks[0])
        else:
            result = torch.empty(len(rows), self.out_features)
            first = 0
            for block in self.blocks:
                torch.mm(rows, block, out=result[:, first : first + block.shape[1]])
                first += block.shape[1]
        if self.bias is not None:
            result += self.bias
        return result.to(x.dtype).view(*x.shape[:-1], self.out_features)


def has_native_16bit(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` (bfloat16 or float16) without emulation."""
    found = torch.cpu.get_capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return any(found.get(name, False) for name in names.get(dtype, ()))


def widen_linears(model: nn.Module) -> None:
    """Replace every `nn.Linear` inside `model`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, WideLinear(child))
