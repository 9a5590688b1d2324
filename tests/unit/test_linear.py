# SPDX-License-Identifier: Apache-2.0
"""Swapped products and embeddings give the numbers of torch's own modules, for few rows and many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvrail.kernels import linear
from kvrail.kernels.linear import HalfLinear, WideLinear, swap_modules

needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("fbgemm", "x86"), reason="this CPU has no FBGEMM"
)


def _linear(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(40, 24, bias=bias)
    made.weight.data *= torch.logspace(-2, 1, 24)[:, None]
    return made.to(dtype)


def _exact(source: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if source.bias is None else source.bias.detach().double()
    return x.double() @ source.weight.detach().double().t() + bias


@needs_fbgemm
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 6, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_half_linear_sums_in_float32(stored, rows, bias, transposed) -> None:
    source = _linear(stored, bias)
    x = torch.randn(1, rows, 40)
    with torch.inference_mode():
        found = HalfLinear(source, few_rows=5, transposed=transposed)(x)
        narrow = HalfLinear(source, few_rows=5, transposed=transposed)(x.to(stored))
    expected = _exact(source, x)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert narrow.dtype == stored
    assert torch.allclose(narrow.double(), expected, rtol=0.03, atol=0.03 * float(expected.std()))


@pytest.mark.parametrize("columns", [24, 7])
def test_wide_linear_in_blocks(monkeypatch, columns) -> None:
    monkeypatch.setattr(linear, "BLOCK_COLUMNS", columns)
    source = _linear(torch.bfloat16)
    x = torch.randn(2, 3, 40)
    with torch.inference_mode():
        assert torch.allclose(WideLinear(source)(x).double(), _exact(source, x), rtol=1e-4, atol=1e-5)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 40)
        self.norm = nn.LayerNorm(40)
        self.inner = _linear(torch.float32)
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)))


@needs_fbgemm
@pytest.mark.parametrize(
    ("dtype", "native", "kinds", "words", "gives"),
    [
        (torch.float32, False, (WideLinear, WideLinear), "float32", torch.float32),
        (torch.bfloat16, False, (HalfLinear, HalfLinear), "float32 activations, FBGEMM", torch.float32),
        (torch.bfloat16, True, (HalfLinear, HalfLinear), "native, FBGEMM", torch.bfloat16),
    ],
)
def test_swapped_model(monkeypatch, dtype, native, kinds, words, gives) -> None:
    monkeypatch.setattr(linear, "has_native_16bit", lambda wanted: native)
    model = _Model().to(dtype)
    ids = torch.arange(50)
    with torch.inference_mode():
        expected = _Model.forward(model, ids).double()
        assert words in swap_modules(model, dtype)
        found = model(ids)
    assert (type(model.inner), type(model.head)) == kinds
    assert found.dtype == gives
    precision = 1e-4 if dtype == torch.float32 else 0.03
    assert float((found.double() - expected).std()) <= precision * float(expected.std())


@pytest.mark.parametrize("value", [1e5, 1e-7])
def test_weights_that_float16_cannot_hold_are_widened(monkeypatch, value) -> None:
    monkeypatch.setattr(linear, "has_native_16bit", lambda wanted: False)
    model = _Model().to(torch.bfloat16)
    model.inner.weight.data[3] = value
    swap_modules(model, torch.bfloat16)
    assert type(model.inner) is WideLinear
    x = torch.randn(2, 40)
    with torch.inference_mode():
        expected = (x.double() * torch.tensor(value, dtype=torch.bfloat16).double()).sum(1)
        found = model.inner(x)[:, 3] - model.inner(torch.zeros(1, 40))[:, 3]
    assert torch.allclose(found.double(), expected, rtol=1e-2, atol=1e-7)
