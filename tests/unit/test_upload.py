# SPDX-License-Identifier: Apache-2.0
"""Arrays of any type come through as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrail.kernels.upload import fetch, stage, upload

ARRAYS = (
    np.arange(7, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4),
    np.array([], dtype=np.int32),
    np.array([1.5, -2.0]),
    np.arange(20, dtype=np.int64)[::2],
)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_same_on_both_sides(kind) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    device = torch.device(kind)
    staged = stage(device, ARRAYS)
    for array, here, there in zip(ARRAYS, staged.host, staged.device, strict=True):
        assert there.device.type == kind
        assert np.array_equal(here.numpy(), array)
        assert np.array_equal(fetch(there).numpy(), array)
        assert there.shape == array.shape
    assert [one.dtype for one in upload(device, ARRAYS)] == [one.dtype for one in staged.host]
