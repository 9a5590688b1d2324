# SPDX-License-Identifier: Apache-2.0
"""Norms that replace a model's own give what those give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvrail.kernels.fused import FusedNorm, fuse_norms


class LlamaRMSNorm(nn.Module):
    """As transformers names it, computed in float64."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (
            self.weight.double()
            * wide
            / (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@torch.inference_mode()
def test_a_fused_norm_equals_the_models_own(dtype, scale) -> None:
    own = LlamaRMSNorm(48, 1e-5)
    model = nn.Sequential(own)
    x = (scale * torch.randn(1, 7, 48)).to(dtype)
    before, kept = own(x), x.clone()
    assert fuse_norms(model.to(dtype)) == 1
    assert isinstance(model[0], FusedNorm)
    found = model(x)
    assert found.dtype == dtype
    assert torch.equal(x, kept)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    assert torch.allclose(found.double(), before, rtol=tolerance, atol=tolerance * 0.1)
