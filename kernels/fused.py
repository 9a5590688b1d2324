# SPDX-License-Identifier: Apache-2.0
"""Norms of transformers models as one GPU kernel each, where the model's own code launches six; on a CPU as half as
many passes over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["FusedNorm", "fuse_norms"]

# Those that mean x / rms(x) * weight, with `variance_epsilon` under the root; others share the name only.
_PLAIN = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class FusedNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside and rounded once, to the type of x."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] → the same shape."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # torch has no such kernel for CPUs.
            squares: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
            return (x * squares.div_(x.shape[-1]).add_(self._epsilon).rsqrt_()).mul_(self.weight)
        return F.rms_norm(x, self.weight.shape, self.weight, self._epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Replace the norms of `model` that are known to be plain ones. Returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in _PLAIN:
                setattr(parent, name, FusedNorm(child.weight, float(child.variance_epsilon)))  # type: ignore[arg-type]
                count += 1
    return count
